"""A picture of a sweep: the metric over the swept keys.

One key: a line, or points for words. Two: a heat map of two rows of numbers, else a line for each value of the
second. Three: the same once for each value of the third. More: one panel for each key. Seeds are no axis: tasks that
differ in nothing else are repetitions, drawn as points around the line of their mean.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.errors import UserError
from tools.sweep_panels import Canvas, levels, panel, repeated_key, strip
from tools.sweep_results import Results
from tools.sweep_status import show

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FORMATS = (".png", ".svg", ".pdf")
_MOST_PANELS = 9


def draw(results: Results, path: Path) -> None:
    """Draw the final values to `path` (.png, .svg or .pdf); raises UserError if there is nothing to draw."""
    if path.suffix.lower() not in _FORMATS:
        raise UserError(f"--plot {path}: give a file that ends in {', '.join(_FORMATS)}")
    rows = [row for row in results.rows if row.final is not None and math.isfinite(row.final)]
    if len(rows) < 2:
        raise UserError(
            f"--plot: {len(rows)} tasks of {results.sweep} have a {results.metric}, two are needed"
        )
    import matplotlib as mpl

    style: Any = {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.3,
        "axes.axisbelow": True,
        "legend.frameon": False,
    }
    with mpl.rc_context(style):
        figure = figure_of(results)
        try:
            figure.savefig(path, dpi=150)
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror}): give another file") from error


def figure_of(results: Results) -> "Figure":
    """Return the picture of the tasks that have a finite final value."""
    canvas = Canvas(results)
    figure = _figure(canvas)
    missing = len(results.rows) - len(canvas.rows)
    told = f"{len(canvas.rows)} tasks" + (f", {missing} without a value" if missing else "")
    figure.suptitle(f"{results.sweep}: final {results.metric} ({told})", x=0.01, ha="left", fontsize=11)
    return figure


def _figure(canvas: Canvas) -> "Figure":
    count = len(canvas.keys)
    if count == 0:
        return _one(canvas, lambda axes: strip(axes, canvas, repeated_key(canvas)))
    if count <= 2:
        return _one(canvas, lambda axes: panel(axes, canvas, canvas.rows, canvas.keys))
    facets = min(canvas.keys, key=lambda key: len(levels(canvas.rows, key)))
    if count == 3 and len(levels(canvas.rows, facets)) <= _MOST_PANELS:
        return _multiples(canvas, facets)
    return _strips(canvas)


def _one(canvas: Canvas, draw_panel: Callable[["Axes"], None]) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    axes = figure.add_subplot()
    draw_panel(axes)
    _explain_colours(canvas, [axes])
    return figure


def _multiples(canvas: Canvas, facets: str) -> "Figure":
    """Draw the panel of two keys once for each value of the third, on the same scale."""
    chosen = levels(canvas.rows, facets)
    keys = [key for key in canvas.keys if key != facets]
    axes = _grid(len(chosen), share=True)
    for one, level in zip(axes, chosen, strict=True):
        panel(one, canvas, [row for row in canvas.rows if row.values.get(facets) == level], keys)
        one.set_title(f"{canvas.short[facets]} = {show(level)}", fontsize=10)
        one.label_outer()
    _explain_colours(canvas, axes)
    return _parent(axes)


def _explain_colours(canvas: Canvas, axes: "Sequence[Axes]") -> None:
    """Draw one scale for all heat maps of a figure, if there is one."""
    images = [image for one in axes for image in one.get_images()]
    if images:
        _parent(axes).colorbar(images[0], ax=list(axes), label=canvas.results.metric)


def _strips(canvas: Canvas) -> "Figure":
    """Draw all tasks over each key for itself, with the mean of each value."""
    axes = _grid(len(canvas.keys), share=False)
    for one, key in zip(axes, canvas.keys, strict=True):
        strip(one, canvas, key)
    return _parent(axes)


def _grid(count: int, share: bool) -> "list[Axes]":
    from matplotlib.figure import Figure

    columns = min(3, count)
    lines = math.ceil(count / columns)
    figure = Figure(figsize=(1.0 + 3.6 * columns, 0.6 + 3.2 * lines), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False, sharey=share).flat)
    for unused in axes[count:]:
        unused.set_visible(False)
    return axes[:count]


def _parent(axes: "Sequence[Axes]") -> "Figure":
    from matplotlib.figure import Figure

    figure = axes[0].figure
    assert isinstance(figure, Figure)
    return figure
