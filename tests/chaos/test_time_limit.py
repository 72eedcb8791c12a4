"""Trainings that are longer than their jobs: each job asks for the stop by itself, comes back, and at last finishes."""

from pathlib import Path

import pytest
from harness.lab_runs import Runs, assert_same_result, events
from harness.slurm_lab import TRAINER, SlurmLab, launch_shell_trainer, wait_until

from contract.run_folder import Event, RunFolder
from slurm.runs.status import RunState, status
from slurm.snapshot import snapshot

STEPS = 4000


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


@pytest.mark.timeout(1500)
@pytest.mark.req("C13", "A22")
def test_a_training_is_cut_into_jobs_of_a_minute_and_ends_with_the_same_weights(runs: Runs) -> None:
    steps = [f"loop.steps={STEPS}", "checkpoint.every_steps=0"]
    calm = runs.start("uncut", *steps, "job.time_limit=00:20:00")
    runs.wait_for("uncut", RunState.finished, timeout_s=600)
    run = runs.start("cut", *steps, "job.time_limit=00:01:00", "cluster.stop_margin_s=10")
    runs.wait_for("cut", RunState.finished, timeout_s=800)
    assert_same_result(run, calm, STEPS)
    restarts = int(runs.lab.job(runs.job("cut"))["Restarts"])
    stopped = [event["step"] for event in events(run, Event.STOPPED)]
    assert 1 <= restarts == len(stopped) == len(events(run, Event.RESUMED))
    assert stopped == sorted(set(stopped)), "each job got further than the one before"
    # Slurm's own signal would come after a minute.
    began = {event["restart"]: event["time"] for event in events(run, Event.STARTED)}
    assert all(event["time"] - began[event["restart"]] < 50 for event in events(run, Event.STOPPED))
    assert not events(run, Event.FAILED, Event.RESTARTED)
