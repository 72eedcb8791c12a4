"""A pool of processes that run a test's function as the ranks of a gloo process group."""

import contextlib
import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import types
from collections import ChainMap
from collections.abc import Callable, Sequence
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import cloudpickle

from harness.worker import DUMP_SIGNAL, Call, Reply, serve

MAX_RANKS = 16

# The fork server imports these once; each rank is a fork of it, ready in milliseconds.
_PRELOAD = [
    "cloudpickle",
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "train.run",
]
Ranks = Callable[..., list[Any]]
"""The type of the `ranks` fixture: RankPool.run."""

_GRACE_S = 0.5
_EXIT_S = 5.0
_CLEAN_UP_S = 20.0
_TESTS = Path(__file__).resolve().parents[1]


def start_fork_server() -> None:
    """Start the process of which all ranks are forks, where it isn't there yet."""
    forkserver.set_forkserver_preload(_PRELOAD)
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        forkserver.ensure_running()


class RanksError(RuntimeError):
    """Some rank raised, died or did not end in time; the text says what each rank did."""


class _Worker:
    """One process of the pool, seen from pytest."""

    def __init__(self, folder: Path) -> None:
        """Fork the process; what it prints and its stacks go to files in `folder`."""
        self._log = folder / "log"
        self._stack = folder / "stack"
        self._log.touch()
        self._stack.touch()
        context = multiprocessing.get_context("forkserver")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, self._log, self._stack))
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self._pid = self._process.pid

    @property
    def sources(self) -> tuple[Any, ...]:
        """What becomes ready when the process has replied or ended."""
        return self._connection, self._process.sentinel

    def send(self, message: Call | None) -> None:
        """Send a message; a process that is dead is found by `receive`."""
        with contextlib.suppress(ConnectionError):
            self._connection.send(message)

    def receive(self) -> Reply:
        """Return the reply that is there, or one that tells how the process ended."""
        try:
            if self._connection.poll():
                reply: Reply = self._connection.recv()
                return reply
        except (EOFError, ConnectionError):
            pass
        self._process.join(_EXIT_S)
        code = self._process.exitcode
        how = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
        return Reply(failure=f"its process ended with {how}\n{self._stack_text()}")

    def dump_stack(self) -> str:
        """Return the Python stacks of the live process."""
        os.kill(self._pid, DUMP_SIGNAL)
        end = time.monotonic() + 1.0
        while not self._stack_text() and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(0.05)  # for the rest of the dump
        return self._stack_text() or "(it does not answer: stopped?)\n"

    def output(self) -> str:
        """Return what the process printed in this call."""
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """End the process and its children now."""
        self._process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        self._process.join(_EXIT_S)
        self._connection.close()

    def _stack_text(self) -> str:
        return self._stack.read_text().partition(f'  File "{_TESTS / "harness"}')[0]


class RankPool:
    """Runs functions on up to MAX_RANKS ranks; processes stay alive until a call of theirs fails."""

    def __init__(self, seed: int) -> None:
        """Every call starts from `seed` in torch, numpy and random."""
        self._seed = seed
        self._workers: list[_Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        start_fork_server()

    def run(
        self, size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0, **kwargs: Any
    ) -> list[Any]:
        """Return `function(*args, **kwargs)` of each of `size` ranks, in the order of the ranks.

        The function may be a closure or belong to a test module. It finds the default gloo group
        initialised, and the caller's environment and working directory. RanksError if any rank raises,
        dies or takes longer than `timeout_s`; the processes of the call are then replaced.
        """
        __tracebackhide__ = True
        if not 1 <= size <= MAX_RANKS:
            raise ValueError(f"{size} ranks asked for: the pool has 1 to {MAX_RANKS}")
        payload = _pickle((function, args, kwargs))
        while len(self._workers) < size:
            self._workers.append(_Worker(Path(tempfile.mkdtemp(dir=self._folder.name))))
        try:
            return self._run(self._workers[:size], payload, timeout_s)
        except BaseException:  # also pytest's own limit and Ctrl-C: the ranks are in an unknown state
            self._kill(size)
            raise

    def close(self) -> None:
        """End every process."""
        self._kill(len(self._workers))
        self._folder.cleanup()

    def _run(self, workers: Sequence[_Worker], payload: bytes, timeout_s: float) -> list[Any]:
        __tracebackhide__ = True
        folder = tempfile.mkdtemp(dir=self._folder.name)
        for rank, worker in enumerate(workers):
            call = Call(
                payload=payload,
                rank=rank,
                size=len(workers),
                store=f"{folder}/store",
                seed=self._seed,
                environment=dict(os.environ),
                folder=str(Path.cwd()),
                timeout_s=timeout_s,
            )
            worker.send(call)
        replies = self._gather(workers, timeout_s)
        for worker in workers:
            worker.send(None)  # all have returned: the group can go
        self._gather(workers, _CLEAN_UP_S)
        return [pickle.loads(replies[rank].result) for rank in range(len(workers))]

    def _gather(self, workers: Sequence[_Worker], timeout_s: float) -> dict[int, Reply]:
        """Wait for one reply of each rank; RanksError soon after one fails, or at the limit."""
        __tracebackhide__ = True
        started = time.monotonic()
        deadline = started + timeout_s
        replies: dict[int, Reply] = {}
        while len(replies) < len(workers):
            pending = [rank for rank in range(len(workers)) if rank not in replies]
            sources = [source for rank in pending for source in workers[rank].sources]
            ready = connection.wait(sources, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in pending:
                if any(source in ready for source in workers[rank].sources):
                    replies[rank] = workers[rank].receive()
            if any(reply.failed for reply in replies.values()):
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        if len(replies) == len(workers) and not any(reply.failed for reply in replies.values()):
            return replies
        raise RanksError(self._report(workers, replies, time.monotonic() - started))

    def _report(self, workers: Sequence[_Worker], replies: dict[int, Reply], after_s: float) -> str:
        """Tell what each rank did: the failed ones first, in the order in which they failed."""
        failed = [rank for rank, reply in replies.items() if reply.failed]
        waiting = [rank for rank in range(len(workers)) if rank not in replies]
        lines = [
            f"{len(workers)} ranks, seed {self._seed}: after {after_s:.1f} s "
            f"rank(s) {failed or 'none'} had failed, {waiting or 'none'} were still running"
        ]
        lines += [f"=== rank {rank} failed: {replies[rank].failure}" for rank in failed]
        lines += [f"=== rank {rank} was still running:\n{workers[rank].dump_stack()}" for rank in waiting]
        for rank, worker in enumerate(workers):
            if output := worker.output():
                lines.append(f"=== output of rank {rank}:\n{output}")
        return "\n".join(lines)

    def _kill(self, size: int) -> None:
        for worker in self._workers[:size]:
            worker.kill()
        del self._workers[:size]


def _pickle(value: Any) -> bytes:
    """Pickle with the code of test modules included: ranks cannot import them by name."""
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path and name.partition(".")[0] != "harness" and Path(path).is_relative_to(_TESTS):
            cloudpickle.register_pickle_by_value(module)
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def _reduce_code(code: types.CodeType) -> Any:
    constructor, values = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return constructor, tuple(code.co_filename if value == "<dynamic-code>" else value for value in values)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Keeps the name of the source file, which cloudpickle drops: tracebacks need it."""

    dispatch_table = ChainMap({types.CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)
