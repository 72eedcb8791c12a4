"""How fast a large all-reduce goes round a ring of nodes: what limits it is the slowest edge, or a shared uplink."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tools.nccl.measurement import Floats, Measurement
from tools.nccl.route.edges import Flags, NodeEdges, steady
from tools.nccl.route.uplink import Uplink, find_uplinks, shared_ways

CHUNK_BYTES = 1 << 20
"""A ring hands on pieces of about this size on each rail: what an edge costs is the time of one."""


@dataclass(frozen=True)
class Pace:
    """A model of a ring over nodes: rates in bytes a second over all rails."""

    rates: Floats
    """Of each edge, as if no other crossed between groups."""
    latency_s: Floats
    labels: NDArray[np.int64]
    uplinks: tuple[Uplink, ...]
    """By label."""
    inside: float
    """What the ring runs at inside a node; infinite where that is not known."""
    gpus_per_node: int

    def seconds(self, order: Sequence[int], size_bytes: float) -> float:
        """Return the time of an all-reduce: 2 (p-1)/p of the buffer over each edge (Patarasuk and Yuan, 2009).

        Infinite where an edge does not answer.
        """
        nodes = len(order)
        ranks = nodes * self.gpus_per_node
        if ranks < 2:
            return 0.0
        share = 2 * (ranks - 1) / ranks
        rate = min(self.rate(order), self.inside)
        if nodes < 2:
            return share * size_bytes / rate
        first = np.asarray(order)
        around = float(np.nan_to_num(self.latency_s[first, np.roll(first, -1)]).sum())
        return share * (size_bytes / rate if rate else np.inf) + share * around

    def rate(self, order: Sequence[int]) -> float:
        """Return the pace of the slowest edge between nodes."""
        if len(order) < 2:
            return float("inf")
        first = np.asarray(order)
        second = np.roll(first, -1)
        rates = self.rates[first, second]
        leave, reach = self.labels[first], self.labels[second]
        crosses = leave != reach
        count = len(self.uplinks)
        outward = np.bincount(leave[crosses], minlength=count)
        inward = np.bincount(reach[crosses], minlength=count)
        limits = np.array([uplink.together for uplink in self.uplinks])
        shared = np.minimum(
            limits[leave] / np.maximum(outward[leave], 1), limits[reach] / np.maximum(inward[reach], 1)
        )
        return float(np.where(crosses, np.minimum(rates, shared), rates).min())

    def chunk_times(self) -> Floats:
        """Return what an edge costs in a ring, seconds for a chunk: between groups as if all their nodes crossed.

        How many cross in the end is what an order decides: this keeps them few. Infinite where nothing answers, NaN
        where nothing is known.
        """
        count = len(self.uplinks)
        sizes = np.maximum(np.bincount(self.labels, minlength=count), 1)
        full = np.array([uplink.together for uplink in self.uplinks]) / sizes
        crowded = np.minimum(full[self.labels][:, None], full[self.labels])
        rates = np.where(self.labels[:, None] == self.labels, self.rates, np.minimum(self.rates, crowded))
        with np.errstate(divide="ignore"):
            return np.nan_to_num(self.latency_s) + CHUNK_BYTES * self.gpus_per_node / rates

    def crossings(self, order: Sequence[int]) -> int:
        """Return how many edges of the ring lead from one group to another."""
        labels = self.labels[np.asarray(order)]
        return int((labels != np.roll(labels, -1)).sum()) if len(order) > 1 else 0


def find_pace(
    measurement: Measurement, edges: NodeEdges, labels: NDArray[np.int64], trusted: Flags | None = None
) -> Pace:
    """Build the model from what was measured between nodes and from the rounds in which that was done.

    `trusted`: pairs whose measured values are no chance, see `edges.blamed`.
    """
    gpus = measurement.gpus_per_node
    latency_s = steady(edges.latency_s, labels, trusted)
    labels, uplinks = find_uplinks(measurement, edges, labels)
    count = len(uplinks)
    with np.errstate(divide="ignore"):
        rates = gpus / steady(1 / edges.bandwidth, labels, trusted, shared_ways(uplinks, labels))
    rates[~np.isfinite(rates)] = 0.0
    np.fill_diagonal(rates, np.inf)
    known = np.isfinite(rates) & (rates > 0)
    for one in range(count):
        for two in range(count):
            here = np.ix_(labels == one, labels == two)
            if one == two or not known[here].any():
                continue
            # A pair that is slower than its like stays slower by the same share.
            usual = float(np.median(rates[here][known[here]]))
            alone = min(uplinks[one].alone, uplinks[two].alone)
            rates[here] = np.where(known[here], alone * np.minimum(rates[here] / usual, 1.0), rates[here])
    busbw = [
        one.busbw
        for one in measurement.collectives
        if one.operation == "all_reduce" and one.nodes == 1 and one.ranks == gpus > 1 and one.busbw > 0
    ]
    return Pace(rates, latency_s, labels, uplinks, max(busbw, default=float("inf")), gpus)
