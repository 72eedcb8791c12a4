"""The supervisor's decisions, with shell commands for the training and scripts for Slurm's commands.

The scripts stand in for scontrol and sbatch; tests/slurm has the same with the real ones.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.programs import Commands, search_path, write_program

from contract.run_folder import Event, RunFolder
from slurm.launch import mpi_command
from slurm.supervise import requeue
from slurm.supervise.judge import Verdict, judge

RUNNING = (
    "JobState=RUNNING Restarts=0 StartTime=2026-01-01T00:00:00 PreemptTime=None "
    "RunTime=00:01:00 TimeLimit=00:05:00"
)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.job_script.write_text("#!/bin/bash\n")
    return folder


class FakeSlurm(Commands):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.job(RUNNING)

    def job(self, shown: str, requeue: str = "exit 0") -> None:
        """Set what `scontrol show job` prints and what `scontrol requeue` and sbatch do."""
        # Slurm ends the job once it has taken the requeue.
        self.put("scontrol", f'if [ "$1" = show ]; then echo "{shown}"; else {requeue}; fi')
        self.put("sbatch", "echo 4711")

    @property
    def called(self) -> list[str]:
        return [line for line in self.noted() if " show " not in line]

    @property
    def environ(self) -> dict[str, str]:
        return {"PATH": search_path(self.folder), "SLURM_JOB_ID": "42"}


@pytest.fixture
def fake_slurm(tmp_path: Path) -> FakeSlurm:
    return FakeSlurm(tmp_path / "bin")


def command(run: RunFolder, script: str, *options: str) -> list[str]:
    start = [sys.executable, "-m", "slurm.supervise", str(run.path), "--launch=step", "--backoff-s=0.01"]
    return [*start, *options, "--", "bash", "-c", script, "trainer", str(run.path)]


def supervise(
    run: RunFolder, script: str, *options: str, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(run, script, *options),
        env={"PATH": os.environ["PATH"], **(environ or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def told(run: RunFolder) -> list[str]:
    return [event["event"] for event in run.read_events()]


EVENTS: dict[str, list[dict[str, Any]]] = {
    "stopped": [{"event": "stopped"}],
    "finished": [{"event": "finished"}],
    "bad": [{"event": "failed", "code": 78, "reason": "no such file"}],
    "crash": [{"event": "failed", "reason": "boom"}],
    "none": [],
}


@pytest.mark.parametrize(
    ("code", "ranks", "events", "verdict", "final"),
    [
        (0, (), "none", Verdict.finished, 0),
        (75, (), "none", Verdict.stopped, 75),
        (76, (), "none", Verdict.crashed, 76),
        (78, (), "none", Verdict.hopeless, 78),
        (93, (), "none", Verdict.hopeless, 93),
        (1, (), "crash", Verdict.crashed, 1),
        (-9, (), "none", Verdict.crashed, 137),
        # srun's 143: one rank left, the others were ended for it.
        (143, (75,), "none", Verdict.stopped, 75),
        (143, (), "stopped", Verdict.stopped, 75),
        (143, (78,), "none", Verdict.hopeless, 78),
        (143, (), "bad", Verdict.hopeless, 78),
        (137, (76,), "none", Verdict.crashed, 76),
        (143, (1,), "none", Verdict.crashed, 143),
        (134, (), "finished", Verdict.finished, 0),
        # A peer of a rank with a wrong configuration saved and left.
        (78, (75, 78), "stopped", Verdict.hopeless, 78),
        (76, (75, 76), "stopped", Verdict.stopped, 75),
    ],
)
def test_judge(code: int, ranks: tuple[int, ...], events: str, verdict: Verdict, final: int) -> None:
    end = judge(code, EVENTS[events], ranks)
    assert (end.verdict, end.code) == (verdict, final)


def test_finished(run: RunFolder) -> None:
    assert supervise(run, "exit 0").returncode == 0
    assert told(run) == [] and not run.failed.exists()


@pytest.mark.parametrize("code", [78, 93])
def test_hopeless_is_never_tried_again(run: RunFolder, fake_slurm: FakeSlurm, code: int) -> None:
    script = f'echo x >> "$1/starts"; exit {code}'
    done = supervise(run, script, "--requeue=slurm", environ=fake_slurm.environ)
    assert done.returncode == code
    assert (run.path / "starts").read_text() == "x\n"
    assert run.failed.read_text().startswith(f"Exit code {code}: ")
    assert told(run) == ["failed"] and fake_slurm.called == []


def test_reason_is_the_trainers_own_and_the_log_is_named(run: RunFolder) -> None:
    failed = '{"event": "failed", "reason": "data/x.bin is cut short"}'
    script = f"echo '{failed}' >> \"$1/events.jsonl\"; exit 78"
    supervise(
        run, script, f"--log={run.logs}/{{job}}.r{{attempt}}.log", environ={"SUBMITIT_LOCAL_JOB_ID": "9"}
    )
    text = run.failed.read_text()
    assert text == f"Exit code 78: data/x.bin is cut short; read {run.logs / '9.r0.log'}.\n"


def test_crashes_without_progress_are_bounded(run: RunFolder) -> None:
    log = f"--log={run.logs}/{{job}}.r{{attempt}}.log"
    done = supervise(run, 'echo x >> "$1/starts"; echo said; exit 3', "--max-restarts=2", log)
    assert done.returncode == 3
    assert (run.path / "starts").read_text() == "x\n" * 3
    assert told(run) == ["restarted", "restarted", "failed"]
    assert "crashed 3 times in a row" in run.failed.read_text()
    assert sorted(path.name for path in run.logs.iterdir()) == [
        "local.r0-1.log",
        "local.r0-2.log",
        "local.r0.log",
    ]
    assert all(path.read_text() == "said\n" for path in run.logs.iterdir())


def test_ranks_code_is_read_from_the_launchers_report_only(run: RunFolder) -> None:
    said = "a rank wrote: Exit code: 78"
    assert supervise(run, f"echo '{said}' >&2; exit 3", "--max-restarts=0").returncode == 3
    report = "srun: error: n2: tasks 2-3: Exited with exit code 78"
    assert supervise(run, f"echo '{report}' >&2; exit 143").returncode == 78
    assert supervise(run, "echo '   Exit code:    75' >&2; exit 143").returncode == 75


def test_crashes_with_progress_are_not_counted(run: RunFolder) -> None:
    # Six crashes with a bound of one, but each start publishes a checkpoint.
    script = """n=$(ls "$1/checkpoints" | wc -l); [ "$n" = 6 ] && exit 0; mkdir "$1/checkpoints/step_$n"; exit 76"""
    assert supervise(run, script, "--max-restarts=1").returncode == 0
    assert told(run) == ["restarted"] * 6


@pytest.mark.req("C13")
def test_a_file_system_that_stumbles_does_not_end_the_supervisor(run: RunFolder) -> None:
    """It cannot be read for a moment, just when the ranks have left."""
    later = 'sleep 1; rmdir "$1/events.jsonl"; mv "$1/away" "$1/events.jsonl"'
    script = f'mv "$1/events.jsonl" "$1/away"; mkdir "$1/events.jsonl"; ({later}) >&- 2>&- & exit 76'
    run.append_event(Event.STARTED)
    done = supervise(run, f"[ -f $1/again ] && exit 0; touch $1/again; {script}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert told(run) == ["started", "restarted"]


def test_first_restart_is_made_at_once(run: RunFolder) -> None:
    script = '[ -e "$1/tried" ] && exit 0; touch "$1/tried"; exit 1'
    assert supervise(run, script, "--backoff-s=600").returncode == 0
    assert told(run) == ["restarted"]


def test_missing_program_is_a_bounded_crash(run: RunFolder) -> None:
    start = [sys.executable, "-m", "slurm.supervise", str(run.path), "--launch=step", "--backoff-s=0.01"]
    done = subprocess.run(
        [*start, "--max-restarts=1", "--", "no-such-srun"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 127 and "cannot start no-such-srun" in done.stdout


STOPPABLE = """trap 'echo x >> "$1/requests"; ending=1' USR2; trap 'echo bad >> "$1/bad"' TERM INT HUP
touch "$1/ready"; while [ -z "$ending" ]; do sleep 0.05; done; sleep 0.5; exit 75"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR2", "SIGINT", "SIGHUP"])
def test_any_signal_is_passed_on_once_as_the_stop_signal(run: RunFolder, name: str) -> None:
    process = subprocess.Popen(command(run, STOPPABLE))
    wait_for(run.path / "ready")
    for _ in range(3):
        process.send_signal(signal.Signals[name])
        time.sleep(0.1)
    assert process.wait(timeout=20) == 75
    assert (run.path / "requests").read_text() == "x\n"
    assert not (run.path / "bad").exists() and told(run) == [] and not run.failed.exists()


def test_the_stop_signal_may_be_another(run: RunFolder) -> None:
    script = STOPPABLE.replace("USR2", "USR1")
    process = subprocess.Popen(command(run, script, "--stop-signal=SIGUSR1"))
    wait_for(run.path / "ready")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 75 and (run.path / "requests").read_text() == "x\n"


def test_crash_after_a_stop_request_is_not_restarted(run: RunFolder, fake_slurm: FakeSlurm) -> None:
    script = STOPPABLE.replace("exit 75", "exit 1")
    process = subprocess.Popen(command(run, script, "--requeue=slurm"), env=os.environ | fake_slurm.environ)
    wait_for(run.path / "ready")
    process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 20
    while not fake_slurm.called and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)  # Slurm's, which ends the requeued job
    assert process.wait(timeout=20) == 75
    assert told(run) == ["warning", "requeued"] and fake_slurm.called == ["scontrol requeue 42"]


def test_ranks_do_not_outlive_a_killed_supervisor(run: RunFolder) -> None:
    process = subprocess.Popen(command(run, f'echo $$ > "$1/pid"; {STOPPABLE}'))
    wait_for(run.path / "ready")
    trainer = int((run.path / "pid").read_text())
    process.kill()
    process.wait(timeout=20)
    deadline = time.monotonic() + 20
    while is_alive(trainer) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(trainer)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert path.exists()


ENDS_JOB = 'kill -TERM "$PPID"; exit 0'


@pytest.mark.req("C13")
@pytest.mark.parametrize("array", [False, True])
def test_stopped_is_requeued_and_of_an_array_only_the_task(
    run: RunFolder, fake_slurm: FakeSlurm, array: bool
) -> None:
    fake_slurm.job(RUNNING, requeue=ENDS_JOB)
    environ = fake_slurm.environ | ({"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "3"} if array else {})
    done = supervise(run, "exit 75", "--requeue=slurm", environ=environ)
    assert done.returncode == 75, done.stdout + done.stderr
    assert fake_slurm.called == [f"scontrol requeue {'40_3' if array else '42'}"]
    assert told(run) == ["requeued"] and not run.failed.exists()


@pytest.mark.parametrize("mode", ["slurm", "successor"])
def test_refused_requeue_submits_the_script_again(run: RunFolder, fake_slurm: FakeSlurm, mode: str) -> None:
    fake_slurm.job(RUNNING, requeue="echo disabled >&2; exit 1")
    assert supervise(run, "exit 75", f"--requeue={mode}", environ=fake_slurm.environ).returncode == 75
    tried = ["scontrol requeue 42"] if mode == "slurm" else []
    successor = f"sbatch --parsable --dependency=afterany:42 {run.job_script}"
    assert fake_slurm.called == [*tried, successor]
    last = run.read_events()[-1]
    assert last["event"] == Event.REQUEUED and last["job_id"] == "4711"
    assert ("warning" in told(run)) == (mode == "slurm")


@pytest.mark.parametrize(
    ("shown", "comes_back"),
    [
        (RUNNING.replace("RUNNING", "COMPLETING"), False),  # a person cancelled it
        (RUNNING.replace("RUNNING", "COMPLETING").replace("RunTime=00:01:00", "RunTime=00:05:01"), True),
        (
            RUNNING.replace("RUNNING", "COMPLETING").replace(
                "PreemptTime=None", "PreemptTime=2026-01-01T00:01:00"
            ),
            True,
        ),
        # Pre-empted in an earlier life, cancelled in this one.
        (
            RUNNING.replace("RUNNING", "COMPLETING").replace(
                "PreemptTime=None", "PreemptTime=2025-12-31T00:01:00"
            ),
            False,
        ),
    ],
)
def test_cancelled_job_does_not_come_back(
    run: RunFolder, fake_slurm: FakeSlurm, shown: str, comes_back: bool
) -> None:
    fake_slurm.job(shown, requeue=ENDS_JOB)
    assert supervise(run, "exit 75", "--requeue=slurm", environ=fake_slurm.environ).returncode == 75
    assert bool(fake_slurm.called) == comes_back
    assert told(run) == (["requeued"] if comes_back else ["warning"])


def test_job_that_slurm_has_requeued_is_left_alone(run: RunFolder, fake_slurm: FakeSlurm) -> None:
    fake_slurm.job(RUNNING.replace("RUNNING", "COMPLETING").replace("Restarts=0", "Restarts=1"))
    assert supervise(run, "exit 75", "--requeue=slurm", environ=fake_slurm.environ).returncode == 75
    assert fake_slurm.called == [] and told(run) == ["requeued"]


def test_crash_of_a_job_that_is_being_preempted_is_requeued(run: RunFolder, fake_slurm: FakeSlurm) -> None:
    # The ranks were told directly, before they could listen; the supervisor was not.
    fake_slurm.job(RUNNING.replace("PreemptTime=None", "PreemptTime=2026-01-01T00:01:00"), requeue=ENDS_JOB)
    done = supervise(run, "kill -USR2 $$", "--requeue=slurm", environ=fake_slurm.environ)
    assert done.returncode == 75 and fake_slurm.called == ["scontrol requeue 42"]


def test_requeues_without_progress_come_to_an_end(run: RunFolder, fake_slurm: FakeSlurm) -> None:
    fake_slurm.job(RUNNING, requeue=ENDS_JOB)
    codes = []
    for restart in range(12):
        environ = fake_slurm.environ | {"SLURM_RESTART_COUNT": str(restart)}
        fake_slurm.job(RUNNING.replace("Restarts=0", f"Restarts={restart}"), requeue=ENDS_JOB)
        codes.append(supervise(run, "exit 75", "--requeue=slurm", environ=environ).returncode)
        if codes[-1] != 75:
            break
    assert codes == [75] * 10 + [93]
    assert "without a new checkpoint" in run.failed.read_text()


# --- what Slurm did is not what it said

LOST_ANSWERS = (
    "Unexpected message received for job 42",
    "slurm_requeue error: Socket timed out on send/recv operation",
)


@pytest.fixture
def in_job(
    fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[RunFolder], str | None]]:
    """`come_back` in this process, with little patience; returns what went wrong."""
    for name, value in fake_slurm.environ.items():
        monkeypatch.setenv(name, value)
    for name in ("_PATIENCE_S", "_RETRY_S", "_KILL_WAIT_S"):
        monkeypatch.setattr(requeue, name, 0.2)
    before = signal.getsignal(signal.SIGTERM)
    yield lambda run: requeue.come_back(run, 3, requeue.Way(), print)
    signal.signal(signal.SIGTERM, before)


Come = Callable[[RunFolder], str | None]
WAITS = RUNNING.replace("RUNNING", "PENDING")
STARTED_ANEW = RUNNING.replace("Restarts=0", "Restarts=1")


@pytest.mark.req("C13")
@pytest.mark.parametrize("said", LOST_ANSWERS)
@pytest.mark.parametrize("after", [WAITS, STARTED_ANEW])
def test_requeue_that_was_carried_out_without_a_word_has_no_successor(
    run: RunFolder, fake_slurm: FakeSlurm, in_job: Come, said: str, after: str
) -> None:
    done = fake_slurm.folder / "done"
    fake_slurm.job(
        f"$([ -e {done} ] && echo {after} || echo {RUNNING})",
        requeue=f"touch {done}; echo {said} >&2; exit 1",
    )
    assert in_job(run) is None
    assert fake_slurm.called == ["scontrol requeue 42"] and told(run) == ["requeued"]


@pytest.mark.parametrize("said", LOST_ANSWERS)
def test_nothing_is_submitted_while_it_is_unknown_whether_the_job_is_requeued(
    run: RunFolder, fake_slurm: FakeSlurm, in_job: Come, said: str
) -> None:
    fake_slurm.job(RUNNING, requeue=f"echo {said} >&2; exit 1")
    assert "did not say in 0 s whether it has requeued job 42" in str(in_job(run))
    assert set(fake_slurm.called) == {"scontrol requeue 42"} and len(fake_slurm.called) > 1


@pytest.mark.parametrize(
    "said",
    ["Requested operation is presently disabled", "Access/permission denied", "Invalid job id specified"],
)
def test_slurms_refusals_are_known(run: RunFolder, fake_slurm: FakeSlurm, in_job: Come, said: str) -> None:
    fake_slurm.job(RUNNING, requeue=f"echo {said} for job 42 >&2; exit 1")
    assert in_job(run) is None
    assert [line.split()[0] for line in fake_slurm.called] == ["scontrol", "sbatch"]


def test_job_that_slurm_does_not_describe_is_not_requeued(
    run: RunFolder, fake_slurm: FakeSlurm, in_job: Come
) -> None:
    # It may have been cancelled, and a requeue would bring it back to life.
    fake_slurm.job("$(exit 1)", requeue=ENDS_JOB)
    write_program(
        fake_slurm.folder / "scontrol", f'[ "$1" = show ] && exit 1; echo requeue >> {fake_slurm.calls}'
    )
    assert "whether job 42 was cancelled, so it is not requeued" in str(in_job(run))
    assert fake_slurm.called == [] and told(run) == []


def test_controller_that_is_away_is_asked_again(run: RunFolder, fake_slurm: FakeSlurm, in_job: Come) -> None:
    asked = fake_slurm.folder / "asked"
    away = 'echo "Unable to contact slurm controller" >&2; exit 1'
    fake_slurm.job(RUNNING, requeue=f"echo x >> {asked}; [ $(wc -l < {asked}) = 2 ] && exit 0; {away}")
    assert in_job(run) is None
    assert asked.read_text() == "x\n" * 2 and told(run) == ["requeued"]


def test_successor_is_submitted_again_only_if_slurm_never_heard_of_it(
    run: RunFolder, fake_slurm: FakeSlurm, in_job: Come
) -> None:
    fake_slurm.job(RUNNING, requeue="echo disabled >&2; exit 1")
    note = f"echo sbatch >> {fake_slurm.calls}"
    write_program(
        fake_slurm.folder / "sbatch", f"{note}; echo Socket timed out on send/recv operation >&2; exit 1"
    )
    assert "Socket timed out" in str(in_job(run))
    assert fake_slurm.called.count("sbatch") == 1
    write_program(
        fake_slurm.folder / "sbatch", f"{note}; echo Unable to contact slurm controller >&2; exit 1"
    )
    assert "Slurm cannot be reached" in str(in_job(run))
    assert fake_slurm.called.count("sbatch") > 2


def test_the_first_word_of_a_jobs_record_counts(run: RunFolder, fake_slurm: FakeSlurm, in_job: Come) -> None:
    fake_slurm.job(f"{RUNNING} Comment=JobState=PENDING Restarts=7")
    assert in_job(run) is None
    assert fake_slurm.called == ["scontrol requeue 42"]


def test_stop_asks_slurm_once_before_the_requeue(run: RunFolder, fake_slurm: FakeSlurm) -> None:
    fake_slurm.job(RUNNING, requeue=ENDS_JOB)
    supervise(run, "exit 75", "--requeue=slurm", environ=fake_slurm.environ)
    assert len(fake_slurm.calls.read_text().splitlines()) == 2


# --- who trains the run


def test_ranks_that_were_turned_away_leave_the_run_to_its_owner(run: RunFolder) -> None:
    owned = """echo '{"event": "failed", "refused": true, "code": 78, "reason": "n1 trains it"}'"""
    done = supervise(run, f'{owned} >> "$1/events.jsonl"; exit 78')
    assert done.returncode == 78 and "n1 trains it" in done.stdout
    assert told(run) == ["failed"] and not run.failed.exists()


def test_wrong_configuration_is_marked_though_a_dead_owner_left_its_file(run: RunFolder) -> None:
    run.owner.write_text("{}")
    assert supervise(run, "exit 78").returncode == 78
    assert run.failed.exists() and told(run) == ["failed"]


# --- a disk that is full

FULL = Path("/dev/full")


def test_launcher_that_says_much_is_read_to_its_end_on_a_full_disk(run: RunFolder) -> None:
    done = supervise(run, "yes | head -c 300000 >&2; echo 'srun: error: x: Exited with exit code 78' >&2; exit 143",
                     f"--log={FULL}")  # fmt: skip
    assert done.returncode == 78


def test_job_is_requeued_though_nothing_can_be_written(run: RunFolder, fake_slurm: FakeSlurm) -> None:
    fake_slurm.job(RUNNING, requeue=ENDS_JOB)
    # A link to nowhere: cannot be written, reads as if nothing were there.
    run.events.symlink_to(run.path / "gone" / "file")
    with FULL.open("w") as output:
        process = subprocess.Popen(
            command(run, "exit 75", "--requeue=slurm"), env=os.environ | fake_slurm.environ, stdout=output
        )
        assert process.wait(timeout=60) == 75
    assert fake_slurm.called == ["scontrol requeue 42"]
    run.failed.symlink_to(run.path / "gone" / "file")
    assert supervise(run, "exit 78").returncode == 78


# --- ranks of mpirun

RANK = """
import os, sys, time; from pathlib import Path
from contract.variables import DIE_WITH_LAUNCHER
from train.resilience.process import die_with_parent
if os.environ.get(DIE_WITH_LAUNCHER) == "1":
    die_with_parent()
Path(sys.argv[1], f"pid{os.environ['OMPI_COMM_WORLD_RANK']}").write_text(f"{os.getpid()}")
time.sleep(60)
"""


def test_ranks_of_mpirun_do_not_outlive_a_killed_supervisor(run: RunFolder) -> None:
    launch, environment = mpi_command(2, [sys.executable, "-c", RANK, str(run.path)])
    start = [sys.executable, "-m", "slurm.supervise", str(run.path), "--launch=step", "--", *launch]
    process = subprocess.Popen(start, env=os.environ | environment)
    files = [run.path / f"pid{rank}" for rank in range(2)]
    ranks = []
    for file in files:
        wait_for(file)
        ranks.append(int(file.read_text()))
    process.kill()
    process.wait(timeout=20)
    deadline = time.monotonic() + 20
    while any(map(is_alive, ranks)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [pid for pid in ranks if is_alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


@pytest.mark.parametrize(
    ("script", "code", "events"),
    [
        # Asked before the ranks could listen: nothing had begun.
        ('kill -USR2 "$PPID"; sleep 0.5; exit 140', 75, ["warning", "stopped"]),
        # Asked, but the checkpoint could not be saved: nobody may take that for a stop with one.
        (
            'echo \'{"event": "failed", "reason": "the disk is full"}\' >> "$1/events.jsonl"; kill -USR2 "$PPID"; '
            "sleep 0.5; exit 1",
            1,
            ["failed", "warning", "failed"],
        ),
    ],
)
def test_a_local_job_that_ends_badly_after_a_stop_request(
    run: RunFolder, script: str, code: int, events: list[str]
) -> None:
    done = supervise(run, f"trap '' USR2; {script}")
    assert done.returncode == code, done.stdout
    assert told(run) == events
    assert run.failed.exists() == (code == 1)
