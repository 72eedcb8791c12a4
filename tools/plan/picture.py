"""A plan as a picture: the step's timeline, communication by axis, and memory against what the GPU has."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.errors import UserError
from tools.plan.memory import Memory
from tools.plan.pipeline.simulate import Span, Timeline
from tools.plan.step import Lane

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_FORMATS = (".png", ".svg", ".pdf")
_GIB = 2**30

COLOURS = {"F": "#4477aa", "B": "#ddaa33", "W": "#66a182", "BW": "#cc6677"}
_WORDS = {
    "F": "forward",
    "B": "backward, input",
    "W": "backward, weights",
    "BW": "backward",
}
_PARTS = {
    "weights": "#332288",
    "gradients": "#88ccee",
    "optimizer": "#117733",
    "activations": "#ddcc77",
    "buffers": "#cc6677",
    "fragmentation": "#aa4499",
    "context": "#bbbbbb",
}
_ROWS = 10
"""Most ranks that are drawn."""
_CHUNKS = 60
"""That are told from each other in a row; of more only the first and the last part of the step are drawn."""
_NUMBERED = 48
"""Chunks in a row that have room for the number of their micro-batch."""
_LETTER = 0.009
"""Width of a digit in a row, as a share of it."""


@dataclass(frozen=True)
class Window:
    """A part of the step that is drawn."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """What it shows."""
        return self.end_s - self.start_s


def draw(
    path: Path,
    timeline: Timeline,
    lanes: Mapping[str, Lane],
    memory: Mapping[str, Memory],
    title: str,
    *,
    capacity_gb: float | None = None,
) -> None:
    """Draw a plan to `path` (.png, .svg or .pdf); raises `UserError` if that cannot be.

    `timeline`: with its spans. `lanes`: by axis. `memory`: by the name of the layout, the planned one first.
    `capacity_gb`: GiB of the GPU.
    """
    if path.suffix.lower() not in _FORMATS:
        raise UserError(f"{path}: a picture is written to a file that ends in {', '.join(_FORMATS)}")
    import matplotlib as mpl

    style: Any = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "legend.frameon": False,
        "legend.fontsize": 8,
        "hatch.linewidth": 0.6,
    }
    with mpl.rc_context(style):
        figure = figure_of(timeline, lanes, memory, title, capacity_gb=capacity_gb)
        try:
            figure.savefig(path, dpi=180)
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror}): give another file") from error


def figure_of(
    timeline: Timeline,
    lanes: Mapping[str, Lane],
    memory: Mapping[str, Memory],
    title: str,
    *,
    capacity_gb: float | None = None,
) -> "Figure":
    """Return the picture, not yet written; see `draw`. Parts for which nothing is given are left out."""
    from matplotlib.figure import Figure

    used = {axis: lane for axis, lane in lanes.items() if lane.exposed_s or lane.hidden_s}
    rows = rows_of(len(timeline.busy_s))
    parts = [("steps", 1.35 + 0.26 * len(rows))] if timeline.spans else []
    parts += [("lanes", 0.95 + 0.24 * len(used))] if used else []
    parts += [("memory", 1.25 + 0.27 * len(memory))] if memory else []
    figure = Figure(figsize=(8.0, 0.35 + sum(height for _, height in parts)), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    if not parts:
        return figure
    shares = [height for _, height in parts]
    split = figure.subfigures(len(parts), 1, height_ratios=shares, squeeze=False)[:, 0]
    places = dict(zip((name for name, _ in parts), split, strict=True))
    if "steps" in places:
        _steps(places["steps"], timeline, rows)
    if "lanes" in places:
        _lanes(places["lanes"], used)
    if "memory" in places:
        _memory(places["memory"], memory, capacity_gb)
    return figure


def rows_of(ranks: int) -> list[int]:
    """Ranks that are drawn: all, or of many the first, the last, and some between them."""
    if ranks <= _ROWS:
        return list(range(ranks))
    return sorted({round(index * (ranks - 1) / (_ROWS - 1)) for index in range(_ROWS)})


def windows_of(timeline: Timeline) -> list[Window]:
    """Parts of the step that are drawn: all of it, or its first and its last part."""
    total = timeline.total_s
    most = max(
        sum(1 for span in timeline.spans if span.rank == rank) for rank in rows_of(len(timeline.busy_s))
    )
    if most <= 2 * _CHUNKS:
        return [Window(0.0, total)]
    length = total * _CHUNKS / most
    filled = 1.35 * min(span.end_s for span in timeline.spans if span.rank == 0 and span.kind != "F")
    if length < filled < 4 * length:
        length = filled  # else most of what is shown would wait for the first backward
    if 2 * length > 0.9 * total:
        return [Window(0.0, total)]
    return [Window(0.0, length), Window(total - length, total)]


def _steps(place: "SubFigure", timeline: Timeline, rows: list[int]) -> None:
    from matplotlib.patches import Patch

    windows = windows_of(timeline)
    scale = 1e3 if timeline.total_s < 1 else 1.0
    panels = place.subplots(1, len(windows), sharey=True, squeeze=False)[0]
    first_stage = {rank: min(span.stage for span in timeline.spans if span.rank == rank) for rank in rows}
    for axes, window in zip(panels, windows, strict=True):
        _window(axes, timeline, rows, window, scale, first_stage)
    axes = panels[0]
    axes.set_yticks(range(len(rows)), [f"rank {rank}" for rank in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_title(
        f"A step, {_time(timeline.total_s)}: {100 * timeline.bubble:.1f} % of it bubbles (white)", loc="left"
    )
    for left, right in itertools.pairwise(panels):
        _break(left, right)
    kinds = [kind for kind in COLOURS if any(span.kind == kind for span in timeline.spans)]
    handles = [Patch(facecolor=COLOURS[kind], label=_WORDS[kind]) for kind in kinds]
    stages = len({span.stage for span in timeline.spans if span.rank == rows[0]})
    if stages > 1:
        handles.append(Patch(facecolor="#aaaaaa", label=f"lighter: later of {stages} stages"))
    place.legend(handles=handles, loc="outside lower center", ncols=len(handles), columnspacing=1.2)


def _window(
    axes: "Axes",
    timeline: Timeline,
    rows: list[int],
    window: Window,
    scale: float,
    first_stage: Mapping[int, int],
) -> None:
    """Draw what is within a window: a row for each rank, a bar for each chunk."""
    ranks = len(timeline.busy_s)
    for row, rank in enumerate(rows):
        shown = [
            span
            for span in timeline.spans
            if span.rank == rank and span.end_s > window.start_s and span.start_s < window.end_s
        ]
        axes.broken_barh(
            [(span.start_s * scale, (span.end_s - span.start_s) * scale) for span in shown],
            (row - 0.4, 0.8),
            facecolors=[_shade(span, first_stage[rank], ranks) for span in shown],
            edgecolors="white",
            linewidth=0.3 if len(shown) <= 2 * _CHUNKS else 0.0,  # lines between many would look like bubbles
        )
        if len(shown) <= _NUMBERED:
            _numbers(axes, row, shown, window, scale)
    axes.set_xlim(window.start_s * scale, window.end_s * scale)
    axes.set_xlabel("time, s" if scale == 1 else "time, ms")
    axes.tick_params(axis="y", length=0)


def _numbers(axes: "Axes", row: int, shown: Iterable[Span], window: Window, scale: float) -> None:
    for span in shown:
        text = str(span.micro_batch)
        if span.end_s - span.start_s > _LETTER * (len(text) + 0.6) * window.length_s:
            middle = (span.start_s + span.end_s) / 2 * scale
            axes.text(
                middle, row, text, ha="center", va="center_baseline", fontsize=6, color="white", clip_on=True
            )


def _shade(span: Span, first_stage: int, ranks: int) -> tuple[float, float, float]:
    """Colour of a kind, lighter for the later stages of a rank."""
    from matplotlib.colors import to_rgb

    turn = 0 if span.stage == first_stage else max(1, (span.stage - first_stage) // ranks)
    share = 0.75**turn
    red, green, blue = (1 - share * (1 - part) for part in to_rgb(COLOURS[span.kind]))
    return red, green, blue


def _break(left: "Axes", right: "Axes") -> None:
    """Show that time is left out between two panels."""
    right.spines["left"].set_visible(False)
    mark: Any = {
        "marker": [(-1, -2), (1, 2)],
        "markersize": 8,
        "linestyle": "none",
        "color": "k",
        "clip_on": False,
    }
    left.plot([1], [0], transform=left.transAxes, **mark)
    right.plot([0], [0], transform=right.transAxes, **mark)


def _lanes(place: "SubFigure", lanes: Mapping[str, Lane]) -> None:
    axes = place.subplots()
    longest = max(lane.exposed_s + lane.hidden_s for lane in lanes.values())
    unit, scale = ("ms", 1e3) if longest < 1 else ("s", 1.0)
    for row, lane in enumerate(lanes.values()):
        axes.barh(row, lane.exposed_s * scale, 0.6, color="#882255", label="waited for" if not row else None)
        axes.barh(
            row,
            lane.hidden_s * scale,
            0.6,
            left=lane.exposed_s * scale,
            color="white",
            edgecolor="#882255",
            hatch="/////",
            linewidth=0.6,
            label="beside computation" if not row else None,
        )
        told = f"{_time(lane.exposed_s)} of {_time(lane.exposed_s + lane.hidden_s)}"
        axes.text(
            (lane.exposed_s + lane.hidden_s) * scale + 0.01 * longest * scale,
            row,
            told,
            va="center",
            fontsize=8,
        )
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(0, longest * scale * 1.2)
    axes.set_xlabel(f"{unit} in a step")
    axes.tick_params(axis="y", length=0)
    axes.set_title("Communication by axis", loc="left")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2)


def _memory(place: "SubFigure", memory: Mapping[str, Memory], capacity_gb: float | None) -> None:
    axes = place.subplots()
    left = [0.0] * len(memory)
    known = {field.name for field in fields(Memory)}
    for part, colour in _PARTS.items():
        assert part in known, part
        widths = [getattr(one, part) / _GIB for one in memory.values()]
        axes.barh(
            range(len(memory)),
            widths,
            0.65,
            left=left,
            color=colour,
            label=part,
            edgecolor="white",
            linewidth=0.4,
        )
        left = [start + width for start, width in zip(left, widths, strict=True)]
    widest = max([*left, capacity_gb or 0.0])
    for row, (total, one) in enumerate(zip(left, memory.values(), strict=True)):
        over = capacity_gb is not None and one.needed > capacity_gb * _GIB
        told = f"{total:.1f}" + (", does not fit" if over else "")
        axes.text(
            total + 0.01 * widest, row, told, va="center", fontsize=8, color="#bb0000" if over else "black"
        )
    if capacity_gb is not None:
        axes.axvline(capacity_gb, color="black", linestyle="--", linewidth=1)
        axes.text(
            capacity_gb,
            -0.62,
            f"the GPU has {capacity_gb:g}",
            ha="center",
            va="bottom",
            fontsize=8,
            clip_on=False,
        )
    axes.set_yticks(range(len(memory)), list(memory))
    axes.set_ylim(len(memory) - 0.5, -0.6)
    axes.set_xlim(0, widest * 1.22)
    axes.set_xlabel("GiB on the GPU that holds most")
    axes.tick_params(axis="y", length=0)
    axes.set_title("Memory", loc="left")
    place.legend(loc="outside lower center", ncols=len(_PARTS), columnspacing=1.0, handlelength=1.2)


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
