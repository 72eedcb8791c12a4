"""The decisions: start the training, read how it ended, and restart it, requeue the job or give up.

How ranks are started is a launcher's business (`slurm/supervise/step.py`, `slurm/supervise/agents.py`).
"""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from contract.exit_codes import ExitCode
from contract.run_folder import Event
from slurm.supervise.judge import End, Verdict
from slurm.supervise.patience import read_patiently
from slurm.supervise.requeue import Way, come_back, is_leaving, note
from slurm.supervise.start import Launcher, Start
from slurm.supervise.stop import StopRequest

_LONGEST_BACKOFF_S = 60.0
# Requeues in a row that brought no new checkpoint; pre-emptions during the start are legitimate, so it is many.
_MAX_IDLE_REQUEUES = 10


@dataclass(frozen=True)
class Policy:
    """What a supervisor may do."""

    max_restarts: int = 3
    """Crashes in a row without a new checkpoint."""
    backoff_s: float = 2.0
    """Pause before the second restart in a row; the first comes at once."""
    way: Way | None = None
    """How the run comes back in another job; None if it does not."""


class Supervisor:
    """Trains one run until there is nothing left to do in this job."""

    def __init__(
        self,
        begin: Start,
        launcher: Launcher,
        stop: StopRequest,
        policy: Policy,
        is_due: Callable[[], bool] = lambda: False,
    ) -> None:
        """`begin` is the first start; `is_due` says when the job's time is nearly over."""
        self.run = begin.run
        self._begin = begin
        self._launcher = launcher
        self._stop = stop
        self._policy = policy
        self._is_due = is_due
        self._failures = 0
        self._step = -1

    def supervise(self) -> int:
        """Start the ranks, and again as often as it is worth it; return the job's exit code."""
        try:
            return self._supervise()
        finally:
            self._launcher.close()

    def _supervise(self) -> int:
        while True:
            if read_patiently(self.run.cancel_is_requested):
                say("the run was cancelled; submit it again to continue")
                return ExitCode.STOPPED
            self._step = self._newest_step()
            end = self._launcher.run(self._begin, self._should_stop)
            say(
                f"start {self._begin.attempt}: {end.verdict} (code {end.code}){f', {end.reason}' * bool(end.reason)}"
            )
            if end.verdict is Verdict.finished:
                return 0
            if end.refused:
                # Not ours to mark: whoever trains the run tells how it goes.
                say(end.reason)
                return end.code
            if end.verdict is Verdict.hopeless:
                return self._give_up(end.code, end.reason or "the training cannot go on")
            if end.verdict is Verdict.stopped or self._stop.reason:
                return self._leave(end)
            if end.verdict is Verdict.short:
                return self._leave(end) if self._policy.way else self._give_up(end.code, end.reason)
            if self._policy.way and not self._launcher.hears_preemption and is_leaving():
                return self._leave(end)
            if not end.node_lost and not self._may_restart():
                crashes = f"crashed {self._failures} times in a row without a new checkpoint"
                return self._give_up(end.code, f"{crashes}{f', last: {end.reason}' if end.reason else ''}")
            self._begin = replace(self._begin, number=self._begin.number + 1)
            self._tell_restart(end)
            self._pause()
            if self._stop.reason:
                return self._leave(end)

    def _should_stop(self) -> bool:
        if self._stop.reason is None and self._is_due():
            self._stop.request("the job's time is nearly over")
        return self._stop.reason is not None

    def _tell_restart(self, end: End) -> None:
        where = {"rank": end.rank, "node": end.node}
        note(
            self.run,
            Event.RESTARTED,
            code=end.code,
            reason=end.reason,
            failures=self._failures,
            step=self._newest_step(),
            start=self._begin.number,
            detected=end.detected,
            teardown_s=round(end.teardown_s, 4),
            **{key: value for key, value in where.items() if value is not None},
        )

    def _may_restart(self) -> bool:
        """Count a crash: in a row are those between which no checkpoint was published."""
        if self._newest_step() > self._step:
            self._failures = 0
        self._failures += 1
        return self._failures <= self._policy.max_restarts

    def _pause(self) -> None:
        """Wait before all restarts but the first, in which something new is tried at once."""
        if self._failures < 2:
            return
        pause_s = min(_LONGEST_BACKOFF_S, self._policy.backoff_s * 2 ** (self._failures - 2))
        deadline = time.monotonic() + pause_s
        while not self._stop.reason and (left := deadline - time.monotonic()) > 0:
            self._launcher.idle(left)

    def _leave(self, end: End) -> int:
        """End this job before the run is finished; under Slurm see to it that the run comes back."""
        # Agents whose supervisor is busy would think that it has died.
        self._launcher.close()
        if end.verdict is Verdict.crashed:
            said = f"the training crashed (code {end.code}) while it was asked to stop"
            note(self.run, Event.WARNING, reason=said, step=self._newest_step())
        elif end.verdict is Verdict.short:
            note(self.run, Event.WARNING, reason=end.reason, step=self._newest_step())
        if self._policy.way is None:
            return self._leave_for_good(end)
        if self._idle_requeues() >= _MAX_IDLE_REQUEUES:
            return self._give_up(
                ExitCode.NO_PROGRESS,
                f"requeued {_MAX_IDLE_REQUEUES} times without a new checkpoint: give the job more time",
            )
        trouble = come_back(self.run, self._newest_step(), self._policy.way, say)
        if trouble:
            return self._give_up(ExitCode.STOPPED, trouble)
        return ExitCode.STOPPED

    def _leave_for_good(self, end: End) -> int:
        if end.verdict is Verdict.crashed and end.reason:
            return self._give_up(end.code, end.reason)
        if end.verdict is Verdict.crashed or not end.begun:
            # Asked before its ranks could listen: nothing was begun, nothing is lost.
            note(self.run, Event.STOPPED, step=self._newest_step())
        say("stopped on request; submit the run again to continue")
        return ExitCode.STOPPED

    def _idle_requeues(self) -> int:
        """Count the requeues since the last submission that found the newest checkpoint where it is now."""
        jobs: set[tuple[Any, Any]] = set()
        newest = self._newest_step()
        for event in read_patiently(self.run.read_events):
            if event.get("event") == Event.SUBMITTED:
                jobs.clear()
            elif event.get("event") == Event.REQUEUED and event.get("step") == newest:
                jobs.add((event.get("job"), event.get("restart")))
        return len(jobs)

    def _give_up(self, code: int, reason: str) -> int:
        text = f"Exit code {code}: {reason.strip().rstrip('.')}; read {self._logs()}."
        with suppress(OSError):  # the disk is full
            self.run.mark_failed(text)
        note(self.run, Event.FAILED, code=code, reason=reason, by="supervisor", step=self._newest_step())
        say(text)
        return code

    def _logs(self) -> str:
        """Name the log of the last start."""
        name = f"{self._begin.job}.r{self._begin.attempt}"
        found = sorted(self.run.logs.glob(f"{name}.*log"))
        if len(found) == 1:
            return str(found[0])
        return str(self.run.logs / f"{name}.*.log") if found else f"the logs in {self.run.logs}"

    def _newest_step(self) -> int:
        return max(read_patiently(self.run.published_steps), default=-1)


def say(text: str) -> None:
    """Tell the user, if there is room on the disk."""
    with suppress(OSError):  # print would fail again when Python ends
        os.write(sys.stdout.fileno(), f"supervise: {text}\n".encode())
