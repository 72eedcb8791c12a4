"""The supervisor and agents on local "nodes": faults, spares, stops, health. The agents are stand-ins without torch."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from harness.supervised import AGENT, World

from contract.run_folder import Event, RunFolder, read_json_lines
from slurm.supervise import attempt, fleet, health
from slurm.supervise.attempt import Failure, first_cause
from slurm.supervise.fleet import Fleet
from slurm.supervise.health import Wishes
from slurm.supervise.nodes import Node
from slurm.supervise.start import Start
from slurm.supervise.supervisor import Policy

pytestmark = pytest.mark.slow


def test_ranks_are_told_who_they_are(world: World) -> None:
    assert world.supervise(master_suffix="i") == 0
    first, second = sorted(world.told, key=lambda line: line["node_rank"])
    assert (first["node"], first["first_rank"], second["first_rank"]) == ("a", 0, 2)
    assert {line["world_size"] for line in world.told} == {4} and {line["nodes"] for line in world.told} == {
        2
    }
    host, _, port = first["master"].partition(":")
    assert host == "ai" and 20000 <= int(port) < 32000 and second["master"] == first["master"]
    assert first["log"] == f"{world.run.logs}/42.r0.{{rank}}.log" and first["cpus"] is None
    assert world.run.finished.exists() and not world.events(Event.RESTARTED)


def test_the_ports_to_try_are_others_for_each_job_and_start(world: World) -> None:
    begins = [
        Start(world.run, job, restart, number)
        for job in ("1", "2")
        for restart in (0, 1)
        for number in (0, 1)
    ]
    firsts = [attempt.candidate_ports(begin, begin.attempt)[0] for begin in begins]
    assert len(set(firsts)) == len(firsts) and all(20000 <= port < 32000 for port in firsts)


@pytest.mark.req("A21", "A22")
@pytest.mark.parametrize(
    ("do", "code", "how"),
    [
        ("kill", 137, "was ended by SIGKILL (often the host's memory: see cluster.memory)"),
        (3, 3, "ended with code 3"),
    ],
)
def test_a_rank_that_dies_costs_one_restart(world: World, do: int | str, code: int, how: str) -> None:
    world.fault(3, do)
    assert world.supervise() == 0
    (event,) = world.events(Event.RESTARTED)
    assert (event["code"], event["rank"], event["node"], event["start"]) == (code, 3, "b", 1)
    assert event["reason"] == f"rank 3 on b {how}" and 0 <= event["teardown_s"] < 5
    assert {line["log"].split("/")[-1] for line in world.told} == {"42.r0.{rank}.log", "42.r0-1.{rank}.log"}


def test_what_peers_failed_of_is_blamed_and_not_the_peers() -> None:
    peer, killed = Failure(76, Node("a"), 0), Failure(-9, Node("b"), 2)
    lost = Failure(76, Node("b"), None, "b was lost", found=True)
    hung = Failure(76, Node("b"), 2, "rank 2 hung", found=True)
    assert first_cause([peer, killed]) is killed
    assert first_cause([peer, lost]) is lost
    # A rank may abort when it is cut off from the one that hung.
    assert first_cause([hung, Failure(-6, Node("a"), 0)]) is hung
    assert first_cause([peer]) is peer and first_cause([]) is None


def test_crashes_without_progress_are_bounded_and_the_reason_is_kept(world: World) -> None:
    for start in range(3):
        world.fault(0, 5, at=1, start=start)
    assert world.supervise(policy=Policy(max_restarts=2, backoff_s=0.01)) == 5
    assert len(world.events(Event.RESTARTED)) == 2
    assert "crashed 3 times in a row" in world.run.failed.read_text()
    assert "rank 0 on a ended with code 5" in world.run.failed.read_text()


def test_a_wrong_configuration_is_not_tried_again(world: World) -> None:
    for rank in range(4):
        world.fault(rank, 78, at=1)
    assert world.supervise() == 78
    assert not world.events(Event.RESTARTED) and len(world.told) == 2


def test_ranks_that_stay_behind_are_ended(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "_LEAVE_FAILED_S", 0.3)
    world.fault(0, 78, at=1)
    world.plan["steps"] = 100_000
    assert world.supervise() == 78
    assert not world.fleet.nodes[1].ready


@pytest.mark.req("C13")
@pytest.mark.parametrize("how", ["signal", "deadline", "agent"])
def test_a_stop_request_reaches_every_rank_once(world: World, how: str) -> None:
    world.plan["steps"] = 100_000
    begun = world.run.checkpoints / "step_3"

    def is_due() -> bool:
        if begun.exists() and how == "signal":
            os.kill(os.getpid(), signal.SIGUSR2)
        if begun.exists() and how == "agent":
            for pid in agents_below(os.getpid()):
                os.kill(pid, signal.SIGTERM)
        return begun.exists() and how == "deadline"

    world.is_due = is_due
    if how == "signal":
        world.plan["linger_s"] = 1.3
    assert world.supervise() == 75
    stops = list(read_json_lines(world.run.path / "stops.jsonl"))
    assert sorted(line["rank"] for line in stops) == [0, 1, 2, 3]
    if how == "signal":
        assert all(line["signals"] == 1 for line in stops)
    assert not world.events(Event.RESTARTED)


def test_ranks_that_crash_after_slurm_asked_their_agent_to_stop_are_not_restarted(world: World) -> None:
    world.plan |= {"steps": 100_000, "stop_code": 1}

    def is_due() -> bool:
        if (world.run.checkpoints / "step_3").exists():
            for pid in agents_below(os.getpid()):
                os.kill(pid, signal.SIGTERM)
        return False

    world.is_due = is_due
    assert world.supervise() == 1
    assert [e["event"] for e in world.run.read_events()] == ["warning", "failed"]


def agents_below(pid: int) -> list[int]:
    """Agents that a process has started; this one may have other children too, of other tests."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if AGENT[-1] in _command_of(child)]


def _command_of(pid: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:  # it has ended
        return []


def test_a_stop_request_before_the_ranks_run_begins_nothing(world: World) -> None:
    world.stop.request("a test")
    assert world.supervise() == 75
    assert not world.told and [e["event"] for e in world.run.read_events()] == ["stopped"]


# --- hangs


@pytest.mark.req("A17", "A21")
def test_a_rank_that_hangs_is_named_and_its_node_avoided(world: World) -> None:
    world.plan |= {"limit_s": 1.5, "steps": 100}
    world.fault(1, "stop", at=4)
    world.nodes.append(Node("c"))
    assert world.supervise() == 0
    (hung,) = world.events(Event.HUNG)
    assert (hung["rank"], hung["node"], hung["state"], hung["phase"]) == (1, "a", "T", "step")
    assert hung["silent_s"] > 1.5
    (failed,) = world.events(Event.NODE_FAILED)
    assert failed["node"] == "a" and "rank 1 hung in step at step 4 (state T)" in failed["reason"]
    assert world.starts_on(0) == ["a", "b"] and world.starts_on(1) == ["b", "c"]


def test_blame_goes_to_who_is_stopped_then_behind_then_silent_longest() -> None:
    stopped = {"state": "T", "step": 9, "silent_s": 1.0}
    behind = {"state": "S", "step": 3, "silent_s": 1.0}
    longest = {"state": "S", "step": 4, "silent_s": 9.0}
    other = {"state": "R", "step": 4, "silent_s": 2.0}
    order = sorted([other, longest, behind, stopped], key=attempt.blame)
    assert order == [stopped, behind, longest, other]


# --- agents and nodes that are lost


@pytest.mark.parametrize("spares", [0, 1])
def test_a_dead_agent_is_replaced_by_a_spare_or_started_anew(world: World, spares: int) -> None:
    world.plan["steps"] = 60
    world.fault(2, "agent")
    world.nodes += [Node("c")][:spares]
    # The health check waits for every agent, the spare's too.
    assert world.supervise(health=Wishes()) == 0
    (event,) = world.events(Event.RESTARTED)
    assert event["node"] == "b" and event["reason"] == "b was lost, its agent has ended"
    assert world.starts_on(1) == (["a", "c"] if spares else ["a", "b"])
    assert not world.events(Event.NODE_FAILED)
    # The node is well: its new agent is there for the next time.
    assert len((world.run.path / "starts-b").read_text()) == 2


@pytest.mark.req("A21")
def test_a_silent_node_has_failed_and_a_spare_takes_over(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "SILENT_S", 3.0)
    world.nodes.append(Node("c"))
    world.node("b", mute=True)
    world.plan["steps"] = 250
    # What a node does is not charged to the run.
    assert world.supervise(policy=Policy(max_restarts=0)) == 0
    (failed,) = world.events(Event.NODE_FAILED)
    assert failed["node"] == "b" and "has not answered for" in failed["reason"]
    assert world.starts_on(1) == ["a", "c"]


def test_a_node_on_which_no_agent_starts_is_given_up(world: World) -> None:
    world.node("b", broken=9)
    assert world.supervise() == 76
    (failed,) = world.events(Event.NODE_FAILED)
    assert failed["node"] == "b" and not world.told
    assert (
        "1 of the 2 nodes that the run needs are left (b: no agent can be started"
        in world.run.failed.read_text()
    )
    assert len((world.run.path / "starts-b").read_text()) == fleet.MAX_FAILED_LAUNCHES


def test_a_node_that_starts_at_the_second_try_is_used(world: World) -> None:
    world.node("b", broken=1)
    assert world.supervise() == 0
    assert not world.events(Event.NODE_FAILED)


@pytest.mark.parametrize(("which", "code"), [(1, 0), (2, 76)])
def test_only_an_agent_that_is_started_anew_has_to_be_quick(
    world: World, monkeypatch: pytest.MonkeyPatch, which: int, code: int
) -> None:
    monkeypatch.setattr(fleet, "READY_AGAIN_S", 1.0)
    world.node("b", slow=which)
    world.fault(2, "agent")
    world.plan["steps"] = 60
    # So that three times the first start is not longer than the second may take.
    monkeypatch.setattr(fleet, "_SLOWER", 0)
    assert world.supervise() == code


def test_a_missing_program_is_no_endless_loop(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.agent = ["no-such-srun"]
    assert world.supervise() == 76
    assert "no-such-srun cannot be run on it" in world.run.failed.read_text()


def test_a_pause_of_the_supervisor_itself_is_nobodys_fault(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the slow agent is late by after the pause stays far from the limit, also on a busy machine.
    monkeypatch.setattr(fleet, "SILENT_S", 3.0)
    monkeypatch.setattr(fleet, "_OWN_PAUSE_S", 0.5)
    paused = False

    def pause() -> bool:
        nonlocal paused
        if not paused and (world.run.checkpoints / "step_2").exists():
            paused = True
            # As slow to answer after the pause as an agent may be at any time.
            slow = agents_below(os.getpid())[-1]
            os.kill(slow, signal.SIGSTOP)
            threading.Timer(3.9, os.kill, (slow, signal.SIGCONT)).start()
            time.sleep(3.5)
        return False

    world.is_due = pause
    world.plan["steps"] = 120
    assert world.supervise() == 0
    assert paused and not world.events(Event.NODE_FAILED) and not world.events(Event.RESTARTED)


def test_when_most_nodes_are_silent_at_once_the_network_is_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "SILENT_S", 3.0)
    monkeypatch.setattr(fleet, "_ALSO_SILENT_S", 1.5)
    world.nodes.append(Node("c"))
    world.plan["steps"] = 150
    stopped: list[int] = []

    def cut_off() -> bool:
        if not stopped and (world.run.checkpoints / "step_2").exists():
            stopped.extend(agents_below(os.getpid())[-2:])
            for late_s, pid in enumerate(stopped):
                os.kill(pid, signal.SIGSTOP)
                threading.Timer(4.0 + 0.4 * late_s, os.kill, (pid, signal.SIGCONT)).start()
        return False

    world.is_due = cut_off
    assert world.supervise(count=3) == 0
    assert len(stopped) == 2 and not world.events(Event.NODE_FAILED) and not world.events(Event.RESTARTED)


@pytest.mark.req("A21")
def test_agents_hear_of_a_supervisor_that_waits_for_its_file_system(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_KEEP_ALIVE_EVERY_S", 0.4)
    stalls = iter([3.0])

    def stall() -> bool:
        if (world.run.checkpoints / "step_2").exists():
            time.sleep(next(stalls, 0.0))
        return False

    world.is_due = stall
    world.plan |= {"steps": 200, "lease_s": 1.5}
    assert world.supervise() == 0
    assert next(stalls, None) is None and not world.events(Event.RESTARTED)


def test_nodes_that_failed_of_late_are_used_last(world: World) -> None:
    world.nodes = [Node("a", suspicion=1), Node("b"), Node("c")]
    assert world.supervise() == 0
    assert world.starts_on(0) == ["b", "c"]


# --- health


@pytest.mark.req("A21")
def test_nodes_that_are_not_well_stand_aside_while_there_are_spares(world: World) -> None:
    world.nodes += [Node("c"), Node("d"), Node("e")]
    world.node("a", problems=["a has 7 of 8 GPUs"])
    world.node("c", unreachable=True)
    world.node("d", time_s=-30)
    assert world.supervise(health=Wishes()) == 0
    assert world.starts_on(0) == ["b", "e"]
    reasons = {event["node"]: event["reason"] for event in world.events(Event.NODE_FAILED)}
    assert (
        reasons["a"] == "a has 7 of 8 GPUs"
        and "all-reduce" in reasons["c"]
        and reasons["d"].startswith("its clock is off by")
    )
    assert not list(world.run.heartbeat.glob("marker*")) and not list(world.run.logs.glob("*health*"))


def test_a_job_of_unwell_nodes_is_given_up_with_one_sentence(world: World) -> None:
    world.node("b", problems=["b has no free space in /x"])
    assert world.supervise(health=Wishes()) == 76
    assert not world.told
    assert "(b: b has no free space in /x)" in world.run.failed.read_text()


def test_a_node_is_looked_at_again_when_one_of_its_ranks_was_killed(world: World) -> None:
    world.nodes.append(Node("c"))
    world.fault(2, "kill")
    checks: list[list[str]] = []
    original = health.check_nodes

    def check(fleet: Fleet, nodes: list[Node], wishes: Wishes, run: RunFolder) -> dict[Node, str]:
        checks.append([node.name for node in nodes])
        return (
            original(fleet, nodes, wishes, run)
            if len(checks) == 1
            else dict.fromkeys(nodes, "GPU 1 has errors")
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slurm.supervise.agents.check_nodes", check)
        assert world.supervise(health=Wishes(), policy=Policy(max_restarts=0)) == 0
    assert checks == [["a", "b", "c"], ["b"]]
    assert world.starts_on(1) == ["a", "c"]


def test_a_node_that_fails_twice_in_a_row_makes_way_for_a_spare_though_nothing_is_found(world: World) -> None:
    world.nodes.append(Node("c"))
    world.fault(2, 1)
    world.fault(2, 1, at=7, start=1)
    world.plan["steps"] = 12
    assert world.supervise() == 0
    assert [world.starts_on(start) for start in range(3)] == [["a", "b"], ["a", "b"], ["a", "c"]]


@pytest.mark.parametrize("fault", [{"problems": ["no InfiniBand"]}, {"unreachable": True}])
def test_what_most_nodes_fail_of_is_no_nodes_fault(world: World, fault: dict[str, Any]) -> None:
    world.nodes.append(Node("c"))
    world.node("a", **fault)
    world.node("c", **fault)
    assert world.supervise(health=Wishes()) == 78
    assert not world.told and not world.events(Event.NODE_FAILED)
    assert "nodes" in world.run.failed.read_text()


def test_a_full_disk_is_no_nodes_fault(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "FREE_BYTES", 1 << 60)
    assert world.supervise(health=Wishes()) == 78
    assert f"{world.run.path} has" in world.run.failed.read_text() and not world.told


def test_a_check_that_hangs_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "CHECK_S", 1.0)
    world.nodes.append(Node("c"))
    world.node("a", mute=True)
    assert world.supervise(health=Wishes()) == 0
    assert world.starts_on(0) == ["b", "c"]


# --- placement


def test_ranks_are_bound_to_shares_of_what_the_agent_may_use(world: World) -> None:
    world.node("a", cpus=[0, 1])
    world.node("b", cpus=[0, 1, 2])
    assert world.supervise(bind=True, rank_cpus=[[0], [2]]) == 0
    cpus = {line["node"]: line["cpus"] for line in world.told}
    assert cpus["b"] == [[0], [2]]
    assert sorted(cpu for share in cpus["a"] for cpu in share) == [0, 1]
    (warning,) = world.events(Event.WARNING)
    assert warning["node"] == "a" and "does not fit" in warning["reason"]


# --- a full disk


def test_a_full_disk_stops_nothing(world: World) -> None:
    world.fault(3, "kill")
    world.run.events.symlink_to(world.run.path / "gone" / "file")
    assert world.supervise() in (0, 1)
    assert world.starts_on(1) == ["a", "b"]
