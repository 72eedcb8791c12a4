"""What should be tested again before it is blamed."""

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from tools.nccl.analyse.attribute import attribute
from tools.nccl.analyse.between import FEW_NODES, Low
from tools.nccl.analyse.robust import by_group
from tools.nccl.findings import Part
from tools.nccl.measurement import Exchanges

ENOUGH = 6
"""Tests after which a pair's bad figures are believed: chance disturbs four of six in no machine of 4,096 nodes."""
ENOUGH_FLAKY = 7
"""The same for a pair that works only sometimes."""
ENOUGH_INSIDE = 3
"""The same for the pairs in a node of which a GPU looks slow."""
CLEARED = 0.3
"""A pair is steady when a smaller share of its tests failed."""


@dataclass(frozen=True)
class Doubts:
    """Nodes by number."""

    links: list[tuple[int, int]]
    """Pairs of nodes whose figures are odd, the oddest first."""
    nodes: list[int]
    """Nodes that are odd with many others."""
    inside: list[int]
    """Nodes among whose GPUs something is odd."""
    good: list[int]
    """Nodes with nothing odd: partners that clear or convict."""


def find_doubts(exchanges: Exchanges, nodes: int, gpus: int) -> Doubts:
    """Return what needs more tests; nothing when all that is odd was tested often enough."""
    found = attribute(exchanges, nodes, gpus)
    odd: dict[tuple[int, int], float] = {}
    for one in (*found.speed.links, *found.late.links):
        if one.tests < ENOUGH:
            ends = (one.nodes[0], one.nodes[1])
            odd[ends] = max(odd.get(ends, 0.0), one.deviations)
    if nodes <= FEW_NODES:
        some = [one for one in found.speed.rails if one.tests < ENOUGH]
        odd.update(((a, b), one.deviations) for one in some for a, b in combinations(range(nodes), 2))
    outer = found.between
    shaky = (outer.unsteady > 0) & (outer.unsteady >= CLEARED * outer.tests) & (outer.tests < ENOUGH_FLAKY)
    broken = (outer.silent | outer.wrong) & (outer.tests < ENOUGH)
    for line in np.flatnonzero(shaky | broken).tolist():
        odd.setdefault((int(outer.first[line]) // gpus, int(outer.second[line]) // gpus), 1.0)
    bad = [
        *found.speed.nodes,
        *found.speed.switches,
        *found.speed.nics,
        *found.late.nodes,
        *found.late.switches,
    ]
    nodes_in_doubt = _nodes(bad)
    inner = found.inside
    shaky_inside = (
        (inner.unsteady > 0) & (inner.unsteady >= CLEARED * inner.tests) & (inner.tests < ENOUGH_FLAKY)
    )
    broken_inside = (inner.silent | inner.wrong) & (inner.tests < ENOUGH)
    lines = np.flatnonzero(shaky_inside | broken_inside)
    odd_inside = {int(inner.first[line]) // gpus for line in lines.tolist()}
    odd_inside.update(_nodes([one for one in found.gpus.links if one.tests < ENOUGH]))
    # Whether an adapter or its GPU gives wrong values, only more tests inside the node tell.
    fewest = by_group(-inner.tests.astype(np.float64), inner.first // gpus, nodes, 1.0)
    odd_inside.update(
        one.nodes[0] for one in found.wrong if one.part is Part.nic and -fewest[one.nodes[0]] < ENOUGH
    )
    # A GPU has few pairs: two that something disturbed are enough to make it look slow.
    odd_inside.update(
        node for node in _nodes([*found.gpus.gpus, *found.gpus.nodes]) if -fewest[node] < ENOUGH_INSIDE
    )
    dead = {node for one in found.silent if len(one.nodes) == 1 for node in one.nodes}
    suspects = set(nodes_in_doubt) | {node for ends in odd for node in ends} | odd_inside | dead
    return Doubts(
        links=sorted((ends for ends in odd if not dead & set(ends)), key=lambda ends: -odd[ends]),
        nodes=nodes_in_doubt,
        inside=sorted(odd_inside - dead),
        good=[node for node in range(nodes) if node not in suspects],
    )


def _nodes(lows: list[Low]) -> list[int]:
    return list(dict.fromkeys(node for one in lows for node in one.nodes))
