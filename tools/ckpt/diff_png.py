"""A diff of two checkpoints as an image: the heat map of layers by roles."""

import colorsys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.ckpt.diff_html import columns, rows
from tools.ckpt.diff_result import Diff
from tools.ckpt.diff_text import side, summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Colour = tuple[float, float, float]
EQUAL: Colour = (0.902, 0.957, 0.918)
NONE: Colour = (0.957, 0.957, 0.957)
_DPI = 120
_MOST_INCHES = 400.0
"""An image has 65,536 pixels at most in each direction."""


def write_png(diff: Diff, path: Path) -> None:
    """Write the image, as PNG whatever the name; raises `OSError`."""
    from matplotlib.figure import Figure

    roles, places = columns(diff), rows(diff)
    height = min(_MOST_INCHES, 2.2 + 0.3 * len(places))
    figure = Figure(figsize=(3.5 + 1.2 * len(roles), height), layout="constrained", dpi=_DPI)
    figure.suptitle(
        f"{summary(diff)}\nA: {side(diff.a)}\nB: {side(diff.b)}",
        ha="left",
        x=0.02,
        fontsize=9,
        parse_math=False,
    )
    axes = figure.add_subplot()
    axes.set_title("largest ‖A-B‖ / ‖A‖ of a tensor; green is equal", fontsize=9)
    if places:
        _draw(axes, roles, places)
    figure.savefig(path, format="png", bbox_inches="tight")  # names of files may be long


def colour(cell: dict[str, Any] | None) -> Colour:
    """Return that of a cell, as the page has it."""
    if cell is None:
        return NONE
    if cell["group"].differing == 0 and cell["shade"] == 0:
        return EQUAL
    return colorsys.hls_to_rgb(12 / 360, 0.97 - 0.45 * cell["shade"], 0.9)


def _draw(axes: "Axes", roles: list[str], places: list[tuple[str, list[dict[str, Any] | None]]]) -> None:
    axes.imshow([[colour(cell) for cell in cells] for _, cells in places], aspect="auto")
    for row, (_, cells) in enumerate(places):
        for column, cell in enumerate(cells):
            if cell is not None:
                axes.text(column, row, cell["text"], ha="center", va="center", fontsize=8, parse_math=False)
    axes.set_xticks(range(len(roles)), roles, fontsize=8, rotation=20, ha="right", parse_math=False)
    axes.set_yticks(range(len(places)), [place for place, _ in places], fontsize=8, parse_math=False)
