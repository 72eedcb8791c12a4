"""What a sweep is asked to be, and what it is already: which tasks are new, which may run again."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import configs.compose
from contract.errors import ConfigError, UserError, closest
from contract.sweep import Manifest, SweepFolder, Task
from slurm.runs.status import RunState, status


@dataclass(frozen=True)
class PlannedTask:
    """One combination of a sweep, composed and checked."""

    run: str
    """The name of its folder."""
    overrides: list[str]
    values: dict[str, Any]
    """The resolved value of every key that is swept, or was when the sweep began."""
    config_yaml: str
    """Its configuration, with the sweep's folder as `run.root`."""


@dataclass(frozen=True)
class SweepPlan:
    """All that a sweep is asked to be."""

    folder: SweepFolder
    keys: list[str]
    base: list[str]
    settings: dict[str, Any]
    """The configuration that `base` gives, by dotted key, and the choice of each group by the group's name."""
    tasks: list[PlannedTask]
    parallel: int | None = None
    command: str = ""


def refuse_changed_base(manifest: Manifest, plan: SweepPlan) -> None:
    """Raise ConfigError if what all tasks share is no longer what it was: the tasks could not be compared."""
    swept = {*manifest.keys, *plan.keys}
    inside = tuple(f"{key}." for key in swept)

    def shared(settings: Mapping[str, Any], base: Sequence[str]) -> dict[str, Any]:
        leaves = {key: value for key, value in settings.items() if not key.startswith(inside)}
        # Below a swept group the base says little: its tasks replace it. What was typed counts.
        typed = dict(text.split("=", 1) for text in base if text.startswith(inside))
        kept = {**leaves, **typed}
        return {key: value for key, value in kept.items() if key not in (*swept, "run.name", "run.root")}

    before, now = shared(manifest.settings, manifest.base), shared(plan.settings, plan.base)
    changed = [
        f"{key} was {before.get(key)} and is {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise ConfigError(
            f"sweep {manifest.name} has other settings: {'; '.join(changed[:3])}{more}: "
            "leave them as they were, sweep over them, or give another --name"
        )


def new_tasks(folder: SweepFolder, manifest: Manifest, plan: SweepPlan) -> list[tuple[Task, PlannedTask]]:
    """Return the planned tasks that the manifest has not, each combination once."""
    keys = sorted({*manifest.keys, *plan.keys})
    known = {_identity(keys, _values(folder, manifest, task, keys)) for task in manifest.tasks}
    names = {task.run for task in manifest.tasks}
    added: list[tuple[Task, PlannedTask]] = []
    for planned in plan.tasks:
        identity = _identity(keys, planned.values)
        if identity in known:
            continue
        if planned.run in names:
            raise UserError(f"two tasks would share the folder {planned.run}: give another --name")
        known.add(identity)
        names.add(planned.run)
        index = len(manifest.tasks) + len(added)
        added.append((Task(index, planned.run, planned.overrides, planned.values), planned))
    return added


def _identity(keys: Sequence[str], values: Mapping[str, Any]) -> str:
    return json.dumps([values.get(key) for key in keys], sort_keys=True)


def _values(folder: SweepFolder, manifest: Manifest, task: Task, keys: Sequence[str]) -> dict[str, Any]:
    """Return a listed task's value of each key, also of those that were not swept when it was added."""
    if set(keys) <= task.values.keys():
        return task.values
    text = folder.run(task).config.read_text()
    return {**manifest.settings, **configs.compose.flatten_yaml(text), **task.values}


def tasks_to_retry(folder: SweepFolder, manifest: Manifest, names: Sequence[str]) -> list[Task]:
    """Return the named tasks, or all that ended without finishing; raises UserError for one that may not run again."""
    states = {one.run.name: one.state for one in status(folder.path)}
    unsent = set(manifest.waiting)
    if not names:
        ended = [task for task in manifest.tasks if _may_run_again(states.get(task.run, RunState.new))]
        return [task for task in ended if task.index not in unsent]
    chosen = [find_task(manifest, name) for name in names]
    for task in chosen:
        state = states.get(task.run, RunState.new)
        if not _may_run_again(state):
            raise UserError(
                f"task {task.run} is {state}: only one that ended without finishing can be sent again"
            )
    return chosen


def _may_run_again(state: RunState) -> bool:
    return not state.is_live and state is not RunState.finished


def find_task(manifest: Manifest, name: str) -> Task:
    """Return the task of that folder name or index; raises UserError with the closest names."""
    for task in manifest.tasks:
        if name in (task.run, str(task.index)):
            return task
    names = [task.run for task in manifest.tasks]
    raise UserError(f"sweep {manifest.name} has no task {name}, {closest(name, names)}")
