"""The sweep folder: many runs that one array job (or a few) works through, and the manifest that lists them.

    runs/<sweep>/
        sweep.json      the manifest: tasks, arrays, what waits (see `Manifest`)
        code/           one snapshot for all tasks
        job.sbatch      one batch script for all tasks: `sbatch --array=0-11%3 job.sbatch`
        submit.yaml     the resolved cluster and job settings of the last submission
        logs/           what Slurm itself writes
        <task>/         a run folder each, with links to code, job.sbatch and submit.yaml

Standard library only: every job of a sweep reads the manifest to learn which run it is.
"""

import dataclasses
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contract.errors import PeerError, UserError
from contract.lock import locked
from contract.run_folder import Event, RunFolder

# From sbatch's answer to its note in the manifest: a job may start in between.
_LISTED_WITHIN_S = 60.0
_LOCK_WAIT_S = 240.0
_RETRY_S = 0.2


@dataclass(frozen=True)
class Task:
    """One run of a sweep; its index never changes."""

    index: int
    run: str
    """The name of its folder in the sweep's."""
    overrides: list[str]
    """What sets it apart from the others, as `KEY=VALUE`."""
    values: dict[str, Any]
    """The resolved value of every swept key."""


@dataclass
class Array:
    """One array job: Slurm's index of a task is its own minus `offset`, so that it stays below the site's limit."""

    tasks: list[int]
    offset: int
    spec: str
    """What `sbatch --array` was given: 0-11%3."""
    after: list[str] = field(default_factory=list)
    """The arrays that have to end first."""
    job_id: str | None = None
    """None while nobody knows whether Slurm has taken it."""
    time: float = field(default_factory=time.time)
    """When it was handed to Slurm, s since the epoch."""


@dataclass
class Manifest:
    """All of a sweep that is not in its runs."""

    name: str
    created: float
    keys: list[str]
    """The swept keys."""
    base: list[str]
    """The overrides that all tasks share."""
    settings: dict[str, Any]
    """The configuration that `base` gives, by dotted key, and the choices of its groups."""
    submitted: dict[str, Any] = field(default_factory=dict)
    """What the event of a submission tells beside the job's id."""
    parallel: int | None = None
    """Tasks that may run at the same time; None for any number."""
    max_array_size: int = 1001
    """Array indices must be below it: Slurm's MaxArraySize."""
    max_array_tasks: int | None = None
    """The most tasks of one array, where the site sets that too."""
    max_submit_jobs: int | None = None
    """Array tasks and jobs that the user may have in the queue; None where no limit is known."""
    commands: list[str] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    arrays: list[Array] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    """Tasks that are to run and that no array holds yet."""
    leaving: list[str] = field(default_factory=list)
    """Array tasks, as Slurm writes them, that have come to their end while others waited."""

    def to_json(self) -> str:
        """Return the text that `from_json` reads."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Return the manifest that `to_json` wrote; raises ValueError, TypeError or KeyError for another text."""
        tree = json.loads(text)
        tree["tasks"] = [Task(**task) for task in tree["tasks"]]
        tree["arrays"] = [Array(**array) for array in tree["arrays"]]
        # A sweep's snapshot reads what a newer checkout has written.
        return cls(**{one.name: tree[one.name] for one in dataclasses.fields(cls) if one.name in tree})

    @property
    def is_sent(self) -> bool:
        """Whether Slurm has every task that is to run, as far as anybody knows."""
        return not self.waiting and all(array.job_id for array in self.arrays)

    def array(self, job_id: str) -> Array | None:
        """Return the array that Slurm knows by this id."""
        return next((array for array in self.arrays if array.job_id == job_id), None)


@dataclass(frozen=True)
class SweepFolder:
    """Paths of one sweep, and the reading and writing of its manifest."""

    path: Path

    @property
    def name(self) -> str:
        """The sweep's name."""
        return self.path.name

    @property
    def manifest(self) -> Path:
        """The list of its tasks and arrays."""
        return self.path / "sweep.json"

    @property
    def is_sweep(self) -> bool:
        """Whether there is a sweep in this folder."""
        return self.manifest.is_file()

    @property
    def code(self) -> Path:
        """The code snapshot of all tasks."""
        return self.path / "code"

    @property
    def job_script(self) -> Path:
        """The batch script of all tasks."""
        return self.path / "job.sbatch"

    @property
    def submit_settings(self) -> Path:
        """The resolved settings of the last submission: cluster and job."""
        return self.path / "submit.yaml"

    @property
    def logs(self) -> Path:
        """What Slurm writes before a task knows its own folder."""
        return self.path / "logs"

    def run(self, task: Task) -> RunFolder:
        """Return the run folder of a task."""
        return RunFolder(self.path / task.run)

    def read(self) -> Manifest:
        """Return the manifest; raises UserError if there is none that can be read."""
        try:
            return Manifest.from_json(self.manifest.read_text())
        except FileNotFoundError:
            raise UserError(
                f"{self.path} is no sweep, it has no {self.manifest.name}: give a sweep's folder"
            ) from None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{self.manifest} cannot be read ({error}): mend it, or start a sweep of another name"
            ) from error

    def write(self, manifest: Manifest) -> None:
        """Replace the manifest as a whole; only while holding the lock."""
        fresh = self.path / f".sweep.json.{os.getpid()}"
        fresh.write_text(manifest.to_json())
        fresh.rename(self.manifest)

    @contextmanager
    def locked(self, wait_s: float = 30.0) -> Iterator[None]:
        """Hold the sweep against other commands and jobs that change it; raises UserError if that takes too long."""
        try:
            with locked(self.path / ".sweep.lock", wait_s):
                yield
        except TimeoutError:
            raise UserError(f"sweep {self.name} is being changed by another command: wait for it") from None

    def record(self, manifest: Manifest, array: Array, job_id: str) -> None:
        """Note the job of an array: first in its runs, so that no task starts before its run says so."""
        for index in array.tasks:
            self.run(manifest.tasks[index]).try_event(
                Event.SUBMITTED, job_id=f"{job_id}_{index - array.offset}", **manifest.submitted
            )
        array.job_id = job_id
        self.write(manifest)


def task_run(sweep: Path, environ: Mapping[str, str]) -> RunFolder:
    """Return the run folder of the array task that this process belongs to.

    Waits for a bounded time until the manifest lists the array: the job may start before. Raises UserError if
    this is no task of the sweep, PeerError if the manifest cannot be changed.
    """
    folder = SweepFolder(sweep)
    try:
        job_id, number = environ["SLURM_ARRAY_JOB_ID"], int(environ["SLURM_ARRAY_TASK_ID"])
    except (KeyError, ValueError):
        raise UserError(
            f"{sweep} is a sweep and this is no array task: send its script with `trierarch sweep retry {sweep.name}`"
        ) from None
    deadline = time.monotonic() + _LISTED_WITHIN_S
    while (array := folder.read().array(job_id)) is None and time.monotonic() < deadline:
        time.sleep(_RETRY_S)
    if array is None:
        array = _adopt(folder, job_id, number)
    index = number + array.offset
    if index not in array.tasks:
        raise UserError(f"array {job_id} of sweep {folder.name} has no task {number}: cancel it")
    return folder.run(folder.read().tasks[index])


def _adopt(folder: SweepFolder, job_id: str, number: int) -> Array:
    """Find the array that was being sent when its sender died; it is the one without a job."""
    try:
        with folder.locked(_LOCK_WAIT_S):
            manifest = folder.read()
            listed = manifest.array(job_id)  # by another task meanwhile
            if listed is not None:
                return listed
            for array in manifest.arrays:
                if array.job_id is None and number + array.offset in array.tasks:
                    folder.record(manifest, array, job_id)
                    return array
    except OSError as error:
        raise PeerError(f"{folder.manifest} cannot be written ({error.strerror}): try again") from error
    raise UserError(
        f"{folder.manifest} does not list array {job_id}: start its tasks by `trierarch sweep retry {folder.name}`"
    )


def index_ranges(indices: Sequence[int]) -> str:
    """Write ascending indices as Slurm does: 0-2,5."""
    parts: list[list[int]] = []
    for index in indices:
        if parts and index == parts[-1][-1] + 1:
            parts[-1][1:] = [index]
        else:
            parts.append([index])
    return ",".join("-".join(str(index) for index in part) for part in parts)
