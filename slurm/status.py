"""What every run is doing: from Slurm where it answers, else from what the run folder says.

Works without accounting. A run is never "running" for ever: one whose job Slurm does not know and that has
left no marker is `lost`.
"""

import json
import re
import socket
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from contract.errors import UserError
from contract.run_folder import HAND_STARTED, Event, RunFolder
from slurm.client import JobState, process_alive
from slurm.job import Job, ask_slurm, is_over, job_folder, newest_job

# A run outside any job is taken to be alive this long after its last sign of life.
_SILENCE_S = 600.0
DEFAULT_ROOT = "runs"
_TAIL_BYTES = 65_536
_STEPS = re.compile(r"^loop:\n(?:[ ].*\n)*?[ ]+steps: (\d+)$", re.MULTILINE)
_WAITING = (
    "PENDING",
    "CONFIGURING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "SPECIAL_EXIT",
    "RESV_DEL_HOLD",
)
_ALIVE = ("RUNNING", "SUSPENDED", "RESIZING")
_ENDING = ("COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED")


class RunState(StrEnum):
    """What a run is doing."""

    new = "new"
    queued = "queued"
    running = "running"
    stopping = "stopping"
    requeued = "requeued"
    stopped = "stopped"
    finished = "finished"
    failed = "failed"
    lost = "lost"


@dataclass(frozen=True)
class RunStatus:
    """One run at one moment; what is not known is None."""

    run: RunFolder
    state: RunState
    job_id: str | None = None
    reason: str = ""
    """Why it waits, failed or was lost; empty where nothing needs saying."""
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    age_s: float | None = None
    """Time since the run last wrote an event, a metric or a heartbeat."""
    checkpoint_step: int | None = None


@dataclass(frozen=True)
class _Story:
    """What a run folder tells; `events` are those since the last submission."""

    run: RunFolder
    events: list[dict[str, Any]]
    job: Job | None
    age_s: float | None

    @property
    def last(self) -> str:
        """The newest event that says what the run is doing."""
        told = [event.get("event") for event in self.events if event.get("event") in _TELLING]
        return str(told[-1]) if told else ""

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


_TELLING = (
    Event.STARTED,
    Event.RESUMED,
    Event.SAVED,
    Event.STOP_REQUESTED,
    Event.STOPPED,
    Event.REQUEUED,
    Event.RESTARTED,
    Event.FINISHED,
    Event.FAILED,
)


def status(root: Path, now: float | None = None) -> list[RunStatus]:
    """Return the state of the run in `root`, or of all runs below it, in order of their names.

    One squeue for each Slurm that has one of the jobs (a site's and a lab's are two).
    """
    moment = time.time() if now is None else now
    stories = [_read(run, moment) for run in find_runs(root)]
    by_slurm: dict[tuple[str | None, str | None], list[Job]] = defaultdict(list)
    for story in stories:
        if story.job is not None and not story.job.is_local:
            by_slurm[story.job.slurm_conf, story.job.clusters].append(story.job)
    answers: dict[Job, JobState | None] = {}
    for jobs in by_slurm.values():
        answers |= ask_slurm(jobs) or {}
    return [_status(story, answers) for story in stories]


def find_runs(root: Path) -> list[RunFolder]:
    """Return `root` itself if it is a run folder, else the run folders in it, by name."""
    try:
        if _is_run(root):
            return [RunFolder(root)]
        if not root.exists() and root.name == DEFAULT_ROOT:
            return []  # nothing was ever run here
        return [RunFolder(path) for path in sorted(root.iterdir()) if _is_run(path)]
    except OSError as error:
        raise UserError(
            f"{root} cannot be read ({error.strerror}): give a folder of runs, or one run"
        ) from error


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() or (path / "events.jsonl").is_file()


def _read(run: RunFolder, now: float) -> _Story:
    events = _since_submission(run.read_events())
    signs = [path for path in (run.events, run.metrics, *_children(run.heartbeat)) if path.exists()]
    newest = max((path.stat().st_mtime for path in signs), default=None)
    return _Story(run, events, newest_job(run, events), None if newest is None else max(0.0, now - newest))


def _since_submission(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out how earlier submissions ended, and that a second trainer of the run was turned away."""
    last = max(
        (index for index, event in enumerate(events) if event.get("event") == Event.SUBMITTED), default=0
    )
    return [event for event in events[last:] if not event.get("refused")]


def _children(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _status(story: _Story, answers: Mapping[Job, JobState | None]) -> RunStatus:
    state, reason = _state(story, answers)
    run = story.run
    metrics = _newest_metrics(run.metrics)
    return RunStatus(
        run=run,
        state=state,
        job_id=story.job.job_id if story.job else None,
        reason=reason,
        step=metrics.get("step"),
        steps=_total_steps(run),
        loss=metrics.get("loss"),
        age_s=story.age_s,
        checkpoint_step=max(run.published_steps(), default=None),
    )


def _state(story: _Story, answers: Mapping[Job, JobState | None]) -> tuple[RunState, str]:
    job = story.job
    if job is None:
        return _without_job(story)
    if job.is_elsewhere:
        state, reason = _without_job(story)
        return state, f"{reason}; on {job.host}" if reason else f"on {job.host}"
    if job.is_local:
        return _alive(story) if job.is_running_here() else _ended(story, "its process has ended")
    if job not in answers:
        state, reason = _without_job(story)
        silent = "Slurm does not answer, this is from the run folder"
        return state, f"{reason}; {silent}" if reason else silent
    found = answers[job]
    if found is None:
        return _ended(story, f"Slurm does not know job {job.job_id}")
    if is_over(found):
        return _ended(story, f"job {job.job_id} ended as {found.state}", cancelled=found.state == "CANCELLED")
    if found.state in _WAITING:
        return (RunState.requeued if story.has_begun else RunState.queued), found.reason
    if found.state in _ENDING:
        return _ending(story)
    if found.state in _ALIVE:
        return _alive(story, "" if found.state == "RUNNING" else found.state.lower())
    state, reason = _without_job(story)
    word = f"Slurm says {found.state}"
    return state, f"{reason}; {word}" if reason else word


def _alive(story: _Story, reason: str = "") -> tuple[RunState, str]:
    if story.last in (Event.STOP_REQUESTED, Event.STOPPED):
        return RunState.stopping, reason
    return RunState.running, reason


def _ending(story: _Story) -> tuple[RunState, str]:
    """Tell the state of a run whose job is being cleaned up."""
    told = _by_marker(story)
    if told:
        return told
    return (RunState.requeued if story.last == Event.REQUEUED else RunState.stopping), ""


def _by_marker(story: _Story) -> tuple[RunState, str] | None:
    if story.run.finished.exists():
        return RunState.finished, ""
    if story.run.failed.exists():
        return RunState.failed, story.run.failed.read_text(errors="replace").strip()
    return None


def _ended(story: _Story, how: str, cancelled: bool = False) -> tuple[RunState, str]:
    """Tell the state of a run whose job is certainly over."""
    if story.last_job == HAND_STARTED:
        return _without_job(story)  # it was started again by hand, outside any job
    told = _by_marker(story) or _by_last_event(story)
    if told:
        return told
    if cancelled:
        return RunState.stopped, how
    return RunState.lost, f"{how} and the run left no word: {_advice(story)}"


def _advice(story: _Story) -> str:
    run, job = story.run, story.job
    if job is not None:
        name = f"{job.job_id}_0_log.err" if job.is_local else f"{job.job_id}.batch.log"
        log = (job_folder(run) if job.is_local else run.logs) / name
        if log.exists():
            return f"read {log}, then submit it again"
        if not job.is_local:
            return (
                f"if it began, {run.path} is not the same folder on the compute nodes, else submit it again"
            )
    return "submit it again to continue"


def _by_last_event(story: _Story) -> tuple[RunState, str] | None:
    if story.last == Event.STOPPED:
        return RunState.stopped, ""
    if story.last == Event.FINISHED:
        return RunState.finished, ""
    if story.last == Event.FAILED:
        reasons = [event.get("reason") for event in story.events if event.get("event") == Event.FAILED]
        return RunState.failed, str(reasons[-1] or "")
    return None


def _without_job(story: _Story) -> tuple[RunState, str]:
    """Tell the state from the run folder alone."""
    told = _by_marker(story) or _by_last_event(story)
    if told:
        return told
    if not story.last:
        return RunState.new, ""
    if _owner_has_died(story.run):
        return RunState.lost, "its process has ended without a word: start it again to continue"
    if story.age_s is not None and story.age_s < _SILENCE_S:
        return _alive(story)
    minutes = (story.age_s or 0.0) / 60
    return RunState.lost, f"no sign of life for {minutes:.0f} minutes: start it again to continue"


def _owner_has_died(run: RunFolder) -> bool:
    """Whether the run's owner was a process of this host that is no more."""
    try:
        owner = json.loads(run.owner.read_text(errors="replace"))
        return owner["host"] == socket.gethostname() and not process_alive(int(owner["pid"]), "train")
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _newest_metrics(path: Path) -> dict[str, Any]:
    """Return the newest value of every metric, from the end of the file: a long run's file is large."""
    values: dict[str, Any] = {}
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return values
    for line in lines:
        with suppress(AttributeError, ValueError):  # cut at the start, torn at the end
            values.update({key: value for key, value in json.loads(line).items() if _is_number(value)})
    return values


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _total_steps(run: RunFolder) -> int | None:
    try:
        match = _STEPS.search(run.config.read_text(errors="replace"))
    except OSError:
        return None
    return int(match[1]) if match else None


def render(statuses: Sequence[RunStatus], width: int = 120) -> str:
    """Return a table for a terminal of `width` columns."""
    from rich.console import Console
    from rich.table import Table

    if not statuses:
        return "no runs\n"
    table = Table(box=None, pad_edge=False)
    for column in ("run", "state", "job"):
        table.add_column(column, no_wrap=True)
    for column in ("step", "loss", "checkpoint", "last sign"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("reason", overflow="fold")
    for one in statuses:
        table.add_row(
            one.run.name,
            one.state,
            one.job_id or "",
            _of(one.step, one.steps),
            "" if one.loss is None else f"{one.loss:.4f}",
            "" if one.checkpoint_step is None else str(one.checkpoint_step),
            "" if one.age_s is None else f"{_duration(one.age_s)} ago",
            one.reason,
        )
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(table, markup=False)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def _of(step: int | None, steps: int | None) -> str:
    if step is None:
        return "" if steps is None else f"-/{steps}"
    return str(step) if steps is None else f"{step}/{steps}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} d"
