"""The norm of all gradients, over every axis of a layout, and clipping by it."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from train.mesh import Mesh


@torch.no_grad()
def clip_grad_norm(parameters: Sequence[nn.Parameter], max_norm: float, mesh: Mesh) -> Tensor:
    """Scale the gradients of `parameters` so that their common norm is at most `max_norm` (0 does not clip).

    `parameters` are those of this rank's parts of the model, each parameter of the model in one pipeline stage.
    Returns the norm before clipping, a plain 0-d tensor, the same on every rank.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if mesh.dims.pp > 1:
        square = norm**2
        dist.all_reduce(square, group=mesh.group("pp"))
        norm = square.sqrt()
    if max_norm > 0:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
