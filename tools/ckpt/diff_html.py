"""A diff of two checkpoints as a page of its own: a heat map of layers by roles, and tables."""

import math
from pathlib import Path
from typing import Any

from tools.ckpt.diff_result import Diff, Group
from tools.ckpt.diff_text import about, cosine, number, percent, rounded, shade, side, summary

_TEMPLATE = "diff.html.j2"


def write_html(diff: Diff, path: Path, top: int) -> None:
    """Write the page, which needs no other file; raises `OSError`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "percent": percent, "cosine": cosine}
    page = environment.get_template(_TEMPLATE).render(
        side_a=side(diff.a),
        side_b=side(diff.b),
        summary=summary(diff),
        rounded=rounded(diff),
        roles=list(diff.by_role().items()),
        columns=columns(diff),
        rows=rows(diff),
        tensors=[
            {"one": one, "values": one.tally and one.tally.facts(), "about": about(one)}
            for one in diff.differing[:top]
        ],
        left_out=max(0, len(diff.differing) - top),
        plain=diff.plain,
    )
    path.write_text(page)


def columns(diff: Diff) -> list[str]:
    """Return the roles that a heat map has, in their order."""
    return list(dict.fromkeys(role for _, role in diff.grid()))


def rows(diff: Diff) -> list[tuple[str, list[dict[str, Any] | None]]]:
    """Return a place and its cells, one for each column; layers by their numbers, after what precedes them."""
    grid = diff.grid()
    places = sorted(dict.fromkeys(place for place, _ in grid), key=_order)
    return [
        (place, [_cell(grid[place, role]) if (place, role) in grid else None for role in columns(diff)])
        for place in places
    ]


def _order(place: str) -> tuple[int, int, str]:
    if place.startswith("layer "):
        return 1, int(place.removeprefix("layer ")), ""
    return (0 if "emb" in place else 2), 0, place


def _cell(group: Group) -> dict[str, Any]:
    text = number(group.distance) if math.isfinite(group.distance) else "\u2260"  # nothing to measure by
    return {"group": group, "shade": shade(group.distance), "text": text}
