"""The states of a sweep's tasks as text: how many of each, then every task with its swept settings."""

import json
import shlex
from collections import Counter
from collections.abc import Mapping
from typing import Any

from configs.sweep import short_keys
from contract.sweep import Manifest, Task
from slurm.runs.status import RunStatus
from tools.table import table


def render(manifest: Manifest, states: Mapping[str, RunStatus], where: str, width: int | None = None) -> str:
    """Return the counts and a table of the tasks, by index; `states` by the name of the run.

    `where` is how the user calls the sweep; the table is folded to `width` columns if there is one.
    """
    short = short_keys(manifest.keys)
    head = ("task", *short.values(), "state", "job", "step", "loss", "reason")
    rows = [_row(manifest, task, states.get(task.run)) for task in manifest.tasks]
    counts = Counter(row[1 + len(short)] for row in rows)
    told = ", ".join(f"{number} {state}" for state, number in counts.most_common())
    throttle = f"; at most {manifest.parallel} at a time" if manifest.parallel else ""
    first = manifest.tasks[0].run if manifest.tasks else "TASK"
    return (
        f"sweep {manifest.name}: {len(manifest.tasks)} tasks: {told}{throttle}\n"
        + table(head, rows, frozenset({"task", "step", "loss", *short.values()}), width)
        + f"each is a run: trierarch logs {shlex.quote(f'{where}/{first}')}\n"
    )


def _row(manifest: Manifest, task: Task, one: RunStatus | None) -> tuple[str, ...]:
    state, reason = _state(manifest, task, one)
    step = (
        "" if one is None or one.step is None else f"{one.step}/{one.steps}" if one.steps else str(one.step)
    )
    return (
        str(task.index),
        *(show(task.values.get(key)) for key in manifest.keys),
        state,
        (one.job_id if one else "") or "",
        step,
        "" if one is None or one.loss is None else f"{one.loss:.4f}",
        reason,
    )


def _state(manifest: Manifest, task: Task, one: RunStatus | None) -> tuple[str, str]:
    if task.index in manifest.waiting:
        return "waiting", "for room in the queue"
    return ("new", "") if one is None else (str(one.state), one.reason)


def as_json_text(manifest: Manifest, states: Mapping[str, RunStatus]) -> str:
    """Return an object with the counts and a list of the tasks; what is not known is null."""
    tasks: list[dict[str, Any]] = []
    for task in manifest.tasks:
        one = states.get(task.run)
        state, reason = _state(manifest, task, one)
        tasks.append(
            {
                "index": task.index,
                "run": task.run,
                "values": task.values,
                "state": state,
                "reason": reason,
                "job": one.job_id if one else None,
                "step": one.step if one else None,
                "steps": one.steps if one else None,
                "loss": one.loss if one else None,
            }
        )
    counts = Counter(task["state"] for task in tasks)
    return json.dumps({"sweep": manifest.name, "counts": counts, "tasks": tasks}, indent=1) + "\n"


def show(value: object) -> str:
    """Write a setting's value short; a key that was not swept when the task was added has none."""
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)
