"""From inside a job: is Slurm about to end it, and how does its run come back, away from nodes that failed.

    python -m slurm.supervise.requeue RUN [options]

is what agents run when the node with their supervisor has died: under --no-kill Slurm leaves such a job RUNNING
for ever. Standard library only: the supervisor of every job imports it.
"""

import argparse
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from contract.run_folder import Event, RunFolder, job_identity
from slurm.client import Answer, ask, clean_environment, parse_duration
from slurm.supervise.alive import supervisor_lives
from slurm.supervise.exclude import FORGET_AFTER_H, affordable, excluded_nodes
from slurm.supervise.patience import read_patiently

# A controller that restarts answers again within minutes; a pre-empted job is killed long before.
_PATIENCE_S = 300.0
_RETRY_S = 5.0
# KillWait is 30 s by default.
_KILL_WAIT_S = 90.0
_UPDATE_S = 20.0
_T = TypeVar("_T")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Way:
    """How a run comes back."""

    by_slurm: bool = True
    """Whether Slurm requeues the job; else its script is submitted again."""
    nodes: int = 1
    """How many nodes the job needs."""
    exclude_for_s: float = FORGET_AFTER_H * 3600
    """How long a node that failed is kept away from."""
    sweep: Path | None = None
    """The folder of the sweep that the run is a task of."""
    abandoned: bool = False
    """Whether nobody else ends this job, whose end its successor waits for."""


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


def come_back(run: RunFolder, step: int, way: Way, say: Say) -> str | None:
    """Requeue this job, or submit its script again where that is refused; return what went wrong, or None.

    Returns when Slurm has begun to end the job, or after a bounded wait for that. A job that a person
    cancelled does not come back.
    """
    if read_patiently(run.cancel_is_requested):
        say("the run was cancelled; submit it again to continue")
        return None
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
    if way.by_slurm:
        own, ours = _to_exclude(run, job, way)
        # Before the call: Slurm may kill this process before it returns.
        note(run, Event.REQUEUED, step=step, by="supervisor", **({"excluded": ours} if ours else {}))
        leave = _TermFlag()
        answer = _patiently(lambda: _requeue(job_id))
        if answer is None:
            return (
                f"stopped with a checkpoint, but Slurm did not say in {_PATIENCE_S:.0f} s whether it has requeued "
                f"job {job_id}: submit the run again unless squeue shows the job"
            )
        if not answer.refused:
            say(f"requeued job {job_id}")
            if set(own + ours) != set(_expand(job)):
                _keep_away(run, job_id, [*own, *ours], say)
            leave.wait(_KILL_WAIT_S)
            return None
        refusal = f"Slurm refused to requeue job {job_id} ({answer.sentence}): its script is submitted again"
        note(run, Event.WARNING, reason=refusal, step=step)
        say(refusal)
    return _submit_successor(run, step, job_id, job, way, say)


def _requeue(job_id: str) -> Answer | None:
    """Ask for the requeue; return Slurm's refusal, another answer if the job is requeued, None if that is unknown.

    A controller may carry out what it never answered: two jobs of one run would follow from taking silence for
    a refusal.
    """
    answer = _ask("scontrol", "requeue", job_id)
    if answer.code == 0 or answer.refused:
        return answer
    return answer if _is_requeued(_show_job(job_id)) else None


def _submit_successor(
    run: RunFolder, step: int, job_id: str, job: dict[str, str], way: Way, say: Say
) -> str | None:
    # Two jobs of one run must never write at once: the successor waits for this one's end.
    command = ["sbatch", "--parsable", f"--dependency=afterany:{job_id}"]
    task = os.environ.get("SLURM_ARRAY_TASK_ID") if "_" in job_id else None
    if task is not None:
        command += [f"--array={task}"]
    own, ours = _to_exclude(run, job, way)
    command += [f"--exclude={','.join([*own, *ours])}"] if own or ours else []
    command += [str(run.job_script)]
    # Asked again only if Slurm never heard of it: a second successor would start beside the first.
    answer = _patiently(lambda: None if (said := _ask(*command)).not_sent else said)
    if answer is None or answer.code != 0:
        why = "Slurm cannot be reached" if answer is None else answer.sentence
        return (
            f"stopped with a checkpoint, but sbatch did not take the next job ({why}): "
            "submit the run again to continue unless squeue shows it"
        )
    successor = answer.output.strip().partition(";")[0]
    if way.sweep is not None:
        _record_successor(way.sweep, successor, say)
    successor += f"_{task}" if task is not None else ""
    note(
        run,
        Event.REQUEUED,
        step=step,
        by="supervisor",
        job_id=successor,
        **({"excluded": ours} if ours else {}),
    )
    say(f"submitted job {successor}, which continues when this one has ended")
    if way.abandoned:
        _ask("scancel", job_id)
    return None


def _record_successor(sweep: Path, successor: str, say: Say) -> None:
    from slurm.sweeps.arrays import record_successor

    try:
        record_successor(sweep, os.environ, successor)
    except Exception as error:  # the successor waits for the manifest, and finds itself in it
        say(f"{sweep} could not be told of job {successor}: {error}")


def _keep_away(run: RunFolder, job_id: str, nodes: list[str], say: Say) -> None:
    """Have the requeued job start elsewhere; Slurm refuses that as long as a job runs."""
    names = ",".join(nodes)
    # A job out of which Slurm has taken a dead node is busy for some seconds.
    deadline = time.monotonic() + _UPDATE_S
    while (answer := _ask("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={names}")).code != 0:
        if answer.refused or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    said = f"job {job_id} keeps away from {names or 'no node any more'}"
    if answer.code != 0:
        said = f"Slurm refused to keep job {job_id} away from {names} ({answer.sentence})"
        note(run, Event.WARNING, reason=said)
    say(said)


def _to_exclude(run: RunFolder, job: dict[str, str], way: Way) -> tuple[list[str], list[str]]:
    """Return the nodes that the user excluded, and those that failed of late, as far as the job can spare them."""
    events = read_patiently(run.read_events)
    # What an earlier requeue added is not the user's, and may be forgotten by now.
    added = {node for event in events for node in event.get("excluded") or []}
    own = [node for node in _expand(job) if node not in added]
    failed = [node for node in excluded_nodes(events, for_s=way.exclude_for_s) if node not in own]
    if not failed:
        return own, []
    usable = _usable_nodes(job.get("Partition", "")) - set(own)
    return own, affordable(failed, usable, way.nodes) if usable else failed


def _usable_nodes(partition: str) -> set[str]:
    """Name the nodes of a partition on which a job could start now or later; none if Slurm does not say."""
    answer = _ask("sinfo", "--noheader", "--Node", f"--partition={partition}", "--format=%N %T")
    lines = [line.split() for line in answer.output.splitlines()] if answer.code == 0 else []
    unfit = ("down", "drain", "fail", "maint", "unknown", "power_down", "powered_down")
    return {name for name, state in lines if not state.startswith(unfit) and not state.endswith("*")}


def _expand(job: dict[str, str]) -> list[str]:
    """Name the nodes that Slurm keeps a job away from."""
    nodes = job.get("ExcNodeList", "(null)")
    return [] if nodes == "(null)" else _ask("scontrol", "show", "hostnames", nodes).output.split()


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Bring the job back after its supervisor was lost; nothing is done if it ends or waits already."""
    parser = argparse.ArgumentParser(
        prog="python -m slurm.supervise.requeue", description=__doc__.splitlines()[0]
    )
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--requeue", choices=["slurm", "successor"], default="slurm")
    parser.add_argument("--nodes", type=int, default=1, help="how many the job needs")
    parser.add_argument("--exclude-for-h", type=float, default=FORGET_AFTER_H)
    parser.add_argument("--lost", help="the node that held the supervisor")
    parser.add_argument("--sweep", type=Path, help="the sweep that the run is a task of")
    given = parser.parse_args(arguments)
    run = RunFolder(given.run.absolute())
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # Slurm's, as soon as it has the requeue

    def say(text: str) -> None:
        print(f"requeue: {text}", file=sys.stderr, flush=True)

    job = _patiently(lambda: _show_job(_job_id())) or {}
    over = run.finished.exists() or run.failed.exists() or run.cancel_is_requested()
    if over or job.get("JobState") != "RUNNING" or _is_requeued(job):
        say(f"nothing to do: job {_job_id()} is {job.get('JobState', 'unknown')}")
        return 0
    if supervisor_lives(run, _job_id()):
        say(f"nothing to do: the supervisor of job {_job_id()} lives, it has given up this node only")
        return 0
    if given.lost:
        note(run, Event.NODE_FAILED, node=given.lost, reason="the supervisor on it was lost")
    way = Way(given.requeue == "slurm", given.nodes, given.exclude_for_h * 3600, given.sweep, abandoned=True)
    trouble = come_back(run, max(run.published_steps(), default=-1), way, say)
    if trouble:
        say(trouble)
    return int(trouble is not None)


if __name__ == "__main__":
    sys.exit(main())
