"""What is usual for two nodes that are so far apart: in one group, in groups of one group, far away."""

from collections.abc import Sequence

import numpy as np

from tools.nccl.analyse.robust import Indices, by_group, median
from tools.nccl.measurement import Floats


def against_class(
    figure: Floats, first: Indices, second: Indices, apart: Indices, levels: Sequence[Indices]
) -> Floats:
    """Take off what is usual for pairs that are equally far apart: the median over pairs of groups of their medians."""
    if not levels:
        return figure - median(figure)
    labels = levels[0]
    groups = int(labels.max()) + 1
    low, high = np.minimum(labels[first], labels[second]), np.maximum(labels[first], labels[second])
    _, which = np.unique(low * groups + high, return_inverse=True)
    count = int(which.max()) + 1
    middles = by_group(figure, which, count)
    distance = np.zeros(count, dtype=np.int64)
    distance[which] = apart
    relative = figure.copy()
    for one in np.unique(apart):
        some = middles[distance == one]
        # One bad group is in most of the pairs of few groups: then the best one is what is usual.
        mine = apart == one
        few = one > 0 and len(some) < 6 and not _share_one(levels[one - 1], first[mine], second[mine])
        relative[mine] -= _typical(some, 1.0 if few else 0.5)
    return relative


def _share_one(labels: Indices, first: Indices, second: Indices) -> bool:
    """Return whether one group is an end of all pairs: then nothing tells what is usual without it."""
    ends = np.stack([labels[first], labels[second]])
    return any(bool((ends == group).any(axis=0).all()) for group in ends[:, 0])


def _typical(values: Floats, quantile: float) -> float:
    finite = values[np.isfinite(values)]
    return float(np.quantile(finite, quantile, method="higher")) if len(finite) else float("nan")


def crowding(
    levels: Sequence[Indices], nodes: int, relative: Floats, first: Indices, second: Indices
) -> Floats:
    """Return by how much a node may be slower to other groups by its group's size alone (logarithm, 0 or more).

    In a round of random pairs more of a small group's nodes have partners elsewhere, and share what leads there. It is
    no more than what the group as a whole is slower by: nothing where the fabric does not block.
    """
    found = np.zeros(nodes)
    for labels in levels:
        crossing = np.maximum((nodes - np.bincount(labels)[labels]) / max(1, nodes - 1), 1e-3)
        far = labels[first] != labels[second]
        ends = np.concatenate([labels[first][far], labels[second][far]])
        of_group = by_group(np.tile(relative[far], 2), ends, int(labels.max()) + 1)[labels]
        most = np.maximum(0.0, np.where(np.isfinite(of_group), -of_group, np.inf))
        found = np.maximum(found, np.minimum(np.log(crossing / np.median(crossing)), most))
    return found
