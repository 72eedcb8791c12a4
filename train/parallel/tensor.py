"""Tensor parallelism: every matrix product shared by the ranks of a node."""

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from train.config import TrainConfig
from train.mesh import Mesh
from train.model.llama import Llama, next_token_loss


def shard(part: Llama, config: TrainConfig, mesh: Mesh) -> None:
    """Turn the parameters of `part` into shards over the tensor-parallel ranks, in place."""
    raise NotImplementedError


def loss_context(config: TrainConfig, mesh: Mesh) -> AbstractContextManager[object]:
    """Context of a loss and its backward."""
    return nullcontext()


def vocabulary_loss(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """`next_token_loss`, also of logits that are split along the vocabulary; returns a plain tensor."""
    return next_token_loss(logits, targets, reduction)
