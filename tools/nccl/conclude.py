"""From a measurement to what is said of it: the analysis, and what a job can do about it."""

from dataclasses import replace
from pathlib import Path

from contract.errors import UserError
from tools.nccl import analyse, reference
from tools.nccl.findings import Findings, Verdict
from tools.nccl.measurement import Measurement
from tools.nccl.route.advice import Advice, advise
from tools.nccl.topology import Topology, parse_address, read_file


def conclude(
    measurement: Measurement, *, baseline: Measurement | None = None, topology: Path | None = None
) -> tuple[Findings, Advice]:
    """Analyse and advise.

    `baseline`: an earlier measurement of the machine; `topology`: what Slurm or the site says of which nodes are near
    each other; without it what the nodes' own variables said counts. Raises UserError for what cannot be read.
    """
    known = read_file(topology) if topology is not None else _told(measurement)
    groups = None if known is None else known.of(measurement.nodes).groups()
    findings = analyse.run(
        measurement, baseline=baseline, reference=reference.of(measurement), slurm_groups=groups
    )
    # From collectives alone neither an order nor a model of all-reduces follows.
    advice = advise(measurement, findings, known=groups) if len(measurement.exchanges) else Advice()
    return findings, advice


def _told(measurement: Measurement) -> Topology | None:
    """What Slurm had in SLURM_TOPOLOGY_ADDR on each node."""
    told: dict[str, list[str]] = measurement.about.get("slurm_topology") or {}
    # Without a topology plugin an address is the node's own name.
    if not any("." in address for address, _ in told.values()):
        return None
    return parse_address(
        {node: address for node, (address, _) in told.items()},
        {node: pattern for node, (_, pattern) in told.items()},
    )


def gravest(findings: Findings, other: Verdict) -> Findings:
    """Return findings whose verdict is no better than `other`, that of files beside the measurement."""
    return replace(findings, verdict=max(findings.verdict, other, key=lambda one: one.exit_code))


def conclude_whatever(
    measurement: Measurement, *, baseline: Measurement | None, topology: Path | None
) -> tuple[Findings, Advice]:
    """Do the same in a job, which has measured: a topology that cannot be read is noted, and left out."""
    try:
        return conclude(measurement, baseline=baseline, topology=topology)
    except UserError as error:
        measurement.unmeasured.append(f"what is known of the topology was not compared: {error}")
        measurement.about.pop("slurm_topology", None)
        return conclude(measurement, baseline=baseline)
