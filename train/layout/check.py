"""What a layout must fulfil, checked before anything is queued or started. Imports no torch."""

from typing import TYPE_CHECKING

from contract.errors import ConfigError
from train.layout.dims import ParallelDims

if TYPE_CHECKING:
    from train.config import TrainConfig


def lay_out(config: "TrainConfig", ranks: int, ranks_per_node: int | None = None) -> ParallelDims:
    """Return the layout that `config` means on `ranks` ranks, and fill in its global batch.

    Raises `ConfigError` for one that cannot work.
    """
    dims = ParallelDims.of(config.parallel, ranks)
    _fill_global_batch(config, dims)
    check_batch(config.loop.samples_per_step, config.parallel.micro_batch_size, dims.dp)
    return dims


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


def _fill_global_batch(config: "TrainConfig", dims: ParallelDims) -> None:
    steps = config.parallel.gradient_accumulation_steps
    if steps is None:
        return
    total = steps * config.parallel.micro_batch_size * dims.dp
    if config.loop.global_batch_size is None:
        config.loop.global_batch_size = total
    if config.loop.global_batch_size != total:
        raise ConfigError(
            f"parallel.gradient_accumulation_steps={steps} with {dims.dp} data-parallel ranks of "
            f"parallel.micro_batch_size={config.parallel.micro_batch_size} makes {total} samples a step, but "
            f"loop.global_batch_size={config.loop.global_batch_size}: set one of the two to null"
        )
