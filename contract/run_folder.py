"""The run folder: the one place on disk that holds a run, and the names of what is in it.

    runs/<name>/
        config.yaml     the resolved training configuration
        submit.yaml     the resolved cluster and job settings, if the run was submitted
        job.sbatch      the batch script, if the run was submitted
        code/           snapshot of the code that the job runs
        checkpoints/    step_<N>/ each, published by one rename
        tb/             TensorBoard
        logs/           <job>.r<restart>.<rank>.log
        events.jsonl    one line an event (see `Event`)
        metrics.jsonl   one line a logged step
        heartbeat/      who is alive
        FINISHED | FAILED

Any command can tell a run's state from this folder alone.
"""

import errno
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from contract.variables import START

HAND_STARTED = "local"
"""The job id of a process that belongs to no job."""

STEP_FOLDER = re.compile(r"^step_(\d+)$")


class Event(StrEnum):
    """The kinds of line in `events.jsonl`."""

    SUBMITTED = "submitted"
    STARTED = "started"
    RESUMED = "resumed"
    SAVED = "saved"
    SAVED_LOCALLY = "saved_locally"
    """A step is whole on the nodes' own disks, and goes from there to the run folder."""
    COMPRESSED = "compressed"
    """A step takes less room now."""
    STOP_REQUESTED = "stop_requested"
    CANCEL_REQUESTED = "cancel_requested"
    """A person wants the run's job to end, and not to come back."""
    STOPPED = "stopped"
    REQUEUED = "requeued"
    RESTARTED = "restarted"
    HUNG = "hung"
    NODE_FAILED = "node_failed"
    NETWORK_TESTED = "network_tested"
    """What lies between the nodes was measured, and judged."""
    FINISHED = "finished"
    FAILED = "failed"
    PRECISION_CHANGED = "precision_changed"
    """Gradients add up in other types from now on."""
    WARNING = "warning"


def job_identity(environ: dict[str, str] | None = None) -> tuple[str, int]:
    """Return (job id, restart count) of the process: of a Slurm job or array task, of submitit's local job, else
    ("local", 0) for a process that was started by hand.
    """
    env = os.environ if environ is None else environ
    restart = int(env.get("SLURM_RESTART_COUNT") or 0)
    if "SLURM_ARRAY_JOB_ID" in env and "SLURM_ARRAY_TASK_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}", restart
    return env.get("SLURM_JOB_ID") or env.get("SUBMITIT_LOCAL_JOB_ID") or HAND_STARTED, restart


def start_number(environ: dict[str, str] | None = None) -> int:
    """Return how many times the training was started before in this start of the job (see `variables.START`)."""
    env = os.environ if environ is None else environ
    return int(env.get(START) or 0)


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run, and the reading and writing of its small files."""

    path: Path

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def submit_settings(self) -> Path:
        """The resolved settings of its last submission: cluster and job."""
        return self.path / "submit.yaml"

    @property
    def job_script(self) -> Path:
        """The batch script."""
        return self.path / "job.sbatch"

    @property
    def code(self) -> Path:
        """The code snapshot."""
        return self.path / "code"

    @property
    def checkpoints(self) -> Path:
        """The folder of published steps."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's log folder."""
        return self.path / "tb"

    @property
    def logs(self) -> Path:
        """Logs of jobs and ranks."""
        return self.path / "logs"

    @property
    def nccl(self) -> Path:
        """What the network test has found: of the run's own preflight, or of a job that only tests."""
        return self.path / "nccl"

    @property
    def heartbeat(self) -> Path:
        """Who is alive."""
        return self.path / "heartbeat"

    @property
    def owner(self) -> Path:
        """Which process trains the run now; gone when it has left in an orderly way."""
        return self.heartbeat / "owner.json"

    @property
    def events(self) -> Path:
        """One line an event."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """One line a logged step."""
        return self.path / "metrics.jsonl"

    @property
    def finished(self) -> Path:
        """Marker: the run is complete."""
        return self.path / "FINISHED"

    @property
    def failed(self) -> Path:
        """Marker: the run will not go on by itself; its text says why."""
        return self.path / "FAILED"

    def create(self) -> None:
        """Make the folder and its parts; an OSError here is the caller's to explain."""
        for folder in (self.path, self.checkpoints, self.tensorboard, self.logs, self.heartbeat):
            folder.mkdir(parents=True, exist_ok=True)

    def append_event(self, event: Event, **fields: Any) -> None:
        """Add one line to `events.jsonl`: the event, the time (s since the epoch), the job, and `fields`."""
        job, restart = job_identity()
        line = {"event": str(event), "time": time.time(), "job": job, "restart": restart, **fields}
        append_json_line(self.events, line)

    def try_event(self, event: Event, **fields: Any) -> None:
        """Add one line if it can be written, else say so on stderr: for news that must not end what works."""
        try:
            self.append_event(event, **fields)
        except OSError as error:
            print(
                f"trierarch: {self.events} cannot be written ({error.strerror}): {event} {fields}",
                file=sys.stderr,
            )

    def read_events(self) -> list[dict[str, Any]]:
        """All events, oldest first; a torn last line is left out."""
        return list(read_json_lines(self.events))

    def cancel_is_requested(self) -> bool:
        """Whether a person has cancelled the run since it was submitted last: its job must not come back.

        Inside a job: whether that was this job or one before it that it goes on from. The event of a new submission
        may be written only after its job has begun.
        """
        own, _ = job_identity()
        since: list[dict[str, Any]] = []
        for event in reversed(self.read_events()):
            if event.get("event") == Event.SUBMITTED:
                break
            since.append(event)
        cancelled = {event.get("job_id") for event in since if event.get("event") == Event.CANCEL_REQUESTED}
        successors = {event.get("job_id") for event in since if event.get("event") == Event.REQUEUED}
        return bool(cancelled) and (own == HAND_STARTED or own in cancelled | successors)

    def published_steps(self) -> list[int]:
        """Steps that have a published checkpoint folder, in ascending order."""
        if not self.checkpoints.is_dir():
            return []
        matches = (STEP_FOLDER.match(entry.name) for entry in self.checkpoints.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def mark_finished(self) -> None:
        """Leave the marker of a complete run."""
        self.failed.unlink(missing_ok=True)
        self.finished.write_text("")

    def mark_failed(self, reason: str) -> None:
        """Leave the marker of a run that will not go on by itself; `reason` is one sentence."""
        self.failed.write_text(reason.rstrip() + "\n")


def append_json_line(path: Path, line: dict[str, Any]) -> None:
    """Append one JSON line by one write, so that lines of several writers never mix.

    A line that a full disk or a power cut has torn is closed first, else it would swallow this one. Raises
    OSError when the line could not be written whole.
    """
    data = (json.dumps(line) + "\n").encode()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size > 0 and os.pread(descriptor, 1, size - 1) != b"\n":
            data = b"\n" + data
        if os.write(descriptor, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a JSON-lines file; a missing file has none, torn and spoilt lines are left out."""
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return
    yield from _objects(text.splitlines())


def _objects(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(value, dict):
            yield value


def last_json_line(path: Path, tail_bytes: int = 65536) -> dict[str, Any] | None:
    """Return the newest whole line of a JSON-lines file without reading all of it, or None."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - tail_bytes))
            tail = file.read().decode(errors="replace")
    except FileNotFoundError:
        return None
    return next(_objects(reversed(tail.splitlines())), None)
