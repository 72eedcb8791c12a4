"""Submission: what is written, what is refused, and a local job that outlives who started it."""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.programs import search_path, write_program, write_python

import slurm.submit
from contract.errors import ConfigError, UserError
from contract.run_folder import Event, RunFolder
from slurm.job import job_folder, newest_job
from slurm.runs.status import RunState, status
from slurm.settings import JobConfig, SubmitConfig
from slurm.sites.profile import Launch, Profile, Scheduler
from slurm.snapshot import RECORD, snapshot
from slurm.submit import submit

CONFIG = "resilience:\n  stop_signal: SIGUSR2\nloop:\n  steps: 7\n"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "it's a run")


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter whose `-m train` is a shell script: it waits for a stop request and leaves with 75."""
    trainer = """trap 'mkdir checkpoints; exit 75' USR2
echo "trains in $PWD with $5, GPUs ${CUDA_VISIBLE_DEVICES-all}"
while true; do sleep 0.05; done"""
    return str(write_python(tmp_path / "python", trainer))


@pytest.fixture
def local(python: str) -> SubmitConfig:
    cluster = Profile(scheduler=Scheduler.local, ranks_per_node=1, time_limit="00:10:00", python=python)
    return SubmitConfig(cluster, JobConfig(launch=Launch.step))


@pytest.fixture
def clean_up(run: RunFolder) -> Iterator[None]:
    yield
    job = newest_job(run, run.read_events())
    if job is not None and job.is_running_here():
        os.kill(int(job.job_id), signal.SIGTERM)
        assert wait_until(lambda: not job.is_running_here())


def wait_until(condition: Callable[[], object], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(condition())


def the_state(run: RunFolder) -> RunState:
    return status(run.path)[0].state


@pytest.mark.req("C11")
def test_dry_run_writes_nothing(run: RunFolder, local: SubmitConfig) -> None:
    submission = submit(run, CONFIG, local, dry_run=True)
    assert submission.job_id is None and "slurm.supervise" in submission.script
    assert not run.path.exists()


@pytest.mark.req("C2", "C11")
def test_local_job_runs_refuses_a_second_launch_and_stops(
    run: RunFolder, local: SubmitConfig, clean_up: None
) -> None:
    first = submit(run, CONFIG, local)
    assert first.job_id and run.config.read_text() == CONFIG and run.job_script.read_text() == first.script
    assert first.job_id in first.summary()
    log = run.logs / f"{first.job_id}.r0.log"
    assert wait_until(lambda: log.exists() and "trains" in log.read_text())
    # It trains in the snapshot, and submitit has not hidden the GPUs.
    assert f"trains in {run.code} with {run.config}, GPUs all" in log.read_text()
    assert the_state(run) is RunState.running
    with pytest.raises(UserError, match=f"is running already as process {first.job_id}"):
        submit(run, CONFIG, local)

    os.kill(int(first.job_id), signal.SIGTERM)
    assert wait_until(lambda: the_state(run) is not RunState.running)
    said = (job_folder(run) / f"{first.job_id}_0_log.out").read_text()
    assert "ended with code 75" in said and not run.failed.exists()
    second = submit(run, CONFIG, local)
    assert second.job_id != first.job_id


@pytest.mark.req("C11")
def test_local_job_outlives_the_submitting_process_and_its_terminal(
    run: RunFolder, local: SubmitConfig, clean_up: None
) -> None:
    code = (
        "import sys; from pathlib import Path; from contract.run_folder import RunFolder\n"
        "from slurm.sites.profile import Launch, Profile, Scheduler\n"
        "from slurm.settings import JobConfig, SubmitConfig\n"
        "from slurm.submit import submit\n"
        "cluster = Profile(scheduler=Scheduler.local, ranks_per_node=1, python=sys.argv[2])\n"
        "submit(RunFolder(Path(sys.argv[1])), sys.argv[3], SubmitConfig(cluster, JobConfig(launch=Launch.step)))\n"
        "sys.stdin.read()\n"
    )
    shell = subprocess.Popen(
        [sys.executable, "-c", code, str(run.path), str(local.cluster.python), CONFIG],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert wait_until(lambda: run.events.exists() and "submitted" in run.events.read_text())
    job = newest_job(run, run.read_events())
    assert job is not None
    for number in (signal.SIGINT, signal.SIGHUP):
        os.killpg(shell.pid, number)
    # The job holds no end of the shell's pipes: an ssh would return.
    shell.communicate(timeout=20)
    time.sleep(0.5)
    assert job.is_running_here()
    assert os.getsid(int(job.job_id)) != os.getsid(0)


def test_unwritable_run_folder_is_one_sentence(tmp_path: Path, local: SubmitConfig) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=r"run folder cannot be written \(.*: Not a directory\): set run.root"
    ):
        submit(RunFolder(tmp_path / "file" / "run"), CONFIG, local)


def fake_slurm(folder: Path, squeue: str, sbatch: str = "echo Submitted batch job 99") -> dict[str, str]:
    """Stand in for Slurm's commands; the lab tests call the real ones."""
    for name, body in {"squeue": squeue, "sbatch": sbatch, "sacct": "exit 1", "srun": "exit 1"}.items():
        write_program(folder / name, body)
    return {"PATH": search_path(folder)}


@pytest.mark.req("C3")
@pytest.mark.parametrize(("limit", "refused"), [(2, True), (3, False), (None, False)])
def test_a_full_queue_is_found_before_sbatch(
    run: RunFolder, tmp_path: Path, limit: int | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = fake_slurm(
        tmp_path, "printf '7\\n8_1\\n'", sbatch=f"touch {tmp_path}/sent; echo Submitted batch job 99"
    )
    monkeypatch.setenv("PATH", environ["PATH"])
    settings = SubmitConfig(Profile(name="site", max_submit_jobs=limit), JobConfig())
    if refused:
        with pytest.raises(UserError, match="you have 2 jobs in the queue and site takes 2"):
            submit(run, CONFIG, settings, environ=environ)
    else:
        assert submit(run, CONFIG, settings, environ=environ).job_id == "99"
    assert (tmp_path / "sent").exists() is not refused


@pytest.mark.parametrize("profile", ["site", "lab"])
@pytest.mark.parametrize(
    ("squeue", "refusal"),
    [
        (
            "echo '7|PENDING|Priority'",
            r"has job 7 already \(pending\): end it with `trierarch cancel .*a run'`",
        ),
        ("echo '7|COMPLETING|None'", r"has job 7 already \(completing\)"),
        ("echo '7|FAILED|NonZeroExitCode'", None),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", None),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", r"Slurm does not say whether job 7"),
    ],
)
def test_run_with_a_live_job_is_refused(
    run: RunFolder,
    tmp_path: Path,
    squeue: str,
    refusal: str | None,
    profile: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environ = fake_slurm(tmp_path, squeue)
    monkeypatch.setenv("PATH", environ["PATH"])
    if profile == "lab" and refusal and "does not say" in refusal:
        refusal = None  # a lab that is down has no jobs
    run.create()
    conf = str(tmp_path / "gone" / "slurm.conf")
    run.append_event(Event.SUBMITTED, job_id="7", profile=profile, scheduler="slurm", slurm_conf=conf)
    run.mark_failed("an earlier failure")
    settings = SubmitConfig(Profile(name="site"), JobConfig())
    if refusal:
        with pytest.raises(UserError, match=refusal):
            submit(run, CONFIG, settings, environ=environ)
        assert run.failed.exists() and not run.job_script.exists()
    else:
        assert submit(run, CONFIG, settings, environ=environ).job_id == "99"
        assert not run.failed.exists()


@pytest.mark.req("C2", "D1")
def test_the_code_of_the_submission_before_can_be_kept(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = fake_slurm(tmp_path, "exit 0")
    monkeypatch.setenv("PATH", environ["PATH"])
    settings = SubmitConfig(Profile(name="site"), JobConfig())
    for keep, kept in ((True, False), (True, True), (False, False)):
        submit(run, CONFIG, settings, environ=environ, keep_code=keep)
        assert (run.code / "slurm/submit.py").exists()
        assert (run.code / "mine").exists() == kept
        (run.code / "mine").touch()


@pytest.mark.req("C2")
def test_submitted_text_environment_and_event(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = fake_slurm(
        tmp_path, "exit 1", 'cp "${@: -1}" "$SEEN/text"; env > "$SEEN/env"; echo Submitted batch job 99'
    )
    monkeypatch.setenv("PATH", environ["PATH"])
    environ |= {
        "SEEN": str(tmp_path),
        "SLURM_JOB_ID": "1",
        "SLURM_CONF": "/x/slurm.conf",
        "SBATCH_TIMELIMIT": "bad",
        "SBATCH_CLUSTERS": "big",
    }
    before = dict(os.environ)
    submission = submit(run, CONFIG, SubmitConfig(Profile(name="site"), JobConfig(nodes=3)), environ=environ)
    assert dict(os.environ) == before
    assert "note:  SBATCH_TIMELIMIT=bad of your shell is not used" in submission.summary()
    # One text: what sbatch got, what a person can read, what the caller has.
    assert (tmp_path / "text").read_text() == run.job_script.read_text() == submission.script
    seen = (tmp_path / "env").read_text()
    assert (
        "SLURM_CONF=/x/slurm.conf" in seen and "SLURM_JOB_ID" not in seen and "SBATCH_TIMELIMIT" not in seen
    )
    event = run.read_events()[-1]
    assert (event["job_id"], event["profile"], event["nodes"]) == ("99", "site", 3)
    assert (event["slurm_conf"], event["clusters"]) == ("/x/slurm.conf", "big")
    assert (event["scheduler"], event["host"]) == ("slurm", socket.gethostname())
    assert list(job_folder(run).glob("99_submission.sh"))


def test_refusal_of_sbatch_is_one_sentence(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = (
        "sbatch: error: invalid partition specified: booster\\nsbatch: error: Batch job submission failed: x"
    )
    environ = fake_slurm(tmp_path, "exit 1", f'printf "{said}\\n" >&2; exit 1')
    monkeypatch.setenv("PATH", environ["PATH"])
    with pytest.raises(UserError) as error:
        submit(run, CONFIG, SubmitConfig(Profile(name="site"), JobConfig()), environ=environ)
    assert str(error.value) == (
        "sbatch refused the job: invalid partition specified: booster; Batch job submission failed: x"
    )
    assert capsys.readouterr().err == ""
    assert not run.read_events()


def test_two_submissions_at_once_are_one(run: RunFolder, local: SubmitConfig) -> None:
    run.create()
    with slurm.submit._one_at_a_time(run), pytest.raises(UserError, match="being submitted by another"):
        submit(run, CONFIG, local)


def test_file_system_without_locks_is_no_obstacle(
    run: RunFolder, local: SubmitConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    run.create()
    monkeypatch.setattr("contract.lock.fcntl.flock", no_locks)
    with slurm.submit._one_at_a_time(run):
        pass


def test_ctrl_c_does_not_lose_a_job_that_sbatch_is_taking(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a terminal does: to sbatch and to the command that called it.
    environ = fake_slurm(tmp_path, "exit 1", "kill -INT $PPID $$; echo Submitted batch job 99")
    monkeypatch.setenv("PATH", environ["PATH"])
    settings = SubmitConfig(Profile(name="site"), JobConfig())
    # A shell's background jobs ignore the signal: these tests may be one.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        submission = submit(run, CONFIG, settings, environ=environ)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert submission.job_id == "99" and run.read_events()[-1]["job_id"] == "99"


def test_missing_srun_is_one_sentence(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"not complete here \(.*srun.*\): load the site's module"):
        submit(run, CONFIG, SubmitConfig(Profile(name="site"), JobConfig()), environ={"PATH": str(tmp_path)})


@pytest.mark.parametrize(("word", "alive"), [(Event.STARTED, True), (Event.STOPPED, False)])
def test_local_job_of_another_host_is_not_started_twice(
    run: RunFolder, local: SubmitConfig, word: Event, alive: bool, clean_up: None
) -> None:
    run.create()
    run.append_event(Event.SUBMITTED, job_id="1", profile="local", scheduler="local", host="login7")
    run.append_event(word)
    if alive:
        with pytest.raises(
            UserError, match="running already as process 1 on login7: end it there with `trierarch cancel"
        ):
            submit(run, CONFIG, local)
    else:
        assert submit(run, CONFIG, local).job_id != "1"


def test_what_nobody_has_tried_is_said(run: RunFolder, local: SubmitConfig) -> None:
    local.cluster.unverified = ["the partition's name"]
    assert submit(run, CONFIG, local, dry_run=True).summary().endswith("\nnote:  the partition's name")


@pytest.mark.req("C11")
def test_submit_and_status_start_without_torch_and_slow_libraries() -> None:
    code = (
        "import sys, slurm.submit, slurm.settings, slurm.runs.status, slurm.supervise.__main__\n"
        "print([name for name in ('torch', 'train', 'submitit', 'rich', 'numpy') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
    code = (
        "import sys, slurm.supervise.__main__\n"
        "print([name for name in ('hydra', 'jinja2', 'omegaconf') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


# --- the snapshot


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    for name in (
        "train/loop.py",
        "slurm/a/b.py",
        "configs/x.yaml",
        "tests/test_x.py",
        "runs/r/big.bin",
        "pyproject.toml",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "train/__pycache__").mkdir()
    (folder / "train/__pycache__/loop.pyc").write_text("")
    (folder / "train/weights.bin").write_bytes(b"0" * 5_000_001)
    return folder


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def git(checkout: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    return subprocess.run(
        ["git", *who, *arguments], cwd=checkout, check=True, capture_output=True, text=True, timeout=30
    ).stdout


def test_snapshot_of_a_git_checkout(run: RunFolder, checkout: Path) -> None:
    run.create()
    (checkout / ".gitignore").write_text("__pycache__\n*.secret\n")
    git(checkout, "init", "-q")
    git(checkout, "add", "-A")
    git(checkout, "commit", "-q", "-m", "x")
    record = snapshot(run, checkout)
    assert record["commit"] == git(checkout, "rev-parse", "HEAD").strip() and record["dirty"] is False
    # Tests, runs and files too large to be code stay behind.
    code = {"train/loop.py", "slurm/a/b.py", "configs/x.yaml", "pyproject.toml", ".gitignore", RECORD}
    assert files(run.code) == code
    assert record["left_out"] == ["train/weights.bin"]

    (checkout / "train/new.py").write_text("")
    (checkout / "train/key.secret").write_text("")
    # New code counts, a new file beside it may be anything.
    (checkout / "notes.txt").write_text("")
    (checkout / ".env").write_text("TOKEN=1")
    (checkout / "train/.env").write_text("TOKEN=1")
    (checkout / "slurm/a/b.py").unlink()
    assert snapshot(run, checkout)["dirty"] is True
    assert files(run.code) == code - {"slurm/a/b.py"} | {"train/new.py"}
    assert json.loads((run.code / RECORD).read_text())["dirty"] is True
    assert not [path.name for path in run.path.iterdir() if re.match(r"\.code", path.name)]


def test_snapshot_without_git(run: RunFolder, checkout: Path) -> None:
    run.create()
    assert snapshot(run, checkout)["commit"] is None
    assert files(run.code) == {"train/loop.py", "slurm/a/b.py", "configs/x.yaml", RECORD}


def test_half_a_snapshot_is_never_run(
    run: RunFolder, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.create()
    snapshot(run, checkout)
    before = files(run.code)

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (checkout / "train/more.py").write_text("")
    monkeypatch.setattr("slurm.snapshot.shutil.copy2", full_disk)
    with pytest.raises(OSError, match="No space"):
        snapshot(run, checkout)
    assert files(run.code) == before


@pytest.mark.req("C12")
def test_a_sweep_and_its_tasks_are_not_written_over(tmp_path: Path, local: SubmitConfig) -> None:
    (tmp_path / "sweep" / "lr=1").mkdir(parents=True)
    (tmp_path / "sweep" / "sweep.json").touch()
    for name, sentence in (
        ("sweep", "is a sweep and no run: give this one another run.name"),
        ("sweep/lr=1", r"is a task of a sweep: `trierarch sweep retry \S+/sweep lr=1` submits it again"),
    ):
        with pytest.raises(UserError, match=sentence):
            submit(RunFolder(tmp_path / name), CONFIG, local)
    assert not list(tmp_path.rglob("job.sbatch"))


def test_the_summary_names_commands_that_know_the_run(
    tmp_path: Path, local: SubmitConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = submit(RunFolder(Path("runs/it's")), CONFIG, local, dry_run=True).summary()
    for command in ("status", "logs", "cancel", "resubmit"):
        assert f"trierarch {command} 'it'\"'\"'s'" in said


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("--nodes=3", "give job.nodes=N"),
        ("-N3", "give job.nodes=N"),
        ("-p fast", "give job.partition=NAME"),
        ("--time 1:00:00", "give job.time_limit="),
        ("--no-requeue", "give job.requeue="),
        ("--array=0-3", "trierarch sweep"),
        ("--output=/x", "a place of their own"),
    ],
)
def test_lines_of_the_users_that_the_supervisor_would_not_know_of_are_refused(
    line: str, instead: str
) -> None:
    for settings in (
        SubmitConfig(Profile(), JobConfig(sbatch_lines=[line])),
        SubmitConfig(Profile(sbatch_lines=[line])),
    ):
        with pytest.raises(ConfigError, match=instead):
            settings.validate({})
    SubmitConfig(Profile(), JobConfig(sbatch_lines=["--mail-type=FAIL", "--ntasks-per-core=1"])).validate({})
