"""A layout as a picture for a terminal, drawn from plain facts."""

import io
import itertools
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

NODES_SHOWN = 4
"""Of more nodes the first ones and the last are drawn."""
RANKS_A_ROW = 8
MEMBERS_SHOWN = 4


@dataclass(frozen=True)
class Place:
    """One rank and what it holds."""

    rank: int
    node: int
    coordinates: dict[str, int]
    """Position on each axis, outermost first."""
    layers: list[str]
    """Of each of its stages: "0-14", "none"."""
    has_embedding: bool
    has_head: bool
    query_heads: int
    kv_heads: int
    hidden_units: int
    vocabulary: int
    positions: int
    """Of each sequence, between the blocks."""
    parameters: int
    """Before ZeRO shares them."""
    sharers: int
    """Ranks that share the state of these parameters."""
    state_bytes: int
    """Weights and the optimizer's state that it keeps between two steps."""


@dataclass(frozen=True)
class Exchange:
    """What a rank exchanges in a group in a step."""

    operation: str
    what: str
    times: int
    sent_bytes: float


@dataclass(frozen=True)
class Group:
    """One axis, or several that exchange together."""

    name: str
    ranks: list[int]
    """The group of the rank that is looked at."""
    nodes: int
    """On how many nodes such a group is spread at most."""
    shares: str
    """What its ranks share."""
    exchanges: list[Exchange]


@dataclass(frozen=True)
class Picture:
    """All there is to see of a layout."""

    title: str
    step: str
    """What a step takes."""
    sizes: dict[str, int]
    """Of each axis."""
    ranks: int
    ranks_per_node: int
    seen_from: int
    """The rank whose groups these are."""
    places: list[Place]
    """All ranks, or the one that was asked for."""
    groups: list[Group]
    notes: list[str]


def render(picture: Picture, width: int) -> str:
    """Draw for a terminal of `width` columns: every rank, or where there is only one place that rank in full."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, highlight=False, emoji=False, markup=False)
    console.print(picture.title)
    console.print(picture.step)
    alone = len(picture.places) == 1 < picture.ranks
    for part in [_one_place(picture.places[0])] if alone else _nodes(picture):
        console.print(part)
    console.print(_holdings(picture))
    if picture.groups:
        console.print(_groups(picture, members=alone))
    for note in picture.notes:
        console.print(f"note:  {note}")
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _table(*heads: str, right: Collection[int] = (), title: str | None = None) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.ROUNDED, title=title, title_justify="left", title_style="none")
    for index, head in enumerate(heads):
        table.add_column(head, justify="right" if index in right else "left", overflow="fold")
    return table


def _used(picture: Picture) -> list[str]:
    return [axis for axis, size in picture.sizes.items() if size > 1]


def _nodes(picture: Picture) -> "Iterator[Table | str]":
    """A box for each node, with a column for each rank; of many nodes some."""
    each = picture.ranks_per_node
    nodes = -(-picture.ranks // each)
    shown = list(range(nodes))
    if nodes > NODES_SHOWN:
        shown = [*range(NODES_SHOWN - 1), nodes - 1]
    for node in shown:
        if node == nodes - 1 and nodes > NODES_SHOWN:
            yield f"... and so on: {nodes - NODES_SHOWN} more nodes ..."
        own = picture.places[node * each : (node + 1) * each]
        for start in range(0, len(own), RANKS_A_ROW):
            yield _node(picture, node, own[start : start + RANKS_A_ROW])


def _one_place(place: Place) -> str:
    position = ", ".join(f"{axis} {index}" for axis, index in place.coordinates.items())
    return f"rank {place.rank} is on node {place.node}, at {position}"


def _node(picture: Picture, node: int, places: list[Place]) -> "Table":
    table = _table(f"node {node}, rank", *(f"{one.rank:>4}" for one in places))
    for axis in _used(picture):
        table.add_row(axis, *(str(one.coordinates[axis]) for one in places))
    if picture.sizes["pp"] > 1:
        table.add_row("layers", *("\n".join(one.layers) for one in places))
    return table


def _holdings(picture: Picture) -> "Table":
    """One row for all ranks that hold equally much of the same stages."""
    alike: Counter[tuple[Any, ...]] = Counter()
    first: dict[tuple[Any, ...], Place] = {}
    for place in picture.places:
        key = (*place.layers, place.has_embedding, place.has_head, place.hidden_units, place.vocabulary)
        alike[key] += 1
        first.setdefault(key, place)
    title = "A rank holds (state: weights and the optimizer's state, between two steps)"
    heads = ("who", "layers", "heads q/kv", "MLP units", "vocabulary", "tokens", "parameters", "state")
    table = _table(*heads, right=range(2, 8), title=title)
    for key, place in first.items():
        layers = [
            *["embedding"] * place.has_embedding,
            *place.layers,
            *["head"] * place.has_head,
        ]
        shared = f" (1/{place.sharers})" if place.sharers > 1 else ""
        table.add_row(
            f"rank {place.rank}" if alike[key] == 1 else f"{alike[key]:,} ranks",
            "\n".join(layers),
            f"{place.query_heads}/{place.kv_heads}",
            f"{place.hidden_units:,}",
            f"{place.vocabulary:,}" if place.has_embedding or place.has_head else "",
            f"{place.positions:,}",
            count(place.parameters),
            f"{size(place.state_bytes)}{shared}",
        )
    return table


def _groups(picture: Picture, members: bool) -> "Table":
    """One row for each exchange of each axis."""
    title = f"In a step rank {picture.seen_from} sends"
    table = _table("group of", "ranks", "spread", "exchange", "times", "sent", right=(4, 5), title=title)
    for group in picture.groups:
        table.add_section()
        who = _members(group.ranks) if members else f"{len(group.ranks):,}"
        left = [(group.name, who, "one node" if group.nodes == 1 else f"{group.nodes} nodes")]
        left.append((f"  for {group.shares}", "", ""))
        right = [
            (f"{one.operation} {one.what}", f"{one.times:,}", size(one.sent_bytes)) for one in group.exchanges
        ]
        for one, other in itertools.zip_longest(left, right, fillvalue=("", "", "")):
            table.add_row(*one, *other)
    return table


def _members(ranks: list[int]) -> str:
    shown = ranks if len(ranks) <= MEMBERS_SHOWN else [*ranks[:2], "...", ranks[-1]]
    return ", ".join(map(str, shown))


def count(number: float) -> str:
    """Write a number of parameters: `864 M`."""
    return _short(number, ("", " k", " M", " G", " T"))


def size(number_bytes: float) -> str:
    """Write a number of bytes in units of 1000: `14.3 GB`."""
    return _short(number_bytes, (" B", " kB", " MB", " GB", " TB", " PB"))


def _short(number: float, units: tuple[str, ...]) -> str:
    index = 0
    while number >= 999.5 and index < len(units) - 1:
        number /= 1000
        index += 1
    return f"{number:.3g}{units[index]}"
