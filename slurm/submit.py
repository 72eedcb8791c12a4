"""Submit one run: run folder, code snapshot, script, sbatch; then return."""

import os
import shlex
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import configs.compose
from contract.errors import ConfigError, UserError
from contract.lock import locked
from contract.run_folder import Event, RunFolder
from slurm.client import CLUSTERS_VARIABLES, ask, clean_environment
from slurm.job import Job, ask_slurm, is_over, job_folder, newest_job
from slurm.render import render
from slurm.runs.find import address, refuse_sweep, sweep_of
from slurm.runs.status import RunState, status
from slurm.settings import SubmitConfig, parse_time_limit
from slurm.sites.detect import scheduler_environment
from slurm.sites.profile import Profile, Scheduler
from slurm.snapshot import snapshot


@dataclass(frozen=True)
class Submission:
    """What became of a submission; `job_id` is None for a dry run, a pid for a local job."""

    job_id: str | None
    run: RunFolder
    script: str
    cluster: Profile
    notes: tuple[str, ...] = ()
    """What of the shell's settings takes part, or does not."""
    trains: bool = True
    """Whether it is a training, and no network test."""

    def summary(self) -> str:
        """Say what was submitted, where to look, how to stop it, and what of the profile is not known to work."""
        job, name = f"job {self.job_id} on {self.cluster.name}", address(self.run.path)
        if self.cluster.scheduler is Scheduler.local:
            job = (
                f"process {self.job_id} on this machine, as no Slurm answers here or cluster=local was given"
            )
        unverified = "; ".join(self.cluster.unverified)
        notes = [*([unverified] if unverified else []), *self.notes]
        return (
            f"run {self.run.name}: {job}\n"
            f"look:  trierarch status {name}, trierarch logs {name}\n"
            f"stop:  trierarch cancel {name}"
            + f"  (it saves first; `trierarch resubmit {name}` continues it)" * self.trains
            + "".join(f"\nnote:  {note}" for note in notes)
        )


def submit(
    run: RunFolder,
    train_config_yaml: str | None,
    settings: SubmitConfig,
    dry_run: bool = False,
    environ: Mapping[str, str] | None = None,
    keep_code: bool = False,
) -> Submission:
    """Submit the training that `train_config_yaml` describes, and return at once; None tests the network only.

    With `keep_code` the job runs the snapshot of the submission before, if there is one.
    Raises UserError (one sentence) if the run has a live job, the folder cannot be written, or the scheduler
    refuses. A dry run writes nothing and returns the script.
    """
    env = dict(os.environ if environ is None else environ)
    run = RunFolder(run.path.absolute())
    refuse_sweep(run.path)
    if (sweep := sweep_of(run.path)) is not None:
        retry = f"trierarch sweep retry {address(Path(sweep))} {shlex.quote(run.name)}"
        raise UserError(f"run {run.name} is a task of a sweep: `{retry}` submits it again")
    if train_config_yaml is not None:
        check_stop_signal(train_config_yaml, settings.cluster.stop_signal)
    script = render(run, settings, env, only_network_test=train_config_yaml is None)
    if dry_run:
        return Submission(None, run, script, settings.cluster)
    env |= scheduler_environment(settings.cluster.name, env)
    try:
        run.create()
        with _one_at_a_time(run):
            refuse_live_job(run, env)
            _refuse_full_queue(settings, env)
            if train_config_yaml is not None:
                write_whole(run.path, "config.yaml", train_config_yaml)
            write_whole(run.path, "submit.yaml", configs.compose.to_yaml(settings))
            if not (keep_code and run.code.is_dir()):
                snapshot(run)
            write_whole(run.path, "job.sbatch", script)
            run.failed.unlink(missing_ok=True)
            with not_interrupted():
                job_id = _start(run, script, settings, env)
                run.append_event(Event.SUBMITTED, job_id=job_id, **submitted_as(settings, env))
    except OSError as error:
        where = error.filename or run.path
        raise UserError(
            f"the run folder cannot be written ({where}: {error.strerror}): set run.root"
        ) from error
    notes = tuple(settings.notes(env))
    return Submission(job_id, run, script, settings.cluster, notes, trains=train_config_yaml is not None)


def submitted_as(settings: SubmitConfig, environ: Mapping[str, str]) -> dict[str, object]:
    """Return what the event of a submission tells beside the job's id."""
    return {
        "profile": settings.cluster.name,
        "scheduler": settings.cluster.scheduler.value,
        "host": socket.gethostname(),
        "nodes": settings.job.nodes,
        "ranks": settings.job.nodes * settings.ranks_per_node,
        "slurm_conf": environ.get("SLURM_CONF"),
        "clusters": next((environ[name] for name in CLUSTERS_VARIABLES if environ.get(name)), None),
    }


def refuse_live_job(run: RunFolder, environ: Mapping[str, str]) -> None:
    """Raise UserError if the run's newest job waits or runs, or if that cannot be found out."""
    job = newest_job(run, run.read_events())
    if job is None:
        return
    if job.is_local:
        if job.is_running_here() or (job.is_elsewhere and _seems_alive(run)):
            where = f" on {job.host}" if job.is_elsewhere else ""
            raise UserError(
                f"run {run.name} is running already as process {job.job_id}{where}: end it{' there' if where else ''} "
                f"with `trierarch cancel {address(run.path)}`, or give this one another run.name"
            )
        return
    answer = ask_slurm([job], environ)
    if job not in answer:
        if _was_in_a_lab_that_is_down(job):
            return
        raise UserError(
            f"Slurm does not say whether job {job.job_id} of run {run.name} still lives: try again when squeue works"
        )
    state = answer[job]
    if state is not None and not is_over(state):
        raise UserError(
            f"run {run.name} has job {job.job_id} already ({state.state.lower()}): end it with "
            f"`trierarch cancel {address(run.path)}`, or give this one another run.name"
        )


def _refuse_full_queue(settings: SubmitConfig, environ: Mapping[str, str]) -> None:
    """Raise UserError if the site's limit on a user's jobs is reached; where squeue is silent, sbatch will tell."""
    limit = settings.cluster.max_submit_jobs
    if limit is None or settings.cluster.scheduler is not Scheduler.slurm:
        return
    queued = ask(["squeue", "--me", "--noheader", "--array", "--format=%i"], clean_environment(environ))
    if queued.code == 0 and (count := len(queued.output.split())) >= limit:
        raise UserError(
            f"you have {count} jobs in the queue and {settings.cluster.name} takes {limit} "
            "(cluster.max_submit_jobs): wait for some to end, or cancel some"
        )


def _seems_alive(run: RunFolder) -> bool:
    (seen,) = status(run.path)
    return seen.state not in (RunState.finished, RunState.failed, RunState.stopped, RunState.lost)


def _was_in_a_lab_that_is_down(job: Job) -> bool:
    """Whether the job is gone with its lab: one that is down took its jobs with it."""
    from slurm.lab.cluster import Lab

    return job.profile == "lab" and not (job.slurm_conf and Lab(Path(job.slurm_conf).parent).is_up())


def check_stop_signal(train_config_yaml: str, stop_signal: str) -> None:
    """Raise ConfigError if the training listens to another signal than the one that its job sends."""
    from omegaconf import OmegaConf

    listens = OmegaConf.select(
        OmegaConf.create(train_config_yaml), "resilience.stop_signal", default=stop_signal
    )
    if listens != stop_signal:
        raise ConfigError(
            f"resilience.stop_signal={listens} differs from cluster.stop_signal={stop_signal}: set both to the same"
        )


def _start(run: RunFolder, script: str, settings: SubmitConfig, environ: Mapping[str, str]) -> str:
    # submitit takes its time to import: only when there is something to submit.
    from slurm.executor import ScriptExecutor, submit_local

    cluster = settings.cluster
    if cluster.scheduler is Scheduler.local:
        limit_s = parse_time_limit("job.time_limit", settings.time_limit)
        return str(submit_local(job_folder(run), run.job_script, environ, limit_s, cluster.stop_margin_s))
    tasks = settings.job.nodes * settings.ranks_per_node
    return str(ScriptExecutor(job_folder(run), script, tasks, environ).submit_script().job_id)


def write_whole(folder: Path, name: str, text: str) -> None:
    """Replace a file of a run's or a sweep's folder as a whole."""
    fresh = folder / f".{name}.new"
    fresh.write_text(text)
    fresh.rename(folder / name)


@contextmanager
def _one_at_a_time(run: RunFolder) -> Iterator[None]:
    """Keep two submissions of one run from passing the check for a live job together.

    Without locks there is still that check, and the trainer's own for another trainer.
    """
    try:
        with locked(run.path / ".submit.lock"):
            yield
    except TimeoutError:
        raise UserError(f"run {run.name} is being submitted by another command: wait for it") from None


@contextmanager
def not_interrupted() -> Iterator[None]:
    """Keep Ctrl-C from coming between a job and the note of its id; sbatch, a child, inherits that."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
