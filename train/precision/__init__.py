"""Mixed precision policies."""

from contextlib import AbstractContextManager, nullcontext

import torch

from train.config import Compute, PrecisionConfig


def autocast(config: PrecisionConfig, device: torch.device) -> AbstractContextManager[object]:
    """Context in which a forward pass computes: matrix products in `config.compute`, weights stay fp32."""
    if config.compute is Compute.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, config.compute.value))
