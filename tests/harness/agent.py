"""Driving a real agent over its pipes, as a supervisor does."""

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import configs.compose
from contract.agent import Decoder, Reply, Request, Task, encode
from contract.run_folder import RunFolder
from contract.variables import START
from train.config import load_config

AGENT = ["-u", "-m", "train.agent"]
WAIT_S = 60.0


class Agent:
    """An agent of this host, and what it has said."""

    def __init__(self, arguments: list[str] | None = None, **environment: str) -> None:
        """`arguments`: Python's, instead of those that start the agent as it is."""
        self.process = subprocess.Popen(
            [sys.executable, *(arguments or AGENT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A library that starts threads when it is imported would start them here.
            env={**os.environ, "OMP_NUM_THREADS": "2", **environment},
            start_new_session=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.requests, self.replies = self.process.stdin, self.process.stdout
        self._decoder = Decoder()
        self._said: list[dict[str, Any]] = []

    @property
    def noise(self) -> list[str]:
        """What came through the channel and was no message."""
        return self._decoder.noise

    def ask(self, kind: Request, **fields: Any) -> None:
        """Send a request."""
        self.requests.write(encode(kind, **fields))
        self.requests.flush()

    def wait_for(self, kind: Reply, timeout_s: float = WAIT_S) -> dict[str, Any]:
        """Return the next reply of a kind; others are kept."""
        deadline = time.monotonic() + timeout_s
        while True:
            for message in self._said:
                if message["kind"] == kind:
                    self._said.remove(message)
                    return message
            left = deadline - time.monotonic()
            assert left > 0, f"no {kind} within {timeout_s} s, but {self._said}"
            if select.select([self.replies], [], [], left)[0]:
                data = os.read(self.replies.fileno(), 65536)
                assert data, f"the agent has left instead of saying {kind}: {self.errors()}"
                self._said += self._decoder.feed(data)

    def has_said(self, kind: Reply) -> bool:
        """Whether a reply of a kind has come that nobody has waited for yet."""
        return any(message["kind"] == kind for message in self._said)

    def codes(self, ranks: int) -> dict[int, int]:
        """Wait until so many ranks have ended; return the exit code of each."""
        ended = [self.wait_for(Reply.EXITED) for _ in range(ranks)]
        return {message["rank"]: message["code"] for message in ended}

    def pulse(self) -> dict[int, dict[str, Any]]:
        """Ask how every rank is."""
        self.ask(Request.PING)
        return {rank["rank"]: rank for rank in self.wait_for(Reply.ALIVE)["ranks"]}

    def wait_until(self, what: str, condition: Callable[[dict[int, dict[str, Any]]], bool]) -> dict[int, Any]:
        """Wait until the ranks' pulses fulfil a condition; return them."""
        deadline = time.monotonic() + WAIT_S
        while not condition(pulses := self.pulse()):
            assert time.monotonic() < deadline, f"waited {WAIT_S} s for {what}: {pulses}"
            assert not self.has_said(Reply.EXITED), f"a rank has ended before {what}: {self._said}"
            time.sleep(0.02)
        return pulses

    def listen(self) -> str:
        """Have it open a port; return the address."""
        self.ask(Request.LISTEN, ports=[0], host="127.0.0.1")
        return f"127.0.0.1:{self.wait_for(Reply.LISTENING)['port']}"

    def start(self, run: RunFolder, size: int, number: int = 0, **fields: Any) -> None:
        """Start the ranks of a run: all of them, unless `fields` say otherwise."""
        attempt = f"0-{number}" if number else "0"
        master = fields.pop("master", None) or self.listen()
        environment = {START: str(number), "OMP_NUM_THREADS": "1", **fields.pop("environment", {})}
        order = {
            "attempt": attempt,
            "task": Task.TRAIN,
            "config": str(run.config),
            "log": str(run.logs / f"local.r{attempt}.{{rank}}.log"),
            "world_size": size,
            "nodes": 1,
            "node_rank": 0,
            "first_rank": 0,
            "local_size": size,
            "cpus": None,
        }
        self.ask(Request.START, master=master, environment=environment, **order | fields)

    def kill_ranks(self) -> None:
        """End the ranks, wait for it, and forget what the agent has said."""
        self.ask(Request.KILL)
        deadline = time.monotonic() + WAIT_S
        while self.pulse():
            assert time.monotonic() < deadline, f"the ranks still run after {WAIT_S} s"
        self._said.clear()

    def errors(self) -> str:
        """All that a dead agent has written to stderr."""
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def close(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait(timeout=10)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


def write_run(overrides: list[str]) -> RunFolder:
    """Make the run folder that a submission would make, for `Agent.start`."""
    config = load_config(overrides)
    run = config.run_folder
    run.create()
    run.config.write_text(configs.compose.to_yaml(config))
    return run
