"""Exchanges between the GPUs of a node: what is slow there, a GPU, an NVLink, or all of a node's."""

from dataclasses import dataclass, field

import numpy as np

from tools.nccl.analyse.between import Limits, Low
from tools.nccl.analyse.pairs import Pairs
from tools.nccl.analyse.robust import by_group, median, sigma
from tools.nccl.analyse.rows import SIGMAS, Table, low_rows
from tools.nccl.measurement import Floats

ALIKE = 0.15
"""In a single node pairs are compared with each other when most of them differ by no more (logarithm)."""


@dataclass
class Inside:
    """What was found."""

    nodes: list[Low] = field(default_factory=list)
    gpus: list[Low] = field(default_factory=list)
    """`rails` holds the GPU's local number."""
    links: list[Low] = field(default_factory=list)
    """`rails` holds both GPUs' local numbers."""
    notes: list[str] = field(default_factory=list)


def fit(pairs: Pairs, nodes: int, gpus: int, limits: Limits) -> Inside:
    """Attribute what is slow.

    A pair is compared with the same two GPUs of other nodes: in a node they may well be linked unevenly.
    """
    found = Inside()
    if not np.isfinite(pairs.speed).any():
        return found
    relative = pairs.speed - _usual(found, pairs, nodes, gpus)
    if not np.isfinite(relative).any():
        return found
    rows = low_rows(Table.of(pairs.first, pairs.second, nodes * gpus), relative, limits.row)
    # With two GPUs, both ends of their only pair look alike.
    low = rows.low & (gpus > 2)
    sure = 1 / max(rows.sigma, 1e-6)
    grid = low.reshape(nodes, gpus)
    effect = np.nan_to_num(rows.effect).reshape(nodes, gpus)
    for node in np.flatnonzero(grid.any(axis=1)).tolist():
        if grid[node].all():
            share = float(np.median(effect[node]))
            found.nodes.append(Low((node,), (), share, -share * sure))
            continue
        for gpu in np.flatnonzero(grid[node]).tolist():
            share = float(effect[node, gpu])
            found.gpus.append(Low((node,), (gpu,), share, -share * sure))
    explained = np.where(low, np.nan_to_num(rows.effect), 0.0)
    residual = relative - np.minimum(explained[pairs.first], explained[pairs.second])
    residual -= median(residual)
    spread = sigma(residual)
    for line in np.flatnonzero(residual < -max(limits.link, SIGMAS * spread)).tolist():
        first, second = int(pairs.first[line]), int(pairs.second[line])
        share = float(residual[line])
        found.links.append(
            Low(
                (first // gpus,),
                (first % gpus, second % gpus),
                share,
                -share / max(spread, 1e-6),
                int(pairs.tests[line]),
                (line,),
            )
        )
    return found


def _usual(found: Inside, pairs: Pairs, nodes: int, gpus: int) -> Floats:
    """Return what each pair should have: the upper median of its place over nodes, the better one of two nodes."""
    place = (pairs.first % gpus) * gpus + pairs.second % gpus
    if nodes > 1:
        return np.asarray(by_group(pairs.speed, place, gpus * gpus)[place])
    center = median(pairs.speed)
    if np.nanmean(np.abs(pairs.speed - center) < ALIKE) > 0.5:
        return np.full(len(pairs), center)
    found.notes.append(
        "the GPUs of the only node are linked unevenly: whether that is by design one node alone cannot tell"
    )
    return pairs.speed
