"""Ranks that are forked by an agent on each node: restarted in well under a second, on other nodes if need be."""

import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from contract.agent import Task
from contract.exit_codes import ExitCode
from contract.run_folder import Event, RunFolder
from slurm.supervise.attempt import Attempt, Failure, Outcome, Ranks
from slurm.supervise.fleet import Fleet
from slurm.supervise.health import (
    AllReduce,
    Wishes,
    check_nodes,
    common_cause,
    exclude_unwell,
    find_unreachable,
    full_disk,
    ready,
)
from slurm.supervise.judge import End, Verdict, judge
from slurm.supervise.network import NetworkRanks, NetworkTest, Tested, tell
from slurm.supervise.nodes import Node, choose
from slurm.supervise.placement import Places, core_of, place
from slurm.supervise.requeue import note
from slurm.supervise.start import Start
from slurm.supervise.supervisor import say

# The first start waits so long for nodes that would train, before a spare takes the place of one that is late.
_LATE_S = 60.0
_FAILURES_BEFORE_CHECK = 2


@dataclass(frozen=True)
class Plan:
    """How ranks are laid over nodes."""

    nodes: int
    """How many train; the job's others are spares."""
    ranks_per_node: int
    master_suffix: str = ""
    bind: bool = False
    rank_cpus: Places | None = None
    """With `bind`: CPUs of each local rank; None shares out what the agent may use."""
    health: Wishes | None = None
    """What is checked before the first start; None for no check."""
    network_test_s: float | None = None
    """How long the nodes may measure their network before the first start; None for no test."""
    network_baseline: str | None = None
    """An earlier measurement, which that of the test is compared with."""


class Agents:
    """Starts ranks through agents that stay between starts."""

    hears_preemption = True
    """Slurm signals the agents, and they tell."""

    def __init__(self, fleet: Fleet, plan: Plan, stop_signal: signal.Signals) -> None:
        """`stop_signal` asks a rank to save and leave."""
        self._fleet = fleet
        self._plan = plan
        self._stop_signal = stop_signal
        self._checked = plan.health is None
        self._tested = plan.network_test_s is None
        self._started = False
        self._blamed: dict[Node, int] = {}
        self._complained = False

    def run(self, begin: Start, should_stop: Callable[[], bool]) -> End:
        """Start the ranks on the best nodes there are, and see them to their end."""
        before = begin.count_events()
        nodes = self._gather(should_stop)
        if isinstance(nodes, list) and not self._checked:
            self._checked = True
            nodes = self._check_all(begin) or self._gather(should_stop)
        if isinstance(nodes, list) and not self._tested:
            self._tested = True
            self.test_network(begin, should_stop)
            nodes = self._gather(should_stop)
        if isinstance(nodes, End):
            return nodes
        self._started = True
        outcome = Attempt(self._fleet, nodes, self._ranks(begin, nodes), begin).run(should_stop)
        end = _judge(outcome, begin.events_since(before))
        if outcome.failure is not None and end.verdict is Verdict.crashed:
            self._suspect(outcome.failure, begin.run)
            node = outcome.failure.node
            end = replace(end, node_lost=node is not None and node.bad is not None)
        return end

    def only_test_network(self, begin: Start, should_stop: Callable[[], bool]) -> Tested:
        """Check the nodes and measure what lies between those that can take part, however few they are."""
        self._await_any(should_stop)
        if self._plan.health is not None and (end := self._check_all(begin)):
            return Tested(None, reason=end.reason)
        absent = {
            node.name: node.bad or "no agent could be started on it in time"
            for node in self._fleet.nodes
            if not node.ready or node.bad is not None
        }
        return self.test_network(begin, should_stop, absent)

    def test_network(
        self, begin: Start, should_stop: Callable[[], bool], absent: Mapping[str, str] | None = None
    ) -> Tested:
        """Measure what lies between the nodes; leave out those that it is better without, and put the rest in order.

        As far as enough are left: a slow node is better than none. `absent`: who cannot take part, for the report.
        """
        plan, limit_s = self._plan, self._plan.network_test_s
        assert limit_s is not None
        since, nodes = time.monotonic(), [node for node in ready(self._fleet.nodes) if node.bad is None]
        ranks = NetworkRanks(begin, plan.ranks_per_node, plan.master_suffix, plan.network_baseline)
        test = NetworkTest(self._fleet, ranks, limit_s)
        tested = test.run(nodes, should_stop, absent)
        tell(tested, begin, time.monotonic() - since, say)
        for node in nodes:
            if node.name in tested.silent:
                self._fleet.condemn(node, tested.silent[node.name])
        if tested.verdict is not None:
            for node in nodes:
                spare = len(ready(self._fleet.nodes)) > plan.nodes
                if spare and node.bad is None and (reason := tested.verdict.exclude.get(node.name)):
                    self._fleet.condemn(node, reason)
            self._fleet.arrange(tested.verdict.order)
        return tested

    def idle(self, seconds: float) -> None:
        """Let time pass; agents hear of their supervisor meanwhile."""
        self._fleet.pump(seconds)

    def close(self) -> None:
        """Let the agents leave."""
        self._fleet.close()

    def _gather(self, should_stop: Callable[[], bool]) -> list[Node] | End:
        """Wait until enough agents are ready; return the nodes to train on, or why there are none."""
        since: float | None = None
        everybody = not self._started and not (self._checked and self._tested)
        while True:
            self._fleet.launch()
            usable = [node for node in self._fleet.nodes if node.bad is None]
            wanted, now = choose(usable, self._plan.nodes), choose(ready(usable), self._plan.nodes)
            if should_stop():
                return End(Verdict.stopped, ExitCode.STOPPED, "", begun=False)
            if wanted is None:
                return self._too_few(usable)
            if now is not None:
                since = since or time.monotonic()
                complete = all(node.ready for node in (usable if everybody else wanted))
                if complete or self._started or time.monotonic() - since > _LATE_S:
                    return now
            self._fleet.pump(1.0)

    def _await_any(self, should_stop: Callable[[], bool]) -> None:
        """Wait until every agent that is still to be hoped for is ready, for some time after the first is."""
        since: float | None = None
        while not should_stop():
            self._fleet.launch()
            usable = [node for node in self._fleet.nodes if node.bad is None]
            if any(node.ready for node in usable):
                since = since or time.monotonic()
            late = since is not None and time.monotonic() - since > _LATE_S
            if late or all(node.ready for node in usable):
                return
            self._fleet.pump(1.0)

    def _too_few(self, usable: Sequence[Node]) -> End:
        bad = [(f"{node.name}: ", node.bad) for node in self._fleet.nodes if node.bad is not None]
        lost = "; ".join(name + reason.removeprefix(name) for name, reason in bad)
        reason = f"{len(usable)} of the {self._plan.nodes} nodes that the run needs are left ({lost})"
        return End(Verdict.short, ExitCode.PEER_FAILED, reason)

    def _check_all(self, begin: Start) -> End | None:
        """Leave out nodes that are not well, and those that the others cannot reach.

        Returns the end of the run where it is not the nodes that are at fault.
        """
        assert self._plan.health is not None
        if full := full_disk(begin.run):
            return End(Verdict.hopeless, ExitCode.CONFIG, full, begun=False)
        nodes = ready(self._fleet.nodes)
        problems = check_nodes(self._fleet, nodes, self._plan.health, begin.run)
        if common_cause(problems, nodes):
            said = "; ".join(problems.values())
            reason = f"{len(problems)} of {len(nodes)} nodes are not fit to train, so it is not one of them: {said}"
            return End(Verdict.hopeless, ExitCode.CONFIG, reason, begun=False)
        exclude_unwell(self._fleet, problems)
        nodes = ready(nodes)
        unreachable = find_unreachable(nodes, AllReduce(self._fleet, begin, self._plan.master_suffix))
        if common_cause(unreachable, nodes):
            reason = (
                f"{len(unreachable)} of {len(nodes)} nodes cannot do an all-reduce with each other: look at "
                f"cluster.socket_interface, cluster.hcas and {begin.run.logs}/{begin.job}.health.*.log"
            )
            return End(Verdict.hopeless, ExitCode.CONFIG, reason, begun=False)
        exclude_unwell(self._fleet, dict.fromkeys(unreachable, "it cannot do an all-reduce with the others"))
        _remove_empty(begin.run.logs.glob(f"{begin.job}.health.*.log"))
        return None

    def _suspect(self, failure: Failure, run: RunFolder) -> None:
        """Look at a node once more whose rank was killed, or at which two starts in a row have failed."""
        node = failure.node
        if node is None:
            return
        self._blamed = {node: self._blamed.get(node, 0) + 1}
        again = self._blamed[node] >= _FAILURES_BEFORE_CHECK
        # Whatever the check finds: a spare that fails as well clears the node.
        node.suspicion += again
        if self._plan.health is not None and node.ready and node.bad is None and (failure.code < 0 or again):
            exclude_unwell(self._fleet, check_nodes(self._fleet, [node], self._plan.health, run))

    def _ranks(self, begin: Start, nodes: Sequence[Node]) -> Ranks:
        return Ranks(
            task=Task.TRAIN,
            config=str(begin.run.config),
            log=str(begin.run.logs / f"{begin.job}.r{begin.attempt}.{{rank}}.log"),
            per_node=self._plan.ranks_per_node,
            cpus={node.name: self._place(begin.run, node) for node in nodes},
            master_suffix=self._plan.master_suffix,
            stop_signal=self._stop_signal,
        )

    def _place(self, run: RunFolder, node: Node) -> Places | None:
        if not self._plan.bind:
            return None
        places, complaint = place(self._plan.rank_cpus, node.cpus, self._plan.ranks_per_node, core_of)
        if complaint and not self._complained:
            self._complained = True
            note(run, Event.WARNING, node=node.name, reason=complaint)
        return places


def _remove_empty(logs: Iterable[Path]) -> None:
    """Leave no log in which nothing is said."""
    for log in logs:
        with suppress(OSError):
            if log.stat().st_size == 0:
                log.unlink()


def _judge(outcome: Outcome, events: list[dict[str, object]]) -> End:
    """Tell what the end of all ranks means; what the first one failed of is known here."""
    failure = outcome.failure
    if failure is None:
        codes = outcome.codes - {ExitCode.FINISHED}
        end = judge(min(codes, default=0), events, outcome.codes)
    else:
        end = judge(failure.code, events, outcome.codes - {ExitCode.FINISHED})
        if end.verdict is Verdict.crashed:
            told = end.reason if failure.rank is not None and failure.code >= 0 else ""
            reason = f"{failure.reason}: {told}" if told else failure.reason
            node = failure.node.name if failure.node else None
            end = replace(end, reason=reason, rank=failure.rank, node=node)
    return replace(end, detected=outcome.detected, teardown_s=outcome.teardown_s)
