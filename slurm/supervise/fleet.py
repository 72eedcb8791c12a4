"""All agents of a job: one event loop that starts them, listens to them, and notices when one is gone."""

import resource
import selectors
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from contract.agent import LEASE_S, PING_EVERY_S, Reply, Request
from contract.run_folder import Event, RunFolder
from slurm.supervise.agent_process import AgentProcess
from slurm.supervise.nodes import Node, down
from slurm.supervise.requeue import note
from slurm.supervise.stop import StopRequest

SILENT_S = 20.0
"""An agent that has said nothing for so long, though it was asked every second, is lost with its node."""
# When most agents are silent for so long, the longer limit holds: it is the network.
_ALSO_SILENT_S = 10.0
_MOST_SILENT_S = LEASE_S
FIRST_READY_S = 600.0
"""How long an agent may take to import torch at first: hundreds of nodes read one file system then."""
READY_AGAIN_S = 30.0
"""The same for one that is started anew: the files are in the node's memory."""
MAX_FAILED_LAUNCHES = 2
_SLOWER = 3
_OWN_PAUSE_S = 5.0
_QUIT_S = 5.0
_ENDING_S = 5.0
_LOOK_EVERY_S = 1.0
_KEEP_ALIVE_EVERY_S = LEASE_S / 4
# A shared file system that fails over stands still for minutes.
_STALLED_S = 600.0
# Wills act one after another, so that the first one's requeue is seen by the next.
_WILL_AFTER_S = 1.0
_WILL_EVERY_S = 15.0
_FEW_WILLS = 8

LOST = "lost"
"""The kind of a message that the fleet itself sends: an agent is gone, with its `reason`."""

News = list[tuple[Node, dict[str, Any]]]


class Fleet:
    """The agents; `pump` returns what they said."""

    def __init__(
        self,
        nodes: Sequence[Node],
        command: Sequence[str],
        environ: Mapping[str, str],
        stop: StopRequest,
        *,
        run: RunFolder,
        will: Sequence[str] | None,
        say: Callable[[str], None],
    ) -> None:
        """`command` with {node} starts an agent; `will` is what agents run when this process is lost."""
        self.nodes = list(nodes)
        self._command = list(command)
        self._environ = dict(environ)
        self._stop = stop
        self._run = run
        self._will = None if will is None else list(will)
        self._say = say
        self._selector = selectors.DefaultSelector()
        self._selector.register(stop, selectors.EVENT_READ)
        self._pinged_s = 0.0
        self._pumped_s = time.monotonic()
        self._slowest_start_s = 0.0
        self._cut_off_until_s = 0.0
        self._news: News = []
        self._buried: list[Node] = []
        """Those whose agents have just ended."""
        self._leaving: list[tuple[AgentProcess, float]] = []
        """Processes that are about to end, and when they are killed."""
        self._closed = threading.Event()
        _allow_files(4 * len(self.nodes) + 64)
        threading.Thread(target=self._keep_alive, name="keep-alive", daemon=True).start()

    def launch(self) -> None:
        """Start an agent on every usable node that has none."""
        for node in self.nodes:
            if node.agent is None and node.bad is None:
                self._launch(node)

    def send(self, to: Iterable[Node], kind: Request, /, **fields: Any) -> None:
        """Send the same request to the agents of the nodes `to`."""
        for node in to:
            # Held once: the loop may drop it while the other thread sends.
            if (agent := node.agent) is not None:
                agent.send(kind, **fields)

    def pump(self, timeout_s: float) -> News:
        """Wait for news, at most until the next signal; ping, and notice who is gone."""
        now = time.monotonic()
        self._forgive(now - self._pumped_s)
        if now - self._pinged_s >= PING_EVERY_S:
            self._pinged_s = now
            self.send((node for node in self.nodes if node.ready), Request.PING)
        timeout_s = 0.0 if self._news else max(0.0, min(timeout_s, self._pinged_s + PING_EVERY_S - now))
        ready = self._selector.select(timeout_s)
        self._forgive(time.monotonic() - now - timeout_s)
        for key, _ in ready:
            if key.data is None:
                self._stop.drain()
            else:
                self._read(key.data)
        self._pumped_s = time.monotonic()
        self._reap()
        self._condemn_dead()
        silence_s = self._silence_s()
        for node in self.nodes:
            if node.agent is not None:
                node.agent.flush()
                self._check_silence(node, silence_s)
        news, self._news = self._news, []
        return news

    def condemn(self, node: Node, reason: str) -> None:
        """Use a node no more in this job, and leave word for the next one."""
        if node.bad is not None:
            return
        node.bad = reason
        self._say(f"node {node.name} has failed: {reason}")
        note(self._run, Event.NODE_FAILED, node=node.name, reason=reason)

    def lose(self, node: Node, reason: str) -> None:
        """Give up an agent that does not answer; whoever waits for it is told by `pump`."""
        if node.agent is not None:
            self._detach(node, grace_s=0.0)
            self._tell_lost(node, reason)

    def arrange(self, order: Sequence[str]) -> None:
        """Put the nodes, and so the ranks, in this order of names; those that are not in it come last."""
        places = {name: place for place, name in enumerate(order)}
        self.nodes.sort(key=lambda node: places.get(node.name, len(places)))

    def close(self) -> None:
        """Let all agents leave, by force after a bounded time."""
        self._closed.set()
        for node in self.nodes:
            if node.agent is not None:
                node.agent.leave()
                self._detach(node, _QUIT_S)
        while self._leaving:
            self._stop.wait(_LOOK_EVERY_S)
            self._reap()

    def _keep_alive(self) -> None:
        """Ping while the loop waits for a slow file system: agents end their ranks when nobody speaks to them.

        In a thread of its own, and not for ever. Seldom, since nobody reads the answers meanwhile.
        """
        while not self._closed.wait(_KEEP_ALIVE_EVERY_S):
            if _KEEP_ALIVE_EVERY_S <= time.monotonic() - self._pumped_s < _STALLED_S:
                self.send((node for node in self.nodes if node.ready), Request.PING)

    def _launch(self, node: Node) -> None:
        command = [word.replace("{node}", node.name) for word in self._command]
        try:
            node.agent = AgentProcess(command, self._environ)
        except OSError as error:
            self._say(f"cannot start {command[0]}: {error.strerror}")
            self._count_failed_launch(node, f"{command[0]} cannot be run on it ({error.strerror})")
            return
        node.launched_s = node.heard_s = time.monotonic()
        self._selector.register(node.agent, selectors.EVENT_READ, node)

    def _read(self, node: Node) -> None:
        if node.agent is None:
            return
        messages, noise = node.agent.read()
        for line in noise:
            self._say(f"{node.name}: {line}")
        if messages:
            node.heard_s = time.monotonic()
        for message in messages:
            if message["kind"] == Reply.READY:
                self._welcome(node, message)
            elif message["kind"] == Reply.STOPPING:
                self._stop.request(f"{node.name} was sent signal {message.get('signal')}")
            elif message["kind"] == Reply.ERROR:
                self._say(f"{node.name}: {message.get('message')}")
            self._news.append((node, message))
        if node.agent.ended:
            self._bury(node)

    def _welcome(self, node: Node, message: dict[str, Any]) -> None:
        node.ready = node.been_ready = True
        node.failed_launches = 0
        node.cpus = [int(cpu) for cpu in message.get("cpus") or []]
        self._slowest_start_s = max(self._slowest_start_s, node.heard_s - node.launched_s)
        if self._will is not None and node.agent is not None:
            # The first node holds the supervisor: its agent is the least likely to outlive it.
            turn = (self.nodes.index(node) - 1) % len(self.nodes)
            # With hundreds of nodes the later ones come at shorter distances.
            delay_s = _WILL_AFTER_S + _WILL_EVERY_S * min(turn, _FEW_WILLS) + max(0, turn - _FEW_WILLS)
            node.agent.send(Request.WILL, command=self._will, delay_s=delay_s)

    def _bury(self, node: Node) -> None:
        """Take note of an agent that has ended by itself."""
        was_ready = node.ready
        # srun takes a second to end after the agent, with a message that says why.
        self._detach(node, grace_s=_ENDING_S)
        self._tell_lost(node, "its agent has ended")
        self._buried.append(node)
        if not was_ready:
            self._count_failed_launch(node, "no agent can be started on it")

    def _condemn_dead(self) -> None:
        """Ask Slurm, once for all, about nodes whose agents have ended."""
        buried, self._buried = self._buried, []
        dead = down([node.name for node in buried])
        for node in buried:
            if node.name in dead:
                self.condemn(node, "Slurm says that it is down")

    def _detach(self, node: Node, grace_s: float) -> None:
        """Have done with a node's agent; its process has `grace_s` to end by itself."""
        assert node.agent is not None
        self._selector.unregister(node.agent)
        self._leaving.append((node.agent, time.monotonic() + grace_s))
        node.agent, node.ready = None, False
        self._reap()

    def _reap(self) -> None:
        """Forget processes that have ended, end those that take too long."""
        now, leaving = time.monotonic(), self._leaving
        self._leaving = []
        for agent, deadline in leaving:
            if now >= deadline:
                agent.kill()
            # One that hangs in the kernel is left to it.
            if agent.has_ended() or now > deadline + _ENDING_S:
                # Not before: an agent that cannot answer thinks that it is alone, and carries out its last will.
                agent.close()
            else:
                self._leaving.append((agent, deadline))

    def _tell_lost(self, node: Node, reason: str) -> None:
        node.suspicion += 1
        self._say(f"lost the agent of {node.name}: {reason}")
        self._news.append((node, {"kind": LOST, "reason": reason}))

    def _count_failed_launch(self, node: Node, reason: str) -> None:
        node.failed_launches += 1
        if node.failed_launches >= MAX_FAILED_LAUNCHES:
            self.condemn(node, reason)

    def _silence_s(self) -> float:
        """How long an agent may be silent now: when most are, it is the network or this node that they wait for."""
        now = time.monotonic()
        ages_s = [now - node.heard_s for node in self.nodes if node.ready]
        silent = sum(age_s > _ALSO_SILENT_S for age_s in ages_s)
        if len(ages_s) > 2 and 2 * silent > len(ages_s):
            # Also while the first are back, and others' answers come a little later.
            self._cut_off_until_s = now + SILENT_S
        return _MOST_SILENT_S if now < self._cut_off_until_s else SILENT_S

    def _check_silence(self, node: Node, silence_s: float) -> None:
        now = time.monotonic()
        if not node.ready:
            limit_s = (
                max(READY_AGAIN_S, _SLOWER * self._slowest_start_s) if node.been_ready else FIRST_READY_S
            )
            if now - node.launched_s > limit_s:
                self.lose(node, f"its agent was not ready after {limit_s:.0f} s")
                self.condemn(node, f"no agent could be started on it in {limit_s:.0f} s")
        elif now - node.heard_s > silence_s:
            self.lose(node, f"its agent has not answered for {silence_s:.0f} s")
            self.condemn(node, f"it has not answered for {silence_s:.0f} s")

    def _forgive(self, pause_s: float) -> None:
        """Blame nobody for the time in which this process itself was stopped (a suspended job) or busy."""
        if pause_s > _OWN_PAUSE_S:
            for node in self.nodes:
                node.heard_s += pause_s
                node.launched_s += pause_s


def _allow_files(count: int) -> None:
    """Raise the limit of open files, which is 1024 on most systems."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
