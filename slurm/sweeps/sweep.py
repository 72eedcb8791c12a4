"""Many runs at once: a sweep's folder, its tasks, one throttled array; then return. No process stays alive.

Started again under its name a sweep grows: what is listed already is not run twice.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import configs.compose
from contract.errors import ConfigError, UserError
from contract.run_folder import RunFolder
from contract.sweep import Array, Manifest, SweepFolder, Task
from slurm.render import render
from slurm.runs.find import address, is_run
from slurm.settings import SubmitConfig
from slurm.sites.detect import scheduler_environment
from slurm.sites.profile import Scheduler
from slurm.snapshot import snapshot
from slurm.submit import check_stop_signal, not_interrupted, submitted_as, write_whole
from slurm.sweeps.arrays import Sent, ask_array_limits, live_arrays, send_waiting
from slurm.sweeps.tasks import PlannedTask, SweepPlan, new_tasks, refuse_changed_base, tasks_to_retry

# What Slurm takes where neither it nor the profile says.
_MAX_ARRAY_SIZE = 1001


@dataclass
class Outcome:
    """What became of a sweep's submission."""

    folder: SweepFolder
    added: list[Task] = field(default_factory=list)
    """The tasks that are sent for the first time; of a retry those that are sent again."""
    again: bool = False
    known: int = 0
    """Tasks of this command that the sweep had already."""
    arrays: list[Array] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    trouble: str = ""
    notes: tuple[str, ...] = ()

    def summary(self) -> str:
        """Say what was sent, what waits, where to look and how to stop it."""
        name = address(self.folder.path)
        added = _count(len(self.added), "task" if self.again else "new task") + " again" * self.again
        lines = [f"sweep {self.folder.name}: {added}"]
        if self.known:
            lines[0] += f", {_count(self.known, 'task')} of this command known already and not run twice"
        for array in self.arrays:
            has = "has" if len(array.after) == 1 else "have"
            after = f", starts when {', '.join(array.after)} {has} ended" if array.after else ""
            lines.append(
                f"array: {array.job_id} with {_count(len(array.tasks), 'task')} ({array.spec}){after}"
            )
        if self.waiting:
            how = f"`trierarch sweep submit {name}` sends them"
            if self.arrays and not self.trouble:
                how = "the last tasks in the queue send them"
            why = self.trouble or "there is no room in the queue"
            lines.append(f"wait:  {_count(len(self.waiting), 'task')}: {why}; {how}")
        lines += [
            f"look:  trierarch sweep status {name}, trierarch sweep results {name}",
            f"stop:  trierarch sweep cancel {name}",
            *(f"note:  {note}" for note in self.notes),
        ]
        return "\n".join(lines)


def start(
    plan: SweepPlan,
    settings: SubmitConfig,
    *,
    new_code: bool = False,
    environ: Mapping[str, str] | None = None,
) -> Outcome:
    """Write the folder, the runs and the manifest of a new sweep or add to it, send what is new, and return.

    With `new_code` all tasks take a fresh snapshot, else those of a sweep that exists keep its own. Raises
    UserError (one sentence) for a base that has changed, a folder that is something else or cannot be written,
    and for what the scheduler refuses; what was listed then waits for `submit_rest`.
    """
    env = dict(os.environ if environ is None else environ)
    folder = plan.folder
    script = check(plan, settings, env)
    env |= scheduler_environment(settings.cluster.name, env)

    def change(manifest: Manifest) -> list[Task]:
        refuse_changed_base(manifest, plan)
        manifest.parallel = plan.parallel or manifest.parallel
        added = new_tasks(folder, manifest, plan)
        for task, planned in added:
            _write_run(folder, task, planned)
        manifest.commands.append(plan.command)
        manifest.keys = list(dict.fromkeys([*manifest.keys, *plan.keys]))
        manifest.tasks += [task for task, _ in added]
        manifest.waiting += [task.index for task, _ in added]
        return [task for task, _ in added]

    fresh = Manifest(folder.name, time.time(), plan.keys, plan.base, plan.settings)
    outcome = _change_and_send(folder, fresh, change, settings, script, env, new_code)
    outcome.known = len(plan.tasks) - len(outcome.added)
    return outcome


def check(plan: SweepPlan, settings: SubmitConfig, environ: Mapping[str, str]) -> str:
    """Return the script of a sweep; raises UserError for what can be seen to fail before anything is written."""
    if settings.cluster.scheduler is not Scheduler.slurm:
        raise ConfigError(
            f"cluster={settings.cluster.name}: a sweep is one array job of Slurm and there is none here: "
            "`make lab-up` starts one on this machine, or submit the runs one by one"
        )
    if plan.parallel is not None and plan.parallel < 1:
        raise ConfigError(f"--parallel {plan.parallel}: let at least one task run")
    for planned in plan.tasks[:1]:
        check_stop_signal(planned.config_yaml, settings.cluster.stop_signal)
    if not plan.folder.is_sweep and is_run(plan.folder.path):
        raise UserError(f"{plan.folder.path} is a run and no sweep: give the sweep another --name")
    if plan.folder.is_sweep:
        refuse_changed_base(plan.folder.read(), plan)
    return render(RunFolder(plan.folder.path), settings, environ, sweep=True)


def preview(plan: SweepPlan, settings: SubmitConfig, environ: Mapping[str, str]) -> tuple[list[Task], str]:
    """Return the tasks that `start` would add, and the script; writes nothing and raises what `check` does."""
    script = check(plan, settings, environ)
    fresh = Manifest(plan.folder.name, time.time(), plan.keys, plan.base, plan.settings)
    manifest = plan.folder.read() if plan.folder.is_sweep else fresh
    return [task for task, _ in new_tasks(plan.folder, manifest, plan)], script


def _write_run(folder: SweepFolder, task: Task, planned: PlannedTask) -> None:
    run = folder.run(task)
    run.create()
    write_whole(run.path, run.config.name, planned.config_yaml)
    for name in (folder.code.name, folder.job_script.name, folder.submit_settings.name):
        link = run.path / name
        link.unlink(missing_ok=True)  # of a command that was interrupted
        link.symlink_to(Path("..") / name)


def retry(
    sweep: Path,
    tasks: Sequence[str] = (),
    settings: SubmitConfig | None = None,
    *,
    new_code: bool = False,
    environ: Mapping[str, str] | None = None,
) -> Outcome:
    """Send tasks again in one array: the named ones (run or index), else all that ended without finishing.

    `settings` replaces the cluster and job settings of the last submission. Raises UserError for a task that is
    not there, lives or has finished.
    """
    env = dict(os.environ if environ is None else environ)
    folder = SweepFolder(sweep.absolute())
    settings, script, env = _as_before(folder, settings, env)

    def change(manifest: Manifest) -> list[Task]:
        live_arrays(folder, env)  # without Slurm's word a task that waits or runs could be sent twice
        chosen = tasks_to_retry(folder, manifest, tasks)
        for task in chosen:
            folder.run(task).failed.unlink(missing_ok=True)
        manifest.waiting = sorted({*manifest.waiting, *(task.index for task in chosen)})
        return chosen

    outcome = _change_and_send(folder, None, change, settings, script, env, new_code)
    outcome.again = True
    return outcome


def submit_rest(
    sweep: Path, settings: SubmitConfig | None = None, *, environ: Mapping[str, str] | None = None
) -> Outcome:
    """Send the tasks that still wait for room in the queue, as many as there is room for."""
    env = dict(os.environ if environ is None else environ)
    folder = SweepFolder(sweep.absolute())
    settings, script, env = _as_before(folder, settings, env)
    return _change_and_send(folder, None, lambda manifest: [], settings, script, env, new_code=False)


def _as_before(
    folder: SweepFolder, settings: SubmitConfig | None, environ: dict[str, str]
) -> tuple[SubmitConfig, str, dict[str, str]]:
    """Return the settings (those of the last submission if none are given), their script and the environment."""
    submitted = folder.read().submitted
    if settings is None:
        settings = configs.compose.load(folder.submit_settings, SubmitConfig)
        settings.validate(environ)
        if submitted.get("slurm_conf"):
            environ["SLURM_CONF"] = submitted["slurm_conf"]
    else:
        environ |= scheduler_environment(settings.cluster.name, environ)
    return settings, render(RunFolder(folder.path), settings, environ, sweep=True), environ


def _change_and_send(
    folder: SweepFolder,
    fresh: Manifest | None,
    change: Callable[[Manifest], list[Task]],
    settings: SubmitConfig,
    script: str,
    environ: Mapping[str, str],
    new_code: bool,
) -> Outcome:
    """Apply `change` to the manifest (`fresh` if there is none yet) and send what waits, all under the lock."""
    try:
        folder.logs.mkdir(parents=True, exist_ok=True)
        with folder.locked(), not_interrupted():
            manifest = folder.read() if fresh is None or folder.is_sweep else fresh
            notes = _take_code(folder, environ, new_code)
            changed = change(manifest)
            _set_limits(manifest, settings, environ)
            manifest.submitted = submitted_as(settings, environ)
            write_whole(folder.path, folder.job_script.name, script)
            write_whole(folder.path, folder.submit_settings.name, configs.compose.to_yaml(settings))
            folder.write(manifest)
            sent = Sent() if manifest.is_sent else send_waiting(folder, environ)
    except OSError as error:
        where = error.filename or folder.path
        raise UserError(
            f"the sweep's folder cannot be written ({where}: {error.strerror}): set run.root"
        ) from error
    if sent.trouble and not sent.arrays:
        waiting = f"{_count(len(sent.waiting), 'task')} of sweep {folder.name}"
        raise UserError(
            f"{sent.trouble}; `trierarch sweep submit {address(folder.path)}` sends the {waiting} when that is mended"
        )
    return Outcome(
        folder,
        changed,
        arrays=sent.arrays,
        waiting=sent.waiting,
        trouble=sent.trouble,
        notes=(*settings.notes(environ), *notes),
    )


def _take_code(folder: SweepFolder, environ: Mapping[str, str], new_code: bool) -> list[str]:
    """Leave the sweep's snapshot as it is, so that its tasks can be compared, unless a new one is wanted.

    Returns what the user should know of that.
    """
    if new_code and folder.is_sweep and live_arrays(folder, environ):
        raise UserError(
            f"tasks of sweep {folder.name} wait or run with its code: give --new-code when they have ended"
        )
    if folder.code.is_dir() and not new_code:
        taken = time.strftime("%Y-%m-%d %H:%M", time.localtime(folder.code.stat().st_mtime))
        return [f"the tasks run the sweep's own code, of {taken}; --new-code takes today's"]
    snapshot(RunFolder(folder.path))
    return []


def _set_limits(manifest: Manifest, settings: SubmitConfig, environ: Mapping[str, str]) -> None:
    size, tasks = ask_array_limits(environ)
    manifest.max_array_size = size or settings.cluster.max_array_size or _MAX_ARRAY_SIZE
    if settings.cluster.max_array_size:
        manifest.max_array_size = min(manifest.max_array_size, settings.cluster.max_array_size)
    manifest.max_array_tasks = tasks
    manifest.max_submit_jobs = settings.cluster.max_submit_jobs


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
