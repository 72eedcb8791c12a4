"""The trainer under a real Slurm: submitted, pre-empted, requeued, resumed, spread over nodes by mpirun."""

import json
import shlex
import sys
from pathlib import Path

import pytest
from harness import who_am_i
from harness.command import wait_for_event
from harness.lab_runs import STEPS, Runs, assert_same_result
from harness.slurm_lab import SlurmLab

from contract.exit_codes import ExitCode
from contract.run_folder import Event, RunFolder
from slurm.runs.status import RunState


@pytest.mark.req("C3", "C4", "C11")
def test_a_job_on_two_nodes_trains_and_finishes(runs: Runs, undisturbed: RunFolder) -> None:
    assert undisturbed.finished.exists()
    started = next(line for line in undisturbed.read_events() if line["event"] == Event.STARTED)
    assert (started["world_size"], started["launcher"]) == (4, "agent")
    job = runs.job("undisturbed")
    assert started["job"] == job
    runs.lab.wait_for_state(job, {"COMPLETED"})
    assert {path.name for path in undisturbed.logs.glob("*.log")} == {
        f"{job}.batch.log",
        *(f"{job}.r0.{rank}.log" for rank in range(4)),
    }
    assert (undisturbed.code / "train/loop.py").exists()
    assert runs.state("undisturbed").checkpoint_step == STEPS


@pytest.mark.req("C13", "A22", "B8")
def test_a_preempted_job_comes_back_and_ends_with_the_same_weights(
    runs: Runs, undisturbed: RunFolder, tmp_path: Path
) -> None:
    assert runs.submit("preempted").returncode == 0
    run, job = runs.folder("preempted"), runs.job("preempted")
    runs.wait_for_step(run, 5)

    again = runs.submit("preempted")
    assert again.returncode == ExitCode.CONFIG
    assert again.stderr == (
        f"trierarch: run preempted has job {job} already (running): end it with `trierarch cancel {run.path}`, or "
        "give this one another run.name\n"
    )

    high = runs.lab.submit("sleep 2", "--partition=high", "--nodes=4", "--exclusive", folder=tmp_path)
    stopped = wait_for_event(run.path, Event.STOPPED)
    assert 5 <= int(str(stopped["step"])) < STEPS
    runs.wait_for("preempted", RunState.requeued)
    runs.lab.wait_for_state(high, {"COMPLETED"})
    runs.wait_for("preempted", RunState.finished)

    events = [line["event"] for line in run.read_events()]
    first = ["submitted", "started", "stop_requested", "saved", "stopped", "requeued"]
    assert events == [*first, "started", "resumed", "saved", "finished"]
    assert runs.job("preempted") == job
    assert (run.logs / f"{job}.r1.0.log").exists()
    assert_same_result(run, undisturbed)


def test_a_wrong_setting_ends_the_job_and_is_never_requeued(runs: Runs) -> None:
    """Wrong in a way that only the ranks can see: there is no such data."""
    at_submission = runs.submit("wrong", "loop.global_batch_size=4")
    assert at_submission.returncode == ExitCode.CONFIG, "what can be seen before the queue is said before it"
    assert "does not divide over 4 data-parallel ranks" in at_submission.stderr
    assert runs.submit("wrong", "data.prefix=/nowhere/tokens").returncode == 0
    failed = runs.wait_for("wrong", RunState.failed)
    assert "/nowhere/tokens.json does not exist" in failed.reason
    runs.lab.wait_for_state(runs.job("wrong"), {"FAILED"})
    assert runs.lab.job(runs.job("wrong"))["ExitCode"] == f"{int(ExitCode.CONFIG)}:0"
    assert runs.lab.job(runs.job("wrong"))["Restarts"] == "0"


def test_a_run_whose_job_was_cancelled_before_it_began_is_not_running_for_ever(runs: Runs) -> None:
    blocker = runs.lab.submit("sleep 60", "--partition=high", "--nodes=4", "--exclusive", folder=runs.root)
    runs.lab.wait_for_state(blocker, {"RUNNING"})
    assert runs.submit("cancelled").returncode == 0
    assert runs.wait_for("cancelled", RunState.queued).reason != ""
    runs.lab.run("scancel", runs.job("cancelled"))
    runs.wait_for("cancelled", RunState.stopped)


@pytest.mark.req("C4", "D3")
def test_mpirun_spans_the_nodes_of_an_allocation(lab: SlurmLab, tmp_path: Path) -> None:
    mpirun = str(Path(sys.executable).with_name("mpirun"))
    command = [mpirun, "--allow-run-as-root", "-H", "n1:2,n2:2", "-n", "4", sys.executable, who_am_i.__file__]
    script = f"export OMP_NUM_THREADS=1\n{shlex.join(command)}"
    job = lab.submit(script, "--nodes=2", "--nodelist=n[1-2]", "--ntasks-per-node=2", folder=tmp_path)
    lab.wait_for_state(job, {"COMPLETED", "FAILED"}, timeout_s=60)
    output = (tmp_path / f"{job}.out").read_text()
    lines = sorted(
        (json.loads(line) for line in output.splitlines() if line.startswith("{")),
        key=lambda line: line["rank"],
    )
    assert [line["rank"] for line in lines] == [0, 1, 2, 3], output
    assert [line["node_rank"] for line in lines] == [0, 0, 1, 1]
    assert [line["local_rank"] for line in lines] == [0, 1, 0, 1]
    for line in lines:
        assert (line["launcher"], line["nodes"], line["local_size"], line["total"]) == ("mpi", 2, 2, 6.0)
        assert line["master"].startswith("n1:")


@pytest.mark.req("C4")
@pytest.mark.parametrize("distribution", ["block", "arbitrary"])
def test_srun_starts_ranks_that_find_each_other(lab: SlurmLab, tmp_path: Path, distribution: str) -> None:
    """With an arbitrary order rank 0 is not on the first node; two steps at once do not meet each other."""
    step = f"srun --overlap {shlex.join([sys.executable, who_am_i.__file__])}"
    script = f"export OMP_NUM_THREADS=1\n{step} & {step} & wait"
    if distribution == "arbitrary":
        (tmp_path / "hosts").write_text("n3\nn3\nn2\nn2\n")
        script = f"export SLURM_HOSTFILE={tmp_path}/hosts\n" + script.replace("srun", "srun -m arbitrary")
    job = lab.submit(script, "--nodes=2", "--nodelist=n[2-3]", "--ntasks-per-node=2", folder=tmp_path)
    lab.wait_for_state(job, {"COMPLETED", "FAILED"}, timeout_s=90)
    output = (tmp_path / f"{job}.out").read_text()
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert sorted(line["rank"] for line in lines) == [0, 0, 1, 1, 2, 2, 3, 3], output
    assert {line["launcher"] for line in lines} == {"slurm"}
    assert {line["total"] for line in lines} == {6.0}
    masters = {line["master"] for line in lines}
    assert len(masters) == 2
    first = "n3" if distribution == "arbitrary" else "n2"
    assert {master.split(":")[0] for master in masters} == {first}
