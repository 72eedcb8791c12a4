"""Mixed precision policies."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from train.config import Compute, PrecisionConfig


def autocast(config: PrecisionConfig, device: torch.device) -> AbstractContextManager[object]:
    """Context in which a forward pass computes: matrix products in `config.compute`, weights stay fp32."""
    if config.compute is Compute.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, config.compute.value))


def sharded_policy(config: PrecisionConfig) -> MixedPrecisionPolicy:
    """What `fully_shard` does for the same end: weights travel and compute in `config.compute`, gradients add in fp32.

    The shards, which the optimizer updates, stay fp32.
    """
    if config.compute is Compute.float32:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=getattr(torch, config.compute.value), reduce_dtype=torch.float32)
