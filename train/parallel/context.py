"""Context parallelism: a sequence shared by several ranks.

Every layer but attention treats tokens one by one, so a rank runs the model on its part of each sequence. Attention
alone is exchanged: `heads` turns parts of the sequence into shares of the heads and back (here), `ring` passes keys
and values around (`ring.py`).
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.device_mesh import DeviceMesh

from train.config import TrainConfig
from train.data.loader import Batch
from train.layout.check import check_gpu
from train.layout.config import ContextMethod
from train.mesh import Mesh
from train.model.llama import CoreAttention, Layer, Llama
from train.parallel.ring import RingAttention


def shard(part: Llama, config: TrainConfig, mesh: Mesh) -> None:
    """Exchange the attention of `part` for one that sees the whole sequence, in place.

    Raises `ConfigError` where the ring can't compute on this kind of device.
    """
    if mesh.root.device_type != "cpu":
        check_gpu(config)
    ring = config.parallel.context is ContextMethod.ring
    for layer in part.layers.values():
        assert isinstance(layer, Layer)
        core = layer.self_attn.core
        layer.self_attn.core = RingAttention(mesh.group("cp")) if ring else HeadsAttention(core, mesh["cp"])


def give_positions(part: Llama, config: TrainConfig, mesh: Mesh, device: torch.device) -> None:
    """Tell `part` where in the sequence its tokens stand, where it can't see that itself.

    Under context parallelism they are not the first ones. A later stage of a pipeline, whose input is split along
    the sequence by tensor parallelism, does not see how long the sequence is.
    """
    parallel, dims = config.parallel, mesh.dims
    if dims.cp == 1 and not (dims.pp > 1 and dims.tp > 1 and parallel.sequence_parallel):
        return
    whole = torch.arange(config.data.sequence_length, device=device)
    own = part_of_sequence(whole, parallel.context, mesh.coordinate("cp"), dims.cp)

    def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {"positions": own} | kwargs

    part.register_forward_pre_hook(add, with_kwargs=True)


def own_share(batch: Batch, config: TrainConfig, mesh: Mesh) -> Batch:
    """This rank's share of the sequence of a batch.

    Documents stay whole: attention, which masks by them, sees the whole sequence.
    """
    if mesh.dims.cp == 1:
        return batch
    method, rank, cp = config.parallel.context, mesh.coordinate("cp"), mesh.dims.cp
    return batch._replace(
        tokens=part_of_sequence(batch.tokens, method, rank, cp),
        targets=part_of_sequence(batch.targets, method, rank, cp),
    )


def part_of_sequence(x: Tensor, method: ContextMethod, rank: int, cp: int) -> Tensor:
    """What `rank` of `cp` ranks holds of x (..., sequence), in its order there.

    With the ring a rank holds chunks `rank` and `2 * cp - 1 - rank` of 2 * cp: a query late in the sequence sees many
    keys, one early few, and each rank gets as many of both.
    """
    chunks = 2 * cp if method is ContextMethod.ring else cp
    assert x.shape[-1] % chunks == 0, f"{x.shape[-1]} tokens in {chunks} chunks"
    size = x.shape[-1] // chunks
    if method is ContextMethod.ring:
        return torch.cat(
            (x.narrow(-1, rank * size, size), x.narrow(-1, (chunks - 1 - rank) * size, size)), -1
        )
    return x.narrow(-1, rank * size, size)


class HeadsAttention(CoreAttention):
    """Attention on the whole sequence for a share of the heads (DeepSpeed-Ulysses, Jacobs et al. 2023)."""

    def __init__(self, core: CoreAttention, mesh: DeviceMesh) -> None:
        """`core` is the attention of one rank, `mesh` that of the axis cp."""
        super().__init__()
        self.core = core
        self._mesh = mesh

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """See `CoreAttention.forward`; tensors are parts of a sequence, `mask` is that of the whole sequence.

        The number of query heads must be a multiple of the ranks; heads of keys and values are repeated as often as
        it takes.
        """
        cp = self._mesh.size()
        # Also divides the query heads of each head of keys and values, so that none is cut.
        repeats = cp // math.gcd(cp, key.shape[1])
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
        shares = [x.unflatten(1, (cp, -1)) for x in (query, key, value)]
        parts = self._exchange(torch.cat(shares, 2).transpose(0, 1))
        whole = parts.permute(1, 2, 0, 3, 4).flatten(2, 3)
        mixed: Tensor = self.core(*whole.split([share.shape[2] for share in shares], 1), mask)
        shares_of_own = self._exchange(mixed.unflatten(2, (cp, -1)).permute(2, 0, 1, 3, 4))
        return shares_of_own.transpose(0, 1).flatten(1, 2)

    def _exchange(self, x: Tensor) -> Tensor:
        """Give x[i] to rank i; the result's [i] is what rank i gave."""
        out: Tensor = all_to_all_single(x.contiguous(), None, None, self._mesh)
        return out
