"""Heat maps of a measurement: who reaches whom how fast, with the faults marked."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tools.nccl.findings import Fault, Findings, Part
from tools.nccl.measurement import Floats, Integers, Measurement
from tools.nccl.report.matrices import Between, Inside, between, in_blocks, inside

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_NAMES = 40
"""More names do not fit along an axis."""
_FAULT = "#d62728"
_NOT_MEASURED = "#e6e6e6"


def write(folder: Path, measurement: Measurement, findings: Findings) -> list[Path]:
    """Draw what was measured; return the files, none if there were no exchanges."""
    import matplotlib as mpl

    figures: dict[str, Figure] = {}
    faults = findings.faults
    if (outside := between(measurement, findings)) is not None:
        figures["bandwidth.png"] = _between(outside, outside.bandwidth, True, "by the slowest rail", faults)
        figures["latency.png"] = _between(outside, outside.latency_s, False, "by the slowest rail", faults)
        for rail, values in outside.rails.items():
            mine = [one for one in faults if one.rail in (None, rail)]
            figures[f"bandwidth.rail{rail}.png"] = _between(outside, values, True, f"rail {rail}", mine)
    if (within := inside(measurement, findings)) is not None and within.pairs:
        figures["inside.png"] = _inside(within, faults)
    written = []
    with mpl.rc_context({"font.size": 9}):
        for name, figure in figures.items():
            _save(figure, folder / name)
            written.append(folder / name)
    return written


def _save(figure: "Figure", path: Path) -> None:
    """Write a picture of few colours, a third of the size: the page carries all of them."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=130)
    picture = Image.open(drawn).convert("RGB")
    palette = Image.new("P", (1, 1))
    palette.putpalette(_palette())
    picture.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True)


def _palette() -> list[int]:
    """Return the colours of the pictures as red, green, blue, red, ...: the scale's, greys, the mark's on white."""
    import matplotlib as mpl
    from matplotlib.colors import to_rgb

    white = np.ones(3)
    scale = mpl.colormaps["viridis"](np.linspace(0, 1, 96))[:, :3]
    greys = np.linspace(0, 1, 24)[:, None] * white
    share = np.linspace(0, 1, 8)[:, None]
    marks = share * np.array(to_rgb(_FAULT)) + (1 - share) * white
    extra = np.array([to_rgb(_NOT_MEASURED)])
    colours: list[int] = (
        np.rint(np.concatenate([scale, greys, marks, extra]) * 255).astype(int).ravel().tolist()
    )
    return colours


def _between(
    outside: Between, values: Floats, is_bandwidth: bool, which: str, faults: Sequence[Fault]
) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.2, 7.2), layout="constrained")
    axes = figure.add_subplot()
    shown, block = in_blocks(values, keep_low=is_bandwidth)
    _heat(axes, shown, is_bandwidth)
    what = "Bandwidth" if is_bandwidth else "Latency"
    several = f", the worst of {block} x {block} nodes" if block > 1 else ""
    axes.set_title(f"{what} between nodes ({which}{several})")
    for end in outside.bounds:
        for line in (axes.axhline, axes.axvline):
            line(end / block - 0.5, color="white", linewidth=0.8)
    _names(axes, outside.nodes, block)
    _mark(axes, outside.nodes, block, faults)
    return figure


def _inside(within: Inside, faults: Sequence[Fault]) -> "Figure":
    from matplotlib.figure import Figure

    shown, block = in_blocks(within.bandwidth, keep_low=True)
    height = min(9.0, 1.8 + 0.22 * len(shown))
    figure = Figure(figsize=(max(6.0, 2.4 + 0.24 * len(within.pairs)), height), layout="constrained")
    axes = figure.add_subplot()
    _heat(axes, shown, True)
    axes.set_aspect("auto")
    axes.set_title("Bandwidth between the GPUs of each node")
    axes.set_xticks(range(len(within.pairs)), [f"{a}-{b}" for a, b in within.pairs], rotation=90, fontsize=7)
    axes.set_xlabel("pair of GPUs")
    places = _some(len(within.nodes))
    axes.set_yticks(places // block, [within.nodes[i] for i in places], fontsize=7)
    rows = {name: row // block for row, name in enumerate(within.nodes)}
    for fault in faults:
        for name in fault.nodes if fault.part in (Part.gpu, Part.nvlink) else ():
            for column, pair in enumerate(within.pairs):
                alone = len(fault.gpus) == 1 and fault.gpus[0] in pair
                if name in rows and (alone or set(pair) == set(fault.gpus)):
                    _box(axes, column, rows[name])
    return figure


def _heat(axes: "Axes", values: Floats, is_bandwidth: bool) -> None:
    """Draw a matrix on a scale that a few outliers do not spoil."""
    import matplotlib as mpl

    scale = 1e-9 if is_bandwidth else 1e6
    low, high = _limits(values[np.isfinite(values)] * scale)
    colours = mpl.colormaps["viridis" if is_bandwidth else "viridis_r"].with_extremes(
        bad=_NOT_MEASURED, under="black" if is_bandwidth else None
    )
    # What is slow beyond the scale has its darkest colour; black is left to what did not answer at all.
    shown = np.ma.masked_invalid(np.where(values == 0, -1.0, np.clip(values * scale, low, high)))
    image = axes.imshow(shown, cmap=colours, vmin=low, vmax=high, interpolation="nearest")
    parent = axes.figure
    bar = parent.colorbar(image, ax=axes, shrink=0.8, extend="both")
    bar.set_label("GB/s each way (black: no answer, grey: not measured)" if is_bandwidth else "us one way")


def _limits(values: Floats) -> tuple[float, float]:
    """Return a scale around the usual values: at least a tenth around the median, at most what 98 % of them need."""
    values = values[values > 0]
    if not values.size:
        return 0.0, 1.0
    low, median, high = np.percentile(values, [1, 50, 99])
    return float(min(low, 0.9 * median)), float(max(high, 1.1 * median))


def _names(axes: "Axes", nodes: Sequence[str], block: int) -> None:
    places = _some(len(nodes))
    names = [nodes[i] for i in places]
    axes.set_xticks(places // block, names, rotation=90, fontsize=7)
    axes.set_yticks(places // block, names, fontsize=7)


def _some(count: int) -> Integers:
    """Return all rows, or as many as can be named."""
    return np.unique(np.linspace(0, count - 1, count if count <= _MOST_NAMES else 16).astype(np.int32))


def _mark(axes: "Axes", nodes: Sequence[str], block: int, faults: Sequence[Fault]) -> None:
    """Point at guilty nodes from the right edge, with their names; put boxes around guilty links."""
    rows = {name: row for row, name in enumerate(nodes)}
    last = (len(nodes) - 1) // block
    labelled: list[float] = []
    for fault in faults:
        places = [rows[name] / block for name in fault.nodes if name in rows]
        if fault.part is Part.link and len(places) == 2:
            _box(axes, *places)
            _box(axes, *reversed(places))
        elif fault.part is Part.switch and places:
            start, size = min(places) - 0.5, max(places) - min(places) + 1
            _box(axes, start + size / 2 - 0.5, start + size / 2 - 0.5, size)
        elif fault.part in (Part.node, Part.nic, Part.gpu):
            for place in places:
                axes.plot(last + 0.5, place, marker="<", color=_FAULT, markersize=6, clip_on=False)
                if all(abs(place - other) > last / 40 for other in labelled):
                    text = f" {fault.nodes[0]}" if len(nodes) > _MOST_NAMES else ""
                    axes.annotate(
                        text, (last + 0.5, place), xytext=(5, -3), textcoords="offset points",
                        color=_FAULT, fontsize=7, annotation_clip=False,
                    )  # fmt: skip
                    labelled.append(place)


def _box(axes: "Axes", column: float, row: float, size: float = 1.0) -> None:
    """Draw a frame around a cell, never too small to be seen."""
    from matplotlib.patches import Rectangle

    span = axes.get_xlim()[1] - axes.get_xlim()[0]
    size = max(size, abs(span) / 60)
    corner = (column - size / 2, row - size / 2)
    axes.add_patch(Rectangle(corner, size, size, fill=False, edgecolor=_FAULT, linewidth=1.5, clip_on=False))
