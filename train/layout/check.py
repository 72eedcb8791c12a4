"""What a layout must fulfil, checked before anything is queued or started. Imports no torch."""

import copy
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from contract.errors import ConfigError
from train.comm.check import check_comm
from train.layout.batch import check_batch, micro_batches, samples_per_step
from train.layout.config import ContextMethod, ParallelConfig, Recompute
from train.layout.dims import ParallelDims
from train.layout.memory import check_host_budget
from train.layout.nearest import nearest_layouts, nearest_rank_counts, write
from train.layout.recompute import check_recompute
from train.layout.stages import check_pipeline
from train.offload.check import check_offload
from train.precision.check import check_precision

if TYPE_CHECKING:
    from train.config import TrainConfig

DEFAULTS = ParallelConfig()


def lay_out(
    config: "TrainConfig", ranks: int, ranks_per_node: int | None = None, on_gpus: bool = False
) -> ParallelDims:
    """Return the layout that `config` means on `ranks` ranks, and fill in its global batch.

    `on_gpus`: it is known that each rank will compute on one. Raises `ConfigError` for a layout that cannot
    work, with the nearest ones that can.
    """
    _check_choices(config.parallel)
    check_offload(config)
    try:
        dims = ParallelDims.of(config.parallel, ranks)
        _check_degrees(config, dims)
    except ConfigError as error:
        raise ConfigError(f"{error}{_possible(config, ranks, ranks_per_node or ranks)}") from None
    check_precision(config, dims)
    check_comm(config, dims, ranks_per_node)
    if on_gpus:
        check_gpu(config)
    check_host_budget(config, dims, "cuda" if on_gpus else "cpu")
    config.loop.global_batch_size = samples_per_step(config, dims)
    return dims


def check_gpu(config: "TrainConfig") -> None:
    """Raise `ConfigError` for what computes on a CPU alone: torch's fast attention on a GPU takes less."""
    if config.parallel.context is not ContextMethod.ring:
        return
    if config.precision.compute_bytes == 4:
        raise ConfigError(
            "parallel.context=ring does not compute in fp32 on a GPU: choose precision=bf16, or "
            "parallel.context=heads"
        )
    if config.model.head_dim % 8 or config.model.head_dim > 256:
        raise ConfigError(
            f"parallel.context=ring on a GPU needs heads of a multiple of 8 up to 256, and model.dim / model.heads is "
            f"{config.model.head_dim}: change model.heads, or choose parallel.context=heads"
        )


def fits(config: "TrainConfig", parallel: ParallelConfig, ranks: int, samples: int | None = None) -> bool:
    """Whether `config` works with another `parallel` section on `ranks` ranks, and with another global batch."""
    changed = copy.copy(config)
    changed.parallel = parallel
    if samples is not None:
        changed.loop = dataclasses.replace(config.loop, global_batch_size=samples)
    try:
        _check_choices(parallel)
        _check_degrees(changed, ParallelDims.of(parallel, ranks))
    except ConfigError:
        return False
    return True


def largest_degrees(config: "TrainConfig") -> dict[str, int]:
    """Return degrees beyond which no layout of this model can go: bounds of a search."""
    return {"tp": config.model.heads, "cp": config.data.sequence_length, "pp": config.model.layers + 2}


def _check_choices(parallel: ParallelConfig) -> None:
    """Refuse choices that do nothing as the others are; other degrees would not mend that."""
    for axis, name in (
        ("pp", "schedule"),
        ("cp", "context"),
        ("tp", "sequence_parallel"),
        ("tp", "loss_parallel"),
    ):
        value = getattr(parallel, name)
        if getattr(parallel, axis) == 1 and value != getattr(DEFAULTS, name):
            raise ConfigError(
                f"parallel.{name}={_written(value)} does nothing with parallel.{axis}=1: leave it out, or set "
                f"parallel.{axis}"
            )
    if parallel.zero == 0 and (parallel.dp_shard or 1) > 1:
        raise ConfigError(
            f"parallel.dp_shard={parallel.dp_shard} has nothing to share with parallel.zero=0: set parallel.zero=1, 2 "
            "or 3, or leave dp_shard out"
        )
    budget, mode = parallel.recompute_budget_gb, parallel.recompute
    if mode is Recompute.auto and budget is None:
        raise ConfigError(
            "parallel.recompute=auto fits activations into a budget: give parallel.recompute_budget_gb"
        )
    if mode is not Recompute.auto and budget is not None:
        raise ConfigError(
            f"parallel.recompute_budget_gb={budget} does nothing with parallel.recompute={mode}: set "
            "parallel.recompute=auto, or leave the budget out"
        )


def _written(value: object) -> str:
    """A value as users write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_degrees(config: "TrainConfig", dims: ParallelDims) -> None:
    """Refuse degrees that the batch, the model, the sequence or a schedule does not allow."""
    parallel = config.parallel
    if parallel.zero == 0 and dims.dp_shard > 1:
        raise ConfigError(
            f"parallel.dp_replicate={dims.dp_replicate} leaves {dims.dp_shard} ranks that share the state, which "
            "parallel.zero=0 does not: set parallel.zero=1, 2 or 3, or leave dp_replicate out"
        )
    check_batch(samples_per_step(config, dims), parallel.micro_batch_size, dims.dp)
    _check_tensor(config, dims)
    _check_context(config, dims)
    check_pipeline(parallel, config.model.layers, micro_batches(config, dims))
    check_recompute(config, dims, micro_batches(config, dims))


def _check_tensor(config: "TrainConfig", dims: ParallelDims) -> None:
    model, tp = config.model, dims.tp
    kv_heads = model.heads if model.kv_heads is None else model.kv_heads
    if model.heads % tp:
        raise ConfigError(f"parallel.tp={tp} does not divide model.heads={model.heads}: change one of them")
    if kv_heads % tp and tp % kv_heads:
        raise ConfigError(
            f"parallel.tp={tp} neither divides model.kv_heads={kv_heads} nor is a multiple of it: change one of them"
        )
    for name, size in (("vocab_size", model.vocab_size), ("ffn_dim", model.ffn_dim)):
        if size is not None and size % tp:
            _check_uneven(config, dims, f"model.{name}", size)


def _check_uneven(config: "TrainConfig", dims: ParallelDims, name: str, size: int) -> None:
    """Refuse a size that `tp` does not divide where the last rank would have none of it, or ZeRO could not share it."""
    tp, dim, ranks = dims.tp, config.model.dim, dims.dp_shard * dims.cp
    if -(-size // tp) * (tp - 1) >= size:
        raise ConfigError(
            f"{name}={size} leaves nothing for the last of parallel.tp={tp} ranks: change one of them"
        )
    # What tensor parallelism cuts unevenly ZeRO cuts the other way.
    if config.parallel.zero > 0 and dim % ranks:
        raise ConfigError(
            f"parallel.zero={config.parallel.zero} shares what parallel.tp={tp} cuts unevenly ({name}={size}) along "
            f"model.dim={dim}, which {ranks} ranks (dp_shard x cp) do not divide: set {name} to a multiple of {tp}"
        )


def _check_context(config: "TrainConfig", dims: ParallelDims) -> None:
    parallel, length = config.parallel, config.data.sequence_length
    tp, cp = dims.tp, dims.cp
    ring = cp > 1 and parallel.context is ContextMethod.ring
    if ring and config.data.mask_documents:
        raise ConfigError(
            "parallel.context=ring has no document masks: set parallel.context=heads, or data.mask_documents=false"
        )
    parts = 2 * cp if ring else cp
    if length % parts:
        raise ConfigError(
            f"parallel.cp={cp} with context={parallel.context} cuts a sequence into {parts} equal parts, which "
            f"data.sequence_length={length} does not divide into: change one of them"
        )
    heads = config.model.heads // tp
    if cp > 1 and not ring and heads % cp:
        raise ConfigError(
            f"parallel.cp={cp} with context=heads shares {heads} heads (model.heads={config.model.heads} / "
            f"parallel.tp={tp}), which it does not divide: set parallel.context=ring, or change cp or tp"
        )
    if tp > 1 and parallel.sequence_parallel and length // cp % tp:
        raise ConfigError(
            f"parallel.sequence_parallel splits {length // cp} positions (data.sequence_length={length} / parallel.cp="
            f"{cp}) over parallel.tp={tp} ranks, which it does not divide: set it to false, or change the length"
        )


def _possible(config: "TrainConfig", ranks: int, ranks_per_node: int) -> str:
    """Name what would work instead: the tail of a refusal; empty if nothing near does."""
    parallel, largest = config.parallel, largest_degrees(config)

    def offer(allowed: Callable[[ParallelConfig], bool]) -> list[ParallelConfig]:
        return nearest_layouts(parallel, ranks, largest, allowed, ranks_per_node)

    offered = [write(one, parallel) for one in offer(lambda one: fits(config, one, ranks))]
    # Where another batch is all that is needed the refusal says so.
    if not offered and not fits(config, parallel, ranks, _near_batch(config, parallel, ranks)):
        layouts = offer(lambda one: fits(config, one, ranks, _near_batch(config, one, ranks)))
        offered = [
            f"{write(one, parallel)} loop.global_batch_size={_near_batch(config, one, ranks)}".strip()
            for one in layouts
        ]
    tail = f"; possible: {', or '.join(offered)}" if offered else ""
    if not offered or not _multiply_to(parallel, ranks):
        counts = nearest_rank_counts(parallel, ranks, lambda on: fits(config, parallel, on), ranks_per_node)
        plural = "s" * (counts != [1])
        tail += f"; unchanged it works on {' or '.join(map(str, counts))} rank{plural}" if counts else ""
    return tail


def _near_batch(config: "TrainConfig", parallel: ParallelConfig, ranks: int) -> int:
    """Global batch near the one asked for that any schedule takes in this layout."""
    at_once = parallel.micro_batch_size * max(1, ranks // (parallel.tp * parallel.pp * parallel.cp))
    if parallel.gradient_accumulation_steps is not None:
        return parallel.gradient_accumulation_steps * at_once
    # Every schedule takes a multiple of twice the pipeline's depth.
    unit = at_once * (2 * parallel.pp if parallel.pp > 1 else 1)
    return max(1, round((config.loop.global_batch_size or 0) / unit)) * unit


def _multiply_to(parallel: ParallelConfig, ranks: int) -> bool:
    try:
        ParallelDims.of(parallel, ranks)
    except ConfigError:
        return False
    return True
