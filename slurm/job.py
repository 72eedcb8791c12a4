"""The job of a run: which one is the newest, and whether it lives."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from contract.run_folder import Event, RunFolder
from slurm.client import ENDED, JobState, clean_environment, job_states, process_alive


@dataclass(frozen=True)
class Job:
    """A submitted job, and the Slurm that has it; `profile` is `local` for a process of this machine."""

    job_id: str
    profile: str
    slurm_conf: str | None
    folder: Path
    is_successor: bool = False
    """Whether the job before it submitted it to go on."""

    @property
    def is_local(self) -> bool:
        """Whether it is a process and not a Slurm job."""
        return self.profile == "local"

    def is_running_here(self) -> bool:
        """Whether a local job's process lives; its command line names its folder."""
        return process_alive(int(self.job_id), str(self.folder))


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
            job = Job(job_id, str(event.get("profile")), event.get("slurm_conf"), job_folder(run))
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
    if jobs[0].slurm_conf:
        env["SLURM_CONF"] = jobs[0].slurm_conf
    states = job_states([job.job_id for job in jobs], env)
    return None if states is None else {job: states.get(job.job_id) for job in jobs}


def is_over(state: JobState | None) -> bool:
    """Whether Slurm will do nothing more with a job in this state."""
    return state is None or state.state in ENDED
