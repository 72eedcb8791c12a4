"""The analysis as a whole: from a measurement to findings with names and sentences."""

from collections.abc import Mapping

import numpy as np

from tools.nccl.analyse.attribute import Attribution, attribute
from tools.nccl.analyse.between import FEW_NODES
from tools.nccl.analyse.compare import Reference, against_baseline, against_class, collectives_broken
from tools.nccl.analyse.faults import all_faults, usual_bandwidth
from tools.nccl.analyse.groups import best_level, differ
from tools.nccl.analyse.pairs import Flags, Pairs
from tools.nccl.analyse.robust import Indices, mad, median
from tools.nccl.findings import Fault, Findings, Level, Part, Symptom, Verdict
from tools.nccl.measurement import Measurement

GRAVITY = [Symptom.silent, Symptom.wrong, Symptom.slow, Symptom.late, Symptom.flaky]


def run(
    measurement: Measurement,
    *,
    baseline: Measurement | None = None,
    reference: Reference | None = None,
    slurm_groups: Mapping[str, str] | None = None,
) -> Findings:
    """Say which part of the machine is bad, by how much and why; a pure function.

    baseline: an earlier measurement of this machine, of the same or of other nodes; reference: figures of its class;
    slurm_groups: node -> the group (switch, block) in which Slurm has it.
    """
    nodes = measurement.nodes
    known = _numbered(nodes, slurm_groups)
    found = attribute(measurement.exchanges, len(nodes), measurement.gpus_per_node, known)
    faults, notes = all_faults(found, measurement)
    limit = _pair_limit(found, measurement.gpus_per_node)
    if baseline is not None:
        changed, compared = against_baseline(measurement, baseline)
        faults, cleared = _cleared(faults, baseline)
        faults += changed
        notes += [*compared, *cleared]
    slower, compared = against_class(measurement, reference, limit)
    faults += slower
    notes += compared
    faults += collectives_broken(measurement, any(one.symptom is Symptom.wrong for one in faults))
    faults += _nothing_measured(measurement)
    labels = found.levels[0] if found.found_groups else None
    if known is not None and found.found_groups:
        labels = best_level(found.levels, known)
    groups = _group_names(nodes, labels)
    if slurm_groups and found.found_groups:
        notes += differ(groups, slurm_groups)
    elif slurm_groups and len(set(slurm_groups.values())) > 1:
        notes.append("the measurement shows no groups of nodes; Slurm's were taken as they are")
    faults.sort(key=lambda one: (GRAVITY.index(one.symptom), one.share))
    return Findings(_verdict(faults), tuple(faults), _levels(found), groups, tuple(notes))


def _verdict(faults: list[Fault]) -> Verdict:
    if any(one.symptom in (Symptom.silent, Symptom.wrong) for one in faults):
        return Verdict.broken
    return Verdict.degraded if faults else Verdict.ok


def _numbered(nodes: list[str], groups: Mapping[str, str] | None) -> Indices | None:
    """Return the number of each node's group; those without one are in a group of their own together."""
    if not groups:
        return None
    labels = np.unique([groups.get(name, "") for name in nodes], return_inverse=True)[1]
    return labels if labels.max() > 0 else None


def _nothing_measured(measurement: Measurement) -> list[Fault]:
    # One rank has nobody to talk to.
    if measurement.ranks == 1 or measurement.has_figures:
        return []
    return [Fault(Part.machine, Symptom.silent, (), "nothing was measured: that is no pass")]


def _pair_limit(found: Attribution, gpus: int) -> float | None:
    usual = usual_bandwidth(found.between, np.ones(len(found.between), dtype=bool), FEW_NODES + 1)
    return usual * gpus if np.isfinite(usual) else None


def _cleared(faults: list[Fault], baseline: Measurement) -> tuple[list[Fault], list[str]]:
    """Drop slow rails that the baseline has too: the machine is built so; note what else was there before."""
    before = attribute(baseline.exchanges, len(baseline.nodes), baseline.gpus_per_node)
    rails = {rail: low.effect for low in before.speed.rails for rail in low.rails}
    kept, notes = [], []
    for fault in faults:
        was = rails.get(fault.rail if fault.rail is not None else -1)
        if fault.part is Part.rail and was is not None and np.log(max(fault.share, 1e-9)) > was - 0.07:
            notes.append(f"{fault.name} is slower than the others, as it was in the baseline")
        else:
            kept.append(fault)
    return kept, notes


def _group_names(nodes: list[str], labels: Indices | None) -> tuple[tuple[str, ...], ...]:
    if labels is None:
        return (tuple(nodes),) if nodes else ()
    groups: dict[int, list[str]] = {}
    for name, label in zip(nodes, labels.tolist(), strict=True):
        groups.setdefault(label, []).append(name)
    return tuple(tuple(group) for group in groups.values())


def _levels(found: Attribution) -> tuple[Level, ...]:
    far = found.speed.far
    levels = [("inside", found.inside, np.ones(len(found.inside), dtype=bool))]
    if not found.levels:
        levels.append(("between", found.between, far))
    else:
        levels += [("near", found.between, ~far), ("far", found.between, far)]
    return tuple(_level(name, pairs, chosen) for name, pairs, chosen in levels if chosen.any())


def _level(name: str, pairs: Pairs, chosen: Flags) -> Level:
    bandwidth, latency = np.exp(pairs.speed[chosen]), np.exp(pairs.latency[chosen])
    return Level(name, int(chosen.sum()), median(bandwidth), mad(bandwidth), median(latency), mad(latency))
