"""The order of nodes in a ring: the slowest edge counts first, since a ring runs at its pace, then the sum.

The same order serves all rails, so that a cost should be the worst over rails; inside a node GPUs stay together.
"""

from dataclasses import dataclass

import numpy as np

from tools.nccl.measurement import Floats
from tools.nccl.route.exact import MOST_NODES, best_ring
from tools.nccl.route.spanning import (
    slowest_edge_bound,
    slowest_edge_bound_directed,
    sum_bound,
    sum_bound_directed,
)
from tools.nccl.route.tour import Order, Tour, greedy, neighbours

MARGIN = 0.03
"""The given order is kept where the best that was found is better by less: measurements differ by as much."""

_TIE = 1e-7
"""Among equal edges those between nodes that are near in the given order win by this share: a result that does not
depend on chance, and differs little from what was given."""
_CLOSE = 0.002
"""How near to the least possible slowest edge the search goes."""


@dataclass(frozen=True)
class Ring:
    """A closed order of nodes."""

    order: tuple[int, ...]
    """It begins with node 0."""
    worst: float
    """Its slowest edge; infinite where no ring does without missing edges."""
    total: float
    """The sum of its edges."""
    bound: float
    """No ring has a faster slowest edge than this."""
    exact: bool
    """No ring is better by more than `slack`: proved."""
    total_bound: float = 0.0
    """No ring whose edges are held to the same limit has a smaller sum."""
    kept: bool = False
    """The order is the given one (0, 1, 2, ...): the best that was found is not better by more than the margin."""


def order_ring(cost: Floats, *, margin: float = MARGIN, slack: float = MARGIN) -> Ring:
    """Order nodes in a ring.

    cost[i][j]: seconds that a chunk takes from i to j; NaN or infinite where there is no such edge: it is used only
    if there is no ring without. The diagonal is not read. slack: edges that are slower by this share than the slowest
    has to be count as equally slow, and then a smaller sum wins. Exact up to 12 nodes, above by local search with
    bounds.
    """
    _check(cost)
    nodes = len(cost)
    given = list(range(nodes))
    if nodes < 3:
        worst, total = _judge(given, cost)
        return Ring(tuple(given), worst, total, worst, exact=True, total_bound=total, kept=True)
    found = _exactly(cost, slack) if nodes <= MOST_NODES else search_ring(cost, slack)
    worst, total = _judge(given, cost)
    if worst <= found.worst * (1 + margin) and total <= found.total * (1 + margin):
        exact = found.exact and worst <= found.worst and total <= found.total
        return Ring(tuple(given), worst, total, found.bound, exact, found.total_bound, kept=True)
    return found


def search_ring(cost: Floats, slack: float = 0.0) -> Ring:
    """Order nodes by greed and local search: what `order_ring` does above 12 nodes. Four nodes or more."""
    symmetric, usable = _usable(cost)
    np.fill_diagonal(usable, np.inf)
    bound = slowest_edge_bound(usable) if symmetric else slowest_edge_bound_directed(usable)
    order, limit = _least_worst(usable, bound, symmetric, slack)
    allowed = np.where(usable > limit, np.inf, usable)
    total = float(usable[order, np.roll(order, -1)].sum())
    total_bound = sum_bound(allowed, total) if symmetric else sum_bound_directed(allowed)
    best = _begin_with_first(order, symmetric)
    worst, total = _judge(best, cost)
    tied = 1 + 2 * _TIE
    exact = worst <= bound * (1 + slack) * tied and total <= total_bound * tied
    return Ring(tuple(best), worst, total, min(bound, worst), exact, min(total_bound, total))


def _check(cost: Floats) -> None:
    assert cost.ndim == 2 and cost.shape[0] == cost.shape[1] and len(cost), cost.shape
    assert not (cost[np.isfinite(cost)] < 0).any(), "a time is negative"


def _exactly(cost: Floats, slack: float) -> Ring:
    symmetric, usable = _usable(cost)
    best, least = best_ring(usable, slack)
    order = _begin_with_first(best, symmetric)
    worst, total = _judge(order, cost)
    return Ring(tuple(order), worst, total, min(least, worst), exact=True, total_bound=total)


def _usable(cost: Floats) -> tuple[bool, Floats]:
    """Say whether the costs are symmetric, and return them all finite, ties broken by the given order."""
    nodes = len(cost)
    around = np.abs(np.subtract.outer(np.arange(nodes), np.arange(nodes)))
    around = np.minimum(around, nodes - around)
    missing = ~np.isfinite(cost)
    np.fill_diagonal(missing, False)
    finite = np.where(np.isfinite(cost), cost, 0.0)
    np.fill_diagonal(finite, 0.0)
    mean = float(finite.mean()) or 1.0
    usable = finite + _TIE * mean * around / nodes
    # More than all other edges together, so that the sum too avoids a missing one.
    usable[missing] = 2 * nodes * float(usable.max())
    return bool(np.array_equal(usable, usable.T)), usable


def _judge(order: list[int], cost: Floats) -> tuple[float, float]:
    if len(order) == 1:
        return 0.0, 0.0
    edges = cost[order, np.roll(order, -1)]
    edges = np.where(np.isfinite(edges), edges, np.inf)
    return float(edges.max()), float(edges.sum())


def _begin_with_first(order: Order | list[int], symmetric: bool) -> list[int]:
    """Turn a ring so that it begins with node 0 and, where direction does not matter, goes on to the lower one."""
    found = np.asarray(order)
    found = np.roll(found, -int(np.flatnonzero(found == 0)[0]))
    if symmetric and found[1] > found[-1]:
        found = np.roll(found[::-1], 1)
    return [int(node) for node in found]


def _least_worst(usable: Floats, bound: float, symmetric: bool, slack: float) -> tuple[Order, float]:
    """Search the least slowest edge by halving between the bound and what was found, the sum under it at last.

    Returns the ring and the limit that its edges were held to.
    """
    weights = usable.copy()
    np.fill_diagonal(weights, 0.0)
    near = neighbours(usable)
    random = np.random.default_rng(len(usable))
    order = greedy(usable, near, symmetric)
    given = np.arange(len(usable))
    order = min((order, given), key=lambda one: _key(one, weights))
    low = bound
    order = _under(low, order, weights, near, symmetric, random, kicks=_kicks(len(usable)) // 2)
    high = _key(order, weights)[0]
    if high > low:
        low, high, order = _halve(low, high, order, weights, near, symmetric, random)
    limit = high * (1 + slack)
    return _under(limit, order, weights, near, symmetric, random, kicks=_kicks(len(usable))), limit


def _halve(
    low: float,
    high: float,
    order: Order,
    weights: Floats,
    near: list[Order],
    symmetric: bool,
    random: np.random.Generator,
) -> tuple[float, float, Order]:
    while high > low * (1 + _CLOSE):
        middle = (low * high) ** 0.5 if low else high / 2
        tried = _under(middle, order, weights, near, symmetric, random, kicks=_kicks(len(order)) // 8)
        worst = _key(tried, weights)[0]
        if worst < high:
            order, high = tried, worst
        if worst > middle:
            low = middle
    return low, high, order


def _under(
    limit: float,
    order: Order,
    weights: Floats,
    near: list[Order],
    symmetric: bool,
    random: np.random.Generator,
    kicks: int,
) -> Order:
    """Improve a ring: as few edges above `limit` as possible, then the sum."""
    price = len(order) * float(weights.max())
    tour = Tour(order, weights + np.where(weights > limit, price, 0.0), near, symmetric)
    tour.improve(order.tolist())
    for _ in range(kicks):
        tour.kick(random)
    return min((order, tour.order), key=lambda one: _key(one, weights, limit))


def _key(order: Order, weights: Floats, limit: float = 0.0) -> tuple[float, float]:
    edges = weights[order, np.roll(order, -1)]
    return max(float(edges.max()), limit), float(edges.sum())


def _kicks(nodes: int) -> int:
    """How much patience: what small rings gain from a kick is cheap."""
    return min(10 * nodes, 1500) if nodes <= 1024 else 500
