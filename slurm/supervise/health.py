"""The health check before a run starts: each node alone, then all together, and who is to blame if that fails."""

import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from contract.agent import Reply, Request, Task
from contract.run_folder import RunFolder
from slurm.supervise.attempt import Attempt, Ranks
from slurm.supervise.fleet import LOST, Fleet
from slurm.supervise.nodes import Node
from slurm.supervise.start import Start

CHECK_S = 90.0
ALL_REDUCE_S = 45.0
_LEAVE_S = 15.0
CLOCK_SKEW_S = 2.0
"""More than this between two nodes confuses whoever compares times of files and events."""
FREE_BYTES = 1 << 30
"""What the run's file system must have: less does not hold a checkpoint worth the name."""
TEMPORARY_BYTES = 1 << 28
"""The same for each node's temporary folder."""
NEEDS_ALL_REDUCE = 2


@dataclass(frozen=True)
class Wishes:
    """What a node must have; None for any."""

    gpus: int | None = None
    gpu_memory_gb: float | None = None


Test = Callable[[Sequence[Node]], bool]
"""Whether these nodes reach each other."""


def check_nodes(fleet: Fleet, nodes: Sequence[Node], wishes: Wishes, run: RunFolder) -> dict[Node, str]:
    """Have each node look at itself; return what is wrong, for those that are not well. Bounded."""
    marker = run.heartbeat / f"marker-{uuid.uuid4().hex[:8]}"
    text = uuid.uuid4().hex
    problems: dict[Node, str] = {}
    try:
        marker.write_text(text)
        seen = {"path": str(marker), "text": text}
    except OSError:  # a full disk: the run itself will say so
        seen = None
    asked = time.time()
    fleet.send(
        nodes,
        Request.CHECK,
        marker=seen,
        folders={str(run.path): 0},
        temporary_bytes=TEMPORARY_BYTES,
        gpus=wishes.gpus,
        gpu_memory_gb=wishes.gpu_memory_gb,
    )
    skews: dict[Node, float] = {}
    deadline = time.monotonic() + CHECK_S
    waiting = set(nodes)
    while waiting and time.monotonic() < deadline:
        for node, message in fleet.pump(min(1.0, deadline - time.monotonic())):
            if node in waiting and message["kind"] == Reply.HEALTH:
                waiting.discard(node)
                if message.get("problems"):
                    problems[node] = "; ".join(message["problems"])
                skews[node] = _skew_s(message.get("time_s"), asked, time.time())
            elif node in waiting and message["kind"] in (LOST, Reply.ERROR):
                waiting.discard(node)
                problems[node] = str(message.get("reason") or message.get("message"))
    problems |= dict.fromkeys(waiting, f"its health check did not end in {CHECK_S:.0f} s")
    marker.unlink(missing_ok=True)
    problems |= {
        node: f"its clock is off by {skew:.1f} s" for node, skew in skews.items() if skew > CLOCK_SKEW_S
    }
    return problems


def full_disk(run: RunFolder) -> str:
    """Say that the run's own file system, which is no node's fault, has no room; empty if it has."""
    try:
        free = shutil.disk_usage(run.path).free
    except OSError as error:
        return f"{run.path} cannot be used ({error.strerror})"
    if free >= FREE_BYTES:
        return ""
    return f"{run.path} has {free / 1e9:.2f} GB free, {FREE_BYTES / 1e9:.2f} GB are needed: free some space"


def common_cause(failed: Collection[Node], nodes: Collection[Node]) -> bool:
    """Whether so many nodes fail a test that it is not the nodes: excluding them would hide the fault."""
    return len(nodes) > 2 and 2 * len(failed) > len(nodes)


def _skew_s(said: object, asked: float, answered: float) -> float:
    """By how much a clock is wrong for certain: its time was read between the question and the answer."""
    if not isinstance(said, int | float):
        return 0.0
    return max(0.0, asked - said, said - answered)


def find_unreachable(nodes: Sequence[Node], works: Test, limit: int = 64) -> list[Node]:
    """Return the nodes because of which `nodes` do not work together, found by halving; at most `limit` tests.

    A group that fails is halved until single nodes are left that fail with a partner that is known to work. When
    no two nodes work together there is nobody to tell good from bad, and all are returned.
    """
    tests = 0

    def try_out(group: Sequence[Node]) -> bool:
        nonlocal tests
        tests += 1
        return tests <= limit and works(group)

    if len(nodes) < NEEDS_ALL_REDUCE or try_out(nodes):
        return []
    good, suspects = _sound_group(list(nodes), try_out)
    if not good:
        return list(nodes)
    bad: list[Node] = []
    groups = [suspects]
    while groups:
        group = groups.pop()
        if try_out([*good, *group]):
            good += group
        elif len(group) == 1:
            bad += group
        else:
            middle = len(group) // 2
            groups += [group[middle:], group[:middle]]
    return sorted(bad, key=list(nodes).index)


def _sound_group(nodes: list[Node], try_out: Test) -> tuple[list[Node], list[Node]]:
    """Find some nodes that work together; return them and the rest."""
    groups = [nodes]
    while groups:
        group = groups.pop(0)
        middle = len(group) // 2
        for half in (group[:middle], group[middle:]):
            if len(half) < NEEDS_ALL_REDUCE:
                continue
            if try_out(half):
                return half, [node for node in nodes if node not in half]
            groups.append(half)
    # Halves can all hold a bad node, or be single nodes: look for any pair.
    for index, one in enumerate(nodes):
        for other in nodes[index + 1 :]:
            if try_out([one, other]):
                return [one, other], [node for node in nodes if node not in (one, other)]
    return [], nodes


class AllReduce:
    """Adds one number over one rank on each of some nodes."""

    def __init__(self, fleet: Fleet, begin: Start, master_suffix: str) -> None:
        self._fleet = fleet
        self._begin = begin
        self._master_suffix = master_suffix
        self._number = 0

    def __call__(self, nodes: Sequence[Node]) -> bool:
        """Whether that works; bounded."""
        alive = [node for node in nodes if node.ready]
        if len(alive) < len(nodes):
            return False
        self._number += 1
        name = f"health{self._number}"
        ranks = Ranks(
            task=Task.ALL_REDUCE,
            config=str(self._begin.run.config),
            log=str(self._begin.run.logs / f"{self._begin.job}.health.{{rank}}.log"),
            per_node=1,
            cpus={},
            master_suffix=self._master_suffix,
            timeout_s=ALL_REDUCE_S,
        )
        attempt = Attempt(self._fleet, nodes, ranks, self._begin, name)
        outcome = attempt.run(lambda: False, limit_s=ALL_REDUCE_S + _LEAVE_S)
        return outcome.failure is None and outcome.codes == {0}


def exclude_unwell(fleet: Fleet, problems: dict[Node, str]) -> None:
    """Use these nodes no more, and say why."""
    for node, problem in problems.items():
        fleet.condemn(node, problem)


def ready(nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes whose agent can fork ranks."""
    return [node for node in nodes if node.ready and node.bad is None]
