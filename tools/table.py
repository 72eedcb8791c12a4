"""States of runs as text: a table for a terminal, objects for a script.

Written without a table library: ten thousand rows must not take seconds.
"""

import json
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from slurm.runs.status import RunState, RunStatus, counts

_HEAD = ("run", "state", "job", "step", "loss", "checkpoint", "to go", "last sign", "reason")
_RIGHT = frozenset({"step", "loss", "checkpoint", "to go", "last sign"})
# Less than this beside the other columns, and a reason stands below its run.
_NARROWEST = 30
_INDENT = 4
Row = tuple[str, ...]


def render(statuses: Sequence[RunStatus], width: int | None = None, tasks: bool = True) -> str:
    """Return a table for a terminal of `width` columns; without a width every run takes one line.

    `tasks=False` makes one line of each sweep. Runs that are over come first, by their last sign of life;
    those that live come last, by name.
    """
    if not statuses:
        return "no runs\n"
    rows = [_row(one) for one in ordered(statuses)] if tasks else list(_with_sweeps(statuses))
    text = table(_HEAD, rows, _RIGHT, width)
    # Of many runs only what they do; of one all that is known.
    is_one = len(statuses) == 1 and (tasks or statuses[0].sweep is None)
    return text + _network(statuses[0], width) if is_one else text


def _network(one: RunStatus, width: int | None) -> str:
    if not one.network:
        return ""
    text = f"network: {_plain(one.network)}"
    lines = [text] if width is None else textwrap.wrap(text, width, subsequent_indent=" " * _INDENT)
    return "".join(f"{line}\n" for line in lines)


def ordered(statuses: Iterable[RunStatus]) -> list[RunStatus]:
    """Sort for a reader who looks at the end: what has gone on lately stands there, and does not jump about."""

    def key(one: RunStatus) -> tuple[bool, float, str]:
        age_s = float("inf") if one.age_s is None else one.age_s
        return one.state.is_live, 0.0 if one.state.is_live else -age_s, str(one.run.path)

    return sorted(statuses, key=key)


def as_json(statuses: Sequence[RunStatus]) -> str:
    """Return a list of objects, one for each run, in the order given; what is not known is null."""
    # One a line: ten times as fast as indented, and still readable.
    return "[" + ",\n ".join(json.dumps(_object(one)) for one in statuses) + "]\n"


def table(head: Row, rows: Sequence[Row], right: frozenset[str], width: int | None) -> str:
    """Align columns; the last one is folded into what `width` leaves for it. Columns without content are left out."""
    kept = [index for index in range(len(head)) if index < 2 or any(row[index] for row in rows)]
    lines = [tuple(row[index] for index in kept) for row in (head, *rows)]
    if kept[-1] != len(head) - 1:  # nothing to fold
        lines = [(*line, "") for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)][:-1]
    marks = [">" if head[index] in right else "<" for index in kept]
    form = "  ".join(f"{{:{mark}{size}}}" for mark, size in zip(marks, widths, strict=False))
    start = sum(widths) + 2 * len(widths)
    if width is not None and width - start < _NARROWEST:
        lines[0] = (*lines[0][:-1], "")  # the reasons stand below
    return "".join(_fold(form.format(*line[:-1]), line[-1], start, width) for line in lines)


def _fold(cells: str, text: str, start: int, width: int | None) -> str:
    text = _plain(text)
    if width is None or start + len(text) <= width:
        return f"{cells}  {text}".rstrip() + "\n"
    if width - start >= _NARROWEST:
        first, *rest = textwrap.wrap(text, width - start)
        return f"{cells}  {first}\n" + "".join(f"{' ' * start}{line}\n" for line in rest)
    below = textwrap.wrap(text, max(_NARROWEST, width - _INDENT))
    return cells.rstrip() + "\n" + "".join(f"{' ' * _INDENT}{line}\n" for line in below)


def _plain(text: str) -> str:
    """Keep a message on its line, and what would drive the terminal out of it."""
    if text.isprintable():
        return text
    return "".join(letter for letter in " ".join(text.split()) if letter.isprintable())


def _row(one: RunStatus) -> Row:
    return (
        _plain(one.run.name if one.sweep is None else f"{Path(one.sweep).name}/{one.run.name}"),
        one.state,
        one.job_id or "",
        _of(one.step, one.steps),
        "" if one.loss is None else f"{one.loss:.4f}",
        "" if one.checkpoint_step is None else str(one.checkpoint_step),
        "" if one.left_s is None else duration(one.left_s),
        "" if one.age_s is None else f"{duration(one.age_s)} ago",
        _remark(one),
    )


def _remark(one: RunStatus) -> str:
    if not one.restarts or not one.state.is_live:
        return one.reason
    times = "once" if one.restarts == 1 else f"{one.restarts} times"
    return f"came back {times}" + (f"; {one.reason}" if one.reason else "")


def _with_sweeps(statuses: Sequence[RunStatus]) -> Iterable[Row]:
    """Yield the rows with one for each sweep, which stands where its newest task would."""
    by_sweep: dict[str, list[RunStatus]] = {}
    for one in statuses:
        if one.sweep is not None:
            by_sweep.setdefault(one.sweep, []).append(one)
    newest = {id(ordered(tasks)[-1]): sweep for sweep, tasks in by_sweep.items()}
    for one in ordered(statuses):
        if one.sweep is None:
            yield _row(one)
        elif id(one) in newest:
            yield _sweep_row(newest[id(one)], by_sweep[newest[id(one)]])


def _sweep_row(sweep: str, tasks: Sequence[RunStatus]) -> Row:
    found = counts(tasks)
    ages = [one.age_s for one in tasks if one.age_s is not None]
    arrays = dict.fromkeys(one.job_id.partition("_")[0] for one in tasks if one.job_id)
    return (
        f"{_plain(Path(sweep).name)}/",
        _sweep_state(found),
        ",".join(arrays),
        "",
        "",
        "",
        "",
        f"{duration(min(ages))} ago" if ages else "",
        f"sweep of {len(tasks)}: " + ", ".join(f"{number} {state}" for state, number in found.items()),
    )


def _sweep_state(found: dict[RunState, int]) -> RunState:
    """Name the state that says most of a sweep: does something go on, else did something go wrong."""
    order = (
        *(RunState.running, RunState.stopping, RunState.silent, RunState.requeued, RunState.queued),
        *(RunState.lost, RunState.failed, RunState.stopped, RunState.new, RunState.finished),
    )
    return next(state for state in order if state in found)


def _object(one: RunStatus) -> dict[str, Any]:
    return {
        "run": one.run.name,
        "path": str(one.run.path),
        "sweep": one.sweep,
        "state": one.state,
        "job": one.job_id,
        "reason": one.reason,
        "step": one.step,
        "steps": one.steps,
        "loss": one.loss,
        "checkpoint_step": one.checkpoint_step,
        "left_s": one.left_s,
        "age_s": one.age_s,
        "restarts": one.restarts,
        "bad_nodes": list(one.bad_nodes),
        "network": one.network,
    }


def _of(step: int | None, steps: int | None) -> str:
    if step is None:
        return "" if steps is None else f"-/{steps}"
    return str(step) if steps is None else f"{step}/{steps}"


def duration(seconds: float) -> str:
    """Write a time in the unit that suits it: `90 s`, `12 min`, `30 h`, `3 d`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} d"
