"""A measurement's exchanges as matrices that can be drawn: between nodes, and inside them."""

from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from tools.nccl.findings import Findings
from tools.nccl.measurement import Floats, Measurement

MOST_CELLS = 1024
"""Rows of a drawn matrix; more nodes are drawn in blocks."""
_RAILS_DIFFER = 0.08
"""Rails are drawn one by one where their medians differ by more than this share."""


@dataclass(frozen=True)
class Between:
    """Exchanges between nodes, nodes in the order of their groups."""

    nodes: tuple[str, ...]
    bounds: tuple[int, ...]
    """Where a group of near nodes ends."""
    bandwidth: Floats
    """By the slowest rail, bytes a second; NaN: not measured, 0: no answer."""
    latency_s: Floats
    """By the slowest rail."""
    rails: dict[int, Floats]
    """The bandwidth of each rail, where they differ."""


@dataclass(frozen=True)
class Inside:
    """Exchanges between the GPUs of a node."""

    nodes: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...]
    """Local numbers."""
    bandwidth: Floats
    """A row for each node, a column for each pair; bytes a second."""
    latency_s: Floats


def order_of(measurement: Measurement, findings: Findings) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the nodes group by group, and where each group ends."""
    known = set(measurement.nodes)
    groups = [tuple(name for name in group if name in known) for group in findings.groups]
    grouped = {name for group in groups for name in group}
    groups.append(tuple(name for name in measurement.nodes if name not in grouped))
    groups = [group for group in groups if group]
    ends = np.cumsum([len(group) for group in groups])
    return tuple(name for group in groups for name in group), tuple(int(end) for end in ends[:-1])


def between(measurement: Measurement, findings: Findings) -> Between | None:
    """Return what was measured between nodes; None if nothing was."""
    exchanges, gpus = measurement.exchanges, measurement.gpus_per_node
    first, second = exchanges.first // gpus, exchanges.second // gpus
    chosen = first != second
    if not chosen.any():
        return None
    nodes, bounds = order_of(measurement, findings)
    place = _places(measurement, nodes)
    on_rail = {rail: chosen & (exchanges.first % gpus == rail) for rail in range(gpus)}
    on_rail = {rail: mine for rail, mine in on_rail.items() if mine.any()}

    def square(mine: NDArray[np.bool_], values: Floats) -> Floats:
        return _square(len(nodes), place[first[mine]], place[second[mine]], values[mine])

    drawn_apart = len(nodes) <= MOST_CELLS and _differ(
        [exchanges.bandwidth[mine] for mine in on_rail.values()]
    )
    return Between(
        nodes=nodes,
        bounds=bounds,
        # One after the other: the matrices of a large machine fill gigabytes.
        bandwidth=reduce(np.fmin, (square(mine, exchanges.bandwidth) for mine in on_rail.values())),
        latency_s=reduce(np.fmax, (square(mine, exchanges.latency_s) for mine in on_rail.values())),
        rails={rail: square(mine, exchanges.bandwidth) for rail, mine in on_rail.items()}
        if drawn_apart
        else {},
    )


def inside(measurement: Measurement, findings: Findings) -> Inside | None:
    """Return what was measured inside nodes; None if nothing was."""
    exchanges, gpus = measurement.exchanges, measurement.gpus_per_node
    node = exchanges.first // gpus
    chosen = node == exchanges.second // gpus
    if not chosen.any():
        return None
    nodes, _ = order_of(measurement, findings)
    place = _places(measurement, nodes)
    low = np.minimum(exchanges.first, exchanges.second)[chosen] % gpus
    high = np.maximum(exchanges.first, exchanges.second)[chosen] % gpus
    pairs = tuple((a, b) for a in range(gpus) for b in range(a + 1, gpus))
    column = np.full((gpus, gpus), -1)
    for index, (a, b) in enumerate(pairs):
        column[a, b] = index
    bandwidth, latency = (np.full((len(nodes), len(pairs)), np.nan) for _ in range(2))
    rows, columns = place[node[chosen]], column[low, high]
    bandwidth[rows, columns] = exchanges.bandwidth[chosen]
    latency[rows, columns] = exchanges.latency_s[chosen]
    return Inside(nodes, pairs, bandwidth, latency)


def in_blocks(values: Floats, keep_low: bool) -> tuple[Floats, int]:
    """Return a matrix of at most `MOST_CELLS` rows and columns, and how many rows are one: of each block the worst."""
    high, wide = (-(-length // MOST_CELLS) for length in values.shape)
    if high <= 1 and wide <= 1:
        return values, 1
    padded = np.full((-(-len(values) // high) * high, -(-values.shape[1] // wide) * wide), np.nan)
    padded[: values.shape[0], : values.shape[1]] = values
    blocks = padded.reshape(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    worst = np.fmin if keep_low else np.fmax
    return worst.reduce(worst.reduce(blocks, axis=3), axis=1), high


def _places(measurement: Measurement, nodes: tuple[str, ...]) -> np.ndarray:
    """Return the row of each node by its number."""
    rows = {name: row for row, name in enumerate(nodes)}
    return np.array([rows[name] for name in measurement.nodes], dtype=np.int64)


def _square(size: int, first: np.ndarray, second: np.ndarray, values: Floats) -> Floats:
    found = np.full((size, size), np.nan)
    low, high = np.minimum(first, second), np.maximum(first, second)
    found[low, high] = values  # of equal places the last counts
    found[high, low] = found[low, high]
    return found


def _differ(rails: list[Floats]) -> bool:
    """Whether the usual bandwidths of rails are too far apart for noise."""
    known = [values[np.isfinite(values)] for values in rails]
    medians = np.array([np.median(values) for values in known if values.size])
    usual = float(np.median(medians)) if medians.size else 0.0
    return usual > 0 and bool(np.abs(medians / usual - 1).max() > _RAILS_DIFFER)
