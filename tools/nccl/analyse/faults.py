"""From what was attributed, by numbers, to faults with names, evidence and what to exclude."""

from collections.abc import Iterable

import numpy as np

from tools.nccl.analyse.attribute import Attribution
from tools.nccl.analyse.between import FEW_NODES, Low
from tools.nccl.analyse.blame import Blame
from tools.nccl.analyse.doubt import ENOUGH
from tools.nccl.analyse.pairs import Flags, Pairs
from tools.nccl.analyse.robust import confidence, median
from tools.nccl.findings import Fault, Part, Symptom
from tools.nccl.measurement import Measurement

VARIES = np.log(1.8)
"""A slow link whose tests differ by more (logarithm) works only sometimes."""

_FAILED = {
    Symptom.silent: "gave no answer",
    Symptom.wrong: "gave wrong values",
    Symptom.flaky: "worked only sometimes",
}

Names = list[str]


def usual_bandwidth(pairs: Pairs, chosen: Flags, nodes: int) -> float:
    """Median bandwidth in bytes/s of some pairs (of few nodes, where most pairs may be bad, the best); NaN of none."""
    speed = pairs.speed[chosen]
    if nodes <= FEW_NODES and np.isfinite(speed).any():
        return float(np.exp(np.nanmax(speed)))
    return float(np.exp(median(speed)))


def all_faults(found: Attribution, measurement: Measurement) -> tuple[list[Fault], list[str]]:
    """Return the faults that the exchanges show, each part named once, and sentences on what remains open."""
    names, gpus = measurement.nodes, measurement.gpus_per_node
    faults = [
        Fault(Part.node, Symptom.silent, (name,), f"it did not answer: {why}", excludes=(name,))
        for name, why in measurement.silent.items()
    ]
    faults += [_blamed(one, Symptom.silent, names, gpus) for one in found.silent]
    faults += [_blamed(one, Symptom.wrong, names, gpus) for one in found.wrong]
    flaky = [_blamed(one, Symptom.flaky, names, gpus) for one in found.flaky]
    slow, notes = _slow(found, names, gpus)
    late, more = _late(found, names)
    faults = _once([*faults, *slow, *flaky, *late])
    return faults, [*notes, *more, *found.gpus.notes]


def _slow(found: Attribution, names: Names, gpus: int) -> tuple[list[Fault], list[str]]:
    usual = f"{usual_bandwidth(found.between, found.speed.far, len(names)) / 1e9:.1f} GB/s"
    speed, inner = found.speed, found.gpus
    faults, nics = _gpus(found, names, gpus)
    for one in inner.nodes:
        faults.append(_low(Part.node, one, names, "its GPUs exchange", "of what those of other nodes do"))
    faults += [
        _low(
            Part.node,
            one,
            names,
            "its exchanges with others reach",
            f"of the bandwidth that is usual ({usual})",
        )
        for one in speed.nodes
    ]
    faults += [
        _low(
            Part.nic,
            one,
            names,
            "exchanges over this adapter reach",
            f"of the bandwidth that is usual ({usual})",
        )
        for one in nics
    ]
    faults += [
        _low(
            Part.switch, one, names, _shared(one), f"of the bandwidth that is usual ({usual})", excludes=False
        )
        for one in speed.switches
    ]
    ends = "which of the two ends is at fault, two nodes alone cannot tell" if len(names) == 2 else ""
    for one in speed.rails:
        if len(names) == 2 and one.tests < ENOUGH:
            continue
        if len(names) == 2:
            pair = Low((0, 1), one.rails, one.effect, one.deviations)
            faults.append(
                _low(
                    Part.link,
                    pair,
                    names,
                    "this rail reaches",
                    f"of what the others do; {ends}",
                    excludes=False,
                )
            )
        else:
            faults.append(
                _low(
                    Part.rail,
                    one,
                    names,
                    "exchanges over it reach",
                    "of what those over the other rails do",
                    excludes=False,
                )
            )
    links, notes = _links(found, names)
    nvlinks, more = _nvlinks(found, names, {(f.nodes, f.gpus) for f in faults})
    return [*faults, *links, *nvlinks], [*notes, *more]


def _gpus(found: Attribution, names: Names, gpus: int) -> tuple[list[Fault], list[Low]]:
    """Return slow GPUs, and the slow NICs that are not explained by them."""
    nics = list(found.speed.nics)
    lows = list(found.gpus.gpus)
    if gpus == 2:
        lows += [
            Low(one.nodes, nic.rails, one.effect, one.deviations)
            for one in found.gpus.links
            for nic in nics
            if nic.nodes == one.nodes and len(nic.rails) == 1 and one.tests >= ENOUGH
        ]
    faults = []
    for low in lows:
        outside = [one for one in nics if one.nodes == low.nodes and low.rails[0] in one.rails]
        nics = [one for one in nics if one not in outside or len(one.rails) > 1]
        beyond = f", those with other nodes {np.exp(outside[0].effect):.0%}" if outside else ""
        text = f"of what is usual between these GPUs{beyond}"
        faults.append(_low(Part.gpu, low, names, "its exchanges with the GPUs of its node reach", text))
    return faults, nics


def _links(found: Attribution, names: Names) -> tuple[list[Fault], list[str]]:
    faults, doubtful = [], 0
    speed = found.speed
    for one in speed.links:
        if one.tests < ENOUGH:
            doubtful += 1
            continue
        text = f"of what its ends reach with others, in {one.tests} tests"
        lines = list(one.pairs)
        varies = median(found.between.range[lines]) > VARIES or bool(
            found.between.unsteady[lines].max() >= ENOUGH
        )
        symptom = Symptom.flaky if varies else Symptom.slow
        faults.append(_low(Part.link, one, names, "it carries", text, symptom=symptom, excludes=False))
    return faults, _doubtful(doubtful, "one link", "links")


def _nvlinks(
    found: Attribution, names: Names, known: set[tuple[tuple[str, ...], tuple[int, ...]]]
) -> tuple[list[Fault], list[str]]:
    faults, doubtful = [], 0
    for one in found.gpus.links:
        if any(((names[one.nodes[0]],), (gpu,)) in known for gpu in one.rails):
            continue
        if one.tests < ENOUGH:
            doubtful += 1
            continue
        text = f"of what these two GPUs reach in other nodes, in {one.tests} tests"
        faults.append(_low(Part.nvlink, one, names, "their exchange reaches", text))
    return faults, _doubtful(doubtful, "one pair of GPUs in a node", "pairs of GPUs in nodes")


def _doubtful(count: int, one: str, several: str) -> list[str]:
    some = (
        f"{one} looked slow in a single test and was"
        if count == 1
        else f"{count} {several} looked slow in a single test and were"
    )
    return [f"{some} not tested again: no fault is made of that"] if count else []


def _late(found: Attribution, names: Names) -> tuple[list[Fault], list[str]]:
    late = found.late
    usual = float(np.exp(median(found.late_pairs.latency)))
    text = f"of the speed that is usual in small messages ({usual * 1e6:.1f} us)"
    faults = [_low(Part.node, one, names, "it answers at", text, symptom=Symptom.late) for one in late.nodes]
    faults += [
        _low(Part.switch, one, names, _shared(one), text, symptom=Symptom.late, excludes=False)
        for one in late.switches
    ]
    faults += [
        _low(Part.link, one, names, "it answers at", text, symptom=Symptom.late, excludes=False)
        for one in late.links
        if one.tests >= ENOUGH
    ]
    return faults, []


def _shared(one: Low) -> str:
    if one.rails:
        return f"over the same rail {len(one.nodes)} nodes reach others at"
    return f"its {len(one.nodes)} nodes are well with each other, but reach all others at"


def _low(
    part: Part,
    one: Low,
    names: Names,
    start: str,
    end: str,
    *,
    symptom: Symptom = Symptom.slow,
    excludes: bool = True,
) -> Fault:
    share = float(np.exp(one.effect))
    nodes = tuple(names[node] for node in one.nodes)
    is_gpu = part in (Part.gpu, Part.nvlink)
    many = one.rails if len(one.rails) > 1 else ()
    return Fault(
        part,
        symptom,
        nodes,
        f"{start} {share:.0%} {end}; {one.deviations:.0f} sigmas from its peers",
        rail=None if is_gpu or not one.rails else one.rails[0],
        gpus=one.rails if is_gpu else many,
        share=share,
        confidence=confidence(one.deviations),
        excludes=nodes if excludes else (),
    )


def _blamed(one: Blame, symptom: Symptom, names: Names, gpus: int) -> Fault:
    nodes = tuple(names[node] for node in one.nodes)
    is_gpu = one.part in (Part.gpu, Part.nvlink)
    return Fault(
        one.part,
        symptom,
        nodes,
        f"{_some(one.failed, one.tested)} {_FAILED[symptom]}",
        rail=None if is_gpu or not one.gpus else one.gpus[0],
        gpus=one.gpus if is_gpu or len(one.gpus) > 1 else (),
        confidence=confidence(2 * one.failed + 4),
        excludes=nodes[-1:]
        if one.part is Part.link and symptom is not Symptom.flaky
        else _no_link(one, nodes),
    )


def _some(failed: int, tested: int) -> str:
    if failed == tested:
        return (
            "the only pair of GPUs that was tested"
            if tested == 1
            else f"all {tested} of its tested pairs of GPUs"
        )
    return f"{failed} of its {tested} tested pairs of GPUs"


def _no_link(one: Blame, nodes: tuple[str, ...]) -> tuple[str, ...]:
    return () if one.part is Part.link else nodes


def _once(faults: Iterable[Fault]) -> list[Fault]:
    """Name each part once, by what is said first; a link that works only sometimes is not slow as well."""
    found: dict[tuple[object, ...], Fault] = {}
    for fault in faults:
        same = (fault.part, fault.nodes, fault.rail, fault.gpus)
        held = found.get(same)
        if held is None or (held.symptom is Symptom.slow and fault.symptom is Symptom.flaky):
            found[same] = fault
    dead = {one.nodes[0] for one in found.values() if one.part is Part.node and one.symptom is Symptom.silent}
    whole = {one.nodes for one in found.values() if one.part is Part.link and one.rail is None}
    return [
        one
        for one in found.values()
        if not (one.part is Part.link and one.rail is not None and one.nodes in whole)
        and not (dead & set(one.nodes) and (one.part, one.symptom) != (Part.node, Symptom.silent))
    ]
