"""What exchanges between ranks take: latency, and bandwidth that a node's ranks share (alpha-beta).

Ranks that are neighbours share a node, as `train.layout.dims` orders them: tp, cp, data parallel, pp from the inside.
"""

import math
from dataclasses import dataclass

from tools.plan.case import Machine
from tools.plan.constants import Constants


@dataclass(frozen=True)
class Group:
    """Ranks that exchange."""

    ranks: int
    rate: float
    """Bytes/s that each sends while all such groups of its node exchange."""
    latency_s: float
    """Of a gather."""

    def gather_s(self, size: float) -> float:
        """Seconds to gather `size` bytes in all, or to reduce and scatter as many, by a ring."""
        return 0.0 if self.ranks == 1 else self.sent_bytes(size) / self.rate + self.latency_s

    def all_reduce_s(self, size: float) -> float:
        """Seconds to reduce `size` bytes."""
        return 2 * self.gather_s(size)

    def sent_bytes(self, size: float) -> float:
        """Bytes that a rank sends to gather `size`."""
        return (self.ranks - 1) / self.ranks * size


def group(machine: Machine, known: Constants, ranks: int, stride: int) -> Group:
    """Return the group of `ranks` that are `stride` apart."""
    link = machine.gpu.link_gb_s * 1e9 * known.link
    here = min(ranks, max(1, machine.gpus_per_node // stride))
    if ranks <= here or machine.nodes == 1:
        return Group(ranks, link, known.link_latency_s * (1 + math.log2(ranks)))
    # Each of the groups that have ranks in a node sends through its adapters.
    network = machine.network * known.network * here / machine.gpus_per_node
    return Group(ranks, min(link, network), known.network_latency_s * (1 + math.log2(ranks / here)))


def neighbour_rate(machine: Machine, known: Constants, stride: int) -> float:
    """Bytes/s at which each rank can send to the one `stride` further, all at once."""
    if stride >= machine.gpus_per_node and machine.nodes > 1:
        return machine.network * known.network / machine.gpus_per_node
    return machine.gpu.link_gb_s * 1e9 * known.link
