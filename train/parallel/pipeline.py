"""Pipeline parallelism: the layers shared by several ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from train.config import TrainConfig
from train.data.loader import Batch
from train.mesh import Mesh
from train.model.llama import Llama


@dataclass(frozen=True)
class Stage:
    """A range of layers, one of `count` in a row."""

    index: int
    count: int
    layers: range


def own_stages(config: TrainConfig, mesh: Mesh) -> list[Stage]:
    """Stages that this rank holds, in their order; without a pipeline one with all layers."""
    if mesh.dims.pp == 1:
        return [Stage(0, 1, range(config.model.layers))]
    raise NotImplementedError


def cut(part: Llama, stage: Stage) -> None:
    """Remove from a whole model what does not belong to `stage`, in place."""
    if stage.count > 1:
        raise NotImplementedError


class Pipelined:
    """Runs the stages of this rank under a schedule."""

    batches_at_once = 1

    def __init__(self, parts: nn.ModuleList, config: TrainConfig, mesh: Mesh, device: torch.device) -> None:
        raise NotImplementedError

    def train(self, micro_batches: Sequence[Batch]) -> Tensor:
        """See `Engine`."""
        raise NotImplementedError

    def evaluate(self, micro_batches: Sequence[Batch]) -> Tensor:
        """See `Engine`."""
        raise NotImplementedError
