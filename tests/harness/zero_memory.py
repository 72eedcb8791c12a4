"""Memory of the stages of ZeRO: what the formulas say, and what a rank really holds."""

from collections.abc import Sequence

import torch
from torch import nn

from train.config import TrainConfig
from train.data.loader import Batch
from train.layout.dims import ParallelDims
from train.mesh import Mesh
from train.monitor.live_bytes import LiveBytes
from train.optim.adamw import build_optimizer
from train.parallel.apply import build_engine, build_parts

CPU = torch.device("cpu")


def formula(zero: int, size: int, precision: str) -> tuple[float, float, float]:
    """Bytes a parameter on each of `size` ranks: between two steps, at most within one, and at its end.

    Weights, moments and gradients in fp32, and the gathered weights in the type that computes, without a working
    set. Of the sums of the ZeRO paper (Rajbhandari et al. 2020) this is the case of shards in fp32 that are the
    master weights too.
    """
    weights = {"fp32": 4, "bf16": 2}[precision]
    if zero == 0:
        # DDP's buckets, in which gradients add up, always live; autocast keeps the weights that it has cast.
        return 16, 16 + weights % 4, 16
    rest, shard = 12 / size, 4 / size
    within = {1: weights + 4, 2: weights + shard, 3: shard}[zero]
    return rest, rest + within, rest + shard


def live_bytes(config: TrainConfig, dims: ParallelDims, batches: Sequence[Batch]) -> tuple[int, int, int]:
    """Bytes of all tensors that live on this rank at the times of `formula`; `batches` are those of a step."""
    with LiveBytes() as live:
        sharded = build_parts(config, Mesh.build(dims, "cpu"), CPU, seed=1)
        engine = build_engine(sharded, config, CPU)
        optimizer = build_optimizer(sharded.parts, config, CPU)
        within: list[int] = []

        def look(*_: object) -> None:
            within.append(live.count())

        for layer in sharded.parts[0].layers.values():
            assert isinstance(layer.mlp, nn.Module)
            layer.mlp.register_forward_hook(look)
            layer.mlp.register_full_backward_hook(look)
        for _ in range(2):
            between = live.count()
            engine.train(batches)
            after = live.count()
            optimizer.step()
            optimizer.zero_grad()
        return between, max(within), after
