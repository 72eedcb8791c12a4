"""One start of ranks through the agents of some nodes: from the first request until no rank is left."""

import hashlib
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from contract.agent import Reply, Request, Task
from contract.exit_codes import ExitCode
from contract.run_folder import Event
from contract.variables import START
from slurm.supervise.fleet import LOST, Fleet
from slurm.supervise.nodes import Node
from slurm.supervise.requeue import note
from slurm.supervise.start import Start

LOOPBACK = "127.0.0.1"
_FIRST_PORT, _PORTS = 20000, 12000
_PORT_CANDIDATES = 16
_LISTEN_S = 20.0
_STACKS_S = 60.0
_KILL_S = 20.0
# A node that has not even answered for so long, after its peers have failed, is what they failed of.
_SUSPECT_SILENT_S = 5.0
# How long the others may take to leave after the first rank has: all save together before that.
_LEAVE_S = {ExitCode.FINISHED: 300.0, ExitCode.STOPPED: 300.0}
_LEAVE_FAILED_S = 10.0


@dataclass(frozen=True)
class Ranks:
    """Who the ranks of one start are."""

    task: Task
    config: str
    log: str
    """Path of a rank's log, with {rank} in it."""
    per_node: int
    cpus: dict[str, list[list[int]] | None]
    """For each node by name: the CPUs of each local rank."""
    master_suffix: str = ""
    stop_signal: signal.Signals = signal.SIGUSR2
    timeout_s: float | None = None
    """How long `Task.ALL_REDUCE` may take."""
    program: str | None = None
    """The module that `Task.PROGRAM` runs."""
    arguments: tuple[str, ...] = ()
    """Of the program."""


@dataclass(frozen=True)
class Failure:
    """What went wrong: `code` of a rank, negative for a signal; without a rank it is the node's fault."""

    code: int
    node: Node | None = None
    rank: int | None = None
    reason: str = ""
    found: bool = False
    """Whether the supervisor saw it itself, a hang or a lost node: ranks that end after that end because of it."""


@dataclass(frozen=True)
class Outcome:
    """How one start ended: without a failure all ranks left by themselves, with `codes`."""

    codes: frozenset[int]
    failure: Failure | None
    detected: float
    teardown_s: float


class Attempt:
    """Ranks on `nodes`, which are in rank order and whose agents are ready."""

    def __init__(
        self, fleet: Fleet, nodes: Sequence[Node], ranks: Ranks, begin: Start, name: str | None = None
    ) -> None:
        """`name` tells this start's replies from another's; by default it is the start's own."""
        self._fleet = fleet
        self._nodes = list(nodes)
        self._ranks = ranks
        self._begin = begin
        self._name = name or begin.attempt
        self._left: dict[Node, set[int]] = {}
        """Ranks that live, or may."""
        self._codes: set[int] = set()
        self._failures: list[Failure] = []
        self._silent = False
        self._killed = False
        self._leave_by = float("inf")
        self._awaited: Reply | None = None
        self._answers: dict[Node, dict[str, Any]] = {}

    def run(self, should_stop: Callable[[], bool], limit_s: float = float("inf")) -> Outcome:
        """Start the ranks and see them to their end; after `limit_s` they are ended."""
        self._leave_by = time.monotonic() + limit_s
        port = self._listen()
        if port is not None:
            self._start(port)
            self._watch(should_stop)
        detected, since = time.time(), time.monotonic()
        if any(self._left.values()):
            self._tear_down()
        failure = first_cause(self._failures)
        if failure is not None and failure.node is not None:
            failure.node.suspicion += failure.code < 0
        return Outcome(frozenset(self._codes), failure, detected, time.monotonic() - since)

    def _listen(self) -> int | None:
        """Have the first node open a port for rank 0's store; return it, None if that failed."""
        first = self._nodes[0]
        host = LOOPBACK if len(self._nodes) == 1 else ""
        self._fleet.send([first], Request.LISTEN, ports=candidate_ports(self._begin, self._name), host=host)
        self._collect(Reply.LISTENING, [first], _LISTEN_S)
        port = self._answers.get(first, {}).get("port")
        if port is None and not self._failures:
            self._fail(first, f"{first.name} opened no port for rank 0's store")
        return None if self._failures else int(str(port))

    def _start(self, port: int) -> None:
        ranks, size = self._ranks, len(self._nodes) * self._ranks.per_node
        host = LOOPBACK if len(self._nodes) == 1 else self._nodes[0].name + ranks.master_suffix
        for index, node in enumerate(self._nodes):
            first = index * ranks.per_node
            self._left[node] = set(range(first, first + ranks.per_node))
            self._fleet.send(
                [node],
                Request.START,
                attempt=self._name,
                task=ranks.task,
                config=ranks.config,
                log=ranks.log,
                world_size=size,
                nodes=len(self._nodes),
                node_rank=index,
                first_rank=first,
                local_size=ranks.per_node,
                master=f"{host}:{port}",
                environment={START: str(self._begin.number)},
                cpus=ranks.cpus.get(node.name),
                **({} if ranks.timeout_s is None else {"timeout_s": ranks.timeout_s}),
                **(
                    {}
                    if ranks.program is None
                    else {"program": ranks.program, "arguments": list(ranks.arguments)}
                ),
            )

    def _watch(self, should_stop: Callable[[], bool]) -> None:
        """Return when all ranks have left or something has gone wrong."""
        asked = False
        while any(self._left.values()) and not self._failures:
            if not asked and should_stop():
                asked = True
                self._fleet.send(self._nodes, Request.SIGNAL, number=int(self._ranks.stop_signal))
            self._pump(1.0)
            if self._silent and not self._failures:
                self._examine()
            if time.monotonic() > self._leave_by and any(self._left.values()):
                rank, node = self._some_rank_left()
                self._fail(node, f"rank {rank} on {node.name} did not leave in time", rank)

    def _tear_down(self) -> None:
        """End all ranks at once; a node that does not confirm that is lost."""
        self._killed = True
        self._fleet.send(self._nodes, Request.KILL)
        since = time.monotonic()
        while any(self._left.values()):
            self._pump(1.0)
            waited_s = time.monotonic() - since
            for node in [node for node, ranks in self._left.items() if ranks]:
                if waited_s > _SUSPECT_SILENT_S and time.monotonic() - node.heard_s > _SUSPECT_SILENT_S:
                    self._give_up_node(node, f"it has not answered for {_SUSPECT_SILENT_S:.0f} s")
                elif waited_s > _KILL_S:
                    ranks = ", ".join(map(str, sorted(self._left[node])))
                    self._give_up_node(node, f"rank {ranks} could not be ended")

    def _give_up_node(self, node: Node, reason: str) -> None:
        self._fleet.condemn(node, reason)
        self._fleet.lose(node, reason)
        self._left[node] = set()
        # What its peers died of.
        self._failures.insert(
            0, Failure(ExitCode.PEER_FAILED, node, None, f"{node.name}: {reason}", found=True)
        )

    def _examine(self) -> None:
        """A rank is silent for too long: have all stacks written, name the rank that hangs."""
        self._collect(Reply.STACKS, self._nodes, _STACKS_S, Request.STACKS)
        if self._failures:
            return
        found = [
            (node, rank)
            for node, answer in self._answers.items()
            for rank in answer.get("ranks") or []
            if rank.get("rank") in self._left[node]
        ]
        if not found:
            self._fail(None, "a rank was silent for too long")
            return
        node, rank = min(found, key=lambda entry: blame(entry[1]))
        what = f"rank {rank['rank']} hung in {rank['phase']} at step {rank['step']} (state {rank['state']})"
        told = {key: rank.get(key) for key in ("rank", "phase", "step", "silent_s", "state")}
        note(self._begin.run, Event.HUNG, node=node.name, **told)
        node.suspicion += 1
        note(self._begin.run, Event.NODE_FAILED, node=node.name, reason=what)
        self._fail(node, f"{what} on {node.name}", int(rank["rank"]))

    def _collect(
        self, reply: Reply, nodes: Iterable[Node], timeout_s: float, request: Request | None = None
    ) -> None:
        """Wait until each of `nodes` has given a reply of this kind, into `_answers`; a failure ends it."""
        self._answers = {}
        self._awaited = reply
        waiting = set(nodes)
        if request is not None:
            self._fleet.send(waiting, request)
        deadline = time.monotonic() + timeout_s
        while not waiting <= self._answers.keys() and not self._failures and time.monotonic() < deadline:
            self._pump(min(1.0, deadline - time.monotonic()))

    def _pump(self, timeout_s: float) -> None:
        for node, message in self._fleet.pump(timeout_s):
            if node not in self._nodes:
                continue
            kind = message["kind"]
            if kind == Reply.EXITED:
                self._take_exit(node, message)
            elif kind == Reply.ALIVE:
                self._silent |= self._ranks.task is not Task.PROGRAM and any(
                    rank.get("limit_s") and rank.get("silent_s", 0) > rank["limit_s"]
                    for rank in message.get("ranks") or []
                    if rank.get("rank") in self._left.get(node, ())
                )
            elif kind == Reply.ERROR:
                self._fail(node, f"{node.name}: {message.get('message')}")
            elif kind == LOST:
                self._left[node] = set()
                self._fail(node, f"{node.name} was lost, {message['reason']}")
            elif kind == self._awaited:
                self._answers[node] = message

    def _take_exit(self, node: Node, message: dict[str, Any]) -> None:
        rank, code = int(message["rank"]), int(message["code"])
        if message.get("attempt") != self._name or rank not in self._left.get(node, ()):
            return
        self._left[node].discard(rank)
        if self._killed and code in (-signal.SIGKILL, ExitCode.FINISHED):
            return
        self._codes.add(code)
        if code in (*_LEAVE_S, ExitCode.CONFIG, ExitCode.NO_PROGRESS):
            wait_s = _LEAVE_S.get(ExitCode(code), _LEAVE_FAILED_S)
            self._leave_by = min(self._leave_by, time.monotonic() + wait_s)
        else:
            self._failures.append(Failure(code, node, rank, f"rank {rank} on {node.name} {_how(code)}"))

    def _fail(self, node: Node | None, reason: str, rank: int | None = None) -> None:
        self._failures.append(Failure(ExitCode.PEER_FAILED, node, rank, reason, found=True))

    def _some_rank_left(self) -> tuple[int, Node]:
        return next((min(ranks), node) for node, ranks in self._left.items() if ranks)


def first_cause(failures: Sequence[Failure]) -> Failure | None:
    """Return what the others failed of: a rank that leaves with 76 only tells that a peer did."""
    for failure in failures:
        if failure.found or failure.code != ExitCode.PEER_FAILED:
            return failure
    return next(iter(failures), None)


def blame(rank: dict[str, Any]) -> tuple[bool, int, float]:
    """Sort ranks of a hang by how likely each is its cause: stopped or stuck in the kernel, behind, silent longest.

    The others wait for it in a collective, at a later step or in the same one since a later moment.
    """
    return rank.get("state") not in ("T", "D"), int(rank.get("step") or 0), -float(rank.get("silent_s") or 0)


def candidate_ports(begin: Start, name: str) -> list[int]:
    """Name the ports to try for rank 0's store: others for each job and start, so that neighbours do not meet."""
    digest = hashlib.sha256(f"{begin.job} {begin.restart} {begin.number} {name}".encode()).digest()
    first = _FIRST_PORT + int.from_bytes(digest[:4]) % (_PORTS - _PORT_CANDIDATES)
    return [*range(first, first + _PORT_CANDIDATES), 0]


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    if code == -signal.SIGKILL:
        return "was ended by SIGKILL (often the host's memory: see cluster.memory)"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
