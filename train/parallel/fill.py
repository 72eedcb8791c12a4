"""Give the parameters of a rank their values, each rank reading or drawing only what it holds."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from train.model.config import ModelConfig
from train.model.llama import initial_rows

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"

Read = Callable[[str, tuple[int, ...], tuple[slice, ...]], Tensor]
"""Return a slice of a whole parameter, by name and whole shape."""


def global_name(name: str, config: ModelConfig) -> str:
    """Name in the whole model of a parameter of a part: the copy of a tied embedding is the embedding."""
    return EMBEDDING if config.tie_embeddings and name == HEAD else name


def local_part(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """What this rank holds of a parameter, and where that lies in the whole."""
    if not isinstance(parameter, DTensor):
        return parameter, tuple(slice(0, size) for size in parameter.shape)
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return parameter.to_local(), tuple(
        slice(start, start + size) for start, size in zip(offset, shape, strict=True)
    )


@torch.no_grad()
def fill(part: nn.Module, config: ModelConfig, read: Read) -> None:
    """Fill every parameter of a part from `read`."""
    for name, parameter in part.named_parameters():
        local, where = local_part(parameter)
        if local.numel():
            local.copy_(read(global_name(name, config), tuple(parameter.shape), where))


def draw(config: ModelConfig, seed: int) -> Read:
    """Random initial weights: the same for every layout, see `initial_rows`."""

    def read(name: str, shape: tuple[int, ...], where: tuple[slice, ...]) -> Tensor:
        rows = initial_rows(config, seed, name, shape, where[0].start, where[0].stop)
        return rows[:, where[1]] if len(where) > 1 else rows

    return read
