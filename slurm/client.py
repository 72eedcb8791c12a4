"""Slurm's commands, asked so that a slow, dead or missing Slurm gives a short answer and never a hang.

Standard library only: the supervisor of every job imports it.
"""

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# What a shell inside a job, or one started by MPI or torchrun, would leak into the next job. SLURM_CONF and
# SLURM_CLUSTERS say which Slurm is meant; SBATCH_* overrides what the script says.
_LEAKS = re.compile(
    r"^(SLURM_(?!CONF$|CLUSTERS$)|SLURMD_|SBATCH_(?!CLUSTERS$)|SRUN_|SALLOC_|SQUEUE_|SACCT_|SCONTROL_|SCANCEL_"
    r"|SINFO_|SUBMITIT_|PMI_|PMI2_|PMIX_|PRTE_|OMPI_(?!ALLOW_RUN_AS_ROOT)|MPI_LOCALRANKID$|I_MPI_|HYDRA_(?!FULL_ERROR$)|MPIR_"
    r"|TORCHELASTIC_|TRIERARCH_(MASTER_SUFFIX|TERMINAL|DIE_WITH_LAUNCHER)$|(GOMP_CPU|KMP)_AFFINITY$"
    r"|(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|NODE_RANK|MASTER_ADDR|MASTER_PORT)$)"
)
# What `--clusters` is without that option; the first one counts.
CLUSTERS_VARIABLES = ("SLURM_CLUSTERS", "SBATCH_CLUSTERS")
# Slurm has decided, and asking again brings the same. Whatever else a command fails with (a time-out, a lost or
# mixed-up answer), Slurm may have done what it was asked.
_REFUSALS = re.compile(
    r"disabled|permission denied|not permitted|Invalid (job|user) id|Invalid node name", re.IGNORECASE
)
_NOT_SENT = re.compile(r"Unable to contact|Connection refused")
_DURATION = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d{1,2}))?(?::(\d{1,2}))?")
# 10 KB of job ids.
_JOBS_A_CALL = 1000
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
    def sentence(self) -> str:
        """What it complains of, as one sentence."""
        return one_sentence(self.error or self.output) or f"code {self.code}"

    @property
    def refused(self) -> bool:
        """Whether Slurm said no; any other failure leaves open what it did."""
        return self.code is not None and self.code != 0 and bool(_REFUSALS.search(self.error))

    @property
    def not_sent(self) -> bool:
        """Whether the question certainly did not reach Slurm."""
        return self.code != 0 and bool(_NOT_SENT.search(self.error))


@dataclass(frozen=True)
class JobState:
    """A job in Slurm's words: `RUNNING`, and why it is so (`Resources`) where Slurm says."""

    state: str
    reason: str = ""
    elapsed_s: int | None = None
    """Since its newest start, where Slurm says."""
    script: str = ""
    """The batch script that was submitted, where Slurm says."""


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Leave out what an enclosing job or launcher set, keep what says which Slurm is meant."""
    kept = {name: value for name, value in environ.items() if not _LEAKS.match(name)}
    if "SLURM_JOB_ID" in environ:  # these GPUs are that job's
        kept.pop("CUDA_VISIBLE_DEVICES", None)
    return kept


def parse_duration(text: str) -> int | None:
    """Return the seconds of one of Slurm's times, None for `UNLIMITED` and what is none.

    M, M:S, H:M:S, D-H, D-H:M, D-H:M:S: see `--time` of sbatch's manual.
    """
    match = _DURATION.fullmatch(text)
    if not match:
        return None
    days, *rest = (None if part is None else int(part) for part in match.groups())
    parts = [part for part in rest if part is not None]
    if any(part > 59 for part in parts[1:]):
        return None
    if days is None:  # minutes stand alone, or before seconds
        parts = [0] * (len(parts) < 3) + parts
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return (((days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def one_sentence(said: str) -> str:
    """Join the lines of a complaint, without the name of the command that stands before each; empty for none."""
    lines = [re.sub(r"^s[a-z]+: (error: )?", "", line.strip()) for line in said.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line))


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


def job_states(
    job_ids: Sequence[str], environ: Mapping[str, str], clusters: str | None = None
) -> dict[str, JobState] | None:
    """State of each job that Slurm knows, by squeue and, for what it forgot, sacct; None if Slurm does not answer.

    `clusters` is what `--clusters` of sbatch was. A job that is missing in the result is one that Slurm has
    forgotten or never had. One call of each command for every thousand jobs; an array counts as one.
    """
    found: dict[str, JobState] = {}
    for which in _in_chunks(job_ids, clusters):
        answer = ask(
            ["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%r|%M|%o", *which], environ
        )
        if answer.code != 0 and "Invalid job id" not in answer.error:
            return None
        found |= _parse(answer.output)
    missing = [job_id for job_id in job_ids if job_id not in found]
    for which in _in_chunks(missing, clusters):
        answer = ask(
            [
                "sacct",
                "--noheader",
                "--parsable2",
                "--allocations",
                "--array",
                "--format=JobID,State",
                *which,
            ],
            environ,
        )
        if answer.code != 0:
            break
        # Without accounting sacct fails, or says that every job is still pending.
        ended = {job_id: state for job_id, state in _parse(answer.output).items() if state.state in ENDED}
        found = ended | found
    return found


def _in_chunks(job_ids: Sequence[str], clusters: str | None) -> Iterator[list[str]]:
    """Yield the options that name the jobs, none of them too long for a command line."""
    # A task of an array is known by its own id once it has begun only: the array is asked for.
    arrays = list(dict.fromkeys(job_id.partition("_")[0] for job_id in job_ids))
    for start in range(0, len(arrays), _JOBS_A_CALL):
        jobs = f"--jobs={','.join(arrays[start : start + _JOBS_A_CALL])}"
        yield [jobs, f"--clusters={clusters}"] if clusters else [jobs]


def _parse(output: str) -> dict[str, JobState]:
    states = {}
    for line in output.splitlines():
        job_id, state, reason, elapsed, script = (*line.strip().split("|", 4), *[""] * 4)[:5]
        if job_id and state:
            states[job_id] = JobState(
                state.split()[0],  # `CANCELLED by 1000` of sacct
                "" if reason == "None" else reason,
                parse_duration(elapsed),
                "" if script == "(null)" else script,  # it came on standard input
            )
    return states


def process_alive(pid: int, word: str) -> bool:
    """Whether `pid` runs and has `word` in its command line (a pid may have gone to someone else)."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return word.encode() in command
