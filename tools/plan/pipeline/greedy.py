"""An order found for given times: zero bubble with a limit of memory (Qi et al. 2023 search for theirs in another way).

Forward and backward take turns after a warm-up, and the gradients of the weights fill the gaps: a rank computes them
when memory asks for it, when they fit before the next chunk arrives, or when it has idled for as long as it may. How
long that is, is tried out.
"""

import heapq
from functools import lru_cache
from itertools import accumulate

from tools.plan.pipeline.orders import FORWARD, INPUT, WEIGHTS, Order

_NEVER = 1 << 62
_ENOUGH = 3
"""Times the ranks: as many micro-batches show which of the ways to play is best."""

Times = tuple[tuple[int, int, int], ...]
"""Forward, backward for the input, for the weights; of each stage, one to a rank."""


@lru_cache(maxsize=32)
def greedy_orders(
    times: Times, handover: int, micro_batches: int, most: float, kept: float
) -> tuple[Order, ...]:
    """Return an order for each rank in which none holds more than `most` micro-batches.

    `kept`: what a micro-batch is counted as from the backward for its input until that for its weights.
    """
    ranks = len(times)
    budgets = [0, sum(weights for _, _, weights in times) // 5, _NEVER]
    few = min(micro_batches, _ENOUGH * ranks)
    best = min(budgets, key=lambda budget: _Game(times, handover, few, most, kept, budget).play())
    game = _Game(times, handover, micro_batches, most, kept, best)
    game.play()
    return tuple(game.orders)


class _Game:
    """One way to play, on all ranks at once."""

    def __init__(
        self,
        times: Times,
        handover: int,
        micro_batches: int,
        most: float,
        kept: float,
        budget: int,
    ) -> None:
        ranks = len(times)
        self._times, self._handover, self._all = times, handover, micro_batches
        self._most, self._kept, self._budget = most + 1e-9, kept, budget
        self._ahead = _warm_up(times, handover, micro_batches, most)
        self._done = [[0] * ranks for _ in range(3)]
        self._arrivals: list[list[list[int]]] = [[[] for _ in range(ranks)] for _ in range(2)]
        self._arrivals[FORWARD][0] = [0] * micro_batches
        self._arrivals[INPUT][-1] = [0] * micro_batches
        self._free = [0] * ranks
        self._first = [-1] * ranks
        self._idle = [0] * ranks
        self._backward_next = [False] * ranks
        self._looks = [(0, rank) for rank in range(ranks)]
        self.orders: list[Order] = [[] for _ in range(ranks)]

    def play(self) -> int:
        """Play to the end; returns the longest time from a rank's first chunk to its last."""
        looks, free = self._looks, self._free
        while looks:
            now, rank = heapq.heappop(looks)
            if now >= free[rank] and self._done[WEIGHTS][rank] < self._all:
                kind, wait = self._choose(rank, now)
                if kind >= 0:
                    self._compute(rank, now, kind)
                elif wait < _NEVER:
                    heapq.heappush(looks, (wait, rank))
        assert all(done == self._all for done in self._done[WEIGHTS]), "deadlock"
        return max(end - start for start, end in zip(self._first, free, strict=True))

    def _choose(self, rank: int, now: int) -> tuple[int, int]:
        """Kind of the next chunk, or -1 and the time until which to wait."""
        forwards, backwards, weights = (done[rank] for done in self._done)
        forward = self._arrival(FORWARD, rank, forwards)
        backward = self._arrival(INPUT, rank, backwards) if backwards < forwards else _NEVER
        pending = weights < backwards
        if forwards < self._all and (forwards < self._ahead[rank] or not self._backward_next[rank]):
            held = forwards - backwards + self._kept * (backwards - weights)
            if held + 1 > self._most:
                if pending:
                    return WEIGHTS, now
                forward = _NEVER
            if forward <= now:
                return FORWARD, now
            wait = min(forward, backward)
        else:
            wait = backward
        if backward <= now:
            return INPUT, now
        if pending and self._fills(rank, now, wait, last=backwards == self._all):
            return WEIGHTS, now
        return -1, wait

    def _arrival(self, kind: int, rank: int, index: int) -> int:
        known = self._arrivals[kind][rank]
        return known[index] if index < len(known) else _NEVER

    def _fills(self, rank: int, now: int, wait: int, *, last: bool) -> bool:
        """Whether the time until `wait` is for the gradients of weights."""
        if last:
            return True
        if wait == _NEVER:
            return self._idle[rank] + now - self._free[rank] > self._budget
        return wait - now >= self._times[rank][WEIGHTS] or self._idle[rank] + wait - now > self._budget

    def _compute(self, rank: int, now: int, kind: int) -> None:
        ranks = len(self._times)
        if self._first[rank] < 0:
            self._first[rank] = now
        else:
            self._idle[rank] += now - self._free[rank]
        end = now + self._times[rank][kind]
        self._free[rank] = end
        self.orders[rank].append((self._done[kind][rank] * ranks + rank) * 4 + kind)
        self._done[kind][rank] += 1
        heapq.heappush(self._looks, (end, rank))
        if kind == WEIGHTS:
            return
        self._backward_next[rank] = kind == FORWARD
        neighbour = rank + 1 if kind == FORWARD else rank - 1
        if 0 <= neighbour < ranks:
            self._arrivals[kind][neighbour].append(end + self._handover)
            heapq.heappush(self._looks, (max(now, self._free[neighbour]), neighbour))


def _warm_up(times: Times, handover: int, micro_batches: int, most: float) -> list[int]:
    """Forwards of each rank that fit before its first backward; fewer on later ranks if memory allows few."""
    ranks = len(times)
    starts = [0, *accumulate(forward + handover for forward, _, _ in times)]
    turn = starts[-1] - handover
    back = [0, *accumulate(inputs + handover for _, inputs, _ in reversed(times))]
    slowest = list(accumulate((max(1, forward) for forward, _, _ in times), max))
    ahead = []
    for rank in range(ranks):
        fit = (turn + back[ranks - 1 - rank] - starts[rank]) // slowest[rank]
        allowed = int(1 + (most - 1) * (ranks - 1 - rank) / max(1, ranks - 1) + 1e-9)
        ahead.append(max(1, min(micro_batches, fit, allowed)))
    return ahead
