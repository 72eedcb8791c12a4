"""Fabrics: which capacities an exchange uses, and how far two nodes are from each other."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tools.nccl.measurement import Floats

Indices = NDArray[np.int64]

GB_S = 1e9
PCIE = 20 * GB_S
LATENCY_S = {"inside": 8.0e-6, "leaf": 10.0e-6, "cell": 11.2e-6, "far": 13.0e-6}
"""One way of a few bytes: in the node, through one switch, through a spine, through another group."""


@dataclass(frozen=True)
class Fabric:
    """A machine's network without faults. Node n's GPU g is rank n * gpus_per_node + g."""

    kind: str
    nodes: int
    gpus_per_node: int
    nics_per_node: int
    nic: float
    """Bytes a second of one NIC, each direction."""
    inside: Floats
    """Bytes a second between the GPUs of a node, (gpus, gpus)."""
    leaf: Indices
    """Number of each node's leaf switch (with `by_rail`, of its set of leaf switches)."""
    cell: Indices
    """Number of each node's group of leaves."""
    uplink: float = 1.0
    """What a leaf carries to other leaves, as a share of what its nodes can send."""
    global_link: float = 1.0
    """What a group of leaves carries to other groups, as a share of what its nodes can send."""
    by_rail: bool = False
    """A leaf switch for each NIC of the nodes, instead of one for all NICs."""

    def nic_of(self, gpu: Indices) -> Indices:
        """Return the NIC that serves a GPU; several GPUs may share one."""
        return gpu * self.nics_per_node // self.gpus_per_node

    @property
    def names(self) -> list[str]:
        """Names of the nodes."""
        return [f"n{node:04d}" for node in range(self.nodes)]


def islands(gpus: int, kind: str) -> Floats:
    """Return bandwidths inside a node.

    kind: `switch` (NVSwitch, all alike), `mesh` (NVLink between each two, fewer links for each), `islands` (two
    islands, PCIe between them), `cube` (as in the first DGX: two, one or no NVLink between two GPUs).
    """
    if kind == "switch":
        return np.full((gpus, gpus), 240 * GB_S)
    if kind == "mesh":
        return np.full((gpus, gpus), 80 * GB_S)
    side = np.arange(gpus) // max(1, gpus // 2)
    if kind == "islands":
        return np.where(side[:, None] == side[None, :], 90 * GB_S, PCIE)
    place = np.arange(gpus) % max(1, gpus // 2)
    near = np.abs(place[:, None] - place[None, :]) % 2 == 1
    same = side[:, None] == side[None, :]
    return np.where(
        same, np.where(near, 45 * GB_S, 22 * GB_S), np.where(place[:, None] == place, 45 * GB_S, 9 * GB_S)
    )


def fat_tree(
    nodes: int, gpus: int, nics: int, inside: str, leaf_nodes: int, oversubscription: float = 1.0
) -> Fabric:
    """Return leaves under a spine; oversubscription 2: the spine carries half of what a leaf's nodes can send."""
    leaf = np.arange(nodes) // leaf_nodes
    return Fabric(
        f"fat tree {oversubscription:g}:1",
        nodes,
        gpus,
        nics,
        24 * GB_S,
        islands(gpus, inside),
        leaf,
        np.zeros(nodes, dtype=np.int64),
        uplink=1 / oversubscription,
    )


def dragonfly(
    nodes: int, gpus: int, nics: int, inside: str, leaf_nodes: int, cell_leaves: int, taper: float = 1.5
) -> Fabric:
    """Return DragonFly+: groups of leaves without blocking inside, fewer links between groups (adaptive routing)."""
    leaf = np.arange(nodes) // leaf_nodes
    return Fabric(
        "DragonFly+",
        nodes,
        gpus,
        nics,
        24 * GB_S,
        islands(gpus, inside),
        leaf,
        leaf // cell_leaves,
        global_link=1 / taper,
    )


def rails(nodes: int, gpus: int, nics: int, inside: str, unit_nodes: int) -> Fabric:
    """Return a rail-optimised fabric: the k-th NIC of all nodes of a unit is on one leaf switch."""
    return Fabric(
        "rails",
        nodes,
        gpus,
        nics,
        48 * GB_S,
        islands(gpus, inside),
        np.arange(nodes) // unit_nodes,
        np.zeros(nodes, dtype=np.int64),
        by_rail=True,
    )


def fair_shares(uses: Indices, capacity: Floats, limit: Floats) -> Floats:
    """Return max-min fair rates of flows.

    uses: (flows, k) resources of each flow, -1 for none; capacity: of each resource; limit: each flow's own, which no
    one shares. Each step settles the flows of every resource that is the tightest for all of its flows (Bertsekas and
    Gallager, "Data Networks", 6.5.2, for all bottlenecks at once).
    """
    flows = len(uses)
    # Each flow's own limit is a resource of its own; the last resource of all stands for "none" and never binds.
    count = len(capacity)
    own = count + np.arange(flows)
    table = np.concatenate([np.where(uses < 0, count + flows, uses), own[:, None]], axis=1)
    left = np.concatenate([capacity, limit, [np.inf]])
    rate = np.zeros(flows)
    active = np.arange(flows)
    while len(active):
        rows = table[active]
        users = np.bincount(rows.ravel(), minlength=len(left))
        share = np.maximum(left, 0.0) / np.maximum(users, 1)
        tightest = share[rows].min(axis=1)
        least = np.full(len(left), np.inf)
        np.minimum.at(least, rows, np.broadcast_to(tightest[:, None], rows.shape))
        binding = least >= share * (1 - 1e-9)
        done = (binding[rows] & (share[rows] <= tightest[:, None] * (1 + 1e-9))).any(axis=1)
        rate[active[done]] = tightest[done]
        np.subtract.at(left, rows[done], np.broadcast_to(tightest[done][:, None], rows[done].shape))
        active = active[~done]
    return rate
