"""The job of a run: which one is the newest, and whether it lives."""

import json
import os
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from contract.run_folder import Event, RunFolder
from slurm.client import CLUSTERS_VARIABLES, ENDED, JobState, clean_environment, job_states, process_alive
from slurm.runs.find import SWEEP_MANIFEST


@dataclass(frozen=True)
class Job:
    """A submitted job, and the Slurm that has it, or the host where it is a process."""

    job_id: str
    profile: str
    scheduler: str
    host: str
    slurm_conf: str | None
    clusters: str | None
    run: RunFolder
    is_successor: bool = False
    """Whether the job before it submitted it to go on."""

    @property
    def is_local(self) -> bool:
        """Whether it is a process and not a Slurm job."""
        return self.scheduler == "local"

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is a process of another host, which this one cannot see."""
        return self.is_local and self.host != socket.gethostname()

    def is_running_here(self) -> bool:
        """Whether a local job's process lives; its command line names its folder."""
        return not self.is_elsewhere and process_alive(int(self.job_id), str(job_folder(self.run)))


def job_folder(run: RunFolder) -> Path:
    """Return the folder in which submitit keeps its files of the run's jobs."""
    return run.logs / "submitit"


def newest_job(run: RunFolder, events: Sequence[Mapping[str, Any]]) -> Job | None:
    """Return the job that was submitted last, by a person or as a successor, or None."""
    job = None
    for event in events:
        if "job_id" not in event:
            continue
        job_id = str(event["job_id"])
        if event.get("event") == Event.SUBMITTED:
            job = Job(
                job_id,
                str(event.get("profile")),
                str(event.get("scheduler")),
                str(event.get("host")),
                event.get("slurm_conf"),
                event.get("clusters"),
                run,
            )
        elif event.get("event") == Event.REQUEUED and job is not None:
            job = replace(job, job_id=job_id, is_successor=True)
    return job


@dataclass(frozen=True)
class Owner:
    """The process that trains a run: rank 0, as it has written itself down."""

    job: str
    host: str
    pid: int

    @property
    def is_here(self) -> bool:
        """Whether it is, or was, a process of this host."""
        return self.host == socket.gethostname()

    def is_running_here(self) -> bool:
        """Whether it lives on this host."""
        return self.is_here and process_alive(self.pid, "train")


def read_owner(run: RunFolder) -> Owner | None:
    """Return who trains the run, or did when it was killed; None after an orderly end."""
    try:
        owner = json.loads(run.owner.read_text(errors="replace"))
        return Owner(str(owner.get("job")), owner["host"], int(owner["pid"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def belongs(state: JobState, run: RunFolder) -> bool:
    """Whether a job that Slurm shows is one of the run: ids come again on a Slurm that was set up anew.

    Told by its script, which lies in the run's folder or, of a task, in its sweep's. Where Slurm does not say
    which script it was, the job is taken to be the run's.
    """
    if not state.script:
        return True
    path = run.path.absolute()
    homes = [path, path.parent] if (path.parent / SWEEP_MANIFEST).is_file() else [path]
    script = Path(state.script)
    return any(script.is_relative_to(home) for home in homes) or any(
        script.resolve().is_relative_to(home.resolve()) for home in homes
    )


def ask_slurm(jobs: Iterable[Job], environ: Mapping[str, str] | None = None) -> dict[Job, JobState | None]:
    """Ask for the state of `jobs`; None for a job that its Slurm does not know, no entry where that does not answer.

    One call for each Slurm that has one of them (a site's and a lab's are two).
    """
    by_slurm: dict[tuple[str | None, str | None], list[Job]] = defaultdict(list)
    for job in jobs:
        by_slurm[job.slurm_conf, job.clusters].append(job)
    answers: dict[Job, JobState | None] = {}
    for group in by_slurm.values():
        env = slurm_environment(group[0], environ)
        states = job_states([job.job_id for job in group], env, group[0].clusters)
        if states is not None:
            answers |= {job: _own(job, states) for job in group}
    return answers


def slurm_environment(job: Job, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment in which Slurm's commands speak to the Slurm that has the job."""
    env = clean_environment(os.environ if environ is None else environ)
    # Without one at its submission it is the site's own Slurm, whatever this shell says now.
    env.pop("SLURM_CONF", None)
    if job.slurm_conf:
        env["SLURM_CONF"] = job.slurm_conf
    for name in CLUSTERS_VARIABLES:
        env.pop(name, None)
    return env


def _own(job: Job, states: Mapping[str, JobState]) -> JobState | None:
    state = states.get(job.job_id)
    return state if state is not None and belongs(state, job.run) else None


def is_over(state: JobState | None) -> bool:
    """Whether Slurm will do nothing more with a job in this state."""
    return state is None or state.state in ENDED
