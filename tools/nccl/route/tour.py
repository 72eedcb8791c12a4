"""A ring of many nodes, made by greed and improved by local search."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from tools.nccl.measurement import Floats

Order = NDArray[np.int64]

_NEAREST = 8
_WINDOW = 50
"""Furthest that a kick reaches along the ring: its repair stays local."""


def neighbours(cost: Floats) -> list[Order]:
    """Return for each node the nodes worth being next to, the nearest first."""
    count = min(_NEAREST, len(cost) - 1)
    near = np.argpartition(cost, count - 1, axis=1)[:, :count]
    rank = np.argsort(np.take_along_axis(cost, near, axis=1), axis=1, kind="stable")
    return list(np.take_along_axis(near, rank, axis=1).astype(np.int64))


def greedy(cost: Floats, near: list[Order], symmetric: bool) -> Order:
    """Return a ring from the cheapest edges that fit together, its pieces joined end to nearest end."""
    nodes = len(cost)
    first = np.repeat(np.arange(nodes), [len(found) for found in near])
    second = np.concatenate(near)
    rank = np.argsort(cost[first, second], kind="stable")
    after, before = [-1] * nodes, [-1] * nodes
    links: list[list[int]] = [[] for _ in range(nodes)]
    piece = list(range(nodes))

    def root(node: int) -> int:
        while piece[node] != node:
            piece[node] = piece[piece[node]]
            node = piece[node]
        return node

    for one, other in zip(first[rank].tolist(), second[rank].tolist(), strict=True):
        if symmetric and max(len(links[one]), len(links[other])) == 2:
            continue
        if not symmetric and max(after[one], before[other]) >= 0:
            continue
        if root(one) != root(other):
            piece[root(one)] = root(other)
            after[one], before[other] = other, one
            links[one].append(other)
            links[other].append(one)
    starts = [node for node in range(nodes) if before[node] < 0]
    paths = _paths(links) if symmetric else [_follow(node, after) for node in starts]
    return _join(paths, cost, symmetric)


def _follow(node: int, after: list[int]) -> list[int]:
    path = [node]
    while after[path[-1]] >= 0:
        path.append(after[path[-1]])
    return path


def _paths(links: list[list[int]]) -> list[list[int]]:
    seen = [False] * len(links)
    paths = []
    for start in range(len(links)):
        if seen[start] or len(links[start]) == 2:
            continue
        path, before = [start], -1
        seen[start] = True
        while True:
            ahead = [node for node in links[path[-1]] if node != before]
            if not ahead:
                break
            before = path[-1]
            path.append(ahead[0])
            seen[ahead[0]] = True
        paths.append(path)
    return paths


def _join(paths: list[list[int]], cost: Floats, symmetric: bool) -> Order:
    """Go from each piece to the piece whose free end is nearest."""
    heads = np.array([path[0] for path in paths])
    tails = np.array([path[-1] for path in paths])
    left = np.ones(len(paths), dtype=bool)
    ring = list(paths[0])
    left[0] = False
    while left.any():
        to_head = np.where(left, cost[ring[-1], heads], np.inf)
        to_tail = np.where(left, cost[ring[-1], tails], np.inf) if symmetric else np.full(len(paths), np.inf)
        turned = bool(to_tail.min() < to_head.min())
        chosen = int((to_tail if turned else to_head).argmin())
        if not left[chosen]:
            chosen = int(left.argmax())
        ring += reversed(paths[chosen]) if turned else paths[chosen]
        left[chosen] = False
    return np.array(ring, dtype=np.int64)


class Tour:
    """A ring under local search: 2-opt (Croes, 1958), and Or-opt (Or, 1976) with segments of any length.

    Works on edges to near nodes only, and looks at a node again only after its edges have changed (Bentley, 1992).
    """

    def __init__(self, order: Order, weights: Floats, near: list[Order], symmetric: bool) -> None:
        """`weights`: square and finite; `near`: see `neighbours`."""
        self.order = order.copy()
        self._weights = weights
        self._turned = weights if symmetric else np.ascontiguousarray(weights.T)
        self._near = near
        self._symmetric = symmetric
        self._place = np.empty_like(order)
        self._place[self.order] = np.arange(len(order))
        self._least = 1e-10 * float(np.abs(weights).mean())
        self.gain = 0.0
        """What the moves so far have saved."""

    def improve(self, nodes: Iterable[int]) -> None:
        """Move until no move at `nodes`, nor at what moved, saves anything."""
        queue = list(nodes)
        waiting = set(queue)
        while queue:
            node = queue.pop()
            waiting.discard(node)
            moved = self._segment(node)
            if moved is None and self._symmetric:
                moved = self._turn(node)
            if moved is not None:
                fresh = [one for one in dict.fromkeys((*moved, node)) if one not in waiting]
                queue += fresh
                waiting.update(fresh)

    def kick(self, random: np.random.Generator) -> None:
        """Exchange two neighbouring pieces at a random place, repair, and take it back unless that saved something."""
        nodes = len(self.order)
        if nodes < 5:
            return
        kept, gain = self.order.copy(), self.gain
        start = int(random.integers(nodes))
        turned = np.roll(self.order, -start)
        first, second, third = np.sort(random.choice(min(_WINDOW, nodes - 1), 3, replace=False)) + 1
        pieces = (turned[:first], turned[second:third], turned[first:second], turned[third:])
        before = self._length(turned[: third + 1])
        turned = np.concatenate(pieces)
        self.gain += before - self._length(turned[: third + 1])
        self._set(turned)
        ends = [turned[first - 1], turned[first], turned[first + third - second - 1]]
        ends += [turned[first + third - second], turned[third - 1], turned[third % nodes]]
        self.improve(dict.fromkeys(int(end) for end in ends))
        if self.gain < gain - self._least:
            self._set(kept)
            self.gain = gain

    def _length(self, path: Order) -> float:
        return float(self._weights[path[:-1], path[1:]].sum())

    def _set(self, order: Order) -> None:
        self.order = order
        self._place[order] = np.arange(len(order))

    def _turn(self, node: int) -> tuple[int, ...] | None:
        """2-opt: turn a part of the ring around, so that `node` gets a near node as neighbour."""
        nodes = len(self.order)
        weights, place = self._weights, self._place
        here = int(place[node])
        near = self._near[node]
        there = place[near]
        for step in (1, -1):
            beside = self.order[(here + step) % nodes]
            besides = self.order[(there + step) % nodes]
            change = (
                weights[node][near]
                + weights[beside][besides]
                - weights[node, beside]
                - weights[near, besides]
            )
            best = int(change.argmin())
            if change[best] < -self._least:
                self.gain -= float(change[best])
                low, high = sorted((here, int(there[best])))
                first, last = (low + 1, high) if step == 1 else (low, high - 1)
                self.order[first : last + 1] = self.order[first : last + 1][::-1]
                place[self.order[first : last + 1]] = np.arange(first, last + 1)
                return int(beside), int(near[best]), int(besides[best])
        return None

    def _segment(self, node: int) -> tuple[int, ...] | None:
        """Or-opt: put a piece of the ring that begins (or, turned around, ends) with a near node after `node`."""
        nodes = len(self.order)
        weights = self._weights
        here = int(self._place[node])
        after = int(self.order[(here + 1) % nodes])
        now = weights[node, after]
        near = self._near[node]
        worth = near[weights[node][near] < now - self._least]
        if not len(worth):
            return None
        ring = np.concatenate([self.order[here + 1 :], self.order[: here + 1]])
        edges = weights[ring[:-1], ring[1:]]
        back = self._turned[after]
        for other in worth.tolist():
            at = (int(self._place[other]) - here - 1) % nodes
            saved = float(now - weights[node, other])
            if 0 < at < nodes - 1:
                before = int(ring[at - 1])
                change = back[ring[at:-1]] + weights[before][ring[at + 1 :]] - edges[at:]
                end = at + int(change.argmin())
                total = float(change[end - at]) - saved - float(edges[at - 1])
                if total < -self._least:
                    self.gain -= total
                    ends = (after, other, before, int(ring[end]), int(ring[end + 1]))
                    self._set(np.concatenate([ring[at : end + 1], ring[:at], ring[end + 1 :]]))
                    return ends
            if self._symmetric and 0 < at < nodes - 1:
                beyond = int(ring[at + 1])
                change = back[ring[1 : at + 1]] + weights[beyond][ring[:at]] - edges[:at]
                begin = 1 + int(change.argmin())
                total = float(change[begin - 1]) - saved - float(edges[at])
                if total < -self._least:
                    self.gain -= total
                    ends = (after, other, beyond, int(ring[begin]), int(ring[begin - 1]))
                    self._set(np.concatenate([ring[begin : at + 1][::-1], ring[:begin], ring[at + 1 :]]))
                    return ends
        return None
