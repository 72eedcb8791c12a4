"""From exchanges to what is wrong with which part, by numbers of nodes and GPUs: no names, no texts."""

from dataclasses import dataclass

import numpy as np

from tools.nccl.analyse import between as out
from tools.nccl.analyse import inside as in_nodes
from tools.nccl.analyse.blame import Blame, blame
from tools.nccl.analyse.groups import LEAST_NODES, find_levels
from tools.nccl.analyse.pairs import Pairs, gather
from tools.nccl.analyse.robust import Indices, by_group, median
from tools.nccl.analyse.rows import Table, low_rows
from tools.nccl.measurement import Exchanges, Floats

ALWAYS, SOMETIMES = 0.6, 0.25
"""Share of a part's pairs that fail when it is dead, and when it fails now and then."""
MINORITY = 0.4
ODD = 0.25
"""A node that is slower by more (logarithm) is set right before groups are looked for by bandwidth."""


@dataclass
class Attribution:
    """All that the exchanges say."""

    between: Pairs
    inside: Pairs
    levels: list[Indices]
    """Group of each node at each level, the smallest groups first: as found, else as known; none: no groups."""
    found_groups: bool
    """The groups were found in the matrix."""
    speed: out.Between
    late: out.Between
    late_pairs: Pairs
    gpus: in_nodes.Inside
    silent: list[Blame]
    wrong: list[Blame]
    flaky: list[Blame]


def attribute(exchanges: Exchanges, nodes: int, gpus: int, known: Indices | None = None) -> Attribution:
    """Attribute what is slow, late, silent, wrong and flaky; known: group of each node, where it is known."""
    pairs = gather(exchanges, nodes * gpus)
    apart = pairs.first // gpus != pairs.second // gpus
    same_rail = pairs.first % gpus == pairs.second % gpus
    outer, inner = pairs.take(apart & same_rail), pairs.take(~apart)
    by_node = _by_node(outer, nodes, gpus)
    levels = _levels(by_node, nodes)
    used = levels or ([] if known is None else [known])
    return Attribution(
        between=outer,
        inside=inner,
        levels=used,
        found_groups=bool(levels),
        speed=out.fit(outer, outer.loaded, outer.speed, nodes, gpus, used, out.SPEED),
        late=out.fit(by_node, -by_node.latency, -by_node.latency, nodes, 1, used, out.LATENCY),
        late_pairs=by_node,
        gpus=in_nodes.fit(inner, nodes, gpus, out.SPEED),
        silent=blame(pairs, pairs.silent, ALWAYS, gpus),
        wrong=blame(pairs, pairs.wrong, SOMETIMES, gpus),
        flaky=blame(pairs, pairs.flaky, SOMETIMES, gpus),
    )


def _by_node(pairs: Pairs, nodes: int, gpus: int) -> Pairs:
    """Collapse the rails: the median one's latency and speed stand for a pair of nodes."""
    if gpus == 1:
        return pairs
    keys, which = np.unique((pairs.first // gpus) * nodes + pairs.second // gpus, return_inverse=True)
    count = len(keys)
    empty = np.zeros(count)
    return Pairs(
        first=keys // nodes,
        second=keys % nodes,
        speed=by_group(pairs.speed, which, count),
        loaded=by_group(pairs.loaded, which, count),
        latency=-by_group(-pairs.latency, which, count),
        tests=by_group(pairs.tests.astype(np.float64), which, count).astype(np.int64),
        unsteady=empty.astype(np.int64),
        silent=empty > 0,
        wrong=empty > 0,
        range=empty,
    )


def _levels(pairs: Pairs, nodes: int) -> list[Indices]:
    """Find groups by latency, which contention does not touch; where it tells nothing, by bandwidth."""
    if nodes < LEAST_NODES or len(pairs) < 0.5 * nodes * (nodes - 1) / 2:
        return []
    for figure, odd in ((-pairs.latency, out.LATENCY.row), (pairs.loaded, ODD)):
        if np.isfinite(figure).any():
            distance = _distance(pairs, figure, nodes, odd)
            seen = np.flatnonzero(np.isfinite(distance).any(axis=1))
            levels = [_spread_out(one, seen, nodes) for one in find_levels(distance[np.ix_(seen, seen)])]
            if levels and not (odd == ODD and _one_apart(levels[-1])):
                return levels
    return []


def _spread_out(labels: Indices, seen: Indices, nodes: int) -> Indices:
    """Give nodes that were not measured a group of their own each."""
    found = labels.max() + 1 + np.arange(nodes)
    found[seen] = labels
    return np.asarray(np.unique(found, return_inverse=True)[1])


def _one_apart(labels: Indices) -> bool:
    """Return whether a minority is apart from all others: by bandwidth that may as well be a bad switch."""
    sizes = np.bincount(labels)
    return len(sizes) == 2 and bool(sizes.min() < MINORITY * len(labels))


def _distance(pairs: Pairs, figure: Floats, nodes: int, odd: float) -> Floats:
    """Return the matrix of distances, without what nodes add to theirs that are worse than others by `odd`."""
    relative = figure - median(figure)
    rows = low_rows(Table.of(pairs.first, pairs.second, nodes), relative, odd)
    of_node = np.where(rows.low, rows.effect, 0.0)
    without = relative - np.minimum(of_node[pairs.first], of_node[pairs.second])
    found = np.full((nodes, nodes), np.nan)
    found[pairs.first, pairs.second] = found[pairs.second, pairs.first] = -without
    return found
