"""The network test of a job: its nodes measure what lies between them, and the job acts on what is found."""

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from contract.agent import Task
from contract.errors import UserError
from contract.exit_codes import ExitCode
from contract.network_test import (
    PROGRAM,
    SPEC,
    TOPOLOGY,
    VERDICT,
    NetworkVerdict,
    blamed,
    cannot_write,
    last_words,
    logs_of,
)
from contract.run_folder import Event
from slurm.client import ask
from slurm.supervise.attempt import Attempt, Outcome, Ranks
from slurm.supervise.fleet import Fleet
from slurm.supervise.nodes import Node
from slurm.supervise.requeue import note
from slurm.supervise.start import Start

TRIES = 4
"""Each without the nodes that the one before got no answer from."""
LEAVE_S = 300.0
"""What ranks may take beyond their time to meet, and to write the report."""
_TRIAL_BYTES = 65_536
LEAST_S = 5.0
"""Less is no time to measure anything in."""


@dataclass(frozen=True)
class Tested:
    """How a network test has ended."""

    verdict: NetworkVerdict | None
    """None where no measurement came to its end."""
    silent: dict[str, str] = field(default_factory=dict)
    """Nodes that did not answer, and what others waited for."""
    reason: str = ""
    """Without a verdict: why."""


@dataclass(frozen=True)
class NetworkRanks:
    """Who measures, and what they are told."""

    begin: Start
    per_node: int
    master_suffix: str = ""
    baseline: str | None = None

    def spec(
        self, nodes: Sequence[Node], silent: dict[str, str], budget_s: float, resume: bool
    ) -> dict[str, object]:
        """What is to be measured, on these nodes; `resume`: what this test has measured before is kept."""
        return {
            "folder": str(self.begin.run.nccl),
            "nodes": [node.name for node in nodes],
            "silent": silent,
            "budget_s": budget_s,
            "baseline": self.baseline,
            "resume": resume,
        }

    def ranks(self) -> Ranks:
        """The ranks that do it."""
        run = self.begin.run
        return Ranks(
            task=Task.PROGRAM,
            config=str(run.config),
            log=logs_of(run.logs, self.begin.job, "{rank}"),
            per_node=self.per_node,
            cpus={},
            master_suffix=self.master_suffix,
            program=PROGRAM,
            arguments=(str(run.nccl / SPEC),),
        )


class NetworkTest:
    """Has the agents of some nodes measure, again without those that do not answer."""

    def __init__(self, fleet: Fleet, ranks: NetworkRanks, limit_s: float) -> None:
        """`limit_s`: how long the measuring itself may take, over all tries."""
        self._fleet = fleet
        self._ranks = ranks
        self._begin = ranks.begin
        self._limit_s = limit_s

    def run(
        self, nodes: Sequence[Node], should_stop: Callable[[], bool], absent: Mapping[str, str] | None = None
    ) -> Tested:
        """Test `nodes`, whose agents are ready. Bounded. `absent`: nodes that cannot take part, and why."""
        folder = self._begin.run.nccl
        silent = dict(absent or {})
        left, reason = list(nodes), ""
        deadline = time.monotonic() + self._limit_s
        for number in range(1, TRIES + 1):
            remaining_s = deadline - time.monotonic()
            if should_stop() or not left or remaining_s < LEAST_S:
                break
            try:
                self._prepare(left, silent, remaining_s, again=number > 1)
            except OSError as error:
                return Tested(None, silent, cannot_write(folder, error))
            before = {log: log.stat().st_size for log in self._logs()}
            attempt = Attempt(self._fleet, left, self._ranks.ranks(), self._begin, f"network{number}")
            outcome = attempt.run(should_stop, limit_s=remaining_s + LEAVE_S)
            if outcome.failure is None and outcome.codes <= {0}:
                return self._read(silent)
            if should_stop():
                return Tested(None, silent, "the job was asked to stop")
            reason = (
                outcome.failure.reason if outcome.failure else f"its ranks ended with {sorted(outcome.codes)}"
            )
            words = self._last_words(outcome, before)
            if words:
                # Another try would end of the same.
                return Tested(None, silent, f"{reason}: {words}")
            found = blamed(folder)
            guilty = outcome.failure.node if outcome.failure is not None else None
            if not found and guilty is not None and (guilty.bad is not None or not guilty.ready):
                found = {guilty.name: reason}
            # Without a culprit the ranks leave out what they hung in.
            silent |= {name: why for name, why in found.items() if name in {node.name for node in left}}
            left = [node for node in left if node.ready and node.name not in silent]
        logs = f"; see {logs_of(self._begin.run.logs, self._begin.job)}" if reason else ""
        return Tested(None, silent, f"{reason or 'there was no time for it'}{logs}")

    def _logs(self) -> list[Path]:
        """What there is of the ranks' logs."""
        pattern = Path(logs_of(self._begin.run.logs, self._begin.job))
        return sorted(pattern.parent.glob(pattern.name))

    def _last_words(self, outcome: Outcome, before: Mapping[Path, int]) -> str:
        """Return what the rank that failed by itself has said of it; `before`: how long the logs were then."""
        failure = outcome.failure
        if failure is not None and (
            failure.rank is None or failure.code < 0 or failure.code == ExitCode.PEER_FAILED
        ):
            return ""
        logs = self._logs()
        if failure is not None:
            logs = [Path(logs_of(self._begin.run.logs, self._begin.job, str(failure.rank)))]
        for log in logs:
            if words := last_words(log, before.get(log, 0)):
                return words
        # The log may lie on the disk that is full.
        return why_not_written(self._begin.run.nccl)

    def _prepare(
        self, nodes: Sequence[Node], silent: dict[str, str], remaining_s: float, again: bool
    ) -> None:
        """Tell the ranks what to measure; what an earlier test has left must not pass for today's. Raises OSError."""
        folder = self._begin.run.nccl
        if not again and folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for waited in folder.glob("waited.*.json"):
            waited.unlink()
        _write_topology(folder / TOPOLOGY)
        spec = self._ranks.spec(nodes, silent, remaining_s, resume=again)
        (folder / SPEC).write_text(json.dumps(spec))

    def _read(self, silent: dict[str, str]) -> Tested:
        try:
            return Tested(NetworkVerdict.load(self._begin.run.nccl / VERDICT), silent)
        except UserError as error:
            return Tested(None, silent, str(error))


def why_not_written(folder: Path) -> str:
    """Return a sentence if nothing can be written into a folder."""
    trial = folder / ".trial"
    try:
        try:
            trial.write_bytes(b"x" * _TRIAL_BYTES)
        finally:
            trial.unlink(missing_ok=True)
    except OSError as error:
        return cannot_write(folder, error)
    return ""


def _write_topology(file: Path) -> None:
    """Keep what Slurm says of its switches beside the measurement, to be compared with it; raises OSError."""
    file.unlink(missing_ok=True)
    if "SLURM_JOB_ID" in os.environ:
        answer = ask(["scontrol", "show", "topology"], os.environ, timeout_s=20.0)
        if answer.code == 0 and "=" in answer.output:
            file.write_text(answer.output)


def tell(tested: Tested, begin: Start, seconds: float, say: Callable[[str], None]) -> None:
    """Note in the run's events, and say, how the test has ended."""
    verdict = tested.verdict
    note(
        begin.run,
        Event.NETWORK_TESTED,
        verdict=None if verdict is None else verdict.verdict,
        reason=tested.reason if verdict is None else verdict.summary,
        exclude=sorted({**tested.silent, **(verdict.exclude if verdict else {})}),
        order=[] if verdict is None else verdict.order,
        seconds=round(seconds, 1),
    )
    say(
        f"network test ended without a verdict after {seconds:.0f} s: {tested.reason}"
        if verdict is None
        else f"network test after {seconds:.0f} s: {verdict.verdict}, {verdict.summary} ({begin.run.nccl})"
    )
