"""Activation checkpointing."""

from train.config import TrainConfig
from train.mesh import Mesh
from train.model.llama import Llama


def apply(part: Llama, config: TrainConfig, mesh: Mesh) -> None:
    """Make the layers of `part` recompute what `parallel.recompute` says, in place."""
