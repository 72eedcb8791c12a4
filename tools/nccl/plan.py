"""Who exchanges with whom in which round, so that no rank is in two pairs at once.

The circle method gives every pair of n in n - 1 rounds (n when n is odd) of n // 2 pairs each: any choice of its
rounds pairs each one with as many different partners. Two rounds in a row join all of them in one chain, hence a plan
that holds such two is connected (Wallis, "One-Factorizations": the standard factorization of a complete graph).
Nodes are numbered at random first: else a round would send one whole switch against another one.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Pair = tuple[int, int]
PairTable = NDArray[np.int64]

PER_DOUBLING = 4
"""Rounds of a sampled plan for each doubling of the nodes: 48 for 4,096."""


def rounds_of(count: int) -> int:
    """Rounds in which everyone of `count` meets everyone else."""
    return 0 if count < 2 else count - 1 + count % 2


def circle(count: int, number: int) -> PairTable:
    """Return the pairs of one round, shape (count // 2, 2); number: 0 to rounds_of(count) - 1."""
    turning = rounds_of(count)
    steps = np.arange(1, (turning + 1) // 2)
    pairs = np.stack([(number + steps) % turning, (number - steps) % turning], axis=1)
    if count % 2 == 0:
        pairs = np.concatenate([np.array([[count - 1, number]]), pairs])
    return np.sort(pairs, axis=1)


@dataclass(frozen=True)
class Plan:
    """The rounds of a campaign."""

    nodes: int
    gpus_per_node: int
    between: tuple[int, ...]
    """Rounds of the circle method over nodes; every rail of a pair of nodes at the same time."""
    seed: int = 0

    @property
    def inside(self) -> int:
        """Rounds among the GPUs of a node, in all nodes at once."""
        return rounds_of(self.gpus_per_node)

    @property
    def rounds(self) -> int:
        """All rounds, without warming up and without what is tested again."""
        return self.inside + len(self.between)

    @property
    def share(self) -> float:
        """Share of the pairs of nodes that are measured; a single bad link is missed with 1 - share."""
        return len(self.between) / max(1, rounds_of(self.nodes))

    def time_s(self, round_s: float) -> float:
        """Return how long the rounds take when each takes `round_s`."""
        return self.rounds * round_s

    def left_out(self) -> str | None:
        """Say in one sentence what this plan can miss; None when it is complete."""
        if self.share >= 1 or self.nodes < 2:
            return None
        return (
            f"{len(self.between)} of {rounds_of(self.nodes)} rounds were made: every node met {len(self.between)} "
            f"others, so slow nodes, NICs and GPUs show, but a single bad link between two nodes is missed with a "
            f"probability of {1 - self.share:.0%}"
        )

    def inside_pairs(self, number: int) -> list[Pair]:
        """Return pairs of ranks of a round inside nodes."""
        return inside_pairs(range(self.nodes), self.gpus_per_node, number)

    def between_pairs(self, number: int) -> PairTable:
        """Return pairs of nodes of a round between them; number: one of `between`."""
        order = np.random.default_rng(self.seed).permutation(self.nodes)
        return np.sort(order[circle(self.nodes, number)], axis=1)

    def shortened(self, rounds: int) -> "Plan":
        """Return the same plan with its first `rounds` between nodes only."""
        return replace(self, between=self.between[:rounds])


def complete(nodes: int, gpus_per_node: int, seed: int = 0) -> Plan:
    """Return the plan in which every pair of nodes meets once."""
    order = np.random.default_rng(seed).permutation(rounds_of(nodes))
    return Plan(nodes, gpus_per_node, _connected_first(order), seed)


def sampled(nodes: int, gpus_per_node: int, rounds: int | None = None, seed: int = 0) -> Plan:
    """Return a plan of few rounds, by default PER_DOUBLING for each doubling of the nodes."""
    wanted = PER_DOUBLING * math.ceil(math.log2(max(2, nodes))) if rounds is None else rounds
    return complete(nodes, gpus_per_node, seed).shortened(max(2, wanted))


def inside_pairs(nodes: range | list[int], gpus_per_node: int, number: int) -> list[Pair]:
    """Return pairs of ranks: the same GPUs of each of `nodes`."""
    gpus = circle(gpus_per_node, number)
    return [(node * gpus_per_node + a, node * gpus_per_node + b) for node in nodes for a, b in gpus.tolist()]


def rail_pairs(pairs: PairTable | list[Pair], gpus_per_node: int) -> list[Pair]:
    """Return pairs of ranks: all rails of each pair of nodes."""
    return [
        (int(a) * gpus_per_node + rail, int(b) * gpus_per_node + rail)
        for a, b in np.asarray(pairs, dtype=np.int64).reshape(-1, 2).tolist()
        for rail in range(gpus_per_node)
    ]


def into_rounds(pairs: list[Pair], most: int) -> Iterator[list[Pair]]:
    """Spread any pairs over rounds of at most `most`, none in two pairs of a round; those named first come early."""
    busy: dict[int, int] = {}
    rounds: dict[int, list[Pair]] = {}
    for first, second in pairs:
        taken = busy.get(first, 0) | busy.get(second, 0)
        free = ~taken & (taken + 1)
        busy[first] = busy.get(first, 0) | free
        busy[second] = busy.get(second, 0) | free
        rounds.setdefault(free, []).append((first, second))
    for free in sorted(rounds):
        for start in range(0, len(rounds[free]), most):
            yield rounds[free][start : start + most]


def _connected_first(order: NDArray[np.int64]) -> tuple[int, ...]:
    """Put two rounds in a row first, so that any beginning of the plan of two rounds or more is connected."""
    if len(order) < 2:
        return tuple(order.tolist())
    first = int(order[0])
    second = (first + 1) % len(order)
    return (first, second, *(one for one in order.tolist() if one not in (first, second)))
