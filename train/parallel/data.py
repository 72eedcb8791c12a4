"""Data parallelism: every rank holds the whole model and gradients are averaged by all-reduce."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel


def replicate(model: nn.Module, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """Keep gradients of `model` equal over the mesh; all-reduce overlaps with backward, bucket by bucket."""
    if mesh.size() == 1:
        return model
    replicated = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        process_group=mesh.get_group(),
        gradient_as_bucket_view=True,
    )
    _settle_buckets(replicated, device)
    return replicated


def accumulate(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Context of one micro-batch: gradients are communicated with the last one of a step only."""
    if last or not isinstance(model, DistributedDataParallel):
        return nullcontext()
    return model.no_sync()


def _settle_buckets(model: DistributedDataParallel, device: torch.device) -> None:
    """Run two small steps, so that the buckets have their final order before the first real one.

    DDP orders its buckets anew after the first backward. On more than two ranks the order decides in which
    order an all-reduce adds, so a resumed run, whose first step has the initial order, would differ in its
    last bits from the run that it continues.
    """
    tokens = torch.zeros((1, 2), dtype=torch.int64, device=device)
    for _ in range(2):
        model(tokens).float().sum().mul(0.0).backward()
    model.zero_grad(set_to_none=True)


def mean_over_ranks(value: torch.Tensor) -> float:
    """Average a scalar tensor over all ranks; `value` itself stays as it is."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()
