"""A training that is longer than its job: Slurm asks it to stop, it comes back, and it finishes."""

from pathlib import Path

import pytest
from harness.slurm_lab import TRAINER, SlurmLab, launch_shell_trainer, wait_until

from contract.run_folder import RunFolder
from slurm.snapshot import snapshot
from slurm.status import RunState, status


@pytest.mark.timeout(600)
@pytest.mark.req("C13")
def test_run_goes_on_after_its_time_limit(lab: SlurmLab, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "long")
    run.create()
    snapshot(run)
    # 90 s and more of steps in jobs of one minute; Slurm may ask up to a minute too early, which costs a life.
    job = launch_shell_trainer(lab, run, TRAINER, 450, time_limit="1")
    assert wait_until(run.finished.exists, 500), (run.read_events(), status(run.path))
    lab.wait_for_state(job, {"COMPLETED"}, 30)
    assert int(lab.job(job)["Restarts"]) >= 1
    told = [event["event"] for event in run.read_events()]
    assert told.count("stopped") == told.count("requeued") == int(lab.job(job)["Restarts"])
    assert told[-1] == "finished" and "failed" not in told
    assert status(run.path)[0].state is RunState.finished
