"""Spanning trees of dense matrices, and the lower bounds on rings that follow from them."""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components

from tools.nccl.measurement import Floats

Tree = NDArray[np.int64]
"""Edges as rows (first, second)."""

_ASCENTS = 60
_ASSIGNED = 1500
"""Up to this many nodes an assignment problem is solved; above, it would take longer than the search."""


def spanning_tree(cost: Floats) -> Tree:
    """Return the edges of a minimum spanning tree of a symmetric matrix.

    Prim's algorithm: on a dense matrix it needs no sorting, unlike scipy's, and is ten times as quick.
    """
    nodes = len(cost)
    near = cost[0].copy()
    parent = np.zeros(nodes, dtype=np.int64)
    outside = np.ones(nodes, dtype=bool)
    outside[0] = False
    edges = np.empty((nodes - 1, 2), dtype=np.int64)
    for step in range(nodes - 1):
        new = int(np.where(outside, near, np.inf).argmin())
        if not outside[new]:
            new = int(outside.argmax())
        edges[step] = parent[new], new
        outside[new] = False
        nearer = outside & (cost[new] < near)
        near[nearer] = cost[new][nearer]
        parent[nearer] = new
    return edges


def _two_trees(cost: Floats) -> Tree:
    """Return a minimum spanning tree and one of what is left without its edges.

    At every threshold the two together are connected, and have no bridge, exactly where all edges of the matrix up
    to it are so (Nagamochi and Ibaraki, 1992).
    """
    first = spanning_tree(cost)
    rest = cost.copy()
    rest[first[:, 0], first[:, 1]] = np.inf
    rest[first[:, 1], first[:, 0]] = np.inf
    return np.concatenate([first, spanning_tree(rest)])


def slowest_edge_bound(cost: Floats) -> float:
    """Return what the slowest edge of any ring takes at least, symmetric costs, three nodes or more.

    Each node needs two edges, and a ring has no bridge: without any edge it is connected still.
    """
    import networkx

    trees = _two_trees(cost)
    needed = float(np.partition(cost, 1, axis=1)[:, 1].max())
    values = np.unique(cost[trees[:, 0], trees[:, 1]])
    values = values[np.isfinite(values)]
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        usable = trees[cost[trees[:, 0], trees[:, 1]] <= values[middle]]
        graph = networkx.Graph(usable.tolist())
        whole = len(graph) == len(cost) and networkx.is_connected(graph)
        if whole and not networkx.has_bridges(graph):
            high = middle
        else:
            low = middle + 1
    return max(needed, float(values[high]))


def slowest_edge_bound_directed(cost: Floats) -> float:
    """Return the same for costs that differ by direction: a way in, a way out, and all nodes within reach of all."""
    ways = np.where(np.eye(len(cost), dtype=bool), np.inf, cost)
    least = max(float(ways.min(axis=1).max()), float(ways.min(axis=0).max()))
    values = np.unique(ways[np.isfinite(ways)])
    low, high = int(np.searchsorted(values, least)), len(values) - 1
    while low < high:
        middle = (low + high) // 2
        parts, _ = connected_components(csr_matrix(ways <= values[middle]), connection="strong")
        low, high = (low, middle) if parts == 1 else (middle + 1, high)
    return float(values[high])


def sum_bound(cost: Floats, known: float) -> float:
    """Return what the edges of any ring take at least together, symmetric costs; `known`: the sum of some ring.

    1-trees with prices on nodes, raised step by step (Held and Karp, 1970 and 1971). Edges that may not be used
    are infinite.
    """
    nodes = len(cost)
    prices = np.zeros(nodes)
    best, scale = 0.0, 1.0
    for step in range(_ASCENTS if nodes <= 1024 else _ASCENTS // 3):
        priced = cost + prices[:, None] + prices
        edges = spanning_tree(priced[1:, 1:]) + 1
        ends = np.argpartition(priced[0, 1:], 1)[:2] + 1
        edges = np.concatenate([edges, np.stack([np.zeros(2, dtype=np.int64), ends], axis=1)])
        degrees = np.bincount(edges.ravel(), minlength=nodes)
        # Prices add up to nothing: as many ends are too many as are missing.
        bound = float(priced[edges[:, 0], edges[:, 1]].sum())
        best = max(best, bound)
        uneven = degrees - 2
        if not uneven.any():
            return best
        if step % 6 == 5:
            scale /= 1.5
        prices += scale * max(known - bound, 0.0) / float((uneven**2).sum()) * uneven
    return best


def sum_bound_directed(cost: Floats) -> float:
    """Return the same for costs that differ by direction: the cheapest way to give every node a successor."""
    if len(cost) > _ASSIGNED:
        return max(float(cost.min(axis=1).sum()), float(cost.min(axis=0).sum()))
    forbidden = 1e3 * float(cost[np.isfinite(cost)].max()) * len(cost)
    finite = np.where(np.isfinite(cost), cost, forbidden)
    return float(finite[linear_sum_assignment(finite)].sum())
