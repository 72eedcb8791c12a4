"""The results of a sweep: the final and the best value of a metric by the swept keys; as a table, CSV or JSON."""

import csv
import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from configs.sweep import short_keys
from contract.errors import UserError, closest
from contract.run_folder import RunFolder
from contract.sweep import SweepFolder
from tools.sweep_status import show
from tools.table import table

_FINISHED = "finished"


@dataclass(frozen=True)
class Result:
    """One task: its settings, its state, and the metric as far as it came."""

    index: int
    run: str
    values: dict[str, Any]
    state: str
    step: int | None = None
    """The step of the final value."""
    final: float | None = None
    """The newest value; None when the run has written none."""
    best: float | None = None
    best_step: int | None = None


@dataclass(frozen=True)
class Results:
    """A sweep's tasks, the best first; those without a value come last."""

    sweep: str
    metric: str
    highest: bool
    keys: list[str]
    rows: list[Result] = field(default_factory=list)

    @property
    def winner(self) -> Result | None:
        """The finished task with the best final value; while none has finished, the best of the others."""
        usable = [row for row in self.rows if row.final is not None and math.isfinite(row.final)]
        finished = [row for row in usable if row.state == _FINISHED]
        return next(iter(finished or usable), None)


def collect(
    folder: SweepFolder, states: Mapping[str, str], metric: str = "eval_loss", highest: bool = False
) -> Results:
    """Read the metric of every task; `states` by the name of the run.

    Raises UserError, with the closest names, if tasks have metrics but none has this one.
    """
    manifest = folder.read()
    rows = []
    for task in manifest.tasks:
        state = "waiting" if task.index in manifest.waiting else states.get(task.run, "new")
        points = list(_points(folder.run(task), metric))
        if not points:
            rows.append(Result(task.index, task.run, task.values, state))
            continue
        final_step, final = points[-1]
        finite = [point for point in points if math.isfinite(point[1])] or points
        best_step, best = (max if highest else min)(finite, key=lambda point: point[1])
        rows.append(Result(task.index, task.run, task.values, state, final_step, final, best, best_step))
    if all(row.final is None for row in rows):
        _refuse_unknown(folder, metric)
    rows.sort(key=lambda row: _rank(row, highest))
    return Results(manifest.name, metric, highest, list(manifest.keys), rows)


def _rank(row: Result, highest: bool) -> tuple[int, float, int]:
    if row.final is None:
        return 2, 0.0, row.index
    if not math.isfinite(row.final):
        return 1, 0.0, row.index
    return 0, -row.final if highest else row.final, row.index


def _points(run: RunFolder, metric: str) -> list[tuple[int, float]]:
    """Return (step, value) of every line that has the metric; a long run's other lines are not parsed."""
    try:
        text = run.metrics.read_text(errors="replace")
    except FileNotFoundError:
        return []
    key = json.dumps(metric)
    points = []
    for line in text.splitlines():
        if key not in line:
            continue
        try:
            values = json.loads(line)
        except ValueError:  # torn
            continue
        value = values.get(metric) if isinstance(values, dict) else None
        if isinstance(value, int | float):
            points.append((int(values.get("step", 0)), float(value)))
    return points


def _refuse_unknown(folder: SweepFolder, metric: str) -> None:
    names: set[str] = set()
    for task in folder.read().tasks:
        file = folder.run(task).metrics
        if file.exists():
            for line in file.read_text(errors="replace").splitlines():
                if line.startswith("{") and line.endswith("}"):
                    names |= json.loads(line).keys()
    names.discard("step")
    if names - {metric}:
        raise UserError(
            f"--metric {metric}: no task of {folder.name} has written it, {closest(metric, names)}"
        )


def render(results: Results) -> str:
    """Return a table, the best task first and marked."""
    short = short_keys(results.keys)
    winner = results.winner
    best = f"{'highest' if results.highest else 'lowest'} {results.metric}"
    head = ("", "task", *short.values(), results.metric, "step", best, "at step", "state", "run")
    rows = [
        (
            "*" if row is winner else "",
            str(row.index),
            *(show(row.values.get(key)) for key in results.keys),
            _number(row.final),
            "" if row.step is None else str(row.step),
            _number(row.best),
            "" if row.best_step is None else str(row.best_step),
            row.state,
            row.run,
        )
        for row in results.rows
    ]
    right = frozenset({"task", *short.values(), results.metric, "step", best, "at step"})
    missing = sum(row.final is None for row in results.rows)
    unfinished = sum(row.state != _FINISHED and row.final is not None for row in results.rows)
    notes = [
        *([f"{missing} without a value"] if missing else []),
        *([f"{unfinished} not finished"] if unfinished else []),
    ]
    told = f" ({', '.join(notes)})" if notes else ""
    return f"sweep {results.sweep}: {results.metric} of {len(results.rows)} tasks{told}\n" + table(
        head, rows, right, None
    )


def to_csv(results: Results) -> str:
    """Return comma-separated values in full precision, with a header."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    metric = results.metric
    writer.writerow(["task", "run", *results.keys, "state", "step", metric, f"best_{metric}", "best_step"])
    for row in results.rows:
        values = [row.values.get(key) for key in results.keys]
        writer.writerow(
            [row.index, row.run, *values, row.state, row.step, row.final, row.best, row.best_step]
        )
    return text.getvalue()


def to_json(results: Results) -> str:
    """Return a list of objects, the best first; what is not known is null, and so is what is no finite number."""
    winner = results.winner
    objects = [
        {
            "index": row.index,
            "run": row.run,
            "values": row.values,
            "state": row.state,
            "step": row.step,
            results.metric: _finite(row.final),
            f"best_{results.metric}": _finite(row.best),
            "best_step": row.best_step,
            "winner": row is winner,
        }
        for row in results.rows
    ]
    return json.dumps(objects, indent=1) + "\n"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"
