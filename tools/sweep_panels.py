"""One panel of a sweep's picture: lines, points or a heat map of the metric over one or two keys."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from configs.sweep import short_keys
from tools.sweep_results import Result, Results
from tools.sweep_status import show

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# From this ratio of the largest to the smallest value on, an axis is logarithmic.
_DECADE = 10.0
_MOST_LINES = 8
# Of all tick labels together, side by side.
_MOST_LETTERS = 45
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C564B")
_BEST = "#D62728"


class Canvas:
    """What is drawn: the tasks that have a value, and the keys that differ between them."""

    def __init__(self, results: Results) -> None:
        """Only tasks with a finite final value can be drawn."""
        self.results = results
        rows = [row for row in results.rows if row.final is not None and math.isfinite(row.final)]
        self.rows = rows
        self.short = short_keys(results.keys)
        self.keys = sorted(
            (key for key in results.keys if len(levels(rows, key)) > 1 and not _is_seed(key)),
            # The longest row of numbers makes the best axis.
            key=lambda key: (not _is_numeric(rows, key), -len(levels(rows, key))),
        )


def panel(axes: "Axes", canvas: Canvas, rows: list[Result], keys: list[str]) -> None:
    """Draw the metric over one or two keys."""
    if len(keys) == 1:
        _line(axes, canvas, rows, keys[0], _COLOURS[0], None)
        _finish(axes, canvas, rows, keys[0])
        return
    first, second = keys
    numbers = all(_is_numeric(rows, key) and len(levels(rows, key)) > 2 for key in keys)
    many = len(levels(canvas.rows, second)) > _MOST_LINES
    if (numbers and not _has_gaps(rows, keys)) or many:
        _heat_map(axes, canvas, rows, first, second)
        return
    for number, level in enumerate(levels(canvas.rows, second)):
        chosen = [row for row in rows if row.values.get(second) == level]
        if chosen:
            _line(axes, canvas, chosen, first, _COLOURS[number], show(level))
    _finish(axes, canvas, rows, first)
    axes.legend(title=canvas.short[second], fontsize=9)


def _line(axes: "Axes", canvas: Canvas, rows: list[Result], key: str, colour: str, label: str | None) -> None:
    """Draw points, and a line through the mean of each value of a numeric key."""
    places = _places(canvas, key)
    by_place: dict[float, list[float]] = defaultdict(list)
    for row in rows:
        by_place[places(row)].append(_final(row))
    axes.plot(
        [places(row) for row in rows],
        [_final(row) for row in rows],
        "o",
        color=colour,
        alpha=0.75,
        markersize=5,
        label=None if _is_numeric(canvas.rows, key) else label,
    )
    x = sorted(by_place)
    means = [_mean(by_place[place]) for place in x]
    if _is_numeric(canvas.rows, key):
        axes.plot(x, means, "-", color=colour, label=label)
    elif len(rows) > len(x):
        axes.plot(x, means, "_", color=colour, markersize=24)


def strip(axes: "Axes", canvas: Canvas, key: str) -> None:
    """Draw all tasks over one key, with the mean of each value."""
    _line(axes, canvas, canvas.rows, key, _COLOURS[0], None)
    _finish(axes, canvas, canvas.rows, key)


def _finish(axes: "Axes", canvas: Canvas, rows: list[Result], key: str) -> None:
    """Name and scale the axes, and mark the best task."""
    axes.set_xlabel(canvas.short[key])
    axes.set_ylabel(canvas.results.metric)
    values = levels(canvas.rows, key)
    if not _is_numeric(canvas.rows, key):
        axes.set_xticks(range(len(values)), [show(level) for level in values])
        axes.set_xlim(-0.5, len(values) - 0.5)
        if sum(len(show(level)) for level in values) > _MOST_LETTERS:
            axes.tick_params(axis="x", rotation=20)
    else:
        _scale_numbers(axes, values)
    finals = [_final(row) for row in canvas.rows]
    if _spans_decades(finals):
        axes.set_yscale("log")
    axes.margins(x=0.08, y=0.15)
    winner = canvas.results.winner
    if winner in rows and winner is not None:
        at = _places(canvas, key)(winner)
        axes.plot([at], [_final(winner)], "*", color=_BEST, markersize=13, zorder=5)
        axes.annotate(
            f"best: {_final(winner):.4g}",
            (at, _final(winner)),
            textcoords="offset points",
            xytext=(0, 10 if canvas.results.highest else -18),
            ha="center",
            color=_BEST,
            fontsize=9,
        )


def _scale_numbers(axes: "Axes", values: Sequence[Any]) -> None:
    from matplotlib.ticker import NullLocator

    if _spans_decades(values):
        axes.set_xscale("log")
    if len(values) <= 10:
        axes.set_xticks(list(values), [show(value) for value in values])
        axes.xaxis.set_minor_locator(NullLocator())
        if len(values) > 6:
            axes.tick_params(axis="x", rotation=30)


def _heat_map(axes: "Axes", canvas: Canvas, rows: list[Result], first: str, second: str) -> None:
    """Draw one cell for each pair, with its value written in it while there is room."""
    columns, lines = levels(canvas.rows, first), levels(canvas.rows, second)
    cells: dict[tuple[int, int], list[float]] = defaultdict(list)
    for row in rows:
        cells[lines.index(row.values.get(second)), columns.index(row.values.get(first))].append(_final(row))
    grid = [
        [
            _mean(cells[line, column]) if (line, column) in cells else math.nan
            for column in range(len(columns))
        ]
        for line in range(len(lines))
    ]
    from matplotlib.patches import Rectangle

    finals = [_final(row) for row in canvas.rows]
    shown = axes.imshow(
        grid,
        origin="lower",
        aspect="auto",
        cmap="viridis" if canvas.results.highest else "viridis_r",
        vmin=min(finals),
        vmax=max(finals),
    )
    axes.grid(False)
    axes.set_facecolor("#E0E0E0")
    axes.set_xticks(range(len(columns)), [show(level) for level in columns])
    axes.set_yticks(range(len(lines)), [show(level) for level in lines])
    axes.set_xlabel(canvas.short[first])
    axes.set_ylabel(canvas.short[second])
    winner = canvas.results.winner
    for (line, column), values in cells.items():
        at = lines[line], columns[column]
        best = winner in rows and (winner.values.get(second), winner.values.get(first)) == at
        if len(columns) * len(lines) <= 100:
            shade = (_mean(values) - min(finals)) / ((max(finals) - min(finals)) or 1.0)
            light = _is_dark(shown.cmap(shade))
            axes.text(
                column,
                line,
                f"{_mean(values):.4g}",
                ha="center",
                va="center",
                fontsize=8,
                color="white" if light else "black",
                fontweight="bold" if best else "normal",
            )
        if best:
            axes.add_patch(
                Rectangle(
                    (column - 0.48, line - 0.48), 0.96, 0.96, fill=False, edgecolor=_BEST, linewidth=2.5
                )
            )


def _is_dark(colour: Any) -> bool:
    red, green, blue = colour[:3]
    return bool(0.3 * red + 0.59 * green + 0.11 * blue < 0.5)


def _places(canvas: Canvas, key: str) -> Callable[[Result], float]:
    """Return where on the x axis a task stands: at its number, or at the place of its word."""
    if _is_numeric(canvas.rows, key):
        return lambda row: float(row.values[key])
    values = levels(canvas.rows, key)
    return lambda row: float(values.index(row.values.get(key)))


def repeated_key(canvas: Canvas) -> str:
    """Return the key that differs where only seeds do."""
    return next(
        (key for key in canvas.results.keys if len(levels(canvas.rows, key)) > 1), canvas.results.keys[0]
    )


def levels(rows: Sequence[Result], key: str) -> list[Any]:
    """Return the values of a key, in order: numbers by size, words by name and the numbers in it."""
    found: list[Any] = []
    for row in rows:
        value = row.values.get(key)
        if value not in found:
            found.append(value)
    numeric = all(_is_number(value) for value in found)
    return sorted(found, key=(lambda value: value) if numeric else _natural)


def _natural(value: object) -> list[tuple[int, str]]:
    """Order llama_3m before llama_25m."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(value))]


def _is_numeric(rows: Sequence[Result], key: str) -> bool:
    return all(_is_number(row.values.get(key)) for row in rows)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_seed(key: str) -> bool:
    return key.rpartition(".")[2] == "seed"


def _spans_decades(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) / min(values) >= _DECADE


def _has_gaps(rows: Sequence[Result], keys: Sequence[str]) -> bool:
    """Whether more than a quarter of the pairs has no task: a heat map would show holes."""
    pairs = {tuple(str(row.values.get(key)) for key in keys) for row in rows}
    return len(pairs) < 0.75 * math.prod(len(levels(rows, key)) for key in keys)


def _final(row: Result) -> float:
    assert row.final is not None
    return row.final


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
