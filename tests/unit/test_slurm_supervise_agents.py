"""The supervisor's command line with agents (stand-ins), sweeps, and jobs that come back elsewhere."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import stand_in_agent
from harness.programs import Commands, search_path, write_program

from contract.run_folder import RunFolder, append_json_line, read_json_lines
from contract.sweep import Array, Manifest, SweepFolder, Task

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
JOB = (
    "JobState=RUNNING Restarts=0 StartTime=2026-01-01T00:00:00 PreemptTime=None Partition=low "
    "RunTime=00:01:00 TimeLimit=00:05:00 ExcNodeList={exclude}"
)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.job_script.write_text("#!/bin/bash\n")
    return folder


class FakeSlurm(Commands):
    """The nodes of the job and of the partition are a, b, c, d."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.refuses_update = False
        self.requeue = 'kill -TERM "$PPID"'
        self.exclude = "(null)"
        self.squeue = "exit 1"
        self.job_states = "a idle\\nb idle\\nc mixed\\nd idle"

    def write(self) -> None:
        update = "echo 'Invalid node name' >&2; exit 1" if self.refuses_update else ":"
        scontrol = f"""case "$1 $2" in
  "show job") echo "{JOB.format(exclude=self.exclude)}" ;;
  "show hostnames") echo "$3" | tr , '\\n' ;;
  requeue*) {self.requeue} ;;
  update*) {update} ;;
esac"""
        self.put("scontrol", scontrol)
        self.put("sbatch", "echo 4711")
        self.put("sinfo", f'printf "{self.job_states}\\n"')
        write_program(self.folder / "squeue", self.squeue)

    @property
    def called(self) -> list[str]:
        """What was asked of Slurm beside questions."""
        return [line for line in self.noted() if not line.startswith(("scontrol show", "sinfo"))]

    @property
    def environ(self) -> dict[str, str]:
        path = search_path(self.folder)
        return {"PATH": path, "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "a,b"}


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    return FakeSlurm(tmp_path / "bin")


def start(
    run: RunFolder,
    plan: dict[str, Any],
    slurm: FakeSlurm,
    *options: str,
    environ: dict[str, str] | None = None,
) -> "subprocess.Popen[str]":
    """Supervise `run`; the folder of a sweep is asked for by `sweep` in `plan`."""
    slurm.write()
    (run.path / "plan.json").write_text(json.dumps({"steps": 8, **plan}))
    begin = [sys.executable, "-m", "slurm.supervise", plan.get("sweep", str(run.path)), "--backoff-s=0.01"]
    begin += ["--nodes=2", "--ranks-per-node=1", *options, "--"]
    command = [*begin, sys.executable, "-u", stand_in_agent.__file__, "{node}", "{run}"]
    return subprocess.Popen(
        command,
        env=slurm.environ | (environ or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def supervise(
    run: RunFolder,
    plan: dict[str, Any],
    slurm: FakeSlurm,
    *options: str,
    environ: dict[str, str] | None = None,
) -> int:
    process = start(run, plan, slurm, *options, environ=environ)
    print(process.communicate(timeout=60)[0])
    return process.returncode


def told(run: RunFolder) -> list[str]:
    return [event["event"] for event in run.read_events()]


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


BROKEN = {"nodes": {"b": {"broken": 9}}}


@pytest.mark.req("C13")
def test_agents_are_started_on_every_node_of_the_job(run: RunFolder, slurm: FakeSlurm) -> None:
    assert supervise(run, {}, slurm, environ={"SLURM_JOB_NODELIST": "c,a,b"}) == 0
    lines = list(read_json_lines(run.path / "told.jsonl"))
    assert sorted((line["node_rank"], line["node"]) for line in lines) == [(0, "c"), (1, "a")]
    assert (run.path / "starts-b").exists(), "a spare stands ready"


@pytest.mark.req("C13")
def test_ranks_are_asked_to_stop_when_the_jobs_time_is_nearly_over(run: RunFolder, slurm: FakeSlurm) -> None:
    # Half of the time is the most that saving may take: two seconds later, and asked once more.
    asked_file = run.path / "asked"
    slurm.squeue = f"[ -e {asked_file} ] && echo '2:29|5:00' || {{ touch {asked_file}; echo '2:32|5:00'; }}"
    assert supervise(run, {"steps": 10_000}, slurm, "--requeue=slurm") == 75
    assert slurm.called == ["scontrol requeue 42"]
    asked = [line for line in read_json_lines(run.path / "told.jsonl") if line["task"] == "train"]
    assert len(asked) == 2 and told(run)[-1] == "requeued"


@pytest.mark.parametrize(("age_h", "nodes"), [(1, ["b", "c"]), (3, ["a", "b"])])
def test_a_node_that_failed_of_late_stands_by(
    run: RunFolder, slurm: FakeSlurm, age_h: float, nodes: list[str]
) -> None:
    failed = {"event": "node_failed", "time": time.time() - age_h * 3600, "node": "a"}
    append_json_line(run.events, failed)
    options = ["--exclude-for-h=2", "--health-check"]  # which waits for all agents
    assert supervise(run, {}, slurm, *options, environ={"SLURM_JOB_NODELIST": "a,b,c"}) == 0
    lines = [line for line in read_json_lines(run.path / "told.jsonl") if line["task"] == "train"]
    assert sorted(line["node"] for line in lines) == nodes


@pytest.mark.parametrize(
    "options",
    [
        ["--launch=agents", "--log=x"],
        ["--launch=step", "--health-check"],
        ["--launch=step", "--rank-cpus=numa"],
    ],
)
def test_an_option_without_effect_is_refused(run: RunFolder, slurm: FakeSlurm, options: list[str]) -> None:
    assert supervise(run, {}, slurm, *options) == 2
    assert not (run.path / "told.jsonl").exists()


@pytest.mark.req("A21")
@pytest.mark.parametrize("own", ["(null)", "x,y"])
def test_a_job_with_too_few_nodes_is_requeued_without_the_bad_one(
    run: RunFolder, slurm: FakeSlurm, own: str
) -> None:
    slurm.exclude = own
    assert supervise(run, BROKEN, slurm, "--requeue=slurm") == 75
    names = "b" if own == "(null)" else "x,y,b"
    assert slurm.called == ["scontrol requeue 42", f"scontrol update JobId=42 ExcNodeList={names}"]
    assert told(run) == ["node_failed", "warning", "requeued"]
    assert run.read_events()[-1]["excluded"] == ["b"]


def test_nodes_that_were_excluded_before_are_forgotten(run: RunFolder, slurm: FakeSlurm) -> None:
    slurm.exclude = "x,c"
    run.append_event("requeued", excluded=["c"])  # type: ignore[arg-type]
    assert supervise(run, BROKEN, slurm, "--requeue=slurm") == 75
    assert slurm.called[-1] == "scontrol update JobId=42 ExcNodeList=x,b"


def test_exclusion_that_would_leave_too_few_nodes_is_left_out(run: RunFolder, slurm: FakeSlurm) -> None:
    slurm.job_states = "a idle\\nb idle\\nc down*\\nd drained"
    assert supervise(run, BROKEN, slurm, "--requeue=slurm") == 75
    assert slurm.called == ["scontrol requeue 42"]


def test_refused_exclusion_is_a_warning(run: RunFolder, slurm: FakeSlurm) -> None:
    slurm.refuses_update = True
    assert supervise(run, BROKEN, slurm, "--requeue=slurm") == 75
    assert told(run)[-2:] == ["requeued", "warning"]
    assert "refused to keep job 42 away from b (Invalid node name)" in run.read_events()[-1]["reason"]


def test_successor_is_sent_without_the_bad_node(run: RunFolder, slurm: FakeSlurm) -> None:
    slurm.exclude = "x"
    assert supervise(run, BROKEN, slurm, "--requeue=successor") == 75
    options = "--parsable --dependency=afterany:42 --exclude=x,b"
    assert slurm.called == [f"sbatch {options} {run.job_script}"]


def test_cancelled_run_neither_begins_nor_comes_back(run: RunFolder, slurm: FakeSlurm) -> None:
    run.append_event("cancel_requested", job_id="42")  # type: ignore[arg-type]
    assert supervise(run, {}, slurm, "--requeue=slurm") == 75
    assert slurm.called == [] and told(run) == ["cancel_requested"]
    assert not (run.path / "told.jsonl").exists()


def test_wrong_map_of_cpus_is_told_in_one_sentence(run: RunFolder, slurm: FakeSlurm) -> None:
    assert supervise(run, {}, slurm, "--rank-cpus=nonsense") == 78
    assert "--rank-cpus=nonsense" in run.failed.read_text() and told(run) == ["failed"]


# --- what is left of a supervisor that died


@pytest.mark.req("A21")
@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING", "finished"])
def test_agents_bring_a_job_back_whose_supervisor_was_lost(
    run: RunFolder, slurm: FakeSlurm, state: str
) -> None:
    slurm.requeue = "exit 0"
    plan = {"steps": 10_000, "lease_s": 3.0}
    process = start(run, plan, slurm, "--requeue=slurm", environ={"SLURMD_NODENAME": "a"})
    wait_for((run.checkpoints / "step_3").exists)
    below = family(process.pid)
    script = slurm.folder / "scontrol"
    # A job whose batch script has died with its node is RUNNING; COMPLETING is one that somebody cancelled.
    if state == "finished":
        run.mark_finished()
    else:
        script.write_text(script.read_text().replace("JobState=RUNNING", f"JobState={state}"))
    # Stopped it looks as if its node were gone; killed it would take the agents with it.
    process.send_signal(signal.SIGSTOP)
    try:
        words = {
            pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in family(process.pid, 1)
        }
        (first,) = (pid for pid, command in words.items() if b"a" in command)
        os.kill(first, signal.SIGKILL)
        if state == "RUNNING":
            wait_for(lambda: slurm.called[-1:] == ["scontrol update JobId=42 ExcNodeList=a"])
            assert slurm.called == ["scontrol requeue 42", "scontrol update JobId=42 ExcNodeList=a"]
            assert told(run) == ["node_failed", "requeued"]
        else:
            # The stand-in ends after its will.
            wait_for(lambda: not any(map(is_alive, below)))
            assert slurm.called == [] and told(run) == []
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=20)
    wait_for(lambda: not any(map(is_alive, below)))


@pytest.mark.req("A21")
@pytest.mark.parametrize("mode", ["slurm", "successor"])
@pytest.mark.parametrize("lives", [True, False])
def test_an_agent_that_a_living_supervisor_gave_up_leaves_the_job_alone(
    run: RunFolder, slurm: FakeSlurm, mode: str, lives: bool
) -> None:
    """Its node was cut off for a minute; the run goes on without it."""
    slurm.write()
    slurm.put("scancel", "echo 4711")
    code = "import time\nfrom pathlib import Path\nfrom contract.run_folder import RunFolder\n"
    code += (
        f"from slurm.supervise.alive import show_life\nshow_life(RunFolder(Path({str(run.path)!r})), '42')\n"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", code + "time.sleep(60)"], env=slurm.environ)
    try:
        wait_for(lambda: (run.heartbeat / "supervisor").exists())
        if not lives:
            supervisor.kill()
        will = [
            sys.executable,
            "-m",
            "slurm.supervise.requeue",
            str(run.path),
            f"--requeue={mode}",
            "--lost=a",
        ]
        subprocess.run(will, env=slurm.environ, check=True, timeout=60)
    finally:
        supervisor.kill()
        supervisor.wait(timeout=20)
    if lives:
        assert slurm.called == [] and told(run) == []
    elif mode == "slurm":
        assert slurm.called == ["scontrol requeue 42", "scontrol update JobId=42 ExcNodeList=a"]
    else:
        # Nobody else ends a job without its batch script, and the successor waits for that.
        submitted, cancelled = slurm.called
        assert submitted.startswith("sbatch --parsable --dependency=afterany:42 --exclude=a ")
        assert cancelled == "scancel 42"


def family(pid: int, depth: int = 9) -> list[int]:
    """The processes below `pid`, so many generations deep."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            found += [child, *(family(child, depth - 1) if depth > 1 else [])]
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_agents_and_ranks_do_not_outlive_a_killed_supervisor(run: RunFolder, slurm: FakeSlurm) -> None:
    process = start(run, {"steps": 10_000}, slurm)
    wait_for((run.checkpoints / "step_3").exists)
    below = family(process.pid)
    assert len(below) == 4
    process.kill()
    process.wait(timeout=20)
    wait_for(lambda: not any(map(is_alive, below)))


# --- a sweep


@pytest.fixture
def sweep(tmp_path: Path) -> SweepFolder:
    folder = SweepFolder(tmp_path / "sweep")
    folder.logs.mkdir(parents=True)
    folder.job_script.write_text("#!/bin/bash\n")
    tasks = [Task(index, f"task{index}", [f"seed={index}"], {"seed": index}) for index in range(2)]
    manifest = Manifest("sweep", 0.0, ["seed"], [], {}, tasks=tasks)
    manifest.arrays.append(Array([0, 1], 0, "0-1", job_id="40"))
    folder.write(manifest)
    for task in tasks:
        folder.run(task).create()
        folder.run(task).job_script.symlink_to(folder.job_script)
    return folder


ARRAY = {"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "43"}


@pytest.mark.req("C12")
def test_a_task_of_a_sweep_is_a_run_with_logs_of_its_own(sweep: SweepFolder, slurm: FakeSlurm) -> None:
    run = RunFolder(sweep.path / "task1")
    assert supervise(run, {"sweep": str(sweep.path)}, slurm, environ=ARRAY) == 0
    assert run.finished.exists() and not (sweep.path / "task0" / "FINISHED").exists()
    assert "finished" in (run.logs / "40_1.batch.log").read_text()


@pytest.mark.req("C12")
@pytest.mark.parametrize("mode", ["slurm", "successor"])
def test_of_an_array_the_task_alone_comes_back(sweep: SweepFolder, slurm: FakeSlurm, mode: str) -> None:
    run = RunFolder(sweep.path / "task1")
    plan = {"sweep": str(sweep.path), **BROKEN}
    assert supervise(run, plan, slurm, f"--requeue={mode}", environ=ARRAY) == 75
    if mode == "slurm":
        assert slurm.called == ["scontrol requeue 40_1", "scontrol update JobId=40_1 ExcNodeList=b"]
        return
    options = "--parsable --dependency=afterany:40_1 --array=1 --exclude=b"
    assert slurm.called == [f"sbatch {options} {run.job_script}"]
    assert run.read_events()[-1]["job_id"] == "4711_1"
    assert sweep.read().array("4711") is not None
