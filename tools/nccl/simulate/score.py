"""Whether an analysis blames what was planted, exactly, and nothing else."""

import numpy as np

from tools.nccl.findings import Fault, Findings, Part, Symptom
from tools.nccl.simulate.fabric import Fabric
from tools.nccl.simulate.faults import Planted


def is_right(planted: Planted, fabric: Fabric, findings: Findings) -> bool:
    """Return whether the only fault found is the planted one: its part, its nodes, its rails, its GPUs.

    With one NIC a node, a slow NIC and a slow node are the same, and a dead node is named as such whatever it says of
    the rest.
    """
    return len(findings.faults) == 1 and _same(planted, fabric, findings.faults[0])


def _same(planted: Planted, fabric: Fabric, fault: Fault) -> bool:
    names = tuple(fabric.names[node] for node in planted.nodes)
    if fault.part is not planted.part or fault.nodes != names:
        return False
    if planted.symptom is not fault.symptom and Symptom.flaky not in (planted.symptom, fault.symptom):
        return False
    if planted.part in (Part.gpu, Part.nvlink):
        return fault.gpus == planted.gpus
    return _rails(fault) == rails_of(planted, fabric)


def rails_of(planted: Planted, fabric: Fabric) -> tuple[int, ...]:
    """Return the rails that a planted fault concerns: those of the GPUs that share the NIC; empty: all."""
    if planted.nic is None:
        return ()
    gpus = np.arange(fabric.gpus_per_node)
    return tuple(int(one) for one in gpus[fabric.nic_of(gpus) == planted.nic])


def _rails(fault: Fault) -> tuple[int, ...]:
    if fault.gpus:
        return fault.gpus
    return () if fault.rail is None else (fault.rail,)
