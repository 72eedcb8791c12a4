"""The norm of all gradients, over every axis of a layout, and clipping by it."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from train.mesh import Mesh


@torch.no_grad()
def clip_grad_norm(
    parameters: Sequence[nn.Parameter], max_norm: float, mesh: Mesh, copies: Sequence[Tensor] = ()
) -> Tensor:
    """Scale the gradients of `parameters` so that their common norm is at most `max_norm` (0 does not clip).

    `parameters` are those of this rank's parts of the model. `copies`, some of them, are the same as parameters of
    another stage: they are scaled with the rest, but only the others count.
    Returns the norm before clipping, a plain 0-d tensor, the same on every rank.
    """
    uncounted = {id(parameter) for parameter in copies}
    gradients = [p.grad for p in parameters if p.grad is not None and id(p) not in uncounted]
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
