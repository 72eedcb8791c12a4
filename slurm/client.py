"""Slurm's commands, asked so that a slow, dead or missing Slurm gives a short answer and never a hang.

Standard library only: the supervisor of every job imports it.
"""

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# What a shell inside a job, or one started by MPI or torchrun, would leak into the next job. SLURM_CONF and
# SLURM_CLUSTERS say which Slurm is meant; SBATCH_* overrides what the script says.
_LEAKS = re.compile(
    r"^(SLURM_(?!CONF$|CLUSTERS$)|SLURMD_|SBATCH_(?!CLUSTERS$)|SRUN_|SALLOC_|SQUEUE_|SACCT_|SCONTROL_|SUBMITIT_"
    r"|PMI_|PMI2_|PMIX_|PRTE_|OMPI_(?!ALLOW_RUN_AS_ROOT)|MPI_LOCALRANKID$|TORCHELASTIC_"
    r"|(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|NODE_RANK|MASTER_ADDR|MASTER_PORT)$)"
)
# Nothing that is still in the queue or that runs.
ENDED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"}
    | {"NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"}
)


@dataclass(frozen=True)
class Answer:
    """What a command said; `code` is None when it could not be run or took too long."""

    code: int | None
    output: str
    error: str

    @property
    def unreachable(self) -> bool:
        """Whether Slurm itself did not answer, so that asking again may help."""
        return self.code is None or "Unable to contact" in self.error or "Connection refused" in self.error


@dataclass(frozen=True)
class JobState:
    """A job in Slurm's words: `RUNNING`, and why it is so (`Resources`) where Slurm says."""

    state: str
    reason: str = ""


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Leave out what an enclosing job or launcher set, keep what says which Slurm is meant."""
    return {name: value for name, value in environ.items() if not _LEAKS.match(name)}


def ask(command: Sequence[str], environ: Mapping[str, str], timeout_s: float = 5.0) -> Answer:
    """Run one of Slurm's commands; never raises."""
    try:
        done = subprocess.run(
            command, env=dict(environ), capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Answer(None, "", f"{command[0]} did not answer in {timeout_s:.0f} s")
    except OSError as error:
        return Answer(None, "", f"{command[0]}: {error.strerror}")
    return Answer(done.returncode, done.stdout, done.stderr)


def job_states(job_ids: Sequence[str], environ: Mapping[str, str]) -> dict[str, JobState] | None:
    """State of each job that Slurm knows, by one squeue and at most one sacct; None if Slurm does not answer.

    A job that is missing in the result is one that Slurm has forgotten or never had.
    """
    if not job_ids:
        return {}
    command = ["squeue", "--noheader", "--states=all", "--format=%i|%T|%r", f"--jobs={','.join(job_ids)}"]
    answer = ask(command, environ)
    if answer.code != 0 and "Invalid job id" not in answer.error:
        return None
    found = _parse(answer.output)
    forgotten = [job_id for job_id in job_ids if job_id not in found]
    return found | _from_accounting(forgotten, environ)


def _from_accounting(job_ids: Sequence[str], environ: Mapping[str, str]) -> dict[str, JobState]:
    if not job_ids:
        return {}
    command = ["sacct", "--noheader", "--parsable2", "--allocations", "--format=JobID,State"]
    answer = ask([*command, f"--jobs={','.join(job_ids)}"], environ)
    # Without accounting sacct fails, or says that every job is still pending.
    return {job_id: state for job_id, state in _parse(answer.output).items() if state.state in ENDED}


def _parse(output: str) -> dict[str, JobState]:
    states = {}
    for line in output.splitlines():
        job_id, _, rest = line.strip().partition("|")
        state, _, reason = rest.partition("|")
        if job_id and state:
            # `CANCELLED by 1000` of sacct.
            states[job_id] = JobState(state.split()[0], "" if reason == "None" else reason)
    return states


def process_alive(pid: int, word: str) -> bool:
    """Whether `pid` runs and has `word` in its command line (a pid may have gone to someone else)."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return word.encode() in command
