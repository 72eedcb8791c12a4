"""The job of a run: which one is the newest, and whether it lives."""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from contract.run_folder import Event, RunFolder
from slurm.client import CLUSTERS_VARIABLES, ENDED, JobState, clean_environment, job_states, process_alive


@dataclass(frozen=True)
class Job:
    """A submitted job, and the Slurm that has it, or the host where it is a process."""

    job_id: str
    profile: str
    scheduler: str
    host: str
    slurm_conf: str | None
    clusters: str | None
    folder: Path
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
        return not self.is_elsewhere and process_alive(int(self.job_id), str(self.folder))


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
                job_folder(run),
            )
        elif event.get("event") == Event.REQUEUED and job is not None:
            job = replace(job, job_id=job_id, is_successor=True)
    return job


def ask_slurm(
    jobs: Sequence[Job], environ: Mapping[str, str] | None = None
) -> dict[Job, JobState | None] | None:
    """Ask one Slurm (that of the first job) for the state of `jobs`; None for a job that it does not know.

    None altogether if it does not answer. One call for all.
    """
    env = clean_environment(os.environ if environ is None else environ)
    if not jobs:
        return {}
    # Without one at its submission it is the site's own Slurm, whatever this shell says now.
    env.pop("SLURM_CONF", None)
    if jobs[0].slurm_conf:
        env["SLURM_CONF"] = jobs[0].slurm_conf
    for name in CLUSTERS_VARIABLES:
        env.pop(name, None)
    states = job_states([job.job_id for job in jobs], env, jobs[0].clusters)
    return None if states is None else {job: states.get(job.job_id) for job in jobs}


def is_over(state: JobState | None) -> bool:
    """Whether Slurm will do nothing more with a job in this state."""
    return state is None or state.state in ENDED
