"""Hidden topology: which nodes are nearer to each other than to the rest, by hierarchical clustering."""

from collections.abc import Mapping, Sequence

import numpy as np

from tools.nccl.analyse.robust import Indices, by_group, median, sigma
from tools.nccl.measurement import Floats

SEPARATION = 3.0
"""Groups are believed when near and far differ by so many sigmas of a single pair."""
LEAST = 0.05
"""And by at least so much (logarithm)."""
LEAST_NODES = 4
MIN_GROUPS = 2
"""Groups of two nodes or more that there must be: else one slow node and the rest would be groups."""
CUTS = 12
COVERED = 0.6
"""Share of the pairs that must have been measured."""
OVERLAP = 0.6
"""Pairs that are in one group and near, as a share of those that are either."""
SHARP = 8
"""How much more overlap counts than distance when one of several cuts is chosen."""


def find_groups(distance: Floats, least_groups: int = MIN_GROUPS) -> Indices | None:
    """Return the number of each node's group, or None where nodes are not in `least_groups` groups of two or more.

    distance: (nodes, nodes), symmetric, logarithmic, NaN where missing. Average linkage (Sokal and Michener, 1958); cut
    where merging is most costly, if the pairs within and between groups differ beyond noise.
    """
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    count = len(distance)
    upper = np.triu_indices(count, 1)
    known = np.isfinite(distance[upper])
    if count < LEAST_NODES or known.mean() < COVERED:
        return None
    tree = linkage(squareform(_filled(distance), checks=False), "average")
    heights = tree[:, 2]
    steps = np.diff(heights)
    best: tuple[float, Indices | None] = (0.0, None)
    for merge in np.argsort(steps)[::-1][:CUTS]:
        height = (heights[merge] + heights[merge + 1]) / 2
        labels = fcluster(tree, height, "distance").astype(np.int64) - 1
        score = _separation(distance, labels, least_groups)
        if score > best[0]:
            best = (score, labels)
    return best[1]


def find_levels(distance: Floats) -> list[Indices]:
    """Return groups at every level that shows, the smallest first (leaves, then cells of leaves); none: nothing."""
    base = find_groups(distance)
    if base is None:
        return []
    finer = _split(distance, base)
    coarser = find_groups(_between_groups(distance, base), least_groups=1)
    levels = [finer, base, None if coarser is None else coarser[base]]
    return [labels for labels in levels if labels is not None]


def best_level(levels: Sequence[Indices], known: Indices) -> Indices:
    """Return the level that agrees best with known groups: on most pairs of nodes."""

    def agreement(labels: Indices) -> float:
        same = (labels[:, None] == labels) == (known[:, None] == known)
        return float(same.mean())

    return max(levels, key=agreement)


def _split(distance: Floats, labels: Indices) -> Indices | None:
    """Return groups within the groups, or None where no group has any."""
    found, next_label, any_split = labels.copy(), 0, False
    for group in range(int(labels.max()) + 1):
        members = np.flatnonzero(labels == group)
        parts = find_groups(distance[np.ix_(members, members)])
        any_split |= parts is not None
        found[members] = next_label + (0 if parts is None else parts)
        next_label = int(found[members].max()) + 1
    return found if any_split else None


def _between_groups(distance: Floats, labels: Indices) -> Floats:
    """Return the matrix of median distances between groups; NaN on the diagonal."""
    count = int(labels.max()) + 1
    pair = labels[:, None] * count + labels[None, :]
    found = by_group(distance.ravel(), pair.ravel(), count * count).reshape(count, count)
    np.fill_diagonal(found, np.nan)
    return found


def differ(groups: Sequence[Sequence[str]], known: Mapping[str, str]) -> list[str]:
    """Say where measured groups differ from known ones (node -> group), in sentences."""
    named = [[name for name in group if name in known] for group in groups]
    usual = [
        max({known[n] for n in group}, key=[known[n] for n in group].count) if group else ""
        for group in named
    ]
    odd = [
        f"{name} is in {known[name]} by Slurm, but is measured among the nodes of {label}"
        for group, label in zip(named, usual, strict=True)
        for name in group
        if known[name] != label and known[name] in usual
    ]
    joined = [
        ", ".join(sorted({known[n] for n in group}))
        for group in named
        if len({known[n] for n in group}) > 1 and any(known[n] not in usual for n in group)
    ]
    split = sorted({label for label in usual if label and usual.count(label) > 1})
    return [
        *odd,
        *(f"the measurement does not tell these groups of Slurm's apart: {names}" for names in joined),
        *(f"the measurement shows several groups in Slurm's {label}" for label in split),
    ]


def _filled(distance: Floats) -> Floats:
    """Fill missing pairs with what their ends have elsewhere, and shift to what linkage takes: no negative figures."""
    rows = np.array([median(row) for row in distance])
    rows = np.where(np.isfinite(rows), rows, median(rows))
    found = np.where(np.isfinite(distance), distance, (rows[:, None] + rows[None, :]) / 2)
    found = found - found.min()
    np.fill_diagonal(found, 0.0)
    return np.asarray(found)


def _separation(distance: Floats, labels: Indices, least_groups: int) -> float:
    """Return how good groups are: sigmas between near and far pairs, less where they overlap; 0: no groups."""
    sizes = np.bincount(labels)
    if len(sizes) < 2 or (sizes > 1).sum() < least_groups or (sizes[labels] == 1).mean() > 0.2:
        return 0.0
    same = labels[:, None] == labels[None, :]
    np.fill_diagonal(same, False)
    near, far = distance[same], distance[labels[:, None] != labels[None, :]]
    step = median(far) - median(near)
    if not step > LEAST:
        return 0.0
    seen_near = distance < (median(far) + median(near)) / 2
    overlap = (seen_near & same).sum() / max(1, ((seen_near | same) & np.isfinite(distance)).sum())
    if overlap < OVERLAP:
        return 0.0
    pooled = np.hypot(sigma(near) * np.sqrt(len(near)), sigma(far) * np.sqrt(len(far)))
    separation = step / max(pooled / np.sqrt(len(near) + len(far)), 1e-9)
    return float(overlap**SHARP * separation) if separation >= SEPARATION else 0.0
