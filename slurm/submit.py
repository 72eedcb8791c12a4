"""Submit one run: run folder, code snapshot, script, sbatch; then return."""

import fcntl
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from contract.errors import ConfigError, UserError
from contract.run_folder import Event, RunFolder
from slurm.job import ask_slurm, is_over, job_folder, newest_job
from slurm.profile import Scheduler, scheduler_environment
from slurm.render import render
from slurm.settings import SubmitConfig, parse_time_limit
from slurm.snapshot import snapshot


@dataclass(frozen=True)
class Submission:
    """What became of a submission; `job_id` is None for a dry run, a pid for a local job."""

    job_id: str | None
    run: RunFolder
    script: str
    profile: str

    def summary(self) -> str:
        """Say in three lines what was submitted, where to look, and how to stop it."""
        job, stop = f"job {self.job_id} on {self.profile}", f"scancel {self.job_id}"
        if self.profile == Scheduler.local:
            job = (
                f"process {self.job_id} on this machine, as no Slurm answers here or cluster=local was given"
            )
            stop = f"kill {self.job_id}"
        return (
            f"run {self.run.name}: {job}\n"
            f"look:  trierarch status {shlex.quote(str(self.run.path))}, logs in {self.run.logs}\n"
            f"stop:  {stop}  (it saves first; submit the run again to continue)"
        )


def submit(
    run: RunFolder,
    train_config_yaml: str,
    settings: SubmitConfig,
    dry_run: bool = False,
    environ: Mapping[str, str] | None = None,
) -> Submission:
    """Submit the training that `train_config_yaml` describes, and return at once.

    Raises UserError (one sentence) if the run has a live job, the folder cannot be written, or the scheduler
    refuses. A dry run writes nothing and returns the script.
    """
    env = dict(os.environ if environ is None else environ)
    env |= scheduler_environment(settings.cluster.name, env)
    run = RunFolder(run.path.absolute())
    check_stop_signal(train_config_yaml, settings.cluster.stop_signal)
    script = render(run, settings, settings.account(env))
    if dry_run:
        return Submission(None, run, script, settings.cluster.name)
    try:
        run.create()
        with _one_at_a_time(run):
            refuse_live_job(run, env)
            _write(run, "config.yaml", train_config_yaml)
            snapshot(run)
            _write(run, "job.sbatch", script)
            run.failed.unlink(missing_ok=True)
            job_id = _start(run, script, settings, env)
            run.append_event(
                Event.SUBMITTED,
                job_id=job_id,
                profile=settings.cluster.name,
                nodes=settings.job.nodes,
                ranks=settings.job.nodes * settings.ranks_per_node,
                slurm_conf=env.get("SLURM_CONF"),
            )
    except OSError as error:
        where = error.filename or run.path
        raise UserError(
            f"the run folder cannot be written ({where}: {error.strerror}): set run.root"
        ) from error
    return Submission(job_id, run, script, settings.cluster.name)


def refuse_live_job(run: RunFolder, environ: Mapping[str, str]) -> None:
    """Raise UserError if the run's newest job waits or runs, or if that cannot be found out."""
    job = newest_job(run, run.read_events())
    if job is None:
        return
    if job.is_local:
        if job.is_running_here():
            raise UserError(
                f"run {run.name} is running already as process {job.job_id}: stop it with `kill {job.job_id}`, "
                "or give this one another run.name"
            )
        return
    answer = ask_slurm([job], environ)
    if answer is None:
        if job.profile == "lab":  # a lab that is down took its jobs with it
            return
        raise UserError(
            f"Slurm does not say whether job {job.job_id} of run {run.name} still lives: try again when squeue works"
        )
    state = answer[job]
    if state is not None and not is_over(state):
        raise UserError(
            f"run {run.name} has job {job.job_id} already ({state.state.lower()}): end it with "
            f"`scancel {job.job_id}`, or give this one another run.name"
        )


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
        return str(submit_local(job_folder(run), run.job_script, environ, limit_s, cluster.stop_lead_s))
    tasks = settings.job.nodes * settings.ranks_per_node
    return str(ScriptExecutor(job_folder(run), script, tasks, environ).submit_script().job_id)


def _write(run: RunFolder, name: str, text: str) -> None:
    """Replace a file of the run folder as a whole."""
    fresh = run.path / f".{name}.new"
    fresh.write_text(text)
    fresh.rename(run.path / name)


@contextmanager
def _one_at_a_time(run: RunFolder) -> Iterator[None]:
    """Keep two submissions of one run from passing the check for a live job together."""
    with (run.path / ".submit.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"run {run.name} is being submitted by another command: wait for it") from None
        yield
