"""Jobs on the lab to which one thing after another happens: the run ends with the weights of an undisturbed one."""

import os
import random
import signal
from collections.abc import Callable

import pytest
from harness.command import wait_until
from harness.lab_runs import Runs, assert_same_result, events, node_of, parent, ranks

from contract.run_folder import Event, RunFolder
from slurm.lab import processes
from slurm.runs.status import RunState

STEPS = 2000
FAULTS = 8

Fault = Callable[[Runs, RunFolder], None]


def kill_a_rank(runs: Runs, run: RunFolder) -> None:
    os.kill(random.choice(list(ranks(run).values())), signal.SIGKILL)


def kill_an_agent(runs: Runs, run: RunFolder) -> None:
    os.kill(parent(random.choice(list(ranks(run).values()))), signal.SIGKILL)


def stop_a_rank(runs: Runs, run: RunFolder) -> None:
    os.kill(random.choice(list(ranks(run).values())), signal.SIGSTOP)


def crash_a_node(runs: Runs, run: RunFolder) -> None:
    """Any of them: with the first one it is the supervisor that is lost."""
    for node in set(runs.lab.cluster.settings().node_names) - set(runs.lab.cluster.running_nodes()):
        runs.lab.cluster.start(node)
    runs.lab.cluster.crash(node_of(random.choice(list(ranks(run).values()))))


def requeue(runs: Runs, run: RunFolder) -> None:
    runs.lab.run("scontrol", "requeue", runs.job(run.name))


def preempt(runs: Runs, run: RunFolder) -> None:
    runs.lab.submit("true", "--partition=high", "--nodes=2", "--exclusive", folder=runs.root)


@pytest.mark.timeout(1800)
@pytest.mark.req("C13", "A21", "A22")
def test_a_job_survives_whatever_happens_to_it(runs: Runs) -> None:
    settings = [f"loop.steps={STEPS}", "job.time_limit=00:30:00"]
    calm = runs.start("calm", *settings)
    runs.wait_for("calm", RunState.finished, timeout_s=300)
    # A rank that is stopped within a save is missed when that has taken too long.
    limits = {"step": 10, "start": 60, "collective": 90, "checkpoint": 90}
    run = runs.start(
        "stormy",
        *settings,
        "job.spares=1",
        "job.exclude_for_h=0",
        *(f"resilience.{phase}_timeout_s={limit_s}" for phase, limit_s in limits.items()),
    )
    faults: list[Fault] = [kill_a_rank, kill_an_agent, stop_a_rank, crash_a_node, requeue, preempt]
    for fault in [random.choice(faults) for _ in range(FAULTS)]:
        runs.wait_for_progress(run, timeout_s=240)
        print(f"{fault.__name__} after step {run.published_steps()[-1]}")
        wait_until("all ranks", lambda: len(ranks(run)) == 4)
        fault(runs, run)
    runs.wait_for("stormy", RunState.finished, timeout_s=300)
    assert_same_result(run, calm, STEPS)


@pytest.mark.timeout(300)
@pytest.mark.req("C13", "A21", "A22")
def test_a_frozen_node_is_replaced_and_writes_nothing_when_it_wakes_up(
    runs: Runs, undisturbed: RunFolder
) -> None:
    """Its peers only wait: the supervisor or Slurm misses it."""
    run = runs.start("frozen", "job.spares=1", "job.health_check=false")
    runs.wait_for_step(run)
    old = {rank: pid for rank, pid in ranks(run).items() if rank in (2, 3)}
    node = node_of(old[2])
    asleep = runs.lab.processes_on(node)
    processes.send(asleep, signal.SIGSTOP)
    wait_until("the spare to take over", lambda: len(events(run, Event.RESUMED)) == 1, 120)
    processes.send(asleep, signal.SIGCONT)
    wait_until("the old ranks to leave", lambda: not set(old.values()) & set(runs.lab.processes_on(node)))
    runs.wait_for("frozen", RunState.finished)
    assert_same_result(run, undisturbed)
    assert runs.lab.job(runs.job("frozen"))["Restarts"] == "0"
    assert [event["node"] for event in events(run, Event.RESTARTED)] == [node]
