"""What a run folder tells of its run, read so that ten thousand of them take a second.

Only the ends of files that grow are read, and of a run that is over not more than its last words.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from contract.run_folder import STEP_FOLDER, Event, RunFolder
from slurm.job import Job, newest_job
from slurm.runs.find import Found

_TAIL_BYTES = 65_536
# Holds the newest line with a loss, unless many evaluations came after it.
_METRICS_BYTES = 2_048
# After the line `loop:`, in its section.
_STEPS = re.compile(rb"(?:[ ].*\n)*?[ ]+steps: (\d+)$", re.MULTILINE)
_SUBMITTED = b'"event": "submitted"'
_TESTED = b'"event": "network_tested"'
_TELLING = frozenset(
    {Event.STARTED, Event.RESUMED, Event.SAVED, Event.STOP_REQUESTED, Event.STOPPED, Event.REQUEUED}
    | {Event.RESTARTED, Event.FINISHED, Event.FAILED}
)


@dataclass(slots=True)
class Story:
    """What a run folder tells; `events` are those since the last submission, of a run that is over the last one."""

    run: RunFolder
    found: Found
    events: list[dict[str, Any]]
    job: Job | None
    over: bool
    """Whether the run's last word was that it is finished, or its supervisor's that it won't go on."""
    age_s: float | None
    """Time since the last sign of life."""
    restarts: int
    """How often it was restarted or requeued since its submission."""
    network: dict[str, Any] = field(default_factory=dict)
    """The newest event of a network test since its submission, empty where there was none."""
    _told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._told = [str(event["event"]) for event in self.events if event.get("event") in _TELLING]

    @property
    def last(self) -> str:
        """The newest event that says what the run is doing."""
        return self._told[-1] if self._told else ""

    @property
    def has_begun(self) -> bool:
        """Whether the run's job has had its turn before, or goes on from one that had."""
        job_id = self.job.job_id if self.job else None
        begun = (Event.STARTED, Event.REQUEUED)
        was_on = any(event.get("event") in begun and event.get("job") == job_id for event in self.events)
        return was_on or (self.job is not None and self.job.is_successor)

    @property
    def last_job(self) -> str:
        """The job of the newest start."""
        starts = [event.get("job") for event in self.events if event.get("event") == Event.STARTED]
        return str(starts[-1]) if starts else ""

    @property
    def is_cancelled(self) -> bool:
        """Whether a person asked for its end after the last submission."""
        return any(event.get("event") == Event.CANCEL_REQUESTED for event in self.events)

    def newest(self, event: Event) -> dict[str, Any]:
        """Return the newest event of a kind, empty if there is none."""
        return next((one for one in reversed(self.events) if one.get("event") == event), {})

    def bad_nodes(self) -> dict[str, str]:
        """Return the nodes that failed since the submission, with the newest reason of each."""
        failures = [event for event in self.events if event.get("event") == Event.NODE_FAILED]
        return {str(event.get("node")): str(event.get("reason", "")) for event in failures}


@dataclass(frozen=True, slots=True)
class Figures:
    """How far a run has come; what is not known is None."""

    step: int | None
    steps: int | None
    loss: float | None
    step_time_s: float | None
    checkpoint_step: int | None


def read_story(found: Found, now: float) -> Story:
    """Read a run's events; `now` is in seconds since the epoch."""
    run = found.run
    data, newest = b"", 0.0
    if "events.jsonl" in found.entries:
        data, newest = _since_submission(f"{found.path}/events.jsonl")
    last = _object(data[data.rstrip().rfind(b"\n") + 1 :])
    over = last.get("event") == Event.FINISHED or (
        last.get("event") == Event.FAILED and last.get("by") == "supervisor"
    )
    if over:
        events, job = [last], newest_job(run, list(_objects(_lines_with_a_job(data))))
        restarts = data.count(b'"event": "restarted"') + data.count(b'"event": "requeued"')
    else:
        events = [event for event in _objects(data.splitlines()) if not event.get("refused")]
        job = newest_job(run, events)
        restarts = sum(event.get("event") in (Event.RESTARTED, Event.REQUEUED) for event in events)
        newest = max([newest, *_heartbeats(found)])
    if "metrics.jsonl" in found.entries:
        with suppress(OSError):
            newest = max(newest, os.stat(f"{found.path}/metrics.jsonl").st_mtime)  # noqa: PTH116
    age_s = max(0.0, now - newest) if newest else None
    return Story(run, found, events, job, over, age_s, restarts, _object(_last_line_with(_TESTED, data)))


def read_figures(found: Found) -> Figures:
    """Read how far a run has come from its metrics, its configuration and its checkpoints."""
    metrics = _newest_metrics(f"{found.path}/metrics.jsonl") if "metrics.jsonl" in found.entries else {}
    return Figures(
        step=metrics.get("step"),
        steps=_total_steps(found),
        loss=metrics.get("loss"),
        step_time_s=metrics.get("step_time_s"),
        checkpoint_step=_newest_checkpoint(found),
    )


def _since_submission(path: str) -> tuple[bytes, float]:
    """Return the lines from the last submission on (all, if there is none) and when the file was changed."""
    try:
        data, size, changed = _tail(path, _TAIL_BYTES)
        start = data.rfind(_SUBMITTED)
        if start < 0 and size > len(data):
            data, _, changed = _tail(path, size)
            start = data.rfind(_SUBMITTED)
    except OSError:
        return b"", 0.0
    return data[data.rfind(b"\n", 0, start) + 1 :] if start >= 0 else data, changed


def _tail(path: str, size: int) -> tuple[bytes, int, float]:
    """Return the last `size` bytes of a file, its whole size, and when it was changed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        return os.pread(descriptor, size, max(0, found.st_size - size)), found.st_size, found.st_mtime
    finally:
        os.close(descriptor)


def _lines_with_a_job(data: bytes) -> Iterator[bytes]:
    at = -1
    while (at := data.find(b'"job_id"', at + 1)) >= 0:
        end = data.find(b"\n", at)
        yield data[data.rfind(b"\n", 0, at) + 1 : end if end >= 0 else None]


def _last_line_with(text: bytes, data: bytes) -> bytes:
    at = data.rfind(text)
    if at < 0:
        return b""
    end = data.find(b"\n", at)
    return data[data.rfind(b"\n", 0, at) + 1 : end if end >= 0 else None]


def _heartbeats(found: Found) -> Iterator[float]:
    if "heartbeat" not in found.entries:
        return
    with suppress(OSError), os.scandir(f"{found.path}/heartbeat") as entries:
        for entry in entries:
            with suppress(OSError):  # gone since
                yield entry.stat().st_mtime


def _newest_metrics(path: str) -> dict[str, Any]:
    """Return the newest value of every metric, from the end of the file: a long run's file is large."""
    for size in (_METRICS_BYTES, _TAIL_BYTES):
        try:
            data, whole, _ = _tail(path, size)
        except OSError:
            return {}
        values: dict[str, Any] = {}
        for line in reversed(data.splitlines()):
            values = {key: value for key, value in _object(line).items() if _is_number(value)} | values
            if "loss" in values and "step" in values:
                return values
        if whole <= size:
            break
    return values


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _objects(lines: list[bytes] | Iterator[bytes]) -> Iterator[dict[str, Any]]:
    return (value for value in map(_object, lines) if value)


def _object(line: bytes) -> dict[str, Any]:
    """Read one line; empty for what was cut at the start, torn at the end, or is no object."""
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _total_steps(found: Found) -> int | None:
    if "config.yaml" not in found.entries:
        return None
    try:
        data, _, _ = _tail(f"{found.path}/config.yaml", _TAIL_BYTES)
    except OSError:
        return None
    _, _, rest = (b"\n" + data).partition(b"\nloop:\n")
    match = _STEPS.match(rest)
    return int(match[1]) if match else None


def _newest_checkpoint(found: Found) -> int | None:
    if "checkpoints" not in found.entries:
        return None
    try:
        names = os.listdir(f"{found.path}/checkpoints")  # noqa: PTH208
    except OSError:
        return None
    return max((int(match[1]) for name in names if (match := STEP_FOLDER.match(name))), default=None)
