"""What a measurement says of the way between any two nodes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tools.nccl.findings import Fault, Part
from tools.nccl.measurement import Floats, Measurement

Flags = NDArray[np.bool_]

NOISE = 0.05
"""Differences up to this share, or 4 sigmas, from what is usual between two groups are taken for noise."""

_RARE = 0.1
"""Up to this share of the pairs (or two of few) may be disturbed by chance; more of them are no chance."""
_MOST_NOISE = 0.25
"""More than this share is no noise, whatever the spread."""
_SIGMA_OF_HALF = 1.349
"""Width of the middle half of a normal distribution, in sigmas."""
_MOST_GROUPS = 64
"""With more groups each pair of them holds too little to know what is usual there: near and far are told apart only."""
_GUESSED = 1.001
"""A way that was not measured counts as this much slower than its like, so that a measured one comes first."""


@dataclass(frozen=True)
class NodeEdges:
    """Symmetric matrices, nodes by nodes; NaN: not measured."""

    latency_s: Floats
    """Of the median rail: one that is disturbed for a moment would else set that of its pair."""
    bandwidth: Floats
    """Bytes a second of the worst rail, all rails at once: a ring's pieces take all rails alike. 0: no answer."""


def node_edges(measurement: Measurement) -> NodeEdges:
    """Put the rails of each pair of nodes together; of what was measured several times the last counts."""
    nodes, gpus = len(measurement.nodes), measurement.gpus_per_node
    rows = measurement.exchanges
    one, other = rows.first.astype(np.int64), rows.second.astype(np.int64)
    between = np.flatnonzero(
        (one // gpus != other // gpus) & (one % gpus == other % gpus) & ~np.isnan(rows.bandwidth)
    )
    one, other = one[between], other[between]
    pair = np.minimum(one, other) // gpus * nodes + np.maximum(one, other) // gpus
    _, last = np.unique((pair * gpus + one % gpus)[::-1], return_index=True)
    last = len(pair) - 1 - last
    pair, between = pair[last], between[last]
    latency, bandwidth = (np.full((nodes, nodes), np.nan) for _ in range(2))
    if len(pair):
        # Sorted by pair, and within a pair by latency, those without any last.
        rank = np.lexsort((rows.latency_s[between], pair))
        between = between[rank]
        found, start, count = np.unique(pair[rank], return_index=True, return_counts=True)
        worst = np.minimum.reduceat(rows.bandwidth[between], start)
        middle = rows.latency_s[between][start + (count - 1) // 2]
        for matrix, values in ((latency, middle), (bandwidth, worst)):
            matrix[found // nodes, found % nodes] = matrix[found % nodes, found // nodes] = values
    return NodeEdges(latency, bandwidth)


def group_labels(names: Sequence[str], groups: Sequence[Sequence[str]]) -> NDArray[np.int64]:
    """Return the number of each node's group; nodes of no group are one more group together."""
    place: Mapping[str, int] = {name: number for number, group in enumerate(groups) for name in group}
    return np.array([place.get(name, len(groups)) for name in names], dtype=np.int64)


def blamed(names: Sequence[str], faults: Sequence[Fault]) -> Flags:
    """Return for each pair of nodes whether a fault was found that is this pair's or one of its ends'.

    Not a switch's: what its nodes share is in the uplinks, and a pair's own value there is that of its round.
    """
    place = {name: number for number, name in enumerate(names)}
    found = np.zeros((len(names), len(names)), dtype=bool)
    for fault in faults:
        nodes = [place[name] for name in fault.nodes if name in place]
        if fault.part is Part.link:
            found[np.ix_(nodes, nodes)] = True
        elif fault.part in (Part.node, Part.nic, Part.gpu):
            found[nodes, :] = found[:, nodes] = True
    return found


def steady(
    times: Floats, labels: NDArray[np.int64], trusted: Flags | None = None, shared: Flags | None = None
) -> Floats:
    """Return times without what is only noise, and with guesses where nothing was measured.

    An order must not be chosen by luck, nor a gain be predicted from it. Between two groups (or within one) a time
    becomes the usual one where it differs by noise; where few differ at all, since something else on the machine
    disturbs an exchange now and then; and where the nodes share what limits them (`shared`), so that a time tells how
    many others were on their way. Pairs with a fault (`trusted`) keep theirs. A missing time is the usual one, or what
    is usual for the slower of its nodes. Infinite times stay. The diagonal is 0.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(np.where(times > 0, times, np.nan))
    usual, spread, rare = _levels(logs, labels, trusted)
    off = logs - usual
    calm = (np.abs(off) <= np.clip(4 * spread, NOISE, _MOST_NOISE)) | rare
    if shared is not None:
        calm |= shared
    if trusted is not None:
        calm &= ~trusted
    calm &= np.isfinite(off)
    found = times.copy()
    found[calm] = np.exp(usual[calm])
    missing = np.isnan(times) & np.isfinite(usual)
    found[missing] = _guess(off, usual, spread)[missing]
    np.fill_diagonal(found, 0.0)
    return found


def _levels(logs: Floats, labels: NDArray[np.int64], trusted: Flags | None) -> tuple[Floats, Floats, Flags]:
    """Return for each pair of nodes what is usual between their groups, its sigma, and whether it is rare there.

    Pairs with a fault say nothing of what is usual, where there are others: in a small group they can be the most.
    """
    usual, spread, rare = np.full_like(logs, np.nan), np.zeros_like(logs), np.zeros(logs.shape, dtype=bool)
    same = labels[:, None] == labels
    known = np.isfinite(logs)
    well = known if trusted is None else known & ~trusted
    count = int(labels.max()) + 1
    if count > _MOST_GROUPS:
        kinds = [np.nonzero(same), np.nonzero(~same)]
    else:
        members = [np.flatnonzero(labels == label) for label in range(count)]
        kinds = [np.ix_(members[one], members[two]) for one in range(count) for two in range(count)]
    across = logs[known & ~same] if (known & ~same).any() else logs[known]
    everywhere = float(np.median(across)) if len(across) else np.nan
    for place in kinds:
        taken = well[place] if well[place].any() else known[place]
        values = np.sort(logs[place][taken])
        middle, sigma = _densest_half(values) if len(values) else (everywhere, 0.0)
        usual[place], spread[place] = middle, sigma
        odd = np.abs(logs[place] - middle) > np.clip(4 * sigma, NOISE, _MOST_NOISE)
        odd &= taken
        # A pair is there twice where a group meets itself.
        rare[place] = odd if odd.sum() <= max(4, _RARE * len(values)) else False
    return usual, spread, rare


def _densest_half(values: Floats) -> tuple[float, float]:
    """Return the median of the half of sorted values that lies closest together, and the sigma that fits it.

    Where a group holds two kinds of pairs that nobody has told apart, this is the greater kind: the median and its
    MAD would lie between the two, and call both of them usual.
    """
    count = len(values) // 2 + 1
    widths = values[count - 1 :] - values[: len(values) - count + 1]
    start = int(widths.argmin())
    # Each pair is there twice where a group meets itself. Few values tell nothing of the spread; of not many the
    # closest half is too close (the correction is Rousseeuw and Leroy's, 1987).
    few = 1 + 5 / max(1.0, len(values) / 2 - 1)
    sigma = few * float(widths[start]) / _SIGMA_OF_HALF if len(values) >= 6 else 0.0
    return float(np.median(values[start : start + count])), sigma


def _guess(off: Floats, usual: Floats, spread: Floats) -> Floats:
    """Return the times that are to be expected where nothing was measured."""
    nodes = np.zeros(len(off))
    for node, row in enumerate(off):
        known = row[np.isfinite(row)]
        effect = float(np.median(known)) if len(known) else 0.0
        nodes[node] = effect if effect > max(NOISE, float(np.median(spread[node]))) else 0.0
    guessed: Floats = _GUESSED * np.exp(usual + np.maximum(nodes[:, None], nodes))
    return guessed
