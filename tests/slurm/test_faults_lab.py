"""Faults done to real trainings on the lab: each run finishes with the weights of an undisturbed one.

Nothing here has accounting: the lab's Slurm keeps none.
"""

import os
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness.command import COMMAND, wait_until
from harness.lab_runs import (
    JOB,
    Runs,
    assert_same_result,
    events,
    node_of,
    parent,
    ranks,
    told,
    weights,
)

from contract.exit_codes import ExitCode
from contract.run_folder import Event, RunFolder
from contract.sweep import SweepFolder
from slurm.lab import processes
from slurm.runs.status import RunState

FOUR_ON_ONE_NODE = ["job.nodes=1", "job.ranks_per_node=4", "job.cpus_per_rank=1", "cluster.cpus_per_node=4"]


def wait_for(run: RunFolder, kind: Event, count: int = 1, timeout_s: float = 60) -> None:
    """Wait for the `count`-th event of a kind; fails at once when the run is given up."""

    def come() -> bool:
        assert not run.failed.exists(), (run.failed.read_text(), told(run))
        return len(events(run, kind)) >= count

    wait_until(f"{count} x {kind} in {run.path}", come, timeout_s)


def kill_one_rank(run: RunFolder) -> None:
    os.kill(ranks(run)[2], signal.SIGKILL)


def kill_all_ranks_of_a_node(run: RunFolder) -> None:
    living = ranks(run)
    for rank in (2, 3):
        os.kill(living[rank], signal.SIGKILL)


def kill_the_first_nodes_agent(run: RunFolder) -> None:
    os.kill(parent(ranks(run)[0]), signal.SIGKILL)


def stop_one_rank(run: RunFolder) -> None:
    os.kill(ranks(run)[1], signal.SIGSTOP)


FAULTS: list[tuple[Callable[[RunFolder], None], str]] = [
    (kill_one_rank, "rank 2 on n2 was ended by SIGKILL"),
    (kill_all_ranks_of_a_node, "on n2 was ended by SIGKILL"),
    (kill_the_first_nodes_agent, "n1 was lost, its agent has ended"),
    (stop_one_rank, "rank 1 hung in step"),
]


@pytest.mark.req("C13", "A12", "A17", "A21", "A22")
def test_killed_and_hung_processes_are_replaced_in_the_job(runs: Runs, undisturbed: RunFolder) -> None:
    run = runs.start(
        "processes", "resilience.step_timeout_s=4", "job.max_restarts=2", "job.health_check=false"
    )
    for number, (fault, reason) in enumerate(FAULTS, start=1):
        runs.wait_for_progress(run)
        fault(run)
        wait_for(run, Event.RESTARTED, number)
        told_of = events(run, Event.RESTARTED)[-1]
        assert reason in told_of["reason"], (fault, told_of)
        assert (told_of["failures"], told_of["start"]) == (1, number)
    runs.wait_for("processes", RunState.finished)
    assert_same_result(run, undisturbed)
    job = runs.job("processes")
    assert runs.lab.job(job)["Restarts"] == "0"
    (hung,) = events(run, Event.HUNG)
    assert (hung["rank"], hung["node"], hung["state"]) == (1, "n1", "T")
    stacks = [(run.logs / f"{job}.r0-3.{rank}.log").read_text() for rank in range(4)]
    assert all("train/" in text for text in stacks), stacks
    resumed = [event["step"] for event in events(run, Event.RESUMED)]
    assert resumed == sorted(resumed) and len(set(resumed)) == len(FAULTS)


@pytest.mark.req("C13", "A21", "A22")
def test_a_spare_takes_over_from_a_node_that_dies(runs: Runs, undisturbed: RunFolder) -> None:
    run = runs.start("spared", "job.spares=1")
    runs.wait_for_step(run)
    nodes, victim = runs.nodes("spared"), node_of(ranks(run)[2])
    runs.lab.cluster.crash(victim)
    wait_for(run, Event.RESUMED)
    assert {node_of(pid) for pid in ranks(run).values()} == set(nodes) - {victim}
    runs.wait_for("spared", RunState.finished)
    assert_same_result(run, undisturbed)
    assert runs.lab.job(runs.job("spared"))["Restarts"] == "0"
    assert [event["node"] for event in events(run, Event.NODE_FAILED)] == [victim]


@pytest.mark.req("C13", "A21", "A22")
def test_a_job_without_a_spare_comes_back_away_from_the_node_that_died(
    runs: Runs, undisturbed: RunFolder
) -> None:
    run = runs.start("replaced", "job.health_check=false")
    runs.wait_for_step(run)
    victim = node_of(ranks(run)[3])
    runs.lab.cluster.crash(victim)
    wait_for(run, Event.REQUEUED)
    runs.lab.cluster.start(victim)
    runs.wait_for("replaced", RunState.finished)
    assert_same_result(run, undisturbed)
    job = runs.lab.job(runs.job("replaced"))
    assert job["Restarts"] == "1" and job["ExcNodeList"] == victim, "kept away although it is up again"
    assert [event["node"] for event in events(run, Event.NODE_FAILED)] == [victim]
    assert [event["excluded"] for event in events(run, Event.REQUEUED)] == [[victim]]


@pytest.mark.chaos
@pytest.mark.req("C13", "A22")
def test_a_job_of_one_step_comes_back_when_its_node_dies(runs: Runs, undisturbed: RunFolder) -> None:
    run = runs.start("stepped", "job.launch=step")
    runs.wait_for_step(run)
    runs.lab.cluster.stop(runs.nodes("stepped")[1])
    runs.wait_for("stepped", RunState.finished)
    assert_same_result(run, undisturbed)
    assert runs.lab.job(runs.job("stepped"))["Restarts"] == "1"


@pytest.mark.chaos  # agents wait a minute before they take their supervisor for dead
@pytest.mark.req("C13", "A21", "A22")
def test_a_lost_supervisor_is_replaced_and_a_node_that_wakes_up_finds_its_run_taken(
    runs: Runs, undisturbed: RunFolder
) -> None:
    """The node with the supervisor loses its power, and another node's agent brings the job back: it has to wait a
    minute to be sure. Meanwhile another job's node stands still until that has started elsewhere."""
    lost = runs.start("orphaned", "job.health_check=false")
    runs.wait_for_step(lost)
    assert node_of(ranks(lost)[0]) == "n1"
    runs.lab.cluster.crash("n1")

    split = runs.start("split", *FOUR_ON_ONE_NODE, runs.crowded(), "job.health_check=false")
    runs.wait_for_step(split)
    old = ranks(split)
    node = node_of(old[0])
    asleep = runs.lab.processes_on(node)
    processes.send(asleep, signal.SIGSTOP)
    wait_for(split, Event.RESUMED, timeout_s=180)
    processes.send(asleep, signal.SIGCONT)
    wait_until("the old ranks to leave", lambda: not set(old.values()) & set(runs.lab.processes_on(node)))
    runs.wait_for("split", RunState.finished)
    assert_same_result(split, undisturbed)
    job = runs.lab.job(runs.job("split"))
    assert job["NodeList"] != node and job["Restarts"] == "1"

    runs.wait_for("orphaned", RunState.finished, timeout_s=120)
    assert_same_result(lost, undisturbed)
    assert runs.lab.job(runs.job("orphaned"))["Restarts"] == "1"
    assert ("n1", "the supervisor on it was lost") in [
        (event["node"], event["reason"]) for event in events(lost, Event.NODE_FAILED)
    ]
    assert len(events(lost, Event.REQUEUED)) == 1


@pytest.mark.req("C13", "A22")
def test_requeued_by_hand_and_preempted_without_grace(
    runs: Runs, undisturbed: RunFolder, tmp_path: Path
) -> None:
    run = runs.start("twice", "job.health_check=false")
    runs.wait_for_step(run)
    job = runs.job("twice")
    runs.lab.run("scontrol", "requeue", job)
    wait_for(run, Event.RESUMED)
    runs.wait_for_progress(run)
    runs.lab.run("scontrol", "update", "PartitionName=low", "GraceTime=0")
    try:
        high = runs.lab.submit("true", "--partition=high", "--nodes=4", "--exclusive", folder=tmp_path)
        runs.lab.wait_for_state(high, {"COMPLETED"})
    finally:
        grace = runs.lab.cluster.settings().grace_s
        runs.lab.run("scontrol", "update", "PartitionName=low", f"GraceTime={grace}")
    runs.wait_for("twice", RunState.finished)
    assert_same_result(run, undisturbed)
    assert runs.job("twice") == job and runs.lab.job(job)["Restarts"] == "2"
    assert not events(run, Event.RESTARTED, Event.NODE_FAILED)


ALONE = ["job.nodes=1", "job.ranks_per_node=1", "job.cpus_per_rank=1", "job.health_check=false"]


@pytest.mark.req("C13")
def test_what_cannot_work_ends_for_good(runs: Runs) -> None:
    """A run that diverges is never tried again, one that crashes over and over only so often."""
    diverging = runs.start("diverging", *ALONE, "optim.lr=1e12", "loop.clip_norm=0")
    crashing = runs.start("crashing", *ALONE, "job.max_restarts=2", "checkpoint.every_steps=0")
    for number in range(3):
        wait_for(crashing, Event.STARTED, number + 1)
        os.kill(ranks(crashing)[0], signal.SIGKILL)
        wait_until(
            "the supervisor to notice",
            lambda count=number + 1: len(events(crashing, Event.RESTARTED, Event.FAILED)) == count,
        )
    assert "training has diverged" in runs.wait_for("diverging", RunState.failed).reason
    assert (
        "crashed 3 times in a row without a new checkpoint"
        in runs.wait_for("crashing", RunState.failed).reason
    )
    assert told(diverging)[:2] == ["started", "failed"] and Event.RESTARTED not in told(diverging)
    for name, code in (("diverging", ExitCode.CONFIG), ("crashing", 128 + signal.SIGKILL)):
        runs.lab.wait_for_state(runs.job(name), {"FAILED"})
        job = runs.lab.job(runs.job(name))
        assert (job["ExitCode"], job["Restarts"]) == (f"{int(code)}:0", "0"), name


@pytest.mark.req("C4", "C13", "C12")
def test_two_runs_submitted_from_inside_a_job_share_their_nodes(
    runs: Runs, undisturbed: RunFolder, tmp_path: Path
) -> None:
    """Neither the outer job's variables nor the neighbour's ports get into a run."""
    names = ["inner-1", "inner-2"]
    shared = [runs.crowded(), "job.sbatch_lines=[--hold,'--nodelist=n1,n2']", "job.cpus_per_rank=1"]
    commands = [
        shlex.join([*COMMAND, "submit", *runs.overrides(name), *JOB, *shared, "job.health_check=false"])
        for name in names
    ]
    outer = runs.lab.submit("\n".join(commands), "--nodes=1", "--nodelist=n3", "--mem=100", folder=tmp_path)
    runs.lab.wait_for_state(outer, {"COMPLETED", "FAILED"}, timeout_s=90)
    assert runs.lab.job(outer)["JobState"] == "COMPLETED", (tmp_path / f"{outer}.out").read_text()
    runs.lab.run("scontrol", "release", ",".join(runs.job(name) for name in names))
    for name in names:
        runs.wait_for(name, RunState.finished)
        assert_same_result(runs.folder(name), undisturbed)
    spans = []
    for name in names:
        lines = runs.folder(name).read_events()
        at = {line["event"]: float(line["time"]) for line in lines}
        spans.append((at[Event.STARTED], at[Event.FINISHED]))
        assert runs.nodes(name) == ["n1", "n2"]
    assert max(start for start, _ in spans) < min(end for _, end in spans), (
        "they were to run at the same time"
    )


@pytest.mark.req("C13", "A21")
@pytest.mark.parametrize("spares", [1, pytest.param(0, marks=pytest.mark.chaos)])
def test_a_node_that_does_not_see_the_run_folder_takes_no_part(
    runs: Runs, undisturbed: RunFolder, spares: int
) -> None:
    """Its own empty file system lies over a folder of the run's."""
    name = f"blind-{spares}"
    run = runs.start(name, f"job.spares={spares}", "job.sbatch_lines=[--hold]")
    runs.lab.on_node("n2", "mount", "-t", "tmpfs", "tmpfs", str(run.heartbeat))
    try:
        runs.lab.run("scontrol", "release", runs.job(name))
        runs.wait_for(name, RunState.finished)
    finally:
        runs.lab.on_node("n2", "umount", str(run.heartbeat))
    assert_same_result(run, undisturbed)
    (failed,) = events(run, Event.NODE_FAILED)
    assert failed["node"] == "n2" and "n2: " in failed["reason"]
    job = runs.lab.job(runs.job(name))
    assert job["Restarts"] == ("0" if spares else "1")
    assert "n2" in runs.nodes(name) if spares else "n2" not in runs.nodes(name)


@pytest.mark.chaos
@pytest.mark.req("C12", "C13", "A22")
def test_of_twelve_tasks_one_is_preempted_and_one_fails(runs: Runs, tmp_path: Path) -> None:
    """Real trainings that differ in nothing but where their tokens are: all have the same weights."""
    prefixes = [tmp_path / f"tokens{index}" for index in range(12)]
    for prefix in prefixes[:-1]:
        for suffix in (".bin", ".idx", ".json"):
            prefix.with_suffix(suffix).symlink_to(runs.tokens.with_suffix(suffix))
    settings = [
        word
        for word in runs.overrides("none")
        if not word.startswith(("data.prefix", "run.name", "loop.steps"))
    ]
    command = [
        *(*COMMAND, "sweep", "--name", "tasks", "--parallel", "3", *settings),
        *(f"data.prefix={','.join(map(str, prefixes))}", "loop.steps=60", "checkpoint.every_steps=20"),
        *("cluster=lab", "job.time_limit=00:05:00", "job.ranks_per_node=1", "job.health_check=false"),
        # A node is a task's own, so that the pre-emption hits one; its second core has no thread to offer.
        "cluster.env={OMP_NUM_THREADS:'1'}",
    ]
    done = subprocess.run(
        command, env=runs.lab.environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    sweep = SweepFolder(runs.root / "tasks")
    manifest = sweep.read()
    (array,) = manifest.arrays
    tasks = [sweep.run(task) for task in manifest.tasks]
    runs.wait_for_step(tasks[1], 10)
    node = node_of(ranks(tasks[1])[0])
    high = runs.lab.submit("true", "--partition=high", f"--nodelist={node}", "--exclusive", folder=tmp_path)

    wait_until(
        "all tasks to end", lambda: all(run.finished.exists() or run.failed.exists() for run in tasks), 180
    )
    runs.lab.wait_for_state(high, {"COMPLETED"})
    assert [run.finished.exists() for run in tasks] == 11 * [True] + [False]
    assert "tokens11.json does not exist" in tasks[11].failed.read_text()
    assert [len(events(run, Event.REQUEUED)) for run in tasks] == [0, 1, *10 * [0]]
    reference = weights(tasks[0])
    for run in tasks[1:-1]:
        assert all(torch.equal(tensor, reference[key]) for key, tensor in weights(run).items()), run.path
    assert runs.lab.job(f"{array.job_id}_1")["Restarts"] == "1"
