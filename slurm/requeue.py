"""From inside a job: is Slurm about to end it, and how does its run come back.

Standard library only: the supervisor of every job imports it.
"""

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from contract.run_folder import Event, RunFolder, job_identity
from slurm.client import Answer, ask, clean_environment, parse_duration

# A controller that restarts answers again within minutes; a pre-empted job is killed long before.
_PATIENCE_S = 300.0
_RETRY_S = 5.0
# KillWait is 30 s by default.
_KILL_WAIT_S = 90.0
_T = TypeVar("_T")


def is_leaving() -> bool:
    """Whether Slurm is taking the nodes away, so that a restart in this job would be in vain.

    Pre-emption tells the ranks only, never the batch script: the controller has to be asked.
    """
    job = _show_job(_job_id())
    return job.get("JobState", "RUNNING") != "RUNNING" or _is_preempted(job)


def note(run: RunFolder, event: Event, **fields: Any) -> None:
    """Append an event where that is possible: a full disk must not keep a job from coming back."""
    with suppress(OSError):
        run.append_event(event, **fields)


def come_back(run: RunFolder, step: int, *, by_slurm: bool, say: Callable[[str], None]) -> str | None:
    """Requeue this job, or submit its script again where that is refused; return what went wrong, or None.

    Returns when Slurm has begun to end the job, or after a bounded wait for that. A job that a person
    cancelled does not come back.
    """
    job_id = _job_id()
    job = _patiently(lambda: _show_job(job_id))
    if not job:
        return (
            f"stopped with a checkpoint, but Slurm did not say in {_PATIENCE_S:.0f} s whether job {job_id} was "
            "cancelled, so it is not requeued: submit the run again to continue"
        )
    if _is_requeued(job):
        note(run, Event.REQUEUED, step=step, by="slurm")
        say(f"Slurm has requeued job {job_id} already")
        return None
    if _is_cancelled(job):
        note(run, Event.WARNING, reason=f"job {job_id} was cancelled: it is not requeued", step=step)
        say(f"job {job_id} was cancelled; submit the run again to continue")
        return None
    if by_slurm:
        # Before the call: Slurm may kill this process before it returns.
        note(run, Event.REQUEUED, step=step, by="supervisor")
        leave = _TermFlag()
        answer = _patiently(lambda: _requeue(job_id))
        if answer is None:
            return (
                f"stopped with a checkpoint, but Slurm did not say in {_PATIENCE_S:.0f} s whether it has requeued "
                f"job {job_id}: submit the run again unless squeue shows the job"
            )
        if not answer.refused:
            say(f"requeued job {job_id}")
            leave.wait(_KILL_WAIT_S)
            return None
        refusal = (
            f"Slurm refused to requeue job {job_id} ({_one_line(answer)}): its script is submitted again"
        )
        note(run, Event.WARNING, reason=refusal, step=step)
        say(refusal)
    return _submit_successor(run, step, job_id, say)


def _requeue(job_id: str) -> Answer | None:
    """Ask for the requeue; return Slurm's refusal, another answer if the job is requeued, None if that is unknown.

    A controller may carry out what it never answered: two jobs of one run would follow from taking silence for
    a refusal.
    """
    answer = _ask("scontrol", "requeue", job_id)
    if answer.code == 0 or answer.refused:
        return answer
    return answer if _is_requeued(_show_job(job_id)) else None


def _submit_successor(run: RunFolder, step: int, job_id: str, say: Callable[[str], None]) -> str | None:
    # Two jobs of one run must never write at once: the successor waits for this one's end.
    command = ["sbatch", "--parsable", f"--dependency=afterany:{job_id}", str(run.job_script)]
    # Asked again only if Slurm never heard of it: a second successor would start beside the first.
    answer = _patiently(lambda: None if (said := _ask(*command)).not_sent else said)
    if answer is None or answer.code != 0:
        why = "Slurm cannot be reached" if answer is None else _one_line(answer)
        return (
            f"stopped with a checkpoint, but sbatch did not take the next job ({why}): "
            "submit the run again to continue unless squeue shows it"
        )
    successor = answer.output.strip().partition(";")[0]
    note(run, Event.REQUEUED, step=step, by="supervisor", job_id=successor)
    say(f"submitted job {successor}, which continues when this one has ended")
    return None


class _TermFlag:
    """Notices the SIGTERM by which Slurm begins to end the job: leaving then frees the nodes at once."""

    def __init__(self) -> None:
        self.raised = False
        signal.signal(signal.SIGTERM, self._on_term)

    def _on_term(self, number: int, frame: object) -> None:
        self.raised = True

    def wait(self, timeout_s: float) -> None:
        """Return when the signal has come, at the latest after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self.raised and time.monotonic() < deadline:
            time.sleep(0.1)


def _job_id() -> str:
    # Of an array only this task: `scontrol requeue` of the plain id may take the whole array.
    return job_identity()[0]


def _ask(*command: str) -> Answer:
    return ask(command, clean_environment(os.environ), timeout_s=30.0)


def _patiently(question: Callable[[], _T | None]) -> _T | None:
    """Ask until there is an answer, for a bounded time: Slurm's controller may be restarting."""
    deadline = time.monotonic() + _PATIENCE_S
    while not (answer := question()) and time.monotonic() < deadline:
        time.sleep(_RETRY_S)
    return answer


def _show_job(job_id: str) -> dict[str, str]:
    """Return the fields of `scontrol show job`, none if it failed."""
    answer = _ask("scontrol", "show", "job", "--oneliner", job_id)
    # The first of a name counts: a comment or a command further on may hold anything.
    return dict(reversed(re.findall(r"(\w+)=(\S+)", answer.output))) if answer.code == 0 else {}


def _is_requeued(job: dict[str, str]) -> bool:
    """Whether the job waits for its next start, or is already past it; it was running when this process began."""
    waits = job.get("JobState", "").startswith(("PENDING", "REQUEUE", "SPECIAL_EXIT"))
    return waits or int(job.get("Restarts", 0)) > job_identity()[1]


def _is_preempted(job: dict[str, str]) -> bool:
    # An ISO time, else None or Unknown; one before the start is from an earlier life of the job.
    preempted = job.get("PreemptTime", "None")
    return preempted[0].isdigit() and preempted >= job.get("StartTime", "")


def _is_cancelled(job: dict[str, str]) -> bool:
    """Whether a person ended the job: Slurm shows it as ending though it was neither pre-empted nor out of time.

    `scontrol requeue` would bring a cancelled job back to life.
    """
    if job.get("JobState", "RUNNING") in ("RUNNING", "CONFIGURING", "SUSPENDED") or _is_preempted(job):
        return False
    limit_s = parse_duration(job.get("TimeLimit", ""))
    return limit_s is None or (parse_duration(job.get("RunTime", "")) or 0) < limit_s


def _one_line(answer: Answer) -> str:
    return " ".join((answer.error or answer.output).split()) or f"code {answer.code}"
