"""From a measurement to what is wrong with which part of the machine: pure functions, no torch."""

from tools.nccl.analyse.compare import Reference
from tools.nccl.analyse.verdict import run

__all__ = ["Reference", "run"]
