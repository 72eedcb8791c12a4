"""From a measurement to what is said of it: the analysis, and what a job can do about it."""

from pathlib import Path

from contract.errors import UserError
from tools.nccl import analyse, reference
from tools.nccl.findings import Findings
from tools.nccl.measurement import Measurement
from tools.nccl.route.advice import Advice, advise
from tools.nccl.topology import read_file


def conclude(
    measurement: Measurement, *, baseline: Measurement | None = None, topology: Path | None = None
) -> tuple[Findings, Advice]:
    """Analyse and advise.

    `baseline`: an earlier measurement of the machine; `topology`: what Slurm or the site says of which nodes are near
    each other. Raises UserError for a topology that cannot be read.
    """
    groups = None if topology is None else read_file(topology).of(measurement.nodes).groups()
    findings = analyse.run(
        measurement, baseline=baseline, reference=reference.of(measurement), slurm_groups=groups
    )
    # From collectives alone neither an order nor a model of all-reduces follows.
    advice = advise(measurement, findings, known=groups) if len(measurement.exchanges) else Advice()
    return findings, advice


def conclude_whatever(
    measurement: Measurement, *, baseline: Measurement | None, topology: Path | None
) -> tuple[Findings, Advice]:
    """Do the same in a job, which has measured: a topology that cannot be read is noted, and left out."""
    try:
        return conclude(measurement, baseline=baseline, topology=topology)
    except UserError as error:
        measurement.unmeasured.append(f"what is known of the topology was not compared: {error}")
        return conclude(measurement, baseline=baseline)
