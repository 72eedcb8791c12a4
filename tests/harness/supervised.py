"""A supervisor in this process, with local "nodes" whose agents are stand-ins without torch.

A `conftest.py` that imports the fixtures has them.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from contract.run_folder import Event, RunFolder, read_json_lines
from slurm.supervise.agents import Agents, Plan
from slurm.supervise.fleet import Fleet
from slurm.supervise.nodes import Node
from slurm.supervise.start import Start
from slurm.supervise.stop import StopRequest
from slurm.supervise.supervisor import Policy, Supervisor

from . import stand_in_agent

AGENT = [sys.executable, "-u", stand_in_agent.__file__]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def stop_request() -> Iterator[StopRequest]:
    numbers = (signal.SIGUSR2, signal.SIGCHLD)
    before = {number: signal.getsignal(number) for number in numbers}
    yield StopRequest({signal.SIGUSR2})
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


class World:
    """Some nodes, what is to happen on them, and a supervisor in this process."""

    def __init__(self, run: RunFolder, stop: StopRequest) -> None:
        self.run, self.stop = run, stop
        self.plan: dict[str, Any] = {"steps": 8, "step_s": 0.02}
        self.nodes = [Node("a"), Node("b")]
        self.said: list[str] = []
        self.agent = AGENT
        self.is_due: Callable[[], bool] = lambda: False
        self.begin = Start(run, "42", 0, 0)

    def fault(self, rank: int, do: int | str, at: int = 3, start: int = 0) -> None:
        self.plan.setdefault("faults", []).append({"start": start, "rank": rank, "at": at, "do": do})

    def node(self, name: str, **own: Any) -> None:
        self.plan.setdefault("nodes", {})[name] = own

    def supervise(self, *, count: int = 2, policy: Policy | None = None, **plan: Any) -> int:
        """Train; return the job's exit code."""
        agents = self.prepare(count, **plan)
        policy = policy or Policy(backoff_s=0.01)
        return Supervisor(self.begin, agents, self.stop, policy, self.is_due).supervise()

    def prepare(self, count: int = 2, **plan: Any) -> Agents:
        """Return what starts ranks on the nodes."""
        (self.run.path / "plan.json").write_text(json.dumps(self.plan))
        command = [*self.agent, "{node}", str(self.run.path)]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.fleet = Fleet(
            self.nodes, command, environ, self.stop, run=self.run, will=None, say=self.said.append
        )
        return Agents(self.fleet, Plan(count, 2, **plan), signal.SIGUSR2)

    def events(self, kind: Event) -> list[dict[str, Any]]:
        return [event for event in self.run.read_events() if event["event"] == kind]

    @property
    def told(self) -> list[dict[str, Any]]:
        """The requests to start, without those of the health check."""
        return [line for line in read_json_lines(self.run.path / "told.jsonl") if line["task"] == "train"]

    def starts_on(self, number: int) -> list[str]:
        told = [line for line in self.told if line["environment"]["TRIERARCH_START"] == str(number)]
        return [line["node"] for line in sorted(told, key=lambda line: line["node_rank"])]


@pytest.fixture
def world(tmp_path: Path, stop_request: StopRequest) -> World:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return World(folder, stop_request)
