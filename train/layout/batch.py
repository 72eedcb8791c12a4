"""How the samples of a step divide into micro-batches. Imports no torch."""

from typing import TYPE_CHECKING

from contract.errors import ConfigError
from train.layout.dims import ParallelDims

if TYPE_CHECKING:
    from train.config import TrainConfig


def samples_per_step(config: "TrainConfig", dims: ParallelDims) -> int:
    """Samples of an optimizer step, over all ranks; raises `ConfigError` where two settings disagree."""
    asked = config.loop.global_batch_size
    steps = config.parallel.gradient_accumulation_steps
    if steps is None:
        assert asked is not None, "the configuration is validated"
        return asked
    total = steps * config.parallel.micro_batch_size * dims.dp
    if asked is not None and asked != total:
        raise ConfigError(
            f"parallel.gradient_accumulation_steps={steps} with {dims.dp} data-parallel ranks of "
            f"parallel.micro_batch_size={config.parallel.micro_batch_size} makes {total} samples a step, but "
            f"loop.global_batch_size={asked}: set one of the two to null"
        )
    return total


def micro_batches(config: "TrainConfig", dims: ParallelDims) -> int:
    """Micro-batches that each rank takes for one step, in a layout that `check_batch` has passed."""
    return samples_per_step(config, dims) // (config.parallel.micro_batch_size * dims.dp)


def check_batch(global_batch_size: int, micro_batch_size: int, dp_size: int) -> None:
    """Raise `ConfigError` unless a global batch divides into whole micro-batches for each data-parallel rank."""
    at_once = micro_batch_size * dp_size
    if global_batch_size % at_once:
        below = global_batch_size // at_once * at_once
        choices = " or ".join(str(size) for size in (below, below + at_once) if size)
        raise ConfigError(
            f"loop.global_batch_size={global_batch_size} does not divide over {dp_size} data-parallel ranks of "
            f"parallel.micro_batch_size={micro_batch_size}: set it to {choices}, or change the micro-batch size"
        )
