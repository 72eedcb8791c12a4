"""Context parallelism: a sequence shared by several ranks."""

import torch

from train.config import TrainConfig
from train.data.loader import Batch
from train.mesh import Mesh
from train.model.llama import Llama


def shard(part: Llama, config: TrainConfig, mesh: Mesh) -> None:
    """Exchange the attention of `part` for one that sees the whole sequence, in place."""
    raise NotImplementedError


def give_positions(part: Llama, config: TrainConfig, mesh: Mesh, device: torch.device) -> None:
    """Tell `part` where in the sequence its tokens stand, where it can't see that itself."""


def own_share(batch: Batch, config: TrainConfig, mesh: Mesh) -> Batch:
    """This rank's share of the sequence of a batch."""
    return batch
