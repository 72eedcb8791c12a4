"""Mixed precision as torch's parts are told of it."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from contract.errors import ConfigError
from train.precision.config import Compute, PrecisionConfig

FLOAT8_CAPABILITY = (8, 9)
"""The compute capability of the first GPUs that multiply numbers of 8 bits."""


def autocast(config: PrecisionConfig, device: torch.device) -> AbstractContextManager[object]:
    """Context in which a forward pass computes: matrix products in `config.compute`, weights stay fp32."""
    if config.compute is Compute.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, config.compute.value))


def sharded_policy(config: PrecisionConfig) -> MixedPrecisionPolicy:
    """What `fully_shard` does for the same end: weights travel and compute in `config.compute`, gradients add in fp32.

    The shards, which the optimizer updates, stay fp32. See `train.parallel.held` for other types of gradients.
    """
    if config.compute is Compute.float32:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=getattr(torch, config.compute.value), reduce_dtype=torch.float32)


def prepare_device(config: PrecisionConfig, device: torch.device) -> None:
    """Set how this process computes on `device`; raise `ConfigError` for types that the device does not have."""
    if config.tf32:
        if device.type != "cuda":
            raise ConfigError(
                "precision.tf32 is a type of a GPU's products, and there is none: choose precision=fp32"
            )
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    if config.float8:
        _check_float8(device)


def _check_float8(device: torch.device) -> None:
    if device.type != "cuda":
        raise ConfigError(
            "precision.float8 needs a GPU that multiplies numbers of 8 bits, and there is none: leave it out"
        )
    if torch.cuda.get_device_capability(device) < FLOAT8_CAPABILITY:
        raise ConfigError(
            f"precision.float8 needs a GPU that multiplies numbers of 8 bits (H100, L40), which the "
            f"{torch.cuda.get_device_name(device)} does not: leave it out"
        )
