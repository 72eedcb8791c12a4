"""The event loop of an agent: requests of the supervisor, signals, ranks that end, and errands.

One thread and no other: a fork copies locks as they are, and only the thread that forks.
"""

import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

from contract import agent as contract
from contract.agent import Decoder, Reply, Request, encode
from train.bootstrap import listen
from train.resilience.errand import Errand
from train.resilience.health import Wanted, problems
from train.resilience.process import ASKING
from train.resilience.ranks import Order, Ranks
from train.resilience.stacks import ANSWER_S, PY_SPY_S, Asked, write_stacks

TICK_S = 0.5
SUSPENDED_S = 10.0
"""A pause of the event loop that only a suspended node explains."""
SEND_S = 10.0
"""How long a reply waits for a supervisor that doesn't read."""
END_S = 10.0
"""How long to wait for the end of killed ranks, which may hang in the kernel."""
CHECK_S = 60.0
WILL_S = 300.0
"""How long a last will may take."""

ORPHANED = 1


class Lost(Exception):
    """The supervisor is gone."""


class Agent:
    """The event loop of one node."""

    def __init__(self, requests: int, replies: int) -> None:
        """`requests` and `replies`: descriptors of the two halves of the channel."""
        self._requests, self._replies = requests, replies
        self._decoder = Decoder()
        self._ranks = Ranks()
        self._errands: dict[Errand, Callable[[Any], None]] = {}
        self._listener: socket.socket | None = None
        self._will: tuple[list[str], float] | None = None
        self._asked = False
        self._leaving = False
        self._heard = self._ticked = self._awake_since = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._wakeup = self._take_signals()
        self._selector.register(requests, selectors.EVENT_READ, self._read)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._on_signals)

    def run(self) -> int:
        """Answer requests until told to quit or the supervisor is gone; return the exit code."""
        cpus = sorted(os.sched_getaffinity(0))
        try:
            self._send(Reply.READY, host=socket.gethostname(), pid=os.getpid(), time_s=time.time(), cpus=cpus)
            while not self._leaving:
                for key, _ in self._selector.select(TICK_S):
                    key.data()
                self._tick()
        except Lost as lost:
            print(f"agent: {lost}, ending the ranks", file=sys.stderr, flush=True)
            self._ranks.end(END_S)
            self._carry_out_will()
            return ORPHANED
        self._ranks.end(END_S)
        return 0

    def _take_signals(self) -> int:
        """Have every signal end up as a byte in a pipe, whose end to read from is returned."""
        reader, writer = os.pipe()
        for descriptor in (reader, writer):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (*ASKING, signal.SIGCHLD):
            signal.signal(number, _noted)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
        self._private = [self._requests, self._replies, reader, writer, self._selector.fileno()]
        return reader

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._ticked > SUSPENDED_S:
            self._awake_since = now
        self._ticked = now
        for errand in [errand for errand in self._errands if now > errand.deadline]:
            self._finish(errand, late=True)
        if now - max(self._heard, self._awake_since) > contract.LEASE_S:
            raise Lost(f"nothing was heard of the supervisor for {contract.LEASE_S:g} s")

    def _on_signals(self) -> None:
        numbers = set(os.read(self._wakeup, 4096))
        for rank, code in self._ranks.reap():
            self._send(Reply.EXITED, attempt=self._ranks.attempt, rank=rank, code=code)
        for number in sorted(numbers & set(ASKING)):
            if not self._asked:
                self._asked = True
                # Ranks take it for a request to stop, whatever their own signal for that is.
                self._ranks.signal(signal.SIGTERM)
                self._send(Reply.STOPPING, signal=signal.Signals(number).name)

    def _read(self) -> None:
        data = os.read(self._requests, 65536)
        if not data:
            raise Lost("the supervisor is gone")
        self._heard = time.monotonic()
        for message in self._decoder.feed(data):
            try:
                self._handle(message)
            except Lost:
                raise
            except Exception as error:  # a request that can't be carried out must not cost the node
                self._send(Reply.ERROR, message=f"{message['kind']}: {type(error).__name__}: {error}")
        for line in self._decoder.noise:
            self._send(Reply.ERROR, message=f"no request: {line[:200]}")
        self._decoder.noise.clear()

    def _handle(self, message: dict[str, Any]) -> None:
        match Request(message["kind"]):
            case Request.LISTEN:
                self._send(Reply.LISTENING, port=self._listen(message["ports"], message.get("host", "")))
            case Request.START:
                self._start(Order.read(message))
            case Request.SIGNAL:
                self._ranks.signal(int(message["number"]))
            case Request.STACKS:
                self._write_stacks()
            case Request.KILL:
                self._ranks.kill()
            case Request.CHECK:
                self._check(message)
            case Request.PING:
                self._send(Reply.ALIVE, time_s=time.time(), ranks=self._ranks.describe(self._awake_since))
            case Request.WILL:
                command = message["command"]
                self._will = ([str(word) for word in command], float(message["delay_s"])) if command else None
            case Request.QUIT:
                self._leaving = True

    def _listen(self, ports: list[int], host: str) -> int | None:
        self._close_listener()
        self._listener = listen(host, ports)
        return None if self._listener is None else int(self._listener.getsockname()[1])

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _start(self, order: Order) -> None:
        if self._ranks.children:
            raise RuntimeError(f"ranks of attempt {self._ranks.attempt} are still there: kill them first")
        if order.first_rank == 0 and self._listener is None:
            raise RuntimeError("rank 0 needs a port: ask to listen first")
        self._asked = False
        try:
            self._ranks.start(order, self._listener, self._held_descriptors())
        finally:
            self._close_listener()

    def _held_descriptors(self) -> list[int]:
        return self._private + [errand.reader for errand in self._errands]

    def _write_stacks(self) -> None:
        asked = [Asked(child.rank, child.pid, child.log) for child in self._ranks.children]
        limit_s = ANSWER_S + PY_SPY_S * len(asked) + 5.0
        # How they are now, not after they were looked at.
        described = self._ranks.describe(self._awake_since)
        self._run_errand(
            partial(write_stacks, asked), limit_s, lambda _: self._send(Reply.STACKS, ranks=described)
        )

    def _check(self, message: dict[str, Any]) -> None:
        wanted = Wanted.read(message)

        def answer(found: Any) -> None:
            late = f"the health check did not end within {CHECK_S:g} s, a device or a folder hangs"
            late = f"{socket.gethostname()}: {late}"
            self._send(Reply.HEALTH, problems=[late] if found is None else found, time_s=time.time())

        self._run_errand(partial(problems, wanted), CHECK_S, answer)

    def _run_errand(self, action: Callable[[], Any], limit_s: float, answer: Callable[[Any], None]) -> None:
        """Run `action` in a child; call `answer` with its result, with None when it took too long."""
        errand = Errand(action, limit_s, self._held_descriptors())
        self._errands[errand] = answer
        self._selector.register(errand.reader, selectors.EVENT_READ, partial(self._on_errand, errand))

    def _on_errand(self, errand: Errand) -> None:
        if errand.read():
            self._finish(errand)

    def _finish(self, errand: Errand, late: bool = False) -> None:
        self._selector.unregister(errand.reader)
        answer = self._errands.pop(errand)
        if late:
            errand.abort()
            answer(None)
            return
        errand.close()
        try:
            result = errand.result()
        except ChildProcessError as error:
            self._send(Reply.ERROR, message=str(error))
            return
        answer(result)

    def _send(self, kind: Reply, **fields: Any) -> None:
        data = encode(kind, **fields)
        while data:
            # A supervisor that has stopped reading must not stop this loop: a pipe that can be written to at all
            # takes PIPE_BUF bytes without waiting.
            if not select.select([], [self._replies], [], SEND_S)[1]:
                raise Lost(f"the supervisor has read nothing for {SEND_S:g} s")
            try:
                data = data[os.write(self._replies, data[: select.PIPE_BUF]) :]
            except OSError as error:
                raise Lost("the supervisor is gone") from error

    def _carry_out_will(self) -> None:
        if self._will is None:
            return
        command, delay_s = self._will
        time.sleep(delay_s)
        print(f"agent: running the last will: {' '.join(command)}", file=sys.stderr, flush=True)
        # A session of its own: what ends this process's group must not end it.
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, start_new_session=True, timeout=WILL_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            print(f"agent: the last will failed: {error}", file=sys.stderr, flush=True)
            return
        if done.returncode != 0:
            print(f"agent: the last will ended with code {done.returncode}", file=sys.stderr, flush=True)


def _noted(number: int, frame: FrameType | None) -> None:
    """Do nothing: the signal's number is in the wake-up pipe."""
