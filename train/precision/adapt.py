"""The steps by which a run follows `Dynamic`: measure, decide, change the types."""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from train.config import TrainConfig
from train.layout.batch import micro_batches
from train.mesh import Mesh
from train.optim.compact import CompactAdamW
from train.parallel.clip import gradient_norm
from train.parallel.held import GradientTypes, keep_gradients
from train.precision.dynamic import Dynamic, Noise
from train.precision.state import PrecisionState


def use_types(parts: nn.ModuleList, dynamic: Dynamic) -> None:
    """Have gradients add up in the types of now; between two steps."""
    for part in parts:
        keep_gradients(part, GradientTypes.of(dynamic.types))


def look(
    state: PrecisionState,
    parts: nn.ModuleList,
    optimizer: CompactAdamW,
    config: TrainConfig,
    mesh: Mesh,
    copies: Collection[Tensor],
) -> str | None:
    """Decide on the types of gradients and change them; returns why, or None if they stay. Collective.

    `copies`: see `gradient_norm`.
    """
    assert state.dynamic is not None
    noise = measured(optimizer, mesh, copies).relative(config.optim.beta1, config.optim.beta2)
    additions = micro_batches(config, mesh.dims) + mesh.dims.dp * mesh.dims.cp
    reason = state.dynamic.look(noise, additions, state.scale.skipped)
    if reason is not None:
        use_types(parts, state.dynamic)
    return reason


@torch.no_grad()
def measured(optimizer: CompactAdamW, mesh: Mesh, copies: Collection[Tensor]) -> Noise:
    """Add up the moments of all parts of the model. Collective."""
    firsts, seconds = {}, {}
    for parameter, first, second in optimizer.moments():
        # What is left of each is a number: not all need be in memory, where they are not kept in fp32.
        firsts[parameter] = first.square().sum()
        seconds[parameter] = second.sum()
    # Magnitudes of what is not negative.
    total = [float(gradient_norm(sums, mesh, copies, order=1.0)) for sums in (firsts, seconds)]
    return Noise(optimizer.updates, *total)
