"""Sweeps under a real Slurm: the real command, script and supervisor, with a shell script in the trainer's place."""

import json
import shlex
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.command import COMMAND, wait_until
from harness.programs import write_python
from harness.slurm_lab import SlurmLab
from harness.toy import LOOP, MODEL, QUIET, REST

from contract.run_folder import Event, RunFolder
from contract.sweep import SweepFolder
from slurm.lab import Lab, LabSettings

# Takes 0.2 s a step, five times as many with a seed of 2; a seed of 13 fails for good until somebody has mended it.
TRAINER = """
run=$(dirname "$5"); sweep=$(dirname "$run"); name=$(basename "$run")
seed=$(sed -n 's/^seed: //p' "$5"); steps=$(sed -n 's/^  steps: //p' "$5" | head -n 1)
say() { echo "{\\"event\\": \\"$1\\", \\"time\\": 0, \\"job\\": \\"$SLURM_ARRAY_JOB_ID\\"}" >> "$run/events.jsonl"; }
stop=; trap 'stop=1' TERM USR2
echo "+ $name" >> "$sweep/live"; trap 'echo "- $name" >> "$sweep/live"' EXIT
env > "$run/env"
say started
[ "$seed" = 2 ] && steps=$((5 * steps))
[ "$seed" = 13 ] && [ ! -e "$sweep/mended" ] && exit 78
for step in $(seq "$steps"); do
  sleep 0.2
  [ -n "$stop" ] && mkdir -p "$run/checkpoints/step_$step" && say stopped && exit 75
done
echo "{\\"step\\": $steps, \\"eval_loss\\": $seed.5}" >> "$run/metrics.jsonl"
say finished
touch "$run/FINISHED"
"""


class Sweeps:
    """Starts sweeps as a user does, in one folder."""

    def __init__(self, environment: dict[str, str], root: Path) -> None:
        self.environment, self.root = environment, root
        self.python = write_python(root / "python", TRAINER)

    def __call__(self, *arguments: str) -> str:
        return self.run(*arguments).stdout

    def run(self, *arguments: str, code: int = 0) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            [*COMMAND, "sweep", *arguments],
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def start(self, name: str, *arguments: str) -> str:
        return self("--name", name, *self.settings(), *arguments)

    def settings(self) -> list[str]:
        return [
            *("cluster=lab", f"cluster.python={self.python}", f"run.root={self.root}/runs"),
            *("job.ranks_per_node=1", "job.cpus_per_rank=1", "job.launch=step", "job.time_limit=00:05:00"),
        ]

    def folder(self, name: str) -> SweepFolder:
        return SweepFolder(self.root / "runs" / name)

    def runs(self, name: str) -> dict[str, RunFolder]:
        folder = self.folder(name)
        return {task.run: folder.run(task) for task in folder.read().tasks}

    def states(self, name: str) -> dict[str, str]:
        told = json.loads(self("status", str(self.folder(name).path), "--json"))
        return {task["run"]: task["state"] for task in told["tasks"]}

    def results(self, name: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(self("results", str(self.folder(name).path), "--json"))
        return rows

    def wait_for_the_end(self, name: str, timeout_s: float = 60) -> None:
        """Wait until every task has a marker."""
        wait_until(
            f"the end of {name}",
            lambda: all(run.finished.exists() or run.failed.exists() for run in self.runs(name).values()),
            timeout_s,
        )

    def most_at_once(self, name: str) -> int:
        live, most = 0, 0
        for line in (self.folder(name).path / "live").read_text().splitlines():
            live += 1 if line.startswith("+") else -1
            most = max(most, live)
        return most


@pytest.fixture
def sweeps(lab: SlurmLab, tmp_path: Path) -> Sweeps:
    return Sweeps(lab.environment, tmp_path)


def told(run: RunFolder, event: Event) -> list[dict[str, Any]]:
    return [line for line in run.read_events() if line["event"] == event]


def wait_for_start(run: RunFolder) -> None:
    wait_until(f"the start of {run.name}", lambda: bool(told(run, Event.STARTED)))


@pytest.mark.req("C12", "A22")
def test_twelve_tasks_three_at_a_time_one_preempted_and_one_failing(lab: SlurmLab, sweeps: Sweeps) -> None:
    whole = "job.cpus_per_rank=2"  # each a node of its own: nobody else is pre-empted with it
    said = sweeps.start("twelve", "seed=range(2,14)", "loop.steps=4", "--parallel", "3", whole)
    runs = sweeps.runs("twelve")
    assert len(runs) == 12 and not any(run.finished.exists() for run in runs.values())
    (array,) = sweeps.folder("twelve").read().arrays
    assert array.spec == "0-11%3" and f"array: {array.job_id} with 12 tasks" in said
    first = runs["seed=2"]
    assert told(first, Event.SUBMITTED)[0]["job_id"] == f"{array.job_id}_0"

    wait_for_start(first)
    node = lab.job(f"{array.job_id}_0")["NodeList"]
    lab.run(
        "sbatch",
        "--partition=high",
        f"--nodelist={node}",
        "--exclusive",
        "--output=/dev/null",
        "--wrap=sleep 1",
    )
    sweeps.wait_for_the_end("twelve")
    starts = {name: len(told(run, Event.STARTED)) for name, run in runs.items()}
    assert starts == {name: 2 if name == "seed=2" else 1 for name in runs}
    assert sweeps.most_at_once("twelve") == 3
    wait_until("the array to leave", lambda: lab.run("squeue", "--noheader", "--format=%i") == "")
    assert Counter(sweeps.states("twelve").values()) == {"finished": 11, "failed": 1}
    rows = sweeps.results("twelve")
    assert [row["eval_loss"] for row in rows] == [*(seed + 0.5 for seed in range(2, 13)), None]
    assert rows[0]["winner"] and (rows[-1]["run"], rows[-1]["state"]) == ("seed=13", "failed")
    logs = {path.name for path in first.logs.glob("*.log")}
    assert f"{array.job_id}_0.batch.log" in logs and any(f"{array.job_id}_0.r1." in name for name in logs)


@pytest.mark.req("C12")
def test_a_sweep_grows_retries_and_runs_nothing_twice(sweeps: Sweeps) -> None:
    sweeps.start("grows", "seed=1,13", "loop.steps=1")
    sweeps.wait_for_the_end("grows")
    assert "no new" not in sweeps.start("grows", "seed=1,13", "loop.steps=1")
    said = sweeps.start("grows", "seed=1,3", "loop.steps=1", "optim.lr=1e-3")
    assert "1 new task, 1 task of this command known already" in said
    refused = sweeps.run("--name", "grows", *sweeps.settings(), "seed=4", "loop.steps=2", code=78).stderr
    assert "loop.steps was 1 and is 2" in refused
    sweeps.wait_for_the_end("grows")
    (sweeps.folder("grows").path / "mended").touch()
    wait_until("the failed task's job to end", lambda: sweeps.states("grows")["seed=13"] == "failed")
    said = sweeps("retry", str(sweeps.folder("grows").path), "job.time_limit=00:02:00")
    assert "with 1 task (1)" in said
    wait_until("the retried task", lambda: sweeps.runs("grows")["seed=13"].finished.exists())
    starts = {name: len(told(run, Event.STARTED)) for name, run in sweeps.runs("grows").items()}
    assert starts == {"seed=1": 1, "seed=13": 2, "seed=3": 1}
    assert "--time=00:02:00" in sweeps.folder("grows").job_script.read_text()
    assert "no task ended without finishing" in sweeps("retry", str(sweeps.folder("grows").path))


@pytest.mark.req("C12")
def test_more_tasks_than_the_submit_limit_follow_by_themselves(sweeps: Sweeps) -> None:
    said = sweeps.start("limited", "seed=range(1,9)", "loop.steps=1", "cluster.max_submit_jobs=4")
    assert "wait:  4 tasks: there is no room in the queue; the last tasks in the queue send them" in said
    assert [array.tasks for array in sweeps.folder("limited").read().arrays] == [[0, 1, 2, 3]]
    sweeps.wait_for_the_end("limited")
    arrays = sweeps.folder("limited").read().arrays
    assert sorted(index for array in arrays for index in array.tasks) == list(range(8))
    assert all(len(told(run, Event.STARTED)) == 1 for run in sweeps.runs("limited").values())


@pytest.mark.req("C12")
def test_a_cancelled_sweep_ends_and_can_be_taken_up_again(lab: SlurmLab, sweeps: Sweeps) -> None:
    sweeps.start("ended", "seed=1,2,3", "loop.steps=100", "--parallel", "1")
    runs = sweeps.runs("ended")
    wait_for_start(runs["seed=1"])
    sweeps("cancel", str(sweeps.folder("ended").path))
    wait_until("the queue to be empty", lambda: lab.run("squeue", "--noheader", "--format=%i") == "")
    assert set(sweeps.states("ended").values()) == {"stopped"}
    assert runs["seed=1"].published_steps()
    assert not told(runs["seed=1"], Event.REQUEUED)
    assert "with 2 tasks (0,2%1)" in sweeps("retry", str(sweeps.folder("ended").path), "0", "seed=3")


@pytest.mark.req("C12")
def test_a_sweep_from_inside_an_array_task_is_a_sweep_of_its_own(
    lab: SlurmLab, sweeps: Sweeps, tmp_path: Path
) -> None:
    command = shlex.join(
        [*COMMAND, "sweep", "--name", "inner", *sweeps.settings(), "seed=1,2", "loop.steps=1"]
    )
    outer = lab.submit(
        f"export SBATCH_TIMELIMIT=3 SBATCH_ARRAY_INX=7\ncd {tmp_path}\n{command}",
        *("--array=1", "--cpus-per-task=2", "--partition=low", "--mem=100"),
        folder=tmp_path,
    )
    wait_until("the inner sweep", lambda: sweeps.folder("inner").is_sweep)
    sweeps.wait_for_the_end("inner")
    (array,) = sweeps.folder("inner").read().arrays
    assert array.job_id and lab.job(f"{array.job_id}_0")["TimeLimit"] == "00:05:00"
    for run in sweeps.runs("inner").values():
        lines = (run.path / "env").read_text().splitlines()
        variables = dict(line.split("=", 1) for line in lines if "=" in line)
        assert variables["SLURM_ARRAY_JOB_ID"] == array.job_id != outer
        assert "SLURM_CPUS_PER_TASK" not in variables or variables["SLURM_CPUS_PER_TASK"] == "1"
        assert (variables["SLURM_ARRAY_TASK_COUNT"], variables["SLURM_ARRAY_TASK_MAX"]) == ("2", "1")


@pytest.fixture
def small_arrays(slurm_packages: None) -> Iterator[dict[str, str]]:
    """The environment of a lab whose arrays have indices below 5."""
    folder = Path(tempfile.mkdtemp(prefix="trierarch-arrays-"))
    cluster = Lab(folder / "lab")
    try:
        cluster.up(LabSettings(nodes=1, cpus=4, extra=("MaxArraySize=5",)))
        yield cluster.full_environment()
    finally:
        cluster.down()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.req("C12")
def test_a_sweep_larger_than_max_array_size_is_cut_and_keeps_its_throttle(
    small_arrays: dict[str, str], tmp_path: Path
) -> None:
    sweeps = Sweeps(small_arrays, tmp_path)
    sweeps.start("cut", "seed=range(1,13)", "loop.steps=1", "--parallel", "4")
    arrays = sweeps.folder("cut").read().arrays
    assert [(array.spec, array.offset) for array in arrays] == [("0-4%4", 0), ("0-4%4", 5), ("0-1%4", 10)]
    assert arrays[1].after == [arrays[0].job_id]
    sweeps.wait_for_the_end("cut")
    # Every task has trained with its own configuration.
    assert {row["run"]: row["eval_loss"] for row in sweeps.results("cut")} == {
        f"seed={seed}": seed + 0.5 for seed in range(1, 13)
    }
    assert sweeps.most_at_once("cut") <= 4


@pytest.mark.req("C12", "C4")
def test_a_task_trains_for_real(lab: SlurmLab, tmp_path: Path, toy_tokens: Path) -> None:
    sweeps = Sweeps(lab.environment, tmp_path)
    said = sweeps(
        *("--name", "real", *MODEL, *LOOP, *REST[:-1], *QUIET, "loop.steps=5", "optim.lr=choice(1e-2)"),
        *(f"data.prefix={toy_tokens}", f"run.root={tmp_path}/runs", "cluster=lab", "job.ranks_per_node=1"),
        "job.time_limit=00:05:00",
    )
    assert "1 new task" in said
    sweeps.wait_for_the_end("real", timeout_s=90)
    wait_until("the job to leave", lambda: lab.run("squeue", "--noheader", "--format=%i") == "")
    (row,) = sweeps.results("real")
    assert (row["run"], row["state"], row["step"]) == ("lr=0.01", "finished", 5)
    assert 0 < row["eval_loss"] < 10
    run = sweeps.runs("real")["lr=0.01"]
    assert run.published_steps() == [5] and (run.code / "train/loop.py").exists()
