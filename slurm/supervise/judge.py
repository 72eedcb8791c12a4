"""What the end of a training means: read from exit codes and from the run's events."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from contract.exit_codes import ExitCode
from contract.run_folder import Event


class Verdict(StrEnum):
    """What the end of the training means."""

    finished = "finished"
    stopped = "stopped"
    crashed = "crashed"
    hopeless = "hopeless"
    short = "short"
    """Too few nodes of the job are left to train on."""


@dataclass(frozen=True)
class End:
    """How one start of the training ended."""

    verdict: Verdict
    code: int
    reason: str
    refused: bool = False
    """Whether the ranks were turned away because another process trains the run."""
    rank: int | None = None
    node: str | None = None
    """Who failed first, where that is known."""
    detected: float = field(default_factory=time.time)
    """When it was noticed, in seconds since the epoch."""
    teardown_s: float = 0.0
    """From then until no rank was left."""
    node_lost: bool = False
    """Whether it was the node's fault, which is used no more. No crash: there are only so many nodes."""
    begun: bool = True
    """Whether ranks were started at all."""


def judge(code: int, events: Sequence[dict[str, Any]], rank_codes: Collection[int] = ()) -> End:
    """Read the end of a training from its exit code, the events since its start, and the ranks' own codes.

    `code` is the launcher's or the first failing rank's, negative for a signal. A launcher's alone says little:
    it is the largest of the ranks' codes, and 128 and more as soon as one rank was ended by the launcher because
    another one had left.
    """
    failures = [event for event in events if event.get("event") == Event.FAILED]
    failed = failures[-1] if failures else {}
    reason = str(failed.get("reason", ""))
    told = {event.get("event") for event in events}
    codes = {code, *rank_codes, failed.get("code")}
    if code == ExitCode.FINISHED:
        return End(Verdict.finished, code, reason)
    for hopeless in (ExitCode.CONFIG, ExitCode.NO_PROGRESS):
        if hopeless in codes:
            return End(Verdict.hopeless, hopeless, reason, refused=bool(failed.get("refused")))
    if Event.FINISHED in told:
        return End(Verdict.finished, ExitCode.FINISHED, reason)
    # All ranks save together before the first one leaves with 75.
    if ExitCode.STOPPED in codes or Event.STOPPED in told:
        return End(Verdict.stopped, ExitCode.STOPPED, reason)
    if ExitCode.PEER_FAILED in codes and code > 0:
        return End(Verdict.crashed, ExitCode.PEER_FAILED, reason)
    return End(Verdict.crashed, 128 - code if code < 0 else code, reason)
