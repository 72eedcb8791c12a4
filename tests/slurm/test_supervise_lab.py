"""The supervisor under a real Slurm, with a shell script in the trainer's place."""

import json
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import stand_in_agent
from harness.programs import search_path, write_program
from harness.slurm_lab import TRAINER, SlurmLab, launch_shell_trainer, wait_until

from contract.run_folder import RunFolder, read_json_lines
from slurm.lab import processes
from slurm.runs.status import RunState, status
from slurm.snapshot import snapshot

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
    write_program(
        commands / "scontrol",
        f"""if [ "$1" = requeue ] && [ ! -e {commands}/asks ]; then
  touch {commands}/asks; while [ ! -e {commands}/go ]; do sleep 0.05; done
  {shutil.which("scontrol")} "$@" 2> {commands}/said; code=$?; touch {commands}/lost; exit $code
fi
exec {shutil.which("scontrol")} "$@"
""",
    )
    monkeypatch.setenv("PATH", search_path(commands))
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


# --- agents, with stand-ins that need no torch; tests/slurm/test_faults_lab.py has the trainer's own


def launch_agents(lab: SlurmLab, run: RunFolder, plan: dict[str, Any], *options: str, setup: str = "") -> str:
    """Submit a job of `options` whose agents are stand-ins that follow `plan`; returns the job id."""
    (run.path / "plan.json").write_text(json.dumps({"steps": 10, **plan}))
    agent = [sys.executable, "-u", stand_in_agent.__file__, "{node}", "{run}"]
    srun = shlex.split(
        "srun --overlap --nodes=1 --ntasks=1 --nodelist={node} --cpu-bind=none --unbuffered --no-kill"
    )
    supervise = [sys.executable, "-u", "-m", "slurm.supervise", str(run.path), "--requeue=slurm"]
    supervise += ["--nodes=2", "--ranks-per-node=1", "--health-check", "--"]
    run.job_script.write_text(
        f"#!/bin/bash\ncd {shlex.quote(str(run.code))}\nexport PYTHONPATH=$PWD\n{setup}\n"
        f"exec {shlex.join(supervise + srun + agent)}\n"
    )
    output = f"--output={str(run.logs).replace('%', '%%')}/%j.batch.log"
    job = ["--no-kill", "--requeue", "--open-mode=append", "--time=00:05:00", "--ntasks-per-node=1", output]
    return lab.run("sbatch", "--parsable", *job, *options, str(run.job_script)).strip()


@pytest.mark.req("C13")
def test_agents_hear_of_a_preemption_that_the_supervisor_is_not_told_of(
    lab: SlurmLab, run: RunFolder
) -> None:
    job = launch_agents(lab, run, {"steps": 150}, "--nodes=2")
    assert wait_until((run.checkpoints / "step_3").exists, 20)
    lab.run("sbatch", "--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=true")
    assert wait_until(run.finished.exists, 40), (run.logs / f"{job}.batch.log").read_text()
    assert told(run) == ["requeued", "finished"]
    lab.wait_for_state(job, {"COMPLETED"})
    assert lab.job(job)["Restarts"] == "1"


@pytest.mark.req("C4")
def test_ranks_follow_the_order_of_a_host_file(lab: SlurmLab, run: RunFolder, tmp_path: Path) -> None:
    """The agents' own steps have one node each, whatever the file says."""
    (tmp_path / "hosts").write_text("n3\nn1\n")
    setup = f"export SLURM_HOSTFILE={shlex.quote(str(tmp_path / 'hosts'))}"
    job = launch_agents(
        lab, run, {}, "--nodes=2", "--nodelist=n[1,3]", "--distribution=arbitrary", setup=setup
    )
    lab.wait_for_state(job, {"COMPLETED", "FAILED"}, 40)
    placed = [line for line in read_json_lines(run.path / "told.jsonl") if line["task"] == "train"]
    assert sorted((line["node_rank"], line["node"]) for line in placed) == [(0, "n3"), (1, "n1")]
    assert placed[0]["master"].startswith("n3:")


@pytest.mark.req("C13")
def test_the_jobs_real_end_is_known(lab: SlurmLab, run: RunFolder, tmp_path: Path) -> None:
    code = "import os; from slurm.supervise.deadline import ask_slurm; print(ask_slurm(os.environ))"
    ask = f"cd {shlex.quote(str(run.code))}; {sys.executable} -c {shlex.quote(code)}"
    change = "scontrol update JobId=$SLURM_JOB_ID TimeLimit=10"
    job = lab.submit(f"{ask}\n{change}\n{ask}", "--time=00:03:00", folder=tmp_path)
    lab.wait_for_state(job, {"COMPLETED", "FAILED"})
    said = re.findall(r"left_s=(\d+), limit_s=(\d+)", (tmp_path / f"{job}.out").read_text())
    (left, limit), (left_later, limit_later) = [tuple(map(int, pair)) for pair in said]
    assert limit == 180 and 120 < left <= 180
    assert limit_later == 600 and 540 < left_later <= 600
