"""The machine as a whole: against an earlier measurement of it, against its class, and what collectives say."""

from typing import Protocol

import numpy as np

from tools.nccl.analyse.pairs import Pairs, gather
from tools.nccl.analyse.robust import confidence, median, sigma
from tools.nccl.findings import Fault, Part, Symptom
from tools.nccl.measurement import Collective, Floats, Measurement

SLOWER = np.log(0.93)
"""Change of the median bandwidth that counts as slower than the baseline."""
LATER = np.log(1.5)
CLASS_SHARE = 0.85
"""Share of its class's figure that a collective must reach."""
LARGE_BYTES = 64 * 2**20
"""Collectives are compared from this size on: below, latency decides."""
ABOVE = 1.05
"""A bus bandwidth above the NICs' by this factor is none (tree over two nodes)."""
ABOVE_PAIRS = 1.7
"""The same where only pairs say what the NICs carry: a pair of GPUs reaches 62 to 75 % of an adapter's rate (facts of
HDR InfiniBand: 15.5 to 18.7 of 25 GB/s), a ring over all of them more."""


class Reference(Protocol):
    """Figures of a class of machines."""

    @property
    def name(self) -> str:
        """What to call the machines."""

    @property
    def adapters_bandwidth(self) -> float | None:
        """What all adapters of a node carry in one direction, bytes/s; None where that is not known."""

    def expected(self, operation: str, nodes: int, gpus_per_node: int, size_bytes: int) -> float | None:
        """Return the bus bandwidth of a healthy one in bytes/s; None where nothing is known."""


def against_baseline(now: Measurement, baseline: Measurement) -> tuple[list[Fault], list[str]]:
    """Compare pair by pair, nodes by name; where no pair is in both, the medians of all pairs.

    Returns faults of the machine (all of it alike slower), and sentences on what was compared.
    """
    faults, notes = [], []
    if now.gpus_per_node != baseline.gpus_per_node:
        return [], ["the baseline has another number of GPUs a node and was not used for pairs"]
    ours, theirs = _named(now), _named(baseline)
    for name, apart in (("between nodes", True), ("inside nodes", False)):
        here, there = ours[apart], theirs[apart]
        if not here or not there:
            continue
        common = sorted(here.keys() & there.keys())
        if common:
            change = np.array([np.subtract(here[key], there[key]) for key in common])
        else:
            change = (
                np.median(list(here.values()), axis=0)[None] - np.median(list(there.values()), axis=0)[None]
            )
        what = f"{len(common)} pairs of the same GPUs" if common else "the medians of different nodes"
        notes.append(f"compared with the baseline {name}: {what}")
        faults += _changes(name, what, change)
    faults += _collectives_slower(now, baseline)
    return faults, notes


def against_class(
    measurement: Measurement, reference: Reference | None, pair_limit: float | None
) -> tuple[list[Fault], list[str]]:
    """Compare large collectives with the class's; pair_limit: bytes/s of all NICs of a node, as pairs show it."""
    faults, notes = [], []
    for one in _largest(measurement.collectives):
        gpus = measurement.gpus_per_node
        expected = reference and reference.expected(one.operation, one.nodes, gpus, one.size_bytes)
        known = reference.adapters_bandwidth if reference else None
        limit = ABOVE * known if known else ABOVE_PAIRS * (pair_limit or np.inf)
        if one.operation == "all_reduce" and one.nodes == 2 and one.busbw > limit:
            notes.append(
                f"the all-reduce over two nodes shows {one.busbw / 1e9:.1f} GB/s where the NICs carry at most "
                f"{limit / 1e9:.1f} GB/s: a tree over two nodes does, it is no proof; measure with NCCL_ALGO=RING"
            )
        elif expected and reference and one.busbw < CLASS_SHARE * expected:
            faults.append(
                Fault(
                    Part.machine,
                    Symptom.slow,
                    (),
                    f"{one.operation} of {one.size_bytes / 1e6:.0f} MB over {one.nodes} nodes reaches "
                    f"{one.busbw / 1e9:.1f} GB/s (busbw); {reference.name} reach {expected / 1e9:.1f} GB/s",
                    share=one.busbw / expected,
                    confidence=0.8,
                )
            )
        elif expected and reference:
            notes.append(f"{one.operation} reaches {one.busbw / expected:.0%} of what {reference.name} reach")
    return faults, notes


def collectives_broken(measurement: Measurement, guilty: bool) -> list[Fault]:
    """Return faults that collectives alone show: no bandwidth at all, or wrong values.

    guilty: a part is known that gives wrong values; then the collectives' are no news.
    """
    faults = []
    for one in measurement.collectives:
        where = () if one.scope == "world" else (one.scope,)
        part = Part.node if where else Part.machine
        what = f"{one.operation} of {one.size_bytes} bytes over {one.ranks} ranks"
        if one.ranks > 1 and not one.busbw > 0:
            text = f"{what} shows a bus bandwidth of 0: it did not work"
            faults.append(Fault(part, Symptom.silent, where, text, excludes=where))
        if one.wrong and not guilty:
            text = f"{what} gave {one.wrong} wrong elements"
            faults.append(Fault(part, Symptom.wrong, where, text, excludes=where))
    first: dict[tuple[object, ...], Fault] = {}
    for fault in faults:
        first.setdefault((fault.part, fault.symptom, fault.nodes), fault)
    return list(first.values())


def _named(measurement: Measurement) -> dict[bool, dict[tuple[str, str], Floats]]:
    """Return (log bandwidth, log latency) by names of ranks: {between nodes?: {pair: both}}."""
    pairs: Pairs = gather(measurement.exchanges, measurement.ranks)
    gpus = measurement.gpus_per_node
    found: dict[bool, dict[tuple[str, str], Floats]] = {True: {}, False: {}}
    figures = np.stack([pairs.speed, pairs.latency], axis=1)
    names = [f"{measurement.nodes[rank // gpus]}/{rank % gpus}" for rank in range(measurement.ranks)]
    for first, second, both in zip(pairs.first.tolist(), pairs.second.tolist(), figures, strict=True):
        if np.isfinite(both[0]):
            a, b = sorted((names[first], names[second]))
            found[first // gpus != second // gpus][a, b] = both
    return found


def _changes(name: str, what: str, change: Floats) -> list[Fault]:
    faults = []
    for column, symptom, worse in ((0, Symptom.slow, 1.0), (1, Symptom.late, -1.0)):
        middle = median(change[:, column]) * worse
        if np.isfinite(middle) and middle < (SLOWER if column == 0 else -LATER):
            share = float(np.exp(middle))
            sure = -middle / max(sigma(change[:, column]) / np.sqrt(len(change)), 0.01)
            word = "bandwidth" if column == 0 else "latency"
            ratio = share if column == 0 else 1 / share
            text = f"the {word} {name} is {ratio:.0%} of the baseline's (median of {what})"
            faults.append(Fault(Part.machine, symptom, (), text, share=share, confidence=confidence(sure)))
    return faults


def _collectives_slower(now: Measurement, baseline: Measurement) -> list[Fault]:
    def key(one: Collective) -> tuple[object, ...]:
        return one.operation, one.ranks, one.nodes, one.size_bytes, one.algorithm, one.in_place, one.scope

    before = {key(one): one for one in baseline.collectives if one.busbw > 0}
    ratios = [
        (one.busbw / before[key(one)].busbw, one)
        for one in _largest(now.collectives)
        if key(one) in before and one.busbw > 0
    ]
    if not ratios:
        return []
    middle = float(np.median([ratio for ratio, _ in ratios]))
    if np.log(middle) >= SLOWER:
        return []
    names = ", ".join(sorted({one.operation for _, one in ratios}))
    text = f"collectives ({names}) of the largest size reach {middle:.0%} of the baseline's bus bandwidth"
    return [Fault(Part.machine, Symptom.slow, (), text, share=middle, confidence=0.9)]


def _largest(collectives: list[Collective]) -> list[Collective]:
    """Return the largest flat one of each operation over all ranks, when it is large."""
    best: dict[tuple[str, int], Collective] = {}
    for one in collectives:
        key = (one.operation, one.ranks)
        usable = one.algorithm == "flat" and one.scope == "world" and one.ranks > 1 and one.busbw > 0
        if (
            usable
            and one.size_bytes >= LARGE_BYTES
            and (key not in best or one.size_bytes > best[key].size_bytes)
        ):
            best[key] = one
    return list(best.values())
