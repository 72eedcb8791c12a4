"""The norm of all gradients, over every axis of a layout, and clipping by it."""

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from train.mesh import Mesh
from train.optim.adamw import Optimizer


@torch.no_grad()
def gradient_norm(
    gradients: Mapping[nn.Parameter, Tensor], mesh: Mesh, copies: Collection[Tensor] = (), order: float = 2.0
) -> Tensor:
    """Norm of the gradients of all parts of the model, a plain 0-d tensor, the same on every rank. Collective.

    `gradients` are those of this rank's parts, by parameter. Of these parameters `copies` are the same as parameters
    of another stage: only the others count. `order` 1 adds up magnitudes, 2 squares.
    """
    uncounted = {id(parameter) for parameter in copies}
    norm = nn.utils.get_total_norm(
        [g for parameter, g in gradients.items() if id(parameter) not in uncounted], order
    )
    if isinstance(norm, DTensor):
        # Of gradients on the host: ranks add up where their mesh is.
        norm = DTensor.from_local(norm.to_local(), norm.device_mesh, norm.placements).full_tensor()
    if mesh.dims.pp > 1:
        power = norm**order
        dist.all_reduce(power, group=mesh.group("pp"))
        norm = power ** (1 / order)
    return norm


@torch.no_grad()
def clip_grad_norm(
    optimizer: Optimizer, max_norm: float, mesh: Mesh, copies: Collection[Tensor] = (), scale: float = 1.0
) -> Tensor:
    """Scale all gradients so that their common norm is at most `max_norm` (0 does not clip). Collective.

    `scale` is what they have been multiplied by, which is undone. Returns the norm before clipping, see
    `gradient_norm`; when it is not finite they stay as they are, to be looked at.
    """
    norm = gradient_norm(optimizer.gradients(), mesh, copies) / scale
    # As in torch.nn.utils.clip_grads_with_norm_: without a look at the value, for which a GPU would have to wait.
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0) if max_norm > 0 else torch.ones_like(norm)
    if max_norm > 0 or scale != 1:
        optimizer.scale_gradients(torch.where(norm.isfinite(), factor / scale, 1.0))
    return norm
