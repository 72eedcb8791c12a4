"""From inside a job: is Slurm about to end it, and how does its run come back.

Standard library only: the supervisor of every job imports it.
"""

import os
import re
import signal
import time
from collections.abc import Callable

from contract.run_folder import Event, RunFolder, job_identity
from slurm.client import Answer, ask, clean_environment

# A controller that restarts answers again within minutes; a pre-empted job is killed long before.
_PATIENCE_S = 300.0
_RETRY_S = 5.0
# KillWait is 30 s by default.
_KILL_WAIT_S = 90.0


def is_leaving() -> bool:
    """Whether Slurm is taking the nodes away, so that a restart in this job would be in vain.

    Pre-emption tells the ranks only, never the batch script: the controller has to be asked.
    """
    job = _show_job(_ask_patiently(["scontrol", "show", "job", "--oneliner", _job_id()], patience_s=0.0))
    return job.get("JobState", "RUNNING") != "RUNNING" or _is_preempted(job)


def come_back(run: RunFolder, step: int, *, by_slurm: bool, say: Callable[[str], None]) -> str | None:
    """Requeue this job, or submit its script again where that is refused; return what went wrong, or None.

    Returns when Slurm has begun to end the job, or after a bounded wait for that. A job that a person
    cancelled does not come back.
    """
    job_id = _job_id()
    job = _show_job(_ask_patiently(["scontrol", "show", "job", "--oneliner", job_id]))
    if int(job.get("Restarts", 0)) > job_identity()[1]:
        run.append_event(Event.REQUEUED, step=step, by="slurm")
        say(f"Slurm has requeued job {job_id} already")
        return None
    if _is_cancelled(job):
        run.append_event(Event.WARNING, reason=f"job {job_id} was cancelled: it is not requeued", step=step)
        say(f"job {job_id} was cancelled; submit the run again to continue")
        return None
    if by_slurm:
        # Before the call: Slurm may kill this process before it returns.
        run.append_event(Event.REQUEUED, step=step, by="supervisor")
        leave = _TermFlag()
        answer = _ask_patiently(["scontrol", "requeue", job_id])
        if answer.code == 0:
            say(f"requeued job {job_id}")
            leave.wait(_KILL_WAIT_S)
            return None
        refusal = (
            f"Slurm refused to requeue job {job_id} ({_one_line(answer)}): its script is submitted again"
        )
        run.append_event(Event.WARNING, reason=refusal, step=step)
        say(refusal)
    return _submit_successor(run, step, job_id, say)


def _submit_successor(run: RunFolder, step: int, job_id: str, say: Callable[[str], None]) -> str | None:
    # Two jobs of one run must never write at once: the successor waits for this one's end.
    command = ["sbatch", "--parsable", f"--dependency=afterany:{job_id}", str(run.job_script)]
    answer = _ask_patiently(command)
    if answer.code != 0:
        return (
            f"stopped with a checkpoint, but sbatch did not take the next job ({_one_line(answer)}): "
            "submit the run again to continue"
        )
    successor = answer.output.strip().partition(";")[0]
    run.append_event(Event.REQUEUED, step=step, by="supervisor", job_id=successor)
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


def _ask_patiently(command: list[str], patience_s: float = _PATIENCE_S) -> Answer:
    """Ask until Slurm answers, for `patience_s` at most: its controller may be restarting."""
    deadline = time.monotonic() + patience_s
    while True:
        answer = ask(command, clean_environment(os.environ), timeout_s=30.0)
        if not answer.unreachable or time.monotonic() > deadline:
            return answer
        time.sleep(_RETRY_S)


def _show_job(answer: Answer) -> dict[str, str]:
    """Return the fields of `scontrol show job --oneliner`, none if it failed."""
    return dict(re.findall(r"(\w+)=(\S+)", answer.output)) if answer.code == 0 else {}


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
    limit_s = _seconds(job.get("TimeLimit", ""))
    return limit_s is None or (_seconds(job.get("RunTime", "")) or 0) < limit_s


def _seconds(duration: str) -> int | None:
    """Return the seconds of Slurm's `[D-]HH:MM:SS`, None for `UNLIMITED` and the like."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", duration)
    if not match:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _one_line(answer: Answer) -> str:
    return " ".join((answer.error or answer.output).split()) or f"code {answer.code}"
