"""The supervisor under a real Slurm, with a shell script in the trainer's place."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.slurm_lab import TRAINER, SlurmLab, launch_shell_trainer, wait_until

from contract.run_folder import RunFolder
from slurm.lab import processes
from slurm.snapshot import snapshot
from slurm.status import RunState, status

Launch = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run folder with code, in a path that needs quoting."""
    folder = RunFolder(tmp_path / "a run's")
    folder.create()
    snapshot(folder)
    return folder


@pytest.fixture
def launch(lab: SlurmLab, run: RunFolder) -> Launch:
    """Submit the rendered script of `run` with other words in the trainer's place; returns the job id."""

    def submit(trainer: str, *arguments: object, **settings: Any) -> str:
        return launch_shell_trainer(lab, run, trainer, *arguments, **settings)

    return submit


def told(run: RunFolder) -> list[str]:
    return [event["event"] for event in run.read_events()]


def the_state(run: RunFolder) -> RunState:
    return status(run.path)[0].state


@pytest.mark.req("C13")
def test_preempted_job_is_requeued_and_finishes(lab: SlurmLab, run: RunFolder, launch: Launch) -> None:

    job = launch(TRAINER, 15)
    assert the_state(run) in (RunState.queued, RunState.running)
    assert wait_until(lambda: "started" in told(run), 20)
    assert the_state(run) is RunState.running
    lab.run("sbatch", "--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 2")
    assert wait_until(lambda: the_state(run) is RunState.requeued, 20), (told(run), status(run.path))
    lab.wait_for_state(job, {"COMPLETED"}, 40)
    assert the_state(run) is RunState.finished
    assert [event for event in told(run) if event != "submitted"] == [
        "started",
        "stopped",
        "requeued",
        "started",
        "finished",
    ]
    # Two lives, two sets of logs: nothing was overwritten.
    assert len(list(run.logs.glob(f"{job}.r0.*.log"))) == 4
    assert len(list(run.logs.glob(f"{job}.r1.*.log"))) == 4


@pytest.mark.req("C13")
def test_stop_before_the_time_limit_is_requeued_and_a_cancelled_job_is_not(
    lab: SlurmLab, run: RunFolder, launch: Launch
) -> None:

    job = launch(TRAINER, 1000)
    assert wait_until(lambda: "started" in told(run), 20)
    # What `--signal` sends at its time: to the ranks, not to the batch script.
    lab.run("scancel", "--signal=USR2", job)
    assert wait_until(lambda: told(run).count("started") == 2, 30), told(run)
    assert lab.job(job)["Restarts"] == "1"
    assert wait_until(lambda: the_state(run) is RunState.running, 10)

    lab.run("scancel", job)
    lab.wait_for_state(job, {"CANCELLED"}, 20)
    assert "warning" in told(run) and told(run).count("requeued") == 1
    assert the_state(run) is RunState.stopped


@pytest.mark.req("C13")
def test_job_that_may_not_be_requeued_has_a_successor(lab: SlurmLab, run: RunFolder, launch: Launch) -> None:

    job = launch(TRAINER, 10)
    lab.run("scontrol", "update", f"JobId={job}", "Requeue=0")
    assert wait_until(lambda: "started" in told(run), 20)
    lab.run("scancel", "--signal=USR2", job)
    assert wait_until(lambda: run.finished.exists(), 40), told(run)
    assert told(run)[-2:] == ["started", "finished"]
    (one,) = status(run.path)
    assert one.job_id != job
    lab.wait_for_state(str(one.job_id), {"COMPLETED"}, 20)


@pytest.mark.req("C13")
def test_controller_that_stalls_during_the_requeue_does_not_make_two_jobs_of_one(
    lab: SlurmLab, run: RunFolder, launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "scontrol").write_text(
        f"""#!/bin/bash
if [ "$1" = requeue ] && [ ! -e {commands}/asks ]; then
  touch {commands}/asks; while [ ! -e {commands}/go ]; do sleep 0.05; done
  {shutil.which("scontrol")} "$@" 2> {commands}/said; code=$?; touch {commands}/lost; exit $code
fi
exec {shutil.which("scontrol")} "$@"
"""
    )
    (commands / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    controller = processes.daemons(lab.cluster.folder)["slurmctld"]

    job = launch(TRAINER, 15)
    assert wait_until(lambda: "started" in told(run), 20)
    lab.run("scancel", "--signal=USR2", job)
    assert wait_until((commands / "asks").exists, 20)
    os.kill(controller, signal.SIGSTOP)
    try:
        (commands / "go").touch()
        assert wait_until((commands / "lost").exists, 30)
        assert (commands / "said").read_text() != ""
    finally:
        os.kill(controller, signal.SIGCONT)
    assert wait_until(run.finished.exists, 40), told(run)
    assert lab.job(job)["Restarts"] == "1"
    assert lab.run("squeue", "--noheader", "--format=%i").split() in ([], [job])
    assert told(run) == ["submitted", "started", "stopped", "requeued", "started", "finished"]


@pytest.mark.parametrize("how", ["together", "one early", "before the others listen"])
def test_wrong_configuration_is_never_tried_again(
    lab: SlurmLab, run: RunFolder, launch: Launch, how: str
) -> None:
    # The other ranks are ended by srun in the later cases, and srun itself leaves with 143.
    others = {"together": "", "one early": "trap '' TERM; sleep 1;", "before the others listen": "sleep 20;"}
    job = launch(f'#!/bin/bash\n[ "$SLURM_PROCID" = 1 ] || {{ {others[how] or "true;"} }}\nexit 78\n')
    lab.wait_for_state(job, {"FAILED"}, 30)
    assert lab.job(job)["ExitCode"] == "78:0" and lab.job(job)["Restarts"] == "0"
    assert "Exit code 78" in run.failed.read_text() and str(run.logs) in run.failed.read_text()
    assert told(run) == ["submitted", "failed"]
    assert the_state(run) is RunState.failed


def test_crashes_are_restarted_in_the_job_and_bounded(lab: SlurmLab, run: RunFolder, launch: Launch) -> None:
    job = launch('#!/bin/bash\n[ "$SLURM_PROCID" = 1 ] && kill -9 $$\nsleep 20\n', max_restarts=1)
    lab.wait_for_state(job, {"FAILED"}, 40)
    assert told(run) == ["submitted", "restarted", "failed"]
    assert "2 times in a row" in run.failed.read_text()
    attempts = {path.name.split(".")[1] for path in run.logs.glob(f"{job}.r*")}
    assert attempts == {"r0", "r0-1"}


def test_lost_job_is_lost_and_not_running_for_ever(lab: SlurmLab, run: RunFolder, launch: Launch) -> None:

    job = launch("#!/bin/bash\nsleep 100\n")
    assert wait_until(lambda: the_state(run) is RunState.running, 20)
    lab.run("scontrol", "update", f"JobId={job}", "Requeue=0")
    for node in ("n1", "n2"):
        lab.cluster.stop(node)
    lab.wait_for_state(job, {"NODE_FAIL"}, 30)
    (one,) = status(run.path)
    assert one.state is RunState.lost and "NODE_FAIL" in one.reason
