"""The `comm` section of the configuration. Imports no torch."""

from dataclasses import dataclass
from enum import StrEnum

from contract.errors import ConfigError


class AllReduce(StrEnum):
    """How replicas average their gradients (parallel.zero=0 on one rank of each tensor and layer)."""

    ring = "ring"
    """One all-reduce over all ranks: a ring, or what NCCL takes for better."""
    hierarchical = "hierarchical"
    """A reduce-scatter in each node, an all-reduce between nodes, an all-gather in each node: between nodes a rank
    sends its share of a node's gradients only."""
    auto = "auto"
    """For each bucket of gradients what the network test has found to be faster at its size."""


@dataclass
class CommConfig:
    """Communication between ranks."""

    allreduce: AllReduce = AllReduce.ring
    plan: str | None = None
    """With allreduce=auto: the file plan.json of a network test; null takes that of the run's own preflight."""

    def validate(self) -> None:
        """Raise `ConfigError` for values that are wrong by themselves."""
        if self.plan is not None and self.allreduce is not AllReduce.auto:
            raise ConfigError(
                f"comm.plan={self.plan} does nothing with comm.allreduce={self.allreduce}: set comm.allreduce=auto, or "
                "leave it out"
            )
