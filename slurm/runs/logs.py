"""The logs of a run: which of them matter, their last lines, and following them over restarts.

logs/<job>.r<restart>[-<start>].<rank>.log   a rank's; without the rank where one file holds all of them
logs/<job>.batch.log                         the supervisor's, beside its sweep's for a task of one
logs/submitit/<pid>_0_log.out and .err       the supervisor's of a job on this machine
"""

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract.errors import UserError
from contract.run_folder import Event, RunFolder
from slurm.job import job_folder, newest_job
from slurm.runs.find import SWEEP_MANIFEST, find_runs
from slurm.runs.status import RunState, statuses

_RANK_LOG = re.compile(r"(?P<job>[\w-]+)\.r(?P<restart>\d+)(?:-(?P<start>\d+))?(?:\.(?P<rank>\d+))?\.log")
_BLOCK_BYTES = 65_536
POLL_S = 0.5
# What happened to the ranks; told between their lines.
_NEWS = frozenset(
    {Event.RESTARTED, Event.REQUEUED, Event.HUNG, Event.NODE_FAILED, Event.STOPPED, Event.FINISHED}
    | {Event.FAILED, Event.CANCEL_REQUESTED, Event.SUBMITTED}
)


@dataclass(frozen=True, slots=True)
class RankLog:
    """One log of one start of the ranks; `rank` is None where the file holds all of them."""

    path: Path
    job: str
    restart: int
    start: int
    rank: int | None

    @property
    def attempt(self) -> str:
        """The start's name: how often Slurm restarted the job, then how often it was restarted in the job."""
        return f"{self.restart}-{self.start}" if self.start else str(self.restart)


@dataclass(frozen=True, slots=True)
class Wish:
    """Which logs somebody wants: of a rank (None: the one that matters), of all ranks, or the supervisor's."""

    rank: int | None = None
    all_ranks: bool = False
    batch: bool = False
    attempt: str | None = None
    """A start's name as in the files' names; None is the newest."""


def attempts(run: RunFolder) -> list[list[RankLog]]:
    """Return the logs of each start of the ranks, oldest start first, by rank."""
    by_start: dict[tuple[str, int, int], list[RankLog]] = {}
    touched: dict[tuple[str, int, int], float] = {}
    for entry, changed in _files(run.logs):
        match = _RANK_LOG.fullmatch(entry.name)
        if not match:
            continue
        rank = None if match["rank"] is None else int(match["rank"])
        log = RankLog(entry, match["job"], int(match["restart"]), int(match["start"] or 0), rank)
        key = (log.job, log.restart, log.start)
        by_start.setdefault(key, []).append(log)
        touched[key] = max(changed, touched.get(key, 0.0))
    # Of two jobs the one that wrote last is the newer one: ids come again on a Slurm that was set up anew.
    jobs = {job: max(touched[key] for key in touched if key[0] == job) for job, _, _ in by_start}
    order = sorted(by_start, key=lambda key: (jobs[key[0]], key[0], key[1], key[2]))
    return [sorted(by_start[key], key=lambda log: -1 if log.rank is None else log.rank) for key in order]


def batch_logs(run: RunFolder) -> list[Path]:
    """Return the logs of the run's newest job itself: the batch script's and the supervisor's, if not empty."""
    job = newest_job(run, run.read_events())
    if job is None:
        return []
    if job.is_local:
        names = [job_folder(run) / f"{job.job_id}_0_log.{end}" for end in ("out", "err")]
    else:
        folders = [run.logs]
        if (run.path.parent / SWEEP_MANIFEST).is_file():
            folders.insert(0, run.path.parent / "logs")
        names = [folder / f"{job.job_id}.batch.log" for folder in folders]
    return [path for path in names if path.is_file() and path.stat().st_size > 0]


def culprit(run: RunFolder) -> int | None:
    """Return the rank that failed first in the newest start of the run, None if nobody knows."""
    events = run.read_events()
    starts = [at for at, event in enumerate(events) if event.get("event") in (Event.STARTED, Event.SUBMITTED)]
    since = events[starts[-1] :] if starts else events
    for event in since:
        if event.get("event") in (Event.FAILED, Event.HUNG, Event.RESTARTED) and not event.get("refused"):
            rank = event.get("rank")
            if isinstance(rank, int):
                return rank
    return None


def choose(run: RunFolder, wish: Wish, failed: bool) -> list[Path]:
    """Return the logs that `wish` means; without one of a rank the one that failed first, else rank 0's.

    `failed` says whether the run has. Raises UserError if there are none.
    """
    if wish.batch:
        return _some(batch_logs(run), run, "its job has written nothing yet")
    logs = _of_attempt(run, wish)
    if not logs:
        # The job ended, or waits, before there was a rank.
        return _some(
            batch_logs(run), run, "nothing has been written yet, or it was started by hand in a terminal"
        )
    if wish.all_ranks:
        return [log.path for log in logs]
    rank = wish.rank if wish.rank is not None else ((culprit(run) if failed else None) or 0)
    chosen = [log.path for log in logs if log.rank in (rank, None)]
    if not chosen and wish.rank is not None:
        ranks = [log.rank for log in logs if log.rank is not None]
        raise UserError(
            f"run {run.name} has no log of rank {rank} in attempt {logs[0].attempt} of job {logs[0].job}: its ranks "
            f"are {ranks[0]} to {ranks[-1]}"
        )
    chosen = chosen or [logs[0].path]
    if wish.rank is None and failed and not any(path.stat().st_size for path in chosen):
        chosen += batch_logs(run)
    return chosen


def last_lines(path: Path, count: int) -> str:
    """Return the last lines of a file, read from its end; empty if it is gone."""
    text, _ = _added(path, _before_last_lines(path, count), to_the_end=True)
    return text + "\n" * (bool(text) and not text.endswith("\n"))


def header(path: Path) -> str:
    """Return the line that stands above what a log says."""
    return f"== {path}\n"


def follow(run: RunFolder, wish: Wish, lines: int, has_ended: Callable[[], bool]) -> Iterator[str]:
    """Yield the last lines of the chosen logs, then what is added, over restarts and requeues, until the run ended.

    What happens to the ranks (restarts, requeues, failures) is told in between. `has_ended` is asked at every
    look; what is written before it says so is still told.
    """
    followed = {path: _before_last_lines(path, lines) for path in _chosen_now(run, wish)}
    told = len(run.read_events())
    shown = None
    while True:
        ended = has_ended()
        # Those of earlier starts too: they may have more lines than at the last look.
        followed |= {path: 0 for path in _chosen_now(run, wish) if path not in followed}
        for path, start in followed.items():
            text, followed[path] = _added(path, start, to_the_end=ended)
            if text:
                yield (header(path) if path != shown else "") + text
                shown = path
        events = run.read_events()
        for event in events[told:]:
            if event.get("event") in _NEWS:
                yield f"-- {_news(event)}\n"
        told = len(events)
        if ended:
            return
        time.sleep(POLL_S)


def until_over(run: RunFolder, every_s: float = 2.0) -> Callable[[], bool]:
    """Return a function that says whether the run is over; it looks at most every `every_s`.

    A run that is neither finished nor given up is over when two looks in a row say so: Slurm may be out of reach
    for a moment, or a job between its end and its requeue.
    """
    next_look_s, misses = 0.0, 0

    def is_over() -> bool:
        nonlocal next_look_s, misses
        if time.monotonic() < next_look_s:
            return False
        next_look_s = time.monotonic() + every_s
        (seen,) = statuses(find_runs(run.path))
        misses = 0 if seen.state.is_live or seen.state is RunState.new else misses + 1
        return misses > 1 or (misses > 0 and seen.state in (RunState.finished, RunState.failed))

    return is_over


def _chosen_now(run: RunFolder, wish: Wish) -> list[Path]:
    try:
        return choose(run, wish, failed=False)
    except UserError:  # nothing has been written yet
        return []


def _before_last_lines(path: Path, count: int) -> int:
    """Return where the last `count` lines of a file begin."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if count < 1:
                return size
            data, wanted = b"", _BLOCK_BYTES
            # One more than asked for: the first of them may be cut.
            while len(data) < size and data.count(b"\n") <= count:
                file.seek(max(0, size - wanted))
                data = file.read(min(wanted, size))
                wanted *= 2
    except FileNotFoundError:
        return 0
    return size - sum(map(len, data.splitlines(keepends=True)[-count:]))


def _added(path: Path, start: int, *, to_the_end: bool) -> tuple[str, int]:
    """Return the whole lines of a file from `start` on, or all of it, and where they end."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read()
    except FileNotFoundError:
        return "", start
    if not to_the_end:
        data = data[: data.rfind(b"\n") + 1]
    return data.decode(errors="replace"), start + len(data)


def _news(event: dict[str, Any]) -> str:
    words = [str(event["event"]).replace("_", " ")]
    words += [
        f"{key} {event[key]}" for key in ("rank", "node", "job_id", "step") if event.get(key) is not None
    ]
    reason = " ".join(str(event.get("reason") or "").split())
    return ", ".join(words) + (f": {reason}" if reason else "")


def _of_attempt(run: RunFolder, wish: Wish) -> list[RankLog]:
    starts = attempts(run)
    if wish.attempt is None:
        return starts[-1] if starts else []
    job = starts[-1][0].job if starts else ""
    of_job = {logs[0].attempt: logs for logs in starts if logs[0].job == job}
    if wish.attempt not in of_job:
        there = f"those of job {job} are {', '.join(of_job)}" if of_job else "there are none yet"
        raise UserError(f"run {run.name} has no attempt {wish.attempt}: {there}")
    return of_job[wish.attempt]


def _some(paths: Sequence[Path], run: RunFolder, otherwise: str) -> list[Path]:
    if not paths:
        raise UserError(f"run {run.name} has no logs to show: {otherwise}")
    return list(paths)


def _files(folder: Path) -> Iterator[tuple[Path, float]]:
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                yield Path(entry.path), entry.stat().st_mtime
