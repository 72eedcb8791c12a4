"""What every run is doing: from Slurm where it answers, else from what the run folder says.

Works without accounting. A run is never "running" for ever: one whose job Slurm does not know and that has
left no marker is `lost`, one whose job runs without a sign of life is `silent`.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from contract.run_folder import HAND_STARTED, Event, RunFolder
from slurm.client import JobState
from slurm.job import Job, ask_slurm, is_over, job_folder, read_owner
from slurm.runs.find import Found, find_runs
from slurm.runs.story import Story, read_figures, read_story

# A run outside any job is taken to be alive this long after its last sign of life.
_SILENCE_S = 600.0
_WAITING = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
)
_ALIVE = frozenset({"RUNNING", "SUSPENDED", "RESIZING"})
_ENDING = frozenset({"COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED"})
# How a job ended, and what to do; of the other ends only its logs can tell.
_ENDS = {
    "BOOT_FAIL": ("lost a node that did not boot", "resubmit it"),
    "DEADLINE": ("could not end before its deadline", "resubmit it"),
    "NODE_FAIL": ("lost a node and was not requeued", "resubmit it"),
    "OUT_OF_MEMORY": ("needed more host memory than it asked for", "raise cluster.memory, then resubmit it"),
    "PREEMPTED": ("was pre-empted and not requeued", "resubmit it"),
    "REVOKED": ("was revoked by another cluster", "resubmit it"),
    "TIMEOUT": ("reached its time limit and was not requeued", "resubmit it, with a longer job.time_limit"),
}


class RunState(StrEnum):
    """What a run is doing."""

    new = "new"
    queued = "queued"
    running = "running"
    silent = "silent"
    """Slurm says that its job runs, and nothing comes from it."""
    stopping = "stopping"
    requeued = "requeued"
    stopped = "stopped"
    finished = "finished"
    failed = "failed"
    lost = "lost"

    @property
    def is_live(self) -> bool:
        """Whether the run has a job or a process that goes on."""
        return self in (
            RunState.queued,
            RunState.running,
            RunState.silent,
            RunState.stopping,
            RunState.requeued,
        )


@dataclass(frozen=True, slots=True)
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
    left_s: float | None = None
    """Time that the steps that are left will take, of a run that trains."""
    restarts: int = 0
    """How often it was restarted or requeued since it was submitted."""
    bad_nodes: tuple[str, ...] = ()
    """Nodes that failed since it was submitted."""
    sweep: str | None = None
    """The folder of the sweep that it is a task of."""
    network: str = ""
    """What the newest test of its network has found, and where the report is; empty where none was made."""


def status(root: Path, now: float | None = None) -> list[RunStatus]:
    """Return the state of the run in `root`, or of all runs below it, in order of their names."""
    return statuses(find_runs(root), now)


def statuses(runs: Iterable[Found], now: float | None = None) -> list[RunStatus]:
    """Return the states of runs, in their order; `now` is in seconds since the epoch."""
    moment = time.time() if now is None else now
    stories = [read_story(found, moment) for found in runs]
    jobs = (story.job for story in stories if not story.over)
    answers = ask_slurm(job for job in jobs if job is not None and not job.is_local)
    return [_status(story, answers) for story in stories]


def _status(story: Story, answers: Mapping[Job, JobState | None]) -> RunStatus:
    state, reason = _state(story, answers)
    figures = read_figures(story.found)
    left_s = None
    if state is RunState.running and figures.step_time_s and None not in (figures.step, figures.steps):
        left_s = max(0, (figures.steps or 0) - (figures.step or 0)) * figures.step_time_s
    bad_nodes = story.bad_nodes()
    if state.is_live:
        reason = _joined(reason, _trouble(story, bad_nodes))
    return RunStatus(
        run=story.run,
        state=state,
        job_id=story.job.job_id if story.job else None,
        reason=reason,
        step=figures.step,
        steps=figures.steps,
        loss=figures.loss,
        age_s=story.age_s,
        checkpoint_step=figures.checkpoint_step,
        left_s=left_s,
        restarts=story.restarts,
        bad_nodes=tuple(bad_nodes),
        sweep=story.found.sweep,
        network=_network(story, reason),
    )


def _network(story: Story, reason: str) -> str:
    """Say what the newest network test has found; not again what the run's own `reason` says of it."""
    tested = story.network
    if not tested:
        return ""
    found = str(tested.get("reason") or "")
    found = "" if found in reason else found
    verdict = tested.get("verdict")
    if verdict is None:
        return _joined("tested without a verdict", found, ": ")
    bad = ", ".join(map(str, tested.get("exclude") or []))
    told = _joined(_joined(str(verdict), found, ": "), f"nodes to leave out: {bad}" if bad else "")
    return f"{told}; report in {story.run.nccl}"


def _trouble(story: Story, bad_nodes: Mapping[str, str]) -> str:
    """Say what a run that goes on has got over."""
    nodes = ", ".join(f"{node} ({reason})" if reason else node for node, reason in bad_nodes.items())
    last = story.newest(Event.RESTARTED)
    where = ", ".join(f"{key} {last[key]}" for key in ("rank", "node") if last.get(key) is not None)
    why = _joined(where, str(last.get("reason") or ""), ": ")
    return _joined(f"restarted after {why}" if why else "", f"bad nodes: {nodes}" if nodes else "")


def _state(story: Story, answers: Mapping[Job, JobState | None]) -> tuple[RunState, str]:
    job = story.job
    if story.over:
        return _told(story) or (RunState.lost, "")
    if job is None:
        return _without_job(story)
    if job.is_elsewhere:
        state, reason = _without_job(story)
        return state, _joined(reason, f"on {job.host}")
    if job.is_local:
        return _alive(story) if job.is_running_here() else _ended(story, "its process has ended")
    if job not in answers:
        state, reason = _without_job(story)
        if state is RunState.new:  # all that is known is that it was submitted
            state = RunState.queued
        return state, _joined(reason, "Slurm does not answer, this is from the run folder")
    found = answers[job]
    if found is None:
        return _ended(story, f"Slurm does not know job {job.job_id}")
    return _by_slurm(story, job, found)


def _by_slurm(story: Story, job: Job, found: JobState) -> tuple[RunState, str]:
    """Tell the state of a run whose job Slurm knows."""
    if is_over(found):
        return _ended(story, f"job {job.job_id} ended as {found.state}", found.state)
    if found.state in _WAITING:
        state = RunState.requeued if story.has_begun else RunState.queued
        return state, _joined(found.reason, "cancelled: it leaves when it starts" * story.is_cancelled)
    if found.state in _ENDING:
        return _ending(story)
    if found.state in _ALIVE:
        silent_s = min(story.age_s or 0, found.elapsed_s or 0)
        if found.state == "RUNNING" and silent_s > _SILENCE_S:
            what = f"no sign of life for {silent_s / 60:.0f} minutes"
            return RunState.silent, f"{what}: read its logs; `trierarch cancel --now` ends the job"
        return _alive(story, "" if found.state == "RUNNING" else found.state.lower())
    state, reason = _without_job(story)
    return state, _joined(reason, f"Slurm says {found.state}")


def _alive(story: Story, reason: str = "") -> tuple[RunState, str]:
    if story.is_cancelled:
        return RunState.stopping, _joined("cancelled", reason)
    if story.last in (Event.STOP_REQUESTED, Event.STOPPED):
        return RunState.stopping, reason
    return RunState.running, reason


def _ending(story: Story) -> tuple[RunState, str]:
    """Tell the state of a run whose job is being cleaned up."""
    told = _by_marker(story)
    if told:
        return told
    if story.is_cancelled:
        return RunState.stopping, "cancelled"
    return (RunState.requeued if story.last == Event.REQUEUED else RunState.stopping), ""


def _by_marker(story: Story) -> tuple[RunState, str] | None:
    if "FINISHED" in story.found.entries:
        return RunState.finished, ""
    if "FAILED" in story.found.entries:
        try:
            told = story.run.failed.read_text(errors="replace").strip()
            # A full disk leaves the marker empty.
            return RunState.failed, told or str(story.newest(Event.FAILED).get("reason") or "")
        except OSError:  # removed by a new start just now
            return None
    return None


def _told(story: Story) -> tuple[RunState, str] | None:
    """Tell the state of a run that has left its last word, or None."""
    return _by_marker(story) or _by_last_event(story)


def _by_last_event(story: Story) -> tuple[RunState, str] | None:
    if story.last == Event.STOPPED:
        return RunState.stopped, ""
    if story.last == Event.FINISHED:
        return RunState.finished, ""
    if story.last == Event.FAILED:
        return RunState.failed, str(story.newest(Event.FAILED).get("reason") or "")
    return None


def _ended(story: Story, how: str, word: str = "") -> tuple[RunState, str]:
    """Tell the state of a run whose job is certainly over; `word` is how Slurm calls its end."""
    if story.last_job == HAND_STARTED:
        return _without_job(story)  # it was started again by hand, outside any job
    told = _told(story)
    if told and told[0] is RunState.finished:
        return told
    if story.is_cancelled or word == "CANCELLED":
        return RunState.stopped, "cancelled" if told or story.is_cancelled else how
    job_id = story.job.job_id if story.job else ""
    end, advice = _ENDS.get(word, ("", ""))
    if told:
        return told[0], _joined(told[1], f"{word}: job {job_id} {end}" if end else "")
    if end:
        return RunState.lost, f"{word}: job {job_id} {end}, and the run left no word: {advice}"
    return RunState.lost, f"{how} and the run left no word: {_advice(story)}"


def _advice(story: Story) -> str:
    run, job = story.run, story.job
    if job is not None:
        name = f"{job.job_id}_0_log.err" if job.is_local else f"{job.job_id}.batch.log"
        log = (job_folder(run) if job.is_local else run.logs) / name
        if log.exists():
            return f"read {log}, then resubmit it"
        if not job.is_local:
            return f"if it began, {run.path} is not the same folder on the compute nodes, else resubmit it"
    return "resubmit it"


def _without_job(story: Story) -> tuple[RunState, str]:
    """Tell the state from the run folder alone."""
    told = _told(story)
    if told:
        return told
    if not story.last:
        return RunState.new, ""
    owner = read_owner(story.run)
    if owner is not None and owner.is_here and not owner.is_running_here():
        return RunState.lost, "its process has ended without a word: start it again to continue"
    if story.age_s is not None and story.age_s < _SILENCE_S:
        return _alive(story)
    minutes = (story.age_s or 0.0) / 60
    return RunState.lost, f"no sign of life for {minutes:.0f} minutes: start it again to continue"


def counts(shown: Sequence[RunStatus]) -> dict[RunState, int]:
    """Count runs by their state, in the order of the states' definition."""
    states = [one.state for one in shown]
    return {state: states.count(state) for state in RunState if state in states}


def _joined(first: str, second: str, by: str = "; ") -> str:
    return by.join(filter(None, (first, second)))
