"""All that a job can act on: the order of nodes, the all-reduce by size, the axes of the mesh, relays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tools.nccl.findings import Findings
from tools.nccl.measurement import Measurement
from tools.nccl.route.costs import Costs, Switch, fit, switch_points
from tools.nccl.route.edges import NodeEdges, blamed, group_labels, node_edges
from tools.nccl.route.graph import Relay, relays, wide_relays
from tools.nccl.route.hierarchy import Hierarchy, plan
from tools.nccl.route.mesh import MeshAdvice, advise_mesh
from tools.nccl.route.pace import Pace, find_pace
from tools.nccl.route.ring import order_ring

GAIN = 0.05
"""An order is recommended when a large all-reduce should be faster by this share; less is no gain."""
LARGE_BYTES = 1 << 30
"""What is called a large all-reduce where none was measured."""

_RELAYED_BYTES = 64 << 20
_SLACK = 0.1
"""Edges that are as much slower are as good, if fewer lead from group to group."""
_TOLD = 5
"""Relays told in sentences; the rest is counted."""
_MOST_NODES_RELAYED = 1024
"""Above, all shortest paths would take minutes."""


@dataclass(frozen=True)
class NamedRelay:
    """A way over another node, by names."""

    first: str
    second: str
    via: tuple[str, ...]
    direct_s: float | None
    """None where there is no direct way."""
    relayed_s: float
    what: str
    """`latency`: a few bytes, received before they are sent on; `bandwidth`: 64 MiB, sent on while received."""


@dataclass(frozen=True)
class Advice:
    """What follows from a measurement; plain data, for JSON by `dataclasses.asdict`."""

    order: tuple[str, ...] = ()
    """Nodes in the order that suits, without those to be excluded; empty where none is better than the given one."""
    order_text: str = "nothing was measured from which an order of nodes follows"
    """The order's gain in a sentence, or why there is none."""
    gain_predicted: float | None = None
    """How much faster a large all-reduce is in that order: 0.2 is a fifth; below `GAIN`: no gain."""
    gain_measured: float | None = None
    """The same as measured, where the all-reduce was measured in an order that was found."""
    switches: Sequence[Switch] = ()
    """From how many bytes on which all-reduce, for all nodes of the measurement."""
    plan: Mapping[int, Sequence[Switch]] = field(default_factory=dict)
    """The same by number of nodes: those of the measurement as measured, others by the model."""
    mesh: tuple[str, ...] = ()
    """Sentences: which axes of a mesh belong where."""
    relays: tuple[str, ...] = ()
    """Sentences: which pairs another node would serve better."""
    notes: tuple[str, ...] = ()
    axes: MeshAdvice | None = None
    """The figures behind `mesh`."""
    relay_pairs: tuple[NamedRelay, ...] = ()
    hierarchy: Hierarchy | None = None
    """Process groups of a hierarchical all-reduce, by ranks of this measurement in the order that suits."""


@dataclass(frozen=True)
class _Order:
    nodes: tuple[int, ...]
    text: str
    predicted: float | None = None
    measured: float | None = None
    better: bool = False


def advise(measurement: Measurement, findings: Findings, *, known: Mapping[str, str] | None = None) -> Advice:
    """Say what a job can do about the machine as it is.

    known: node -> group by Slurm or the site; used for the order where the measurement shows no groups by itself.
    """
    names = measurement.nodes
    left_out = set(measurement.silent) | set(findings.exclude)
    kept = tuple(index for index, name in enumerate(names) if name not in left_out)
    if len(kept) < 2:
        kept = tuple(index for index, name in enumerate(names) if name not in measurement.silent)
    groups = _groups(findings, known)
    costs = fit(measurement)
    if not kept or costs is None:
        return Advice()
    labels = group_labels(names, groups)
    edges = node_edges(measurement)
    pace = find_pace(measurement, edges, labels, blamed(names, findings.faults))
    chosen = _order(measurement, kept, edges, pace)
    answering = len([name for name in names if name not in measurement.silent])
    switches = tuple(switch_points(costs, answering, measurement.gpus_per_node))
    pairs, notes = _relays(names, kept, edges, pace)
    axes = advise_mesh(measurement, groups)
    inner = [[names.index(name) for name in group if name in names] for group in groups]
    levels = plan(chosen.nodes, measurement.gpus_per_node, inner)
    return Advice(
        order=tuple(names[node] for node in chosen.nodes) if chosen.better else (),
        order_text=chosen.text,
        gain_predicted=chosen.predicted,
        gain_measured=chosen.measured,
        switches=switches,
        plan=_plan(costs, answering, measurement.gpus_per_node, switches),
        mesh=(axes.sentence,),
        relays=_tell(pairs),
        notes=(*notes, *([levels.note] if levels.note else [])),
        axes=axes,
        relay_pairs=pairs,
        hierarchy=levels,
    )


def _groups(findings: Findings, known: Mapping[str, str] | None) -> tuple[tuple[str, ...], ...]:
    if len(findings.groups) > 1 or not known:
        return findings.groups
    members: dict[str, list[str]] = {}
    for name, group in known.items():
        members.setdefault(group, []).append(name)
    return tuple(tuple(group) for group in members.values())


def _order(measurement: Measurement, kept: tuple[int, ...], edges: NodeEdges, pace: Pace) -> _Order:
    """Order the nodes that are kept, unless their given order is as good."""
    if len(kept) < 4:
        few = f"{len(kept)} node{'s' * (len(kept) != 1)}"
        return _Order(kept, f"no gain: a ring of {few} has one order only")
    rows = np.ix_(kept, kept)
    if not (edges.bandwidth[rows] > 0).any():
        return _Order(
            kept, "no exchanges between nodes were measured, from which an order of nodes would follow"
        )
    ring = order_ring(pace.chunk_times()[rows], slack=_SLACK)
    found = tuple(kept[place] for place in ring.order)
    size = _large(measurement)
    tried, measured = _tried(measurement, kept)
    if tried and pace.seconds(tried, size) <= pace.seconds(found, size) * (1 + GAIN):
        found = tried
    else:
        measured = None
    given_s, found_s = pace.seconds(kept, size), pace.seconds(found, size)
    if not np.isfinite(found_s):
        return _Order(kept, "some nodes do not answer each other, and every ring would need such a pair")
    gain = given_s / found_s - 1 if np.isfinite(given_s) else None
    better = (gain is None or gain >= GAIN) if measured is None else measured >= GAIN
    return _Order(found if better else kept, _text(pace, kept, found, gain, measured), gain, measured, better)


def _text(
    pace: Pace, given: Sequence[int], found: Sequence[int], gain: float | None, measured: float | None
) -> str:
    seen = "" if measured is None else f"; measured: {measured:+.0%}"
    if gain is None:
        return f"the given order needs a pair of nodes that do not answer each other, this one does not{seen}"
    if gain < GAIN and (measured is None or measured < GAIN):
        limit = (
            "what a node does inside" if pace.inside <= pace.rate(given) else "the slowest edge of any ring"
        )
        return (
            f"no gain: {limit} sets the pace of a large all-reduce, the given order is as good as any{seen}"
        )
    before, after = (min(pace.rate(order), pace.inside) / 1e9 for order in (given, found))
    why = f"its slowest edge carries {after:.3g} GB/s instead of {before:.3g} GB/s"
    crossed, crosses = pace.crossings(given), pace.crossings(found)
    if crosses < crossed:
        why += f", {crosses} of {len(found)} edges lead from one group of near nodes to another instead of {crossed}"
        if not all(uplink.told for uplink in pace.uplinks):
            why += " (if what they share there is what limits them, which the measurement does not tell)"
    verb = "should be" if measured is None or measured >= GAIN else "was predicted to be"
    last = "" if measured is None or measured >= GAIN else ", so that the given order stays"
    return f"a large all-reduce {verb} {gain:.0%} faster in this order of nodes: {why}{seen}{last}"


def _tried(measurement: Measurement, kept: tuple[int, ...]) -> tuple[tuple[int, ...], float | None]:
    """Return the order in which an all-reduce was measured, if it is one of these nodes, and its gain."""
    names: Sequence[str] = measurement.about.get("order") or ()
    place = {name: index for index, name in enumerate(measurement.nodes)}
    order = tuple(place.get(name, -1) for name in names)
    if sorted(order) != sorted(kept):
        return (), None
    times: dict[str, dict[int, float]] = {"flat": {}, "ordered": {}}
    for one in measurement.collectives:
        if (
            one.operation == "all_reduce"
            and one.algorithm in times
            and one.scope == "world"
            and one.time_s > 0
        ):
            times[one.algorithm][one.size_bytes] = one.time_s
    both = times["flat"].keys() & times["ordered"].keys()
    if not both:
        return (), None
    largest = max(both)
    return order, times["flat"][largest] / times["ordered"][largest] - 1


def _large(measurement: Measurement) -> float:
    sizes = [one.size_bytes for one in measurement.collectives if one.operation == "all_reduce"]
    return float(max(sizes, default=LARGE_BYTES))


def _plan(
    costs: Costs, nodes: int, gpus_per_node: int, switches: tuple[Switch, ...]
) -> dict[int, tuple[Switch, ...]]:
    found = {}
    fewer = 2
    while fewer < nodes:
        found[fewer] = tuple(switch_points(costs, fewer, gpus_per_node))
        fewer *= 2
    return {**found, nodes: switches}


def _relays(
    names: Sequence[str], kept: tuple[int, ...], edges: NodeEdges, pace: Pace
) -> tuple[tuple[NamedRelay, ...], list[str]]:
    if len(kept) > _MOST_NODES_RELAYED:
        return (), [f"relays were not looked for among more than {_MOST_NODES_RELAYED} nodes"]
    rows = np.ix_(kept, kept)
    answers = edges.bandwidth[rows]
    latency = np.where(answers == 0, np.inf, pace.latency_s[rows])
    bandwidth = pace.rates[rows]
    latency[np.isnan(answers)] = bandwidth[np.isnan(answers)] = np.nan
    found = [
        NamedRelay(
            names[kept[one.first]],
            names[kept[one.second]],
            tuple(names[kept[node]] for node in one.via),
            one.direct_s if np.isfinite(one.direct_s) else None,
            one.relayed_s,
            what,
        )
        for what, some_relays in (
            ("latency", _once(relays(latency))),
            ("bandwidth", wide_relays(bandwidth, _RELAYED_BYTES)),
        )
        for one in some_relays
    ]
    return tuple(found), []


def _once(found: list[Relay]) -> list[Relay]:
    """Leave the way back out: the matrix is symmetric."""
    return [relay for relay in found if relay.first < relay.second]


def _tell(pairs: tuple[NamedRelay, ...]) -> tuple[str, ...]:
    told = []
    for what in ("latency", "bandwidth"):
        some = [pair for pair in pairs if pair.what == what]
        for pair in some[:_TOLD]:
            if what == "latency":
                direct = "no answer" if pair.direct_s is None else f"{pair.direct_s * 1e6:.3g} us"
                figures = f"{pair.relayed_s * 1e6:.3g} us instead of {direct}"
            else:
                direct = (
                    "no answer"
                    if pair.direct_s is None
                    else f"{_RELAYED_BYTES / pair.direct_s / 1e9:.3g} GB/s"
                )
                figures = f"{_RELAYED_BYTES / pair.relayed_s / 1e9:.3g} GB/s instead of {direct}"
            told.append(f"{pair.first} - {pair.second} over {', '.join(pair.via)}: {what} {figures}")
        if len(some) > _TOLD:
            told.append(f"{what}: {len(some) - _TOLD} more pairs")
    return tuple(told)
