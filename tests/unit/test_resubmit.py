"""The same job again: what is refused, what stays, what may change. Jobs here are processes of this machine."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.programs import search_path, write_program, write_python

from contract.errors import ConfigError, UserError
from contract.run_folder import Event, RunFolder
from slurm.runs.cancel import cancel
from slurm.runs.find import find_runs
from slurm.runs.resubmit import failed_or_lost, resubmit
from slurm.runs.status import RunState, RunStatus, statuses
from slurm.settings import JobConfig, SubmitConfig
from slurm.sites.profile import Launch, Profile, Scheduler
from slurm.submit import submit

CONFIG = "resilience:\n  stop_signal: SIGUSR2\nloop:\n  steps: 7\n"


@pytest.fixture
def settings(tmp_path: Path) -> SubmitConfig:
    """Settings whose interpreter runs a shell script for `-m train`: it saves and leaves when it is told to stop."""
    path = write_python(
        tmp_path / "python",
        """trap 'mkdir -p "${5%/*}/checkpoints/step_$SECONDS"; exit 75' USR2
echo "trains in $PWD"
while true; do sleep 0.05; done""",
    )
    cluster = Profile(
        scheduler=Scheduler.local,
        launch=Launch.step,
        ranks_per_node=1,
        time_limit="00:10:00",
        python=str(path),
    )
    return SubmitConfig(cluster, JobConfig())


@pytest.fixture
def run(tmp_path: Path, settings: SubmitConfig) -> Iterator[RunFolder]:
    """A run with a live job."""
    folder = RunFolder(tmp_path / "runs" / "one")
    submit(folder, CONFIG, settings)
    yield folder
    cancel([folder], now=True)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def state(run: RunFolder) -> RunStatus:
    (seen,) = statuses(find_runs(run.path))
    return seen


def trains(run: RunFolder) -> bool:
    return any("trains in" in log.read_text() for log in run.logs.glob("*.log") if log.stat().st_mtime > 0)


def again(run: RunFolder, *overrides: str) -> str:
    (said,) = resubmit([state(run)], overrides)
    return said


@pytest.mark.req("C12")
def test_a_cancelled_run_saves_and_is_submitted_again_as_it_was(run: RunFolder) -> None:
    wait_until(lambda: trains(run))
    with pytest.raises(UserError, match=r"run one has job \d+ already .running.: end it first"):
        again(run)
    (done,) = cancel([run])
    assert done.acted
    wait_until(lambda: not state(run).state.is_live)
    assert run.published_steps() and state(run).state is RunState.stopped
    assert state(run).reason == "cancelled" and not run.failed.exists()

    first = state(run).job_id
    (run.code / "mark").touch()
    said = again(run, "job.time_limit=12:00:00", "job.max_restarts=1")
    assert state(run).job_id != first and str(state(run).job_id) in said
    assert state(run).state is RunState.running
    assert (run.code / "mark").exists(), "it is the code of the first submission"
    assert "time_limit: '12:00:00'" in run.submit_settings.read_text()
    assert "--max-restarts=1" in run.job_script.read_text()
    assert run.config.read_text() == CONFIG
    (done,) = cancel([run], now=True)
    assert done.acted
    wait_until(lambda: state(run).state is RunState.stopped)


@pytest.fixture
def ended(tmp_path: Path, settings: SubmitConfig) -> RunFolder:
    """A run whose job is gone without a word."""
    folder = RunFolder(tmp_path / "runs" / "ended")
    folder.create()
    folder.config.write_text(CONFIG)
    from configs.compose import to_yaml

    folder.submit_settings.write_text(to_yaml(settings))
    folder.append_event(Event.SUBMITTED, job_id="4194305", scheduler="local", host=os.uname().nodename)
    return folder


def test_what_cannot_be_submitted_again_is_said(ended: RunFolder) -> None:
    with pytest.raises(UserError, match=r"run ended has job 7 already .stopping.: wait for its end"):
        list(resubmit([RunStatus(ended, RunState.stopping, job_id="7")]))
    with pytest.raises(ConfigError, match=r"optim.lr=1: a resubmission keeps the training as it is"):
        again(ended, "optim.lr=1")
    with pytest.raises(ConfigError, match=r"did you mean job.nodes"):
        again(ended, "job.node=2")
    ended.append_event(Event.FINISHED)
    with pytest.raises(UserError, match=r"run ended is finished: .* larger loop.steps"):
        again(ended)
    ended.append_event(Event.SUBMITTED, job_id="4194305", scheduler="local", host=os.uname().nodename)
    ended.submit_settings.unlink()
    with pytest.raises(UserError, match="run ended was never submitted: use `trierarch submit`"):
        again(ended)
    assert len(ended.read_events()) == 3


def test_another_cluster_is_taken_as_a_whole_and_what_the_job_asks_for_stays(
    ended: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, body in (
        ("sbatch", "echo Submitted batch job 77"),
        ("srun", ""),
        ("squeue", ""),
        ("sacct", ""),
    ):
        write_program(tmp_path / "bin" / name, body)
    monkeypatch.setenv("PATH", search_path(tmp_path / "bin"))
    ended.submit_settings.write_text(
        ended.submit_settings.read_text().replace("max_restarts: 3", "max_restarts: 9")
    )
    again(ended, "cluster=slurm", "cluster.partition=big", "job.time_limit=1-00:00:00")
    script = ended.job_script.read_text()
    assert "--partition=big" in script and "--time=1-00:00:00" in script and "--max-restarts=9" in script
    assert state(ended).job_id == "77"


def test_only_failed_and_lost_runs_are_submitted_again_together(tmp_path: Path, ended: RunFolder) -> None:
    stopped = RunFolder(tmp_path / "runs" / "stopped")
    stopped.create()
    stopped.append_event(Event.STARTED)
    stopped.append_event(Event.STOPPED)
    stopped.submit_settings.touch()
    assert [one.run.name for one in failed_or_lost(find_runs(tmp_path / "runs"))] == ["ended"]
