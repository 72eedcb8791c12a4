"""Which types go with which layout and model. Imports no torch."""

from typing import TYPE_CHECKING

from contract.errors import ConfigError
from train.layout.dims import ParallelDims
from train.offload.config import Tier
from train.precision.config import Moments, Sum

if TYPE_CHECKING:
    from train.config import TrainConfig


def check_precision(config: "TrainConfig", dims: ParallelDims) -> None:
    """Raise `ConfigError` for types that this layout, this model or what is offloaded does not allow."""
    precision = config.precision
    if config.has_masters:
        _check_masters(config)
    if precision.embedding is not None:
        _check_embedding(config, dims)
    if precision.float8 and dims.tp > 1:
        raise ConfigError(
            f"precision.float8 with parallel.tp={dims.tp}: tensor parallelism here computes the products itself, leave "
            "one of the two out"
        )
    if (
        precision.reduce.bytes < precision.accumulate.bytes
        and dims.dp_replicate > 1
        and config.parallel.zero >= 2
    ):
        raise ConfigError(
            f"precision.reduce={precision.reduce.value} with parallel.zero={config.parallel.zero} and "
            f"{dims.dp_replicate} copies (dp_replicate) would add up micro-batches in it too, not in "
            f"precision.accumulate={precision.accumulate.value}: set parallel.zero=1, or both types alike"
        )


def _check_masters(config: "TrainConfig") -> None:
    """Refuse what an optimizer with fp32 weights of its own does not do."""
    precision = config.precision
    cause = (
        f"precision.parameters={precision.parameters.value}"
        if precision.parameters is not None
        else f"offload.optimizer={config.offload.optimizer.value}"
    )
    if precision.embedding is not None:
        raise ConfigError(
            f"precision.embedding=int8 with {cause}: the optimizer would keep the table in fp32 beside it, leave one "
            "of the two out"
        )
    if precision.optimizer_state is Moments.int8:
        raise ConfigError(
            f"precision.optimizer_state=int8 with {cause}, which keeps moments in fp32 elsewhere: leave one of the two "
            "out"
        )
    if precision.accumulate is not Sum.float32 and config.offload.gradients is not Tier.none:
        raise ConfigError(
            "offload.gradients=cpu adds gradients up in fp32, not in precision.accumulate="
            f"{precision.accumulate.value}: leave one of the two out"
        )
    if precision.dynamic:
        raise ConfigError(
            f"precision.dynamic reads all moments every precision.dynamic_steps, which {cause} keeps elsewhere: leave "
            "one of the two out"
        )


def _check_embedding(config: "TrainConfig", dims: ParallelDims) -> None:
    model = config.model
    if model.tie_embeddings:
        raise ConfigError(
            "precision.embedding=int8 with model.tie_embeddings: the same table would be the head, whose products "
            "need more bits, leave one of the two out"
        )
    ranks = dims.tp * (dims.dp_shard * dims.cp if config.parallel.zero > 0 else 1)
    if model.vocab_size is not None and model.vocab_size % ranks:
        raise ConfigError(
            f"precision.embedding=int8 deals out whole rows, and model.vocab_size={model.vocab_size} does not divide "
            f"over {ranks} ranks (tp x dp_shard x cp): set it to {-(-model.vocab_size // ranks) * ranks}"
        )
