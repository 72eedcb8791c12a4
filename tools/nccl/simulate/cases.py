"""Cases by seed: a fabric, and a fault in it or none.

How grave the faults are: they leave 30 to 90 % of the speed of a node, NIC, GPU or rail; 30 to 75 % of a link's, 5 to
60 % of an NVLink's; through a bad leaf's uplinks 30 to 75 % of what a healthy round sends fits; a flaky link has 20 to
50 % of its repetitions at 5 to 30 % of their speed; a GPU with wrong values gives them in 50 to 100 % of its exchanges;
a late node takes 1.9 to 4 times as long. What leaves more is within the noise of a machine (an exchange differs by
2 % and more, NICs by 1 %) and is called no fault. In a fabric that blocks speeds differ by tens of percent from round
to round: there a node's, NIC's or GPU's share is one of what the fabric lets through, and `reach` and
`reach_of_switch` say how much a bad link or leaf leaves at most; links that nothing could tell are not drawn.
"""

from dataclasses import dataclass

import numpy as np

from tools.nccl.findings import Part, Symptom
from tools.nccl.simulate.fabric import Fabric, dragonfly, fat_tree, rails
from tools.nccl.simulate.faults import Planted

KINDS = (
    "slow node",
    "slow NIC",
    "flaky link",
    "slow link",
    "oversubscribed leaf",
    "missing NVLink",
    "slow GPU",
    "dead node",
    "rail switch",
    "wrong values",
    "late node",
)
SIZES = (8, 12, 16, 24, 27, 32, 48, 64, 96, 128, 200, 256, 384, 512)


@dataclass(frozen=True)
class Case:
    """What a simulator is given."""

    seed: int
    fabric: Fabric
    planted: tuple[Planted, ...]

    @property
    def kind(self) -> str:
        """Kind of the fault, or `healthy`."""
        return self.planted[0].kind if self.planted else "healthy"


def make_case(seed: int, kind: str, sizes: tuple[int, ...] = SIZES) -> Case:
    """Draw a fabric on which the kind of fault exists (`healthy`: any fabric), and the fault.

    Small fabrics are drawn more often, by the root of their size.
    """
    rng = np.random.default_rng([seed, *kind.encode()])
    weight = np.array(sizes) ** -0.5
    while True:
        fabric = _draw_fabric(rng, int(rng.choice(sizes, p=weight / weight.sum())))
        if _possible(kind, fabric):
            planted = () if kind == "healthy" else (_draw_fault(rng, kind, fabric),)
            return Case(seed, fabric, planted)


def _draw_fabric(rng: np.random.Generator, nodes: int) -> Fabric:
    gpus = int(rng.choice([1, 4, 8], p=[0.1, 0.5, 0.4]))
    nics = int(rng.choice([count for count in (1, 2, 4, 8) if count <= gpus]))
    inside = str(rng.choice(["mesh", "switch"] if gpus == 4 else ["switch", "islands", "cube"]))
    leaf = max(2, min(int(rng.choice([4, 8, 16, 32])), nodes // 4))
    shape = rng.choice(["tree", "blocking", "dragonfly", "rails"])
    if shape == "tree":
        return fat_tree(nodes, gpus, nics, inside, leaf)
    if shape == "blocking":
        return fat_tree(nodes, gpus, nics, inside, leaf, float(rng.choice([1.5, 2.0, 3.0])))
    if shape == "dragonfly":
        return dragonfly(
            nodes, gpus, nics, inside, leaf, int(rng.choice([2, 4])), float(rng.choice([1.0, 1.5]))
        )
    return rails(nodes, gpus, nics, inside, int(rng.choice([8, 32, 64])))


def _possible(kind: str, fabric: Fabric) -> bool:
    several = fabric.gpus_per_node > 1
    leaves = np.bincount(fabric.leaf)
    return {
        "slow NIC": several and fabric.nics_per_node > 1,
        "missing NVLink": several,
        "slow GPU": several,
        "wrong values": several,
        "rail switch": fabric.by_rail and fabric.nics_per_node > 1,
        "slow link": reach(fabric) > 0.1,
        "oversubscribed leaf": not fabric.by_rail and len(leaves) >= 3,
    }.get(kind, True)


def reach(fabric: Fabric) -> float:
    """Share of its speed that a single bad link keeps at most, to be told from what is usual on this fabric.

    In a fabric that blocks, the nodes of a leaf (or of a cell) that send elsewhere share what is there: how many they
    are differs from round to round, and so does the speed of a pair (binomial; six sigmas of it are out of reach).
    """
    share = min(fabric.uplink, fabric.global_link)
    if share >= 1:
        return 0.75
    members = float(np.median(np.bincount(fabric.leaf if fabric.uplink < 1 else fabric.cell)))
    crossing = (fabric.nodes - members) / (fabric.nodes - 1)
    if crossing <= 0:
        return 0.75
    differs = np.sqrt(crossing * (1 - crossing) / members) / crossing
    return float(min(0.75, min(1.0, share / crossing) * np.exp(-6.5 * np.hypot(0.03, differs))))


def reach_of_switch(fabric: Fabric) -> float:
    """Share of the usual speed that is left at most behind a bad switch, to be told from a fabric that blocks."""
    if min(fabric.uplink, fabric.global_link) >= 1:
        return 0.75
    return 0.7 if np.bincount(fabric.leaf).max() >= 8 else 0.5


def _draw_fault(rng: np.random.Generator, kind: str, fabric: Fabric) -> Planted:
    node, other = (int(one) for one in rng.choice(fabric.nodes, 2, replace=False))
    gpus = rng.choice(fabric.gpus_per_node, min(2, fabric.gpus_per_node), replace=False)
    nic = int(rng.integers(fabric.nics_per_node))
    left = float(rng.uniform(0.3, 0.9))
    blocking = min(fabric.uplink, fabric.global_link)
    under = left * (1.0 if blocking >= 1 else blocking)
    ends = tuple(sorted((node, other)))
    if kind == "slow node":
        return Planted(kind, Part.node, Symptom.slow, (node,), left=under)
    if kind == "slow NIC":
        return Planted(kind, Part.nic, Symptom.slow, (node,), nic, left=under)
    if kind == "flaky link":
        share, often = float(rng.uniform(0.05, 0.3)), float(rng.uniform(0.2, 0.5))
        return Planted(kind, Part.link, Symptom.flaky, ends, left=share, often=often)
    if kind == "slow link":
        lowest = min(0.3, reach(fabric) / 2)
        return Planted(kind, Part.link, Symptom.slow, ends, left=float(rng.uniform(lowest, reach(fabric))))
    if kind == "oversubscribed leaf":
        sizes = np.bincount(fabric.leaf)
        leaf = int(rng.choice(np.flatnonzero(sizes > 1)))
        crossing = (fabric.nodes - sizes[leaf]) / (fabric.nodes - 1)
        usual = min(1.0, fabric.uplink / crossing, fabric.global_link / crossing)
        share = float(rng.uniform(0.3, reach_of_switch(fabric))) * usual * crossing / fabric.uplink
        members = tuple(np.flatnonzero(fabric.leaf == leaf).tolist())
        return Planted(kind, Part.switch, Symptom.slow, members, left=share)
    if kind == "missing NVLink":
        pair = tuple(sorted(int(one) for one in gpus))
        return Planted(
            kind, Part.nvlink, Symptom.slow, (node,), gpus=pair, left=float(rng.uniform(0.05, 0.6))
        )
    if kind == "slow GPU":
        return Planted(kind, Part.gpu, Symptom.slow, (node,), gpus=(int(gpus[0]),), left=under)
    if kind == "dead node":
        return Planted(kind, Part.node, Symptom.silent, (node,))
    if kind == "rail switch":
        return Planted(kind, Part.rail, Symptom.slow, (), nic, left=left)
    if kind == "wrong values":
        often = float(rng.uniform(0.5, 1))
        return Planted(kind, Part.gpu, Symptom.wrong, (node,), gpus=(int(gpus[0]),), often=often)
    return Planted(kind, Part.node, Symptom.late, (node,), left=1 / float(rng.uniform(1.9, 4)))
