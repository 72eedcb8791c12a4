"""The same job again, for a run that ended without finishing: its configuration, its code, its settings.

The task of a sweep is sent again as one task of its sweep's array.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import configs.compose
from contract.errors import ConfigError, UserError
from contract.run_folder import RunFolder
from slurm.job import newest_job
from slurm.runs.find import Found, address, sweep_of, title
from slurm.runs.status import RunState, RunStatus, statuses
from slurm.settings import SubmitConfig, load_submit, says_where
from slurm.submit import submit
from slurm.sweeps.sweep import retry

_AGAIN = (RunState.failed, RunState.lost, RunState.stopped)


def check(shown: Sequence[RunStatus]) -> None:
    """Raise UserError for the first run that cannot be submitted again, with what to do instead."""
    for one in shown:
        name = title(one.run.path)
        if one.state.is_live:
            how = f"end it first with `trierarch cancel {address(one.run.path)}`"
            if one.state is RunState.stopping:
                how = "wait for its end"
            raise UserError(f"run {name} has job {one.job_id} already ({one.state}): {how}")
        if one.state is RunState.finished:
            raise UserError(
                f"run {name} is finished: to train it further, submit it with a larger loop.steps"
            )
        if one.state not in _AGAIN or not one.run.submit_settings.exists():
            raise UserError(f"run {name} was never submitted: use `trierarch submit`")


def unfinished(runs: Sequence[Found]) -> list[RunStatus]:
    """Return those of `runs` that ended without finishing."""
    return [one for one in statuses(runs) if one.state in _AGAIN]


def failed_or_lost(runs: Sequence[Found]) -> list[RunStatus]:
    """Return those of `runs` that `check` lets pass and that nobody stopped on purpose."""
    return [
        one
        for one in statuses(runs)
        if one.state in (RunState.failed, RunState.lost) and one.run.submit_settings.exists()
    ]


def resubmit(
    shown: Sequence[RunStatus], overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Submit runs again, with `overrides` of their cluster and job settings; yield what to tell of each.

    What `check` refuses is refused before the first one is submitted. Raises UserError too where Slurm refuses.
    """
    for override in overrides:
        if not says_where(configs.compose.key_of(override)):
            raise ConfigError(
                f"{override}: a resubmission keeps the training as it is, change it with `trierarch submit`"
            )
    check(shown)
    by_sweep: dict[str, list[RunFolder]] = defaultdict(list)
    for one in shown:
        sweep = sweep_of(one.run.path)
        if sweep is not None:
            by_sweep[sweep].append(one.run)
            continue
        run = RunFolder(one.run.path.absolute())
        settings, env = _settings(run, overrides, environ)
        # A network test has none.
        training = run.config.read_text() if run.config.exists() else None
        done = submit(run, training, settings, environ=env, keep_code=True)
        yield done.summary()
    for sweep, tasks in by_sweep.items():
        names = [task.name for task in tasks]
        if overrides:
            settings, env = _settings(tasks[0], overrides, environ)
            yield retry(Path(sweep), names, settings, environ=env).summary()
        else:
            yield retry(Path(sweep), names, environ=environ).summary()


def _settings(
    run: RunFolder, overrides: Sequence[str], environ: Mapping[str, str] | None
) -> tuple[SubmitConfig, dict[str, str]]:
    """Return the settings of the last submission under `overrides`, and the environment to submit in."""
    env = dict(os.environ if environ is None else environ)
    choices = [one for one in overrides if configs.compose.key_of(one) == "cluster"]
    values = [one for one in overrides if one not in choices]
    job = newest_job(run, run.read_events())
    if not choices:
        if job is not None and job.slurm_conf and Path(job.slurm_conf).exists():
            env["SLURM_CONF"] = job.slurm_conf
        settings = configs.compose.load(run.submit_settings, SubmitConfig, values)
        settings.validate(env)
        return settings, env
    # Another cluster as a whole; what the job asks for stays.
    saved = configs.compose.load(run.submit_settings, SubmitConfig)
    settings = configs.compose.change(SubmitConfig(load_submit(choices, env).cluster, saved.job), values)
    settings.validate(env)
    return settings, env
