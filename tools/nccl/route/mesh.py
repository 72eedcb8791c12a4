"""Which axes of the mesh suit which part of the machine, by what was measured there."""

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components

from tools.nccl.measurement import Floats, Measurement, matrix

_ISLAND = 0.6
"""GPUs belong to one island where they reach this share of the node's best pair; NVLink and PCIe are further apart."""
_ALIKE = 0.8
"""Places whose bandwidth is this share of each other's are alike: an axis may span either."""


@dataclass(frozen=True)
class MeshAdvice:
    """Where each axis had best live."""

    tp_most: int
    """Largest degree of tensor parallelism that stays where bandwidth is highest."""
    tp_within: str
    """`node`, `island` (GPUs of a node that are near each other), `any` where nodes are no better than the network."""
    islands: tuple[tuple[int, ...], ...]
    """Local numbers of the GPUs that are near each other; one island is a node whose GPUs are all alike."""
    dp_shard_nodes: int
    """Nodes that a sharding group may span before it leaves a group of near nodes."""
    inside: float
    """Median bandwidth of a pair of GPUs in one island, bytes a second; 0: not measured."""
    near: float
    """The same for one rail between nodes of one group."""
    far: float
    """The same between groups; equal to `near` where there is one group."""
    sentence: str


def advise_mesh(measurement: Measurement, groups: tuple[tuple[str, ...], ...]) -> MeshAdvice:
    """Choose by the medians inside islands, between near nodes and between groups of nodes."""
    inside_pairs = _inside(measurement)
    islands = _islands(inside_pairs)
    same = np.zeros_like(inside_pairs, dtype=bool)
    for island in islands:
        same[np.ix_(island, island)] = True
    inside = _median(inside_pairs[same])
    near, far = _between(measurement, groups)
    outside = near or far
    smallest = min(len(island) for island in islands)
    if inside and outside and outside >= _ALIKE * inside:
        within, most = "any", measurement.ranks
    elif len(islands) > 1:
        within, most = "island", smallest
    else:
        within, most = "node", measurement.gpus_per_node
    split = len(groups) > 1 and far < _ALIKE * near
    nodes = min(len(group) for group in groups) if split else len(measurement.nodes)
    sentence = _sentence(within, most, (inside, near, far), split, nodes)
    return MeshAdvice(most, within, islands, nodes, inside, near, far, sentence)


def _inside(measurement: Measurement) -> Floats:
    """Return the median over nodes of the bandwidth of each pair of local GPUs."""
    gpus = measurement.gpus_per_node
    values = measurement.exchanges.bandwidth
    first, second = measurement.exchanges.first, measurement.exchanges.second
    local = (first // gpus == second // gpus) & (values > 0)
    found = np.full((gpus, gpus), np.nan)
    low, high = np.minimum(first, second) % gpus, np.maximum(first, second) % gpus
    for one in range(gpus):
        for other in range(one + 1, gpus):
            found[one, other] = found[other, one] = (
                _median(values[local & (low == one) & (high == other)]) or np.nan
            )
    return found


def _islands(pairs: Floats) -> tuple[tuple[int, ...], ...]:
    known = pairs[np.isfinite(pairs)]
    if not len(known):
        return (tuple(range(len(pairs))),)
    # What was not measured does not set a GPU apart.
    joined = ~(pairs < _ISLAND * known.max())
    count, labels = connected_components(csr_matrix(joined), directed=False)
    return tuple(tuple(np.flatnonzero(labels == label).tolist()) for label in range(count))


def _between(measurement: Measurement, groups: tuple[tuple[str, ...], ...]) -> tuple[float, float]:
    """Return the median over pairs of nodes of one rail's bandwidth, in groups and between them."""
    place = {name: number for number, group in enumerate(groups) for name in group}
    label = np.array([place.get(name, -1 - index) for index, name in enumerate(measurement.nodes)])
    gpus = measurement.gpus_per_node
    near, far = [], []
    for rail in range(gpus):
        ranks = [node * gpus + rail for node in range(len(measurement.nodes))]
        values = np.triu(np.nan_to_num(matrix(measurement, ranks, "bandwidth")), 1)
        alike = label[:, None] == label
        near.append(values[(values > 0) & alike])
        far.append(values[(values > 0) & ~alike])
    inner, outer = _median(np.concatenate(near)), _median(np.concatenate(far))
    return inner or outer, outer or inner


def _median(values: Floats) -> float:
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else 0.0


def _sentence(within: str, most: int, figures: tuple[float, float, float], split: bool, nodes: int) -> str:
    inside, near, far = (f"{value / 1e9:.3g} GB/s" for value in figures)
    if not figures[1]:
        return f"tp up to {most} in a node: a pair of its GPUs exchanges {inside}"
    between = f"{near} between two GPUs of different nodes" + (
        f", {far} between groups of nodes" if split else ""
    )
    start = {
        "any": f"tp may span nodes: {inside} in a node is hardly more than {between}",
        "island": f"tp up to {most}, in one island of a node's GPUs: {inside} there, {between}",
        "node": f"tp up to {most}, in a node: {inside} there, {between}",
    }[within]
    if within == "node" and most == 1:
        start = f"a node has one GPU, so tp would cross nodes: {between}"
    elif not figures[0]:
        start = f"tp in a node: {between}; inside it nothing was measured"
    if split:
        return f"{start}; dp_shard in groups of {nodes} nodes or fewer, pp and dp_replicate across groups"
    return f"{start}; pp and dp across nodes, in any order of groups"
