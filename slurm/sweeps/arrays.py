"""A sweep's array jobs: how many tasks fit into the queue now, sending them, and what to do when one ends.

The manifest is written before and after each call of sbatch, under the sweep's lock: whoever dies in between, no
task is sent twice and none is forgotten. Standard library only: every job of a sweep imports it.
"""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from contract.errors import UserError
from contract.sweep import Array, Manifest, SweepFolder, index_ranges
from slurm.client import ask, clean_environment

_SBATCH_TIMEOUT_S = 60.0
_ASK_TIMEOUT_S = 30.0
# An sbatch that nobody waits for any more may still reach the controller.
_IN_FLIGHT_S = 120.0
# The last task of a sweep waits for those that end with it: an srun's end and Slurm's own clean-up.
_LAST_WAIT_S = 60.0
_RETRY_S = 1.0
# Slurm has read the request, or may have.
_UNKNOWN = re.compile(r"timed out|Zero Bytes|transmission|Unable to confirm", re.IGNORECASE)
_LIMIT = re.compile(
    r"MaxSubmit|job submit limit|Job violates accounting|maximum number of jobs", re.IGNORECASE
)


@dataclass
class Sent:
    """What became of the tasks that waited."""

    arrays: list[Array] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    """Tasks that are still to be sent."""
    trouble: str = ""
    """Why not all of them were sent; empty where the queue's limit is all."""


def ask_array_limits(environ: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Return Slurm's MaxArraySize and max_array_tasks, None for what it does not say."""
    answer = ask(["scontrol", "show", "config"], clean_environment(environ), _ASK_TIMEOUT_S)
    size = re.search(r"^MaxArraySize\s*=\s*(\d+)", answer.output, re.MULTILINE)
    tasks = re.search(r"^SchedulerParameters\s*=.*\bmax_array_tasks=(\d+)", answer.output, re.MULTILINE)
    return (int(size[1]) if size else None), (int(tasks[1]) if tasks else None)


def cut_array(waiting: Sequence[int], manifest: Manifest, room: int | None) -> Array:
    """Return the next array of the tasks that wait: as many as the site's limits and `room` let in.

    Slurm's index is the task's own where all of them are below MaxArraySize; else an offset is taken off.
    """
    indices = sorted(waiting)
    offset = 0 if indices[-1] < manifest.max_array_size else indices[0]
    chosen = [index for index in indices if index - offset < manifest.max_array_size]
    limits = [limit for limit in (room, manifest.max_array_tasks) if limit is not None]
    chosen = chosen[: min(limits, default=None)]
    throttle = f"%{manifest.parallel}" if manifest.parallel else ""
    return Array(chosen, offset, index_ranges([index - offset for index in chosen]) + throttle)


def send_waiting(folder: SweepFolder, environ: Mapping[str, str], *, least: int = 1) -> Sent:
    """Send what waits in arrays, as far as the submit limit has room for at least `least` tasks (or the rest).

    Where the sweep has a throttle, an array starts when those before it have ended, so that it holds over all of
    them. Call it while holding the sweep's lock.
    """
    env = clean_environment(environ)
    manifest = folder.read()
    sent = Sent()
    sent.trouble = _settle_unknown(folder, manifest, env)
    while manifest.waiting and not sent.trouble:
        queue = _queue(env)
        if queue is None:
            sent.trouble = "squeue does not answer"
            break
        room = _room(manifest, queue)
        if room is not None and room < min(least, len(manifest.waiting)):
            break
        array = cut_array(manifest.waiting, manifest, room)
        if manifest.parallel:
            live = {one.array for one in queue}
            array.after = [one.job_id for one in manifest.arrays if one.job_id and one.job_id in live]
        sent.trouble = _send(folder, manifest, array, env)
        if not sent.trouble:
            sent.arrays.append(array)
    sent.waiting = list(manifest.waiting)
    return sent


def _send(folder: SweepFolder, manifest: Manifest, array: Array, env: Mapping[str, str]) -> str:
    """Hand one array to Slurm; return what went wrong, or an empty string."""
    manifest.arrays.append(array)
    manifest.waiting = [index for index in manifest.waiting if index not in set(array.tasks)]
    folder.write(manifest)
    command = ["sbatch", "--parsable", f"--array={array.spec}"]
    if array.after:
        command.append(f"--dependency=afterany:{':'.join(array.after)}")
    answer = ask([*command, str(folder.job_script)], env, _SBATCH_TIMEOUT_S)
    if answer.code == 0:
        folder.record(manifest, array, answer.output.strip().partition(";")[0])
        return ""
    if answer.code is None or _UNKNOWN.search(answer.error):
        return f"nobody knows whether Slurm has taken the array {array.spec} ({answer.sentence})"
    _take_back(folder, manifest, array)
    if _LIMIT.search(answer.error) and manifest.max_submit_jobs is None:
        return (
            f"sbatch refused the array {array.spec} ({answer.sentence}): if that is a limit on the jobs that you "
            "may have in the queue, give it as cluster.max_submit_jobs=N"
        )
    return f"sbatch refused the array {array.spec}: {answer.sentence}"


def _take_back(folder: SweepFolder, manifest: Manifest, array: Array) -> None:
    manifest.arrays.remove(array)
    manifest.waiting = sorted({*manifest.waiting, *array.tasks})
    folder.write(manifest)


def _settle_unknown(folder: SweepFolder, manifest: Manifest, env: Mapping[str, str]) -> str:
    """Find out whether Slurm has the arrays whose sending was cut short; return a sentence if that is not clear."""
    unknown = [array for array in manifest.arrays if array.job_id is None]
    if not unknown:
        return ""
    queue = _queue(env)
    known = {array.job_id for array in manifest.arrays if array.job_id}
    if queue is not None:
        script = str(folder.job_script.absolute())
        strays = sorted({one.array for one in queue if one.script == script} - known, key=int)
        for array, job_id in zip(list(unknown), strays, strict=False):
            folder.record(manifest, array, job_id)
            unknown.remove(array)
    for array in unknown:
        if queue is None or time.time() - array.time < _IN_FLIGHT_S:
            return (
                f"it is not clear yet whether Slurm has taken the array {array.spec}: try again in "
                f"{_IN_FLIGHT_S / 60:.0f} minutes"
            )
        _take_back(folder, manifest, array)
    return ""


@dataclass(frozen=True)
class _Queued:
    """One of the user's jobs or array tasks in the queue."""

    array: str
    task: str
    state: str
    script: str

    @property
    def name(self) -> str:
        return f"{self.array}_{self.task}"


def _queue(env: Mapping[str, str]) -> list[_Queued] | None:
    """Return what the user has in the queue, each array task for itself; None if Slurm does not answer."""
    answer = ask(["squeue", "--me", "--noheader", "--array", "--format=%F|%K|%T|%o"], env, _ASK_TIMEOUT_S)
    if answer.code != 0:
        return None
    lines = (line.strip().split("|", 3) for line in answer.output.splitlines())
    return [_Queued(*fields) for fields in lines if len(fields) == 4]


def _room(manifest: Manifest, queue: Sequence[_Queued]) -> int | None:
    """Return how many more tasks the submit limit lets in; None without a limit."""
    if manifest.max_submit_jobs is None:
        return None
    return manifest.max_submit_jobs - sum(one.state != "COMPLETING" for one in queue)


def live_arrays(folder: SweepFolder, environ: Mapping[str, str]) -> list[str]:
    """Return the ids of the sweep's arrays that wait or run; raises UserError if Slurm does not say."""
    queue = _queue(clean_environment(environ))
    if queue is None:
        raise UserError(f"Slurm does not say what lives of sweep {folder.name}: try again when squeue works")
    live = {one.array for one in queue}
    return [array.job_id for array in folder.read().arrays if array.job_id in live and array.job_id]


def continue_sweep(sweep: Path, environ: Mapping[str, str]) -> str | None:
    """At the end of an array task: send what waits for room in the queue. Return a sentence for the log, or None.

    Never raises: the task's own end must not depend on it. Half of the limit has to be free, else many small arrays
    would follow each other. The last task of the sweep waits for a bounded time until those that end with it are gone.
    """
    folder = SweepFolder(sweep)
    try:
        if folder.read().is_sent:
            return None
        with folder.locked():
            sent = _send_at_the_end(folder, environ)
    except (UserError, OSError) as error:
        return f"the sweep's next tasks were not sent ({error}): `trierarch sweep submit {folder.name}` sends them"
    if sent.trouble:
        return f"{sent.trouble}; `trierarch sweep submit {folder.name}` sends the {len(sent.waiting)} tasks that wait"
    if not sent.arrays:
        return None
    jobs = ", ".join(f"{array.job_id} ({array.spec})" for array in sent.arrays)
    return f"sent the sweep's next tasks as {jobs}, {len(sent.waiting)} wait"


def _send_at_the_end(folder: SweepFolder, environ: Mapping[str, str]) -> Sent:
    manifest = folder.read()
    here = f"{environ.get('SLURM_ARRAY_JOB_ID')}_{environ.get('SLURM_ARRAY_TASK_ID')}"
    if here not in manifest.leaving:
        manifest.leaving.append(here)
        folder.write(manifest)
    sent = send_waiting(folder, environ, least=max(1, (manifest.max_submit_jobs or 2) // 2))
    if sent.arrays or sent.trouble or not sent.waiting or _others_will(manifest, environ):
        return sent
    # Tasks that end at the same moment see each other in the queue: nobody comes after the last one.
    deadline = time.monotonic() + _LAST_WAIT_S
    while not sent.arrays and not sent.trouble and time.monotonic() < deadline:
        time.sleep(_RETRY_S)
        sent = send_waiting(folder, environ)
    if not sent.arrays and not sent.trouble:
        sent.trouble = "this was the last task in the queue and there is no room for the next"
    return sent


def _others_will(manifest: Manifest, environ: Mapping[str, str]) -> bool:
    """Whether another task of the sweep is in the queue that has not come to its end yet."""
    queue = _queue(clean_environment(environ)) or []
    ours = {array.job_id for array in manifest.arrays}
    return any(one.array in ours and one.name not in manifest.leaving for one in queue)


def record_successor(sweep: Path, environ: Mapping[str, str], job_id: str) -> None:
    """Note the job that was sent to continue this array task, so that it finds its run.

    Raises UserError or OSError if the manifest cannot be changed.
    """
    folder = SweepFolder(sweep)
    with folder.locked():
        manifest = folder.read()
        array = manifest.array(environ["SLURM_ARRAY_JOB_ID"])
        number = int(environ["SLURM_ARRAY_TASK_ID"])
        if array is None:
            raise UserError(f"{folder.manifest} does not list array {environ['SLURM_ARRAY_JOB_ID']}")
        # Its run's event `requeued` tells of the job; `submitted` would begin a new story.
        manifest.arrays.append(Array([number + array.offset], array.offset, str(number), job_id=job_id))
        folder.write(manifest)
