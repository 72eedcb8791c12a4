"""The steps of an all-reduce that follows the machine: which ranks reduce with which, level by level."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One level: all its groups work at the same time, each rank in one of them."""

    name: str
    """`node`: the ranks of a node; `cluster`: those with one local number in a cluster of nodes; `world`."""
    operation: str
    """`reduce_scatter`, undone by an all-gather on the way back; `all_reduce` at the outermost level."""
    groups: tuple[tuple[int, ...], ...]
    """Ranks, each group in the order that its ring should have."""


@dataclass(frozen=True)
class Hierarchy:
    """An all-reduce in steps: the levels from first to last, then all-gathers from the last but one back."""

    steps: tuple[Step, ...]
    leaders: tuple[int, ...]
    """The first rank of each node, where one is to act for all."""
    note: str = ""
    """Why there is no level of clusters, where some were given."""


def plan(
    order: Sequence[int], gpus_per_node: int, clusters: Sequence[Sequence[int]] | None = None
) -> Hierarchy:
    """Lay out the levels for nodes in the order of their ring; a rank is node * gpus_per_node + gpu.

    `clusters`: groups of nodes that are near to each other, a level of their own where they are alike in size, more
    than one, and have more than one node each: else a share of a reduce-scatter would have no counterpart.
    """
    gpus = range(gpus_per_node)
    nodes = Step(
        "node", "reduce_scatter", tuple(tuple(node * gpus_per_node + gpu for gpu in gpus) for node in order)
    )
    leaders = tuple(group[0] for group in nodes.groups)
    found, note = _usable(order, clusters)
    rails = _rails(order, gpus_per_node)
    if not found:
        last = Step("world", "all_reduce", rails)
        return Hierarchy((nodes, last) if gpus_per_node > 1 else (last,), leaders, note)
    inner = tuple(rail for cluster in found for rail in _rails(cluster, gpus_per_node))
    outer = tuple(
        tuple(cluster[place] * gpus_per_node + gpu for cluster in found)
        for place in range(len(found[0]))
        for gpu in gpus
    )
    steps = (Step("cluster", "reduce_scatter", inner), Step("world", "all_reduce", outer))
    return Hierarchy((nodes, *steps) if gpus_per_node > 1 else steps, leaders, note)


def _rails(order: Sequence[int], gpus_per_node: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(node * gpus_per_node + gpu for node in order) for gpu in range(gpus_per_node))


def _usable(order: Sequence[int], clusters: Sequence[Sequence[int]] | None) -> tuple[list[list[int]], str]:
    """Return the clusters in the order of the ring, their nodes too; none, and why, where they make no level."""
    kept = [[node for node in order if node in set(cluster)] for cluster in clusters or ()]
    kept = sorted((cluster for cluster in kept if cluster), key=lambda cluster: list(order).index(cluster[0]))
    if len(kept) < 2:
        return [], ""
    sizes = sorted({len(cluster) for cluster in kept})
    if sum(len(cluster) for cluster in kept) != len(order):
        return [], "the groups of near nodes do not hold every node, so that they make no level of their own"
    if len(sizes) > 1:
        return (
            [],
            f"groups of {sizes[0]} to {sizes[-1]} nodes make no level of their own: they are not alike in size",
        )
    if sizes == [1]:
        return [], "groups of one node make no level of their own"
    return kept, ""
