"""The best ring of a few nodes, found by going through all subsets."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tools.nccl.measurement import Floats

MOST_NODES = 12
"""Up to here the exact search takes milliseconds: it grows as 2^n n^2."""

_Join = Callable[[Floats, Floats], Floats]


def best_ring(cost: Floats, slack: float = 0.0) -> tuple[list[int], float]:
    """Return the ring with the least sum among those whose slowest edge is the least, and that edge.

    Dynamic programme over subsets (Held and Karp, 1962; Bellman, 1962), once for the slowest edge, once for the sum
    with slower edges forbidden; edges that are slower than the least by the share `slack` are allowed still. All costs
    must be finite. The ring begins with node 0.
    """
    nodes = len(cost)
    if nodes < 3:
        return list(range(nodes)), float(cost[0, -1])
    worst, _ = _solve(cost, np.maximum)
    _, order = _solve(np.where(cost > worst * (1 + slack), np.inf, cost), np.add)
    return order, worst


def _solve(cost: Floats, join: _Join) -> tuple[float, list[int]]:
    others = len(cost) - 1
    inner = cost[1:, 1:]
    best = np.full((1 << others, others), np.inf)
    best[1 << np.arange(others), np.arange(others)] = cost[0, 1:]
    masks = np.arange(1 << others)
    sizes = ((masks[:, None] >> np.arange(others)) & 1).sum(axis=1)
    for size in range(2, others + 1):
        layer = masks[sizes == size]
        for last in range(others):
            chosen = layer[(layer >> last) & 1 == 1]
            best[chosen, last] = join(best[chosen ^ (1 << last)], inner[:, last]).min(axis=1)
    return _walk_back(cost, best, join)


def _walk_back(cost: Floats, best: NDArray[np.float64], join: _Join) -> tuple[float, list[int]]:
    others = len(cost) - 1
    mask = (1 << others) - 1
    closing = join(best[mask], cost[1:, 0])
    last = int(closing.argmin())
    order = [last + 1]
    while mask != 1 << last:
        mask ^= 1 << last
        last = int(join(best[mask], cost[1:, last + 1]).argmin())
        order.append(last + 1)
    return float(closing.min()), [0, *reversed(order)]
