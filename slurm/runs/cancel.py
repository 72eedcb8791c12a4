"""End the jobs of runs: in order, with a checkpoint, or at once. A run that was cancelled does not come back.

The order that is kept: the event `cancel_requested` tells the job's supervisor that there will be no requeue and no
restart; then SIGTERM to the batch script, whose place the supervisor has taken, makes it ask the ranks for a
checkpoint. `scancel` alone would leave the ranks no more than KillWait for that.
"""

import os
import re
import signal
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from contract.errors import UserError
from contract.run_folder import HAND_STARTED, Event, RunFolder
from contract.sweep import SweepFolder
from slurm.client import JobState, ask
from slurm.job import Job, ask_slurm, is_over, newest_job, read_owner, slurm_environment
from slurm.runs.find import title

_SCANCEL_TIMEOUT_S = 30.0
# Ids a call: scancel asks the controller for each.
_JOBS_A_CALL = 200
# It has ended since Slurm was asked for its state.
_GONE = re.compile(r"Invalid job id|already completing or completed", re.IGNORECASE)
_NO_JOB = "has no live job"
_BEFORE_ITS_START = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")


class Way(StrEnum):
    """How a job is ended."""

    dequeue = "dequeue"
    """It has not begun: out of the queue."""
    ask = "ask"
    """It saves first."""
    kill = "kill"
    """At once."""


_SAID = {
    Way.dequeue: "waited in the queue and is taken out of it",
    Way.ask: "is asked to save and to end (at once: trierarch cancel --now)",
    Way.kill: "is ended at once",
}


@dataclass(frozen=True)
class Cancelled:
    """What was done about one run, in words."""

    run: RunFolder
    what: str
    acted: bool = False
    """Whether there was a live job, and it will end."""
    failed: bool = False
    """Whether its job may go on though it should not."""


def cancel(
    runs: Sequence[RunFolder], *, now: bool = False, environ: Mapping[str, str] | None = None
) -> list[Cancelled]:
    """End the jobs of `runs`, with a checkpoint or at once (`now`); tell for each run what was done.

    A run without a live job is none to complain about. Never ends a job that is not the run's own.
    """
    jobs: dict[RunFolder, Job | None] = {run: newest_job(run, run.read_events()) for run in runs}
    answers = ask_slurm((job for job in jobs.values() if job is not None and not job.is_local), environ)
    done: dict[RunFolder, Cancelled] = {}
    plans: dict[tuple[str | None, str | None, Way], list[Job]] = defaultdict(list)
    for run, job in jobs.items():
        if job is None:
            done[run] = _end_by_hand(run, now)
        elif job.is_local:
            done[run] = _end_local(job, now)
        else:
            plan = _plan(job, answers, now)
            if isinstance(plan, Cancelled):
                done[run] = plan
            else:
                plans[job.slurm_conf, job.clusters, plan].append(job)
    # Those that wait first: the end of one that runs could let them start meanwhile.
    for (_, _, way), planned in sorted(plans.items(), key=lambda plan: plan[0][2] is not Way.dequeue):
        done |= {one.run: one for one in _carry_out(way, planned, environ)}
    return [done[run] for run in runs]


def drop_waiting_tasks(sweep: Path) -> int:
    """Let nothing more of a sweep be submitted; return how many of its tasks waited for that."""
    folder = SweepFolder(sweep)
    with folder.locked():
        manifest = folder.read()
        waiting, manifest.waiting = len(manifest.waiting), []
        if waiting:
            folder.write(manifest)
    return waiting


def _plan(job: Job, answers: Mapping[Job, JobState | None], now: bool) -> Way | Cancelled:
    """Return how to end a job, or what there is to say instead."""
    if job not in answers:
        silent = f"Slurm does not say what job {job.job_id} is doing: nothing was done, try again"
        return Cancelled(job.run, silent, failed=True)
    state = answers[job]
    if state is None or is_over(state):
        ended = _NO_JOB if state is None else f"{_NO_JOB}: {job.job_id} ended as {state.state}"
        return _end_by_hand(job.run, now, otherwise=ended)
    if not state.script:
        unclear = f"Slurm does not say whether job {job.job_id} is its own: if it is, `scancel {job.job_id}`"
        return Cancelled(job.run, unclear, failed=True)
    if state.state in _BEFORE_ITS_START:
        return Way.dequeue
    return Way.kill if now or state.state == "CONFIGURING" else Way.ask


def _carry_out(way: Way, jobs: Sequence[Job], environ: Mapping[str, str] | None) -> Iterator[Cancelled]:
    # SIGTERM to the batch script: the supervisor takes it for a request to stop, whatever the stop signal is.
    options = ["--batch", "--signal=TERM"] if way is Way.ask else []
    environment = slurm_environment(jobs[0], environ)
    if jobs[0].clusters:
        options.append(f"--clusters={jobs[0].clusters}")
    for start in range(0, len(jobs), _JOBS_A_CALL):
        chunk = jobs[start : start + _JOBS_A_CALL]
        for job in chunk:
            job.run.append_event(Event.CANCEL_REQUESTED, job_id=job.job_id, at_once=way is Way.kill)
        answer = ask(["scancel", *options, *(job.job_id for job in chunk)], environment, _SCANCEL_TIMEOUT_S)
        # It names the jobs that it could do nothing about; what names none is about all of them. Of a task whose
        # array has others that wait it says nothing and leaves with 229, though the signal has arrived.
        said = " ".join(answer.error.split())
        refused = {
            job: line for job in chunk for line in answer.error.splitlines() if f" {job.job_id}:" in line
        }
        if answer.code is None or (answer.code and said and not refused):
            refused = dict.fromkeys(chunk, said)
        for job in chunk:
            if job in refused and _GONE.search(refused[job]):
                yield Cancelled(job.run, _NO_JOB)
            elif job in refused:
                why = f"job {job.job_id} was not ended ({refused[job]}): try again"
                yield Cancelled(job.run, why, failed=True)
            else:
                yield Cancelled(job.run, f"job {job.job_id} {_SAID[way]}", acted=True)


def _end_local(job: Job, now: bool) -> Cancelled:
    if job.is_elsewhere:
        return Cancelled(job.run, f"is process {job.job_id} of {job.host}: cancel it there", failed=True)
    if not job.is_running_here():
        return _end_by_hand(job.run, now)
    way = Way.kill if now else Way.ask
    job.run.append_event(Event.CANCEL_REQUESTED, job_id=job.job_id, at_once=now)
    try:
        if now:
            # Its controller, script and supervisor; the ranks' launcher dies with the supervisor.
            os.killpg(os.getpgid(int(job.job_id)), signal.SIGKILL)
        else:
            os.kill(int(job.job_id), signal.SIGTERM)
    except ProcessLookupError:
        return Cancelled(job.run, _NO_JOB)
    return Cancelled(job.run, f"process {job.job_id} {_SAID[way]}", acted=True)


def _end_by_hand(run: RunFolder, now: bool, otherwise: str = _NO_JOB) -> Cancelled:
    """End a training that somebody started in a terminal: its owner is rank 0."""
    owner = read_owner(run)
    if owner is None or owner.job != HAND_STARTED or (owner.is_here and not owner.is_running_here()):
        return Cancelled(run, otherwise)
    if not owner.is_here:
        return Cancelled(run, f"was started by hand on {owner.host}: cancel it there", failed=True)
    os.kill(owner.pid, signal.SIGKILL if now else signal.SIGTERM)
    return Cancelled(run, f"process {owner.pid} {_SAID[Way.kill if now else Way.ask]}", acted=True)


def refuse(results: Sequence[Cancelled]) -> None:
    """Raise UserError if a job may go on though it should not."""
    failed = [title(one.run.path) for one in results if one.failed]
    if failed:
        raise UserError(f"not cancelled: {', '.join(failed)}; see above for the reasons")
