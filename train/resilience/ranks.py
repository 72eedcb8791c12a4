"""The ranks of one node: forked by an agent, each a process that finds in its environment who it is."""

import functools
import gc
import importlib
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from contract.agent import Task
from contract.errors import UserError
from contract.variables import AGENT, LISTENER
from train.__main__ import main, train_rank
from train.config import ResilienceConfig, TrainConfig, read_config
from train.resilience import pulse, stacks
from train.resilience.all_reduce import all_reduce
from train.resilience.process import ASKING, fork, let_trace, process_state
from train.resilience.pulse import Phase, Pulse

ALL_REDUCE_S = 60.0


@dataclass(frozen=True)
class Order:
    """A request to start ranks; see `contract.agent`."""

    attempt: str
    log: str
    world_size: int
    nodes: int
    node_rank: int
    first_rank: int
    local_size: int
    master: str
    task: Task = Task.TRAIN
    config: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    cpus: list[list[int]] | None = None
    timeout_s: float = ALL_REDUCE_S
    program: str | None = None
    arguments: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, message: dict[str, Any]) -> "Order":
        """Take the fields of a message; raises `TypeError` or `ValueError` when they are no order."""
        fields = {name: value for name, value in message.items() if name != "kind"}
        fields["task"] = Task(fields.get("task", Task.TRAIN))
        order = cls(**fields)
        if order.task is Task.TRAIN and not order.config:
            raise ValueError("config is missing")
        if order.task is Task.PROGRAM and not order.program:
            raise ValueError("program is missing")
        if order.cpus is not None and len(order.cpus) < order.local_size:
            raise ValueError(f"cpus has {len(order.cpus)} lists for {order.local_size} ranks")
        return order

    def log_of(self, rank: int) -> Path:
        """The log of a rank."""
        return Path(self.log.replace("{rank}", str(rank)))


@dataclass(frozen=True)
class Child:
    """A rank that runs."""

    rank: int
    pid: int
    log: Path
    pulse: Pulse


class Ranks:
    """The ranks that an agent has started last."""

    def __init__(self) -> None:
        self.attempt = ""
        self.children: list[Child] = []
        """Those that have not ended yet."""

    def start(self, order: Order, listener: socket.socket | None, close: Iterable[int]) -> None:
        """Fork the ranks; `listener` is rank 0's, `close` are descriptors that no rank may hold."""
        self.attempt = order.attempt
        memory = pulse.shared_memory(order.local_size)
        config = _read_config(order)
        for local_rank in range(order.local_size):
            rank = order.first_rank + local_rank
            own = Pulse(memory, local_rank)
            # Until the rank has read its own.
            own.limits = pulse.limits(ResilienceConfig())
            own.beat(Phase.START, 0)
            # A listener that others hold would keep callers waiting when rank 0 has died.
            others = [listener.fileno()] if listener is not None and rank > 0 else []
            child = _Forked(order, local_rank, own, listener if rank == 0 else None, os.getpid(), config)
            pid = fork(child.run, [*close, *others])
            self.children.append(Child(rank, pid, order.log_of(rank), own))

    def reap(self) -> list[tuple[int, int]]:
        """Return (rank, exit code) of each rank that has ended; the code is negative for a signal."""
        ended = []
        running = {child.pid: child for child in self.children}
        with suppress(ChildProcessError):  # none is left
            while (found := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                pid, status = found
                # Children that are no ranks, the agent's errands, are reaped along with them.
                if child := running.get(pid):
                    self.children.remove(child)
                    ended.append((child.rank, os.waitstatus_to_exitcode(status)))
        return ended

    def signal(self, number: int) -> None:
        """Send every rank a signal."""
        for child in self.children:
            with suppress(ProcessLookupError):
                os.kill(child.pid, number)

    def kill(self) -> None:
        """End every rank at once, with whatever it has started."""
        for child in self.children:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)

    def end(self, limit_s: float) -> None:
        """End every rank and see to it, for `limit_s` at most: they must be gone before the run goes on elsewhere."""
        self.kill()
        deadline = time.monotonic() + limit_s
        while self.children and time.monotonic() < deadline:
            self.reap()
            time.sleep(0.01)

    def describe(self, awake_since: float) -> list[dict[str, Any]]:
        """Tell how each rank is.

        `awake_since`: before this moment (by `time.monotonic`) the whole node was suspended, which nobody's silence
        may be measured over.
        """
        now = time.monotonic()
        return [_describe(child, now, awake_since) for child in self.children]


def _describe(child: Child, now: float, awake_since: float) -> dict[str, Any]:
    last = child.pulse.last()
    return {
        "rank": child.rank,
        "pid": child.pid,
        "state": process_state(child.pid),
        "phase": last.phase,
        "step": last.step,
        "silent_s": round(max(0.0, now - max(last.time_s, awake_since)), 3),
        "limit_s": last.limit_s,
    }


def _read_config(order: Order) -> TrainConfig | None:
    """Read the configuration once for all ranks, and once for all starts: it takes longer than anything else."""
    if order.config is None:
        return None
    try:
        status = Path(order.config).stat()
        return _read_version(order.config, status.st_mtime_ns, status.st_size)
    except (OSError, UserError):
        return None


@functools.lru_cache(maxsize=1)
def _read_version(path: str, modified_ns: int, size_bytes: int) -> TrainConfig:
    return read_config(Path(path))


@dataclass(frozen=True)
class _Forked:
    """What a forked rank is made of, seen from inside."""

    order: Order
    local_rank: int
    pulse: Pulse
    listener: socket.socket | None
    agent: int
    """The agent's process number."""
    config: TrainConfig | None
    """None where it can't be read: the rank tries again and tells why."""

    @property
    def rank(self) -> int:
        return self.order.first_rank + self.local_rank

    def run(self) -> int:
        """Become the rank and do its task; return the exit code."""
        self._take_log()
        stacks.install()
        let_trace(self.agent)
        gc.enable()
        os.environ.update(self._environment())
        self._bind()
        self._reseed()
        pulse.adopt(self.pulse)
        if self.order.task is Task.ALL_REDUCE:
            return all_reduce(self.order.timeout_s)
        if self.order.task is Task.PROGRAM:
            return self._run_program()
        if self.config is None:
            return main(["--config", str(self.order.config)])
        return train_rank(self.config)

    def _run_program(self) -> int:
        # Agents fork their ranks with the signals blocked; this one has nothing to save.
        for number in ASKING:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
        try:
            return int(importlib.import_module(str(self.order.program)).main(self.order.arguments))
        except UserError as error:
            print(f"trierarch: {error}", file=sys.stderr)
            return error.exit_code

    def _take_log(self) -> None:
        log = self.order.log_of(self.rank)
        log.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)

    def _environment(self) -> dict[str, str]:
        order = self.order
        host, _, port = order.master.rpartition(":")
        who = {
            "RANK": self.rank,
            "WORLD_SIZE": order.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": order.local_size,
            "NODE_RANK": order.node_rank,
            "GROUP_RANK": order.node_rank,
            "GROUP_WORLD_SIZE": order.nodes,
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            AGENT: 1,
        }
        if self.listener is not None:
            who[LISTENER] = self.listener.detach()
        return {name: str(value) for name, value in who.items()} | order.environment

    def _bind(self) -> None:
        """Keep to the rank's CPUs and use as many threads as there are: ranks that use all disturb each other."""
        if self.order.cpus is not None:
            cpus = self.order.cpus[self.local_rank]
            try:
                os.sched_setaffinity(0, cpus)
            except OSError as error:
                said = f"trierarch: rank {self.rank} cannot be bound to the CPUs {cpus} ({error.strerror})"
                print(f"{said}: it runs unbound", file=sys.stderr)
        own = len(os.sched_getaffinity(0))
        if self.order.cpus is None:
            own = max(1, own // self.order.local_size)
        # libgomp has read the variable when the agent imported torch.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or own))

    def _reseed(self) -> None:
        """Forked processes have the same generators; what draws from them before the run seeds them must differ."""
        random.seed()
        np.random.seed()
        torch.default_generator.seed()
