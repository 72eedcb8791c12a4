"""The checks. Importing this package fills `tools.doctor.finding.CHECKS`, in the order of the imports below."""

# The order is that in which findings are told.
from tools.doctor.checks import (  # noqa: I001
    settings,
    layout,
    pipeline,
    shapes,
    memory,
    training,
    saving,
    folders,
    slurm_there,
    gpus,
    network,
    limits,
    packages,
)

__all__ = [
    "folders",
    "gpus",
    "layout",
    "limits",
    "memory",
    "network",
    "packages",
    "pipeline",
    "saving",
    "settings",
    "shapes",
    "slurm_there",
    "training",
]
