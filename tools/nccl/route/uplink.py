"""What nodes of a group share on their way to others, from rounds in which more or fewer of them were on that way."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components

from tools.nccl.measurement import Floats, Measurement
from tools.nccl.route.edges import Flags, NodeEdges

_BETTER = 0.8
"""Nodes are taken to share what limits them if that leaves less than this share of the deviations unexplained."""
_THIN = 0.8
"""Below this share of the near bandwidth the way between groups is taken to be shared, where no round tells."""
_SWEEPS = 4
_AS_NEAR = 0.9
"""Groups whose way to each other has this share of the near bandwidth may be parts of one group, for bandwidth."""


@dataclass(frozen=True)
class Uplink:
    """What the nodes of a group have in common on their way to others, bytes a second in each direction."""

    alone: float
    """Of one pair of nodes, all rails together, when no other pair crosses."""
    together: float
    """Of all pairs that cross at the same time; infinite where they don't disturb each other."""
    told: bool
    """Rounds with few and with many pairs that cross were compared; else it is assumed that they share."""


@dataclass(frozen=True)
class _Crossings:
    """Exchanges between groups as rows, those of one round and one pair of groups as one."""

    ends: NDArray[np.int64]
    """(rows, 2): the groups."""
    pairs: Floats
    """(rows, 2): pairs of nodes that crossed each group's border in that round."""
    rate: Floats
    """Mean of a pair of nodes, all rails together."""


def find_uplinks(
    measurement: Measurement, edges: NodeEdges, labels: NDArray[np.int64]
) -> tuple[NDArray[np.int64], tuple[Uplink, ...]]:
    """Return the groups that matter to bandwidth, and what each of them shares.

    Groups may be told apart by latency alone, such as the leaves of one cell: they count as one group where that
    explains better what was measured between groups.
    """
    rail = near_bandwidth(edges, labels)
    near = measurement.gpus_per_node * rail
    coarse = _joined(edges, labels, rail)
    fine_uplinks = _fit(_crossings(measurement, labels), int(labels.max()) + 1, near)
    if coarse.max() == labels.max():
        return labels, fine_uplinks
    coarse_uplinks = _fit(_crossings(measurement, coarse), int(coarse.max()) + 1, near)
    fine, joined = (
        _misfit(measurement, labels, one, uplinks, near)
        for one, uplinks in ((labels, fine_uplinks), (coarse, coarse_uplinks))
    )
    return (coarse, coarse_uplinks) if joined < _BETTER * fine else (labels, fine_uplinks)


def shared_ways(uplinks: Sequence[Uplink], labels: NDArray[np.int64]) -> Flags:
    """Return the pairs of nodes that share what limits them with other pairs."""
    crowded = np.array([np.isfinite(uplink.together) for uplink in uplinks])[labels]
    found: Flags = (labels[:, None] != labels) & (crowded[:, None] | crowded)
    return found


def near_bandwidth(edges: NodeEdges, labels: NDArray[np.int64]) -> float:
    """Return the median bandwidth of a rail between nodes of one group, or between any where groups hold one each."""
    works = edges.bandwidth > 0
    inner = works & (labels[:, None] == labels)
    return float(np.median(edges.bandwidth[inner if inner.any() else works])) if works.any() else 0.0


def _joined(edges: NodeEdges, labels: NDArray[np.int64], near: float) -> NDArray[np.int64]:
    """Join groups between which a rail has nearly what it has inside them."""
    count = int(labels.max()) + 1
    alike = np.zeros((count, count), dtype=bool)
    members = [np.flatnonzero(labels == label) for label in range(count)]
    for one in range(count):
        for other in range(one):
            values = edges.bandwidth[np.ix_(members[one], members[other])]
            values = values[values > 0]
            alike[one, other] = len(values) > 0 and float(np.median(values)) >= _AS_NEAR * near
    _, groups = connected_components(csr_matrix(alike), directed=False)
    found: NDArray[np.int64] = groups.astype(np.int64)[labels]
    return found


def _misfit(
    measurement: Measurement,
    fine: NDArray[np.int64],
    labels: NDArray[np.int64],
    uplinks: Sequence[Uplink],
    near: float,
) -> float:
    """Return how far off the model is for the exchanges between fine groups, a mean of logarithms."""
    rows, gpus = measurement.exchanges, measurement.gpus_per_node
    one, other = rows.first // gpus, rows.second // gpus
    used = (fine[one] != fine[other]) & (rows.bandwidth > 0)
    one, other = labels[one[used]], labels[other[used]]
    _, place = np.unique(rows.round[used], return_inverse=True)
    crosses = one != other
    pairs = np.zeros((int(place.max(initial=0)) + 1, len(uplinks)))
    for end in (one, other):
        np.add.at(pairs, (place[crosses], end[crosses]), 1 / gpus)
    alone = np.array([uplink.alone for uplink in uplinks])
    together = np.array([uplink.together for uplink in uplinks])
    rate = np.full(len(one), near)
    for end in (one, other):
        model = np.minimum(alone[end], together[end] / np.maximum(pairs[place, end], 1 / gpus))
        rate = np.where(crosses, np.minimum(rate, model), rate)
    return float(np.abs(np.log(gpus * rows.bandwidth[used] / rate)).mean()) if used.any() else 0.0


def _crossings(measurement: Measurement, labels: NDArray[np.int64]) -> _Crossings:
    rows, gpus = measurement.exchanges, measurement.gpus_per_node
    one, other = labels[rows.first // gpus], labels[rows.second // gpus]
    used = (one != other) & (rows.bandwidth > 0)
    ends = np.sort(np.stack([one[used], other[used]], axis=1), axis=1)
    count = int(labels.max()) + 1
    _, place = np.unique(rows.round[used], return_inverse=True)
    pairs = np.zeros((int(place.max(initial=0)) + 1, count))
    for end in ends.T:
        np.add.at(pairs, (place, end), 1 / gpus)
    key = (place * count + ends[:, 0]) * count + ends[:, 1]
    _, first, cell, size = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
    rate = gpus * np.bincount(cell, rows.bandwidth[used], minlength=len(first)) / size
    return _Crossings(ends[first], pairs[place[first][:, None], ends[first]], rate)


def _fit(seen: _Crossings, count: int, near: float) -> tuple[Uplink, ...]:
    """Fit the least of alone and together / pairs, of both groups, to what was measured: one group after the other.

    All groups together, since a pair that crosses two borders may be slow because of either.
    """
    found = [Uplink(near, float("inf"), told=False) for _ in range(count)]
    mine = [np.nonzero(seen.ends == label) for label in range(count)]
    for _ in range(_SWEEPS):
        for label, (row, side) in enumerate(mine):
            if not len(row):
                continue
            across = seen.ends[row, 1 - side]
            alone = np.array([uplink.alone for uplink in found])[across]
            together = np.array([uplink.together for uplink in found])[across]
            other = np.minimum(alone, together / seen.pairs[row, 1 - side])
            found[label] = _fit_one(seen.rate[row], seen.pairs[row, side], other, near)
    return tuple(found)


def _fit_one(rate: Floats, pairs: Floats, other: Floats, near: float) -> Uplink:
    """Fit one group; `other`: what the groups at the other ends allow."""

    def miss(alone: float, together: float) -> float:
        model = np.minimum(np.minimum(alone, together / pairs), other)
        return float(np.abs(np.log(rate / model)).sum())

    usual, full = float(np.median(rate)), float(np.median(rate * pairs))
    if pairs.max() <= 1.5 * pairs.min():
        if pairs.max() > 1 and usual < _THIN * near:
            return Uplink(min(near, full), full, told=False)
        return Uplink(usual, float("inf"), told=False)
    # Far fewer pairs than usual tell what one can do alone, those of them that the other ends hold back least.
    calm = float(np.quantile(rate[pairs <= 1.5 * pairs.min()], 0.9))
    free = min((miss(alone, float("inf")), -alone) for alone in (near, usual, calm))
    best, found = _BETTER * free[0], Uplink(-free[1], float("inf"), told=True)
    # A little less than all is explained by noise too: what one pair could do by itself is as much as a near one can,
    # unless less explains clearly more.
    for alone in (near, calm):
        chosen = min((miss(alone, float(full)), float(full)) for full in _candidates(rate * pairs))
        if chosen[0] < best:
            best, found = _BETTER * chosen[0], Uplink(alone, chosen[1], told=True)
    return found


def _candidates(values: Floats) -> Floats:
    found: Floats = np.unique(np.quantile(values, np.linspace(0, 1, 41)))
    return found
