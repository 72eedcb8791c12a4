"""When to stop before the time limit, so that there is time to save: from the job's real end, however long it is."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from contract.run_folder import Event, RunFolder, job_identity, last_json_line
from slurm.client import ask, clean_environment, parse_duration

MARGIN_S = 60.0
_UNMEASURED_SAVE_S = 60.0
_UNMEASURED_STEP_S = 5.0
# Somebody may extend a job, and an administrator may cut it short.
_ASK_EVERY_S = 180.0
_ASK_AGAIN_S = 10.0


@dataclass(frozen=True)
class Left:
    """What Slurm says of a job's time, in seconds."""

    left_s: float
    limit_s: float


def lead_s(save_s: float | None, step_s: float | None, margin_s: float, limit_s: float) -> float:
    """How long before the end to ask for a stop: three saves, two steps and a margin, at most half of the time.

    The request waits for the end of a step and is granted one step later at most; then for a save in the background,
    and its own save may take twice as long as the longest so far. None stands for what was not measured yet.
    """
    save_s = _UNMEASURED_SAVE_S if save_s is None else save_s
    step_s = _UNMEASURED_STEP_S if step_s is None else step_s
    return min(3 * save_s + 2 * step_s + margin_s, limit_s / 2)


def longest_save_s(run: RunFolder) -> float | None:
    """Return how long the longest save of the run took, None if none was measured."""
    seconds = [event.get("seconds") for event in run.read_events() if event.get("event") == Event.SAVED]
    return max((float(value) for value in seconds if isinstance(value, int | float)), default=None)


def last_step_s(run: RunFolder) -> float | None:
    """Return how long a step took when that was measured last, None if it never was."""
    seconds = (last_json_line(run.metrics) or {}).get("step_time_s")
    return float(seconds) if isinstance(seconds, int | float) else None


def ask_slurm(environ: Mapping[str, str]) -> Left | None:
    """Ask how much time this job has, infinitely much without a limit; None if nobody says."""
    job_id, _ = job_identity(dict(environ))
    command = ["squeue", "--noheader", "--jobs", job_id, "--format=%L|%l"]
    answer = ask(command, clean_environment(environ))
    if answer.code == 0:
        left, _, limit = answer.output.strip().partition("|")
        if limit == "UNLIMITED":
            return Left(math.inf, math.inf)
        left_s, limit_s = parse_duration(left), parse_duration(limit)
        return Left(left_s, limit_s) if left_s is not None and limit_s else None
    begin, end = (environ.get(f"SLURM_JOB_{name}_TIME", "") for name in ("START", "END"))
    if begin.isdigit() and end.isdigit() and int(end) > int(begin):
        return Left(int(end) - time.time(), int(end) - int(begin))
    return None


class Deadline:
    """Watches the end of this job."""

    def __init__(self, run: RunFolder, margin_s: float, question: Callable[[], Left | None]) -> None:
        """`question` is asked how much time there is."""
        self._run = run
        self._margin_s = margin_s
        self._question = question
        self._stop_s = float("inf")
        self._ask_s = time.monotonic()

    def is_due(self) -> bool:
        """Whether it is time to stop; asks Slurm every few minutes, and once more before it says yes."""
        if time.monotonic() >= self._ask_s:
            self._ask()
        if time.monotonic() < self._stop_s:
            return False
        self._ask()
        return time.monotonic() >= self._stop_s

    def _ask(self) -> None:
        left = self._question()
        now = time.monotonic()
        self._ask_s = now + (_ASK_AGAIN_S if left is None else _ASK_EVERY_S)
        if left is not None:
            save_s = step_s = None
            with suppress(OSError):  # a file system that stumbles must not end the supervisor
                save_s, step_s = longest_save_s(self._run), last_step_s(self._run)
            self._stop_s = now + left.left_s - lead_s(save_s, step_s, self._margin_s, left.limit_s)
