"""What an all-reduce costs by size: as measured, else by models of its steps with the measured latency and bandwidth.

Symbols: n nodes, g GPUs each, p = n g, S bytes; a_in, a_out seconds of a step inside a node and between two; B_in what
a ring inside a node runs at, B_out what one rail carries while all rails are used, so that a node has g B_out.

- ring: 2(p-1) steps, of which a share n/p goes between nodes, and 2(p-1)/p S over each edge (Patarasuk and Yuan,
  2009; the count of steps between nodes as in NCCL's src/graph/tuning.cc);
- tree: two binary trees over nodes, a chain inside each, pipelined: 2 ceil(log2 n) steps between nodes, 2(g-1) inside,
  and 2(n-1)/n S in and out of a node on average (Sanders, Speck, Traeff, 2009), of which NCCL reckons 92 % to be had;
- hierarchical: reduce-scatter and all-gather in the node, each g-1 steps and (g-1)/g S, and between them g rings over
  nodes at the same time, each 2(n-1) steps and 2(n-1)/n S/g (Thakur, Rabenseifner, Gropp, 2005, for its parts).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tools.nccl.measurement import Measurement
from tools.nccl.route.line import Curve, Line, fit_line

RING, TREE, HIERARCHICAL = "ring", "tree", "hierarchical"
FLAT = "flat"
"""Ring or tree, whichever the library takes."""

_TREE_SHARE = 0.92
_SIZES = tuple(1 << power for power in range(10, 34))
"""Where algorithms are compared: 1 KiB to 8 GiB."""
_SWITCH = 0.2
"""A change of algorithm has to save this much, added up over doublings of the size (5 % over four of them): noise
would else make many short intervals."""

Switch = tuple[int, str]
"""From how many bytes on, and what."""
_Key = tuple[str, int, int]
"""Algorithm, nodes, GPUs a node."""


@dataclass(frozen=True)
class Costs:
    """Times of an all-reduce on one machine."""

    inside: Line
    """One step between two GPUs of a node; its bandwidth is B_in."""
    between: Line
    """One step between two nodes on one rail, while all rails are used."""
    curves: Mapping[_Key, Curve] = field(default_factory=dict)
    """What was measured."""
    launch_s: float = 0.0
    """What starting one collective costs before its first step."""
    hurry: float = 1.0
    """Latency of a step inside a collective, as a share of that of an exchange."""
    share: Mapping[str, float] = field(default_factory=dict)
    """By algorithm: bandwidth that was reached, as a share of the model's."""
    trees: bool = True
    """The library has trees; gloo has none."""

    def measured(self, algorithm: str, nodes: int, gpus_per_node: int) -> Curve | None:
        """Return the curve that was measured for this, if there is one."""
        return self.curves.get((algorithm, nodes, gpus_per_node))

    def predict(self, algorithm: str, size_bytes: float, nodes: int, gpus_per_node: int) -> float:
        """Return seconds for `flat`, `ring`, `tree` or `hierarchical`, measured where that was measured.

        What the library does by itself was measured as one: it is the quicker of ring and tree by the model, and the
        other one is slower in the model's proportion.
        """
        shape = size_bytes, nodes, gpus_per_node
        curve = self.measured(algorithm, nodes, gpus_per_node)
        if curve is not None:
            return curve.seconds(size_bytes)
        if algorithm == FLAT:
            return min(self.model(one, *shape) for one in self._flat())
        flat = self.measured(FLAT, nodes, gpus_per_node)
        if flat is None or algorithm == HIERARCHICAL:
            return self.model(algorithm, *shape)
        quicker = min(self.model(one, *shape) for one in self._flat())
        return flat.seconds(size_bytes) * (self.model(algorithm, *shape) / quicker if quicker else 1.0)

    def model(self, algorithm: str, size_bytes: float, nodes: int, gpus_per_node: int) -> float:
        """Return the seconds of the closed form, see the module."""
        n, g = nodes, gpus_per_node
        p = n * g
        if p < 2:
            return self.launch_s
        a_in, a_out = self.hurry * self.inside.alpha_s, self.hurry * self.between.alpha_s
        in_node = size_bytes / self.inside.bandwidth if g > 1 else 0.0
        out_of_node = size_bytes / (g * self.between.bandwidth) if n > 1 else 0.0
        share = self.share.get(algorithm, 1.0)
        if algorithm == RING:
            between = n / p if n > 1 else 0.0
            steps = 2 * (p - 1) * (between * a_out + (1 - between) * a_in)
            return self.launch_s + steps + 2 * (p - 1) / p * max(in_node, out_of_node) / share
        if algorithm == TREE:
            steps = 2 * math.ceil(math.log2(n)) * a_out + 2 * (g - 1) * a_in
            moved = max(2 * in_node, 2 * (n - 1) / n * out_of_node)
            return self.launch_s + steps + moved / _TREE_SHARE / share
        if algorithm != HIERARCHICAL:
            raise ValueError(f"no model of {algorithm}")
        steps = 2 * (g - 1) * a_in + 2 * (n - 1) * a_out
        moved = 2 * (g - 1) / g * in_node + 2 * (n - 1) / n * out_of_node
        return (1 + 2 * (g > 1)) * self.launch_s + steps + moved / share

    def algorithms(self, nodes: int, gpus_per_node: int) -> tuple[str, ...]:
        """Return what there is to choose from: in one node, or with one GPU a node, levels make no difference."""
        if nodes < 2:
            return (RING,)
        return self._flat() + ((HIERARCHICAL,) if gpus_per_node > 1 else ())

    def _flat(self) -> tuple[str, ...]:
        return (RING, TREE) if self.trees else (RING,)


def fit(measurement: Measurement) -> Costs | None:
    """Fit latencies and bandwidths to what was measured; None where neither exchanges nor all-reduces tell any.

    Exchanges give the steps. All-reduces give their own curves, what a ring in a node runs at, what starting one costs,
    and which share of a model's bandwidth is reached.
    """
    curves = _curves(measurement)
    n, g = len(measurement.nodes), measurement.gpus_per_node
    trees = measurement.backend != "gloo"
    inside, between = _lines(measurement, curves)
    if inside is None and between is None:
        return None
    known = inside or between
    assert known is not None
    bare = Costs(
        inside=inside or Line(known.alpha_s, float("inf")),
        between=between or Line(known.alpha_s, float("inf")),
        curves=curves,
        trees=trees,
    )
    return _calibrate(bare, n, g)


def switch_points(costs: Costs, nodes: int, gpus_per_node: int) -> list[Switch]:
    """Return from which size on which all-reduce is best, ascending, the first from 0 bytes on.

    The sequence of algorithms over sizes with the least sum of logarithms of times, where a change has a price
    (Viterbi, 1967).
    """
    algorithms = costs.algorithms(nodes, gpus_per_node)
    logs = np.array(
        [
            [math.log(costs.predict(one, size, nodes, gpus_per_node) or 1e-12) for one in algorithms]
            for size in _SIZES
        ]
    )
    chosen = _cheapest_sequence(logs)
    switches: list[Switch] = []
    for size, index in zip(_SIZES, chosen, strict=True):
        if not switches or switches[-1][1] != algorithms[index]:
            switches.append((size if switches else 0, algorithms[index]))
    return switches


def _cheapest_sequence(logs: np.ndarray) -> Sequence[int]:
    count = logs.shape[1]
    price = _SWITCH * (1 - np.eye(count))
    total = logs[0]
    came_from = []
    for row in logs[1:]:
        ways = total[:, None] + price
        came_from.append(ways.argmin(axis=0))
        total = ways.min(axis=0) + row
    chosen = [int(total.argmin())]
    for back in reversed(came_from):
        chosen.append(int(back[chosen[-1]]))
    return chosen[::-1]


def _curves(measurement: Measurement) -> dict[_Key, Curve]:
    points: dict[_Key, list[tuple[float, float]]] = {}
    for one in measurement.collectives:
        if (
            one.operation == "all_reduce"
            and one.time_s > 0
            and one.size_bytes > 0
            and one.ranks % one.nodes == 0
        ):
            key = one.algorithm, one.nodes, one.ranks // one.nodes
            points.setdefault(key, []).append((float(one.size_bytes), one.time_s))
    return {key: Curve.of(found) for key, found in points.items()}


def _lines(measurement: Measurement, curves: Mapping[_Key, Curve]) -> tuple[Line | None, Line | None]:
    rows, g = measurement.exchanges, measurement.gpus_per_node
    n = len(measurement.nodes)
    local = rows.first // g == rows.second // g
    size = float(measurement.about.get("exchange_bytes") or 0)
    inside, between = (_step(rows.latency_s[some], rows.bandwidth[some], size) for some in (local, ~local))
    node = curves.get((FLAT, 1, g)) if g > 1 else None
    if node is not None:
        whole = fit_line(node.sizes, node.times)
        reached = 2 * (g - 1) / g * whole.bandwidth
        alpha = inside.alpha_s if inside else whole.alpha_s / (2 * (g - 1))
        inside = Line(alpha, reached)
    world = curves.get((FLAT, n, g)) if n > 1 else None
    if between is None and world is not None:
        whole = fit_line(world.sizes, world.times)
        steps = 2 * (n * g - 1)
        spent = steps * (1 - 1 / g) * (inside.alpha_s if inside else 0.0)
        alpha = max(whole.alpha_s - spent, 0.1 * whole.alpha_s) / (steps / g)
        between = Line(alpha, 2 * (n * g - 1) / (n * g) * whole.bandwidth / g)
    return inside, between


def _step(latency_s: np.ndarray, bandwidth: np.ndarray, size_bytes: float) -> Line | None:
    """Return the median exchange; the bandwidth without its latency, where the size is known and large."""
    works = bandwidth > 0
    if not works.any():
        return None
    latency = latency_s[works & np.isfinite(latency_s)]
    alpha = float(np.median(latency)) if len(latency) else 0.0
    rate = float(np.median(bandwidth[works]))
    time = size_bytes / rate
    return Line(alpha, size_bytes / (time - alpha) if time > 2 * alpha else rate)


def _calibrate(costs: Costs, nodes: int, gpus_per_node: int) -> Costs:
    """Adapt latency and the reached bandwidth to the flat all-reduce over all, and to the hierarchical one."""
    shape = nodes, gpus_per_node
    flat = costs.measured(FLAT, *shape)
    if flat is None:
        return costs
    smallest = float(flat.sizes[0])
    quickest = min(costs.model(one, smallest, *shape) for one in costs._flat())
    measured = float(flat.times[0])
    # Steps inside a collective may be quicker than exchanges from outside; what is left over is the start.
    hurry = min(1.0, measured / quickest) if quickest else 1.0
    fitted = Costs(
        costs.inside, costs.between, costs.curves, max(0.0, measured - quickest), hurry, trees=costs.trees
    )
    shares = {}
    for algorithm, curve in ((FLAT, flat), (HIERARCHICAL, costs.measured(HIERARCHICAL, *shape))):
        if curve is None:
            continue
        size, time = float(curve.sizes[-1]), float(curve.times[-1])
        kinds = fitted._flat() if algorithm == FLAT else (HIERARCHICAL,)
        start = min(fitted.model(kind, 0, *shape) for kind in kinds)
        moving = min(fitted.model(kind, size, *shape) for kind in kinds) - start
        if time > 2 * start and moving > 0:
            shares.update(dict.fromkeys(kinds, moving / (time - start)))
    if shares and HIERARCHICAL not in shares:
        shares[HIERARCHICAL] = min(1.0, min(shares.values()))
    return Costs(
        costs.inside, costs.between, costs.curves, fitted.launch_s, fitted.hurry, shares, trees=costs.trees
    )
