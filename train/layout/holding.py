"""What each rank holds of a model: layers, heads, rows, parameters. By arithmetic alone; imports no torch."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from train.layout.activations import StageLayers
from train.layout.dims import ParallelDims
from train.layout.stages import stage_layers, stages_of

if TYPE_CHECKING:
    from train.config import TrainConfig

STATE_BYTES = 12
"""A parameter at rest: the weight and the two moments of Adam, in fp32."""


@dataclass(frozen=True)
class Unit:
    """Parameters of a rank that travel together where ZeRO shares them: a layer, the embedding, the head."""

    parameters: int
    stays: bool
    """Whether it is kept from forward to backward even where parameters are freed."""
    gathers: int
    """How often a micro-batch needs it gathered where parameters are freed."""


@dataclass(frozen=True)
class Holding:
    """What one rank holds."""

    rank: int
    coordinates: dict[str, int]
    stages: tuple[StageLayers, ...]
    query_heads: int
    kv_heads: int
    hidden_units: int
    """Of the MLP."""
    vocabulary: int
    """Rows of the embedding and of the head, where the rank has them."""
    positions: int
    """Of each sequence, outside attention."""
    parameters: int
    """Of its stages and its share of their tensors, before ZeRO shares them."""
    sharers: int
    """Ranks that share the state of these parameters by ZeRO."""

    @property
    def state_bytes(self) -> float:
        """Weights and moments that the rank keeps between two steps."""
        return STATE_BYTES * self.parameters / self.sharers

    @property
    def has_embedding(self) -> bool:
        """Whether the first stage is here."""
        return any(stage.first for stage in self.stages)

    @property
    def has_head(self) -> bool:
        """Whether the last stage is here."""
        return any(stage.last for stage in self.stages)


def holdings(config: "TrainConfig", dims: ParallelDims, ranks: Iterable[int]) -> list[Holding]:
    """Return what each of `ranks` holds in a layout that `lay_out` has passed. Needs `model.vocab_size`."""
    model, tp, parallel = config.model, dims.tp, config.parallel
    everything = range(model.layers)
    layers = [everything] if dims.pp == 1 else stage_layers(parallel, model, config.data.sequence_length)
    stages = [
        tuple(
            StageLayers(layers[stage], first=stage == 0, last=stage == len(layers) - 1)
            for stage in stages_of(parallel, pp_rank)
        )
        for pp_rank in range(dims.pp)
    ]

    @functools.cache
    def parameters(pp_rank: int, tp_rank: int) -> int:
        return sum(
            unit.parameters for stage in stages[pp_rank] for unit in units(config, dims, stage, tp_rank)
        )

    found = []
    for rank in ranks:
        place = dims.coordinates(rank)
        found.append(
            Holding(
                rank=rank,
                coordinates=place,
                stages=stages[place["pp"]],
                query_heads=model.heads // tp,
                kv_heads=max(1, model.kv_dim // model.head_dim // tp),
                hidden_units=share(model.ffn_dim, tp, place["tp"]),
                vocabulary=share(model.vocabulary, tp, place["tp"]),
                positions=config.data.sequence_length // dims.cp // (tp if parallel.sequence_parallel else 1),
                parameters=parameters(place["pp"], place["tp"]),
                sharers=dims.dp_shard * dims.cp if parallel.zero > 0 else 1,
            )
        )
    return found


def units(config: "TrainConfig", dims: ParallelDims, stage: StageLayers, tp_rank: int) -> list[Unit]:
    """What ZeRO shares one by one of a stage, as `train.parallel.data.shard` groups it."""
    model = config.model
    table = share(model.vocabulary, dims.tp, tp_rank) * model.dim
    layer = layer_parameters(config, dims, tp_rank)
    found = [Unit(layer, stays=False, gathers=2) for _ in stage.layers]
    # A tied model that is in one piece has no head of its own: its embedding is needed at both ends.
    tied = stage.first and stage.last and model.tie_embeddings
    if tied:
        return [*found, Unit(table + model.dim, stays=True, gathers=1)]
    if stage.first:
        # The backward of a lookup needs no weights.
        found.insert(0, Unit(table, stays=False, gathers=1))
    if stage.last:
        found.append(Unit(table + model.dim, stays=True, gathers=1))
    return found


def layer_parameters(config: "TrainConfig", dims: ParallelDims, tp_rank: int) -> int:
    """Parameters of one layer on a rank."""
    model, tp = config.model, dims.tp
    kv_heads = model.kv_dim // model.head_dim
    kv_width = model.kv_dim // tp if kv_heads % tp == 0 else model.kv_dim
    hidden = share(model.ffn_dim, tp, tp_rank)
    return model.dim * (2 * model.dim // tp + 2 * kv_width + 3 * hidden + 2)


def share(size: int, ranks: int, rank: int) -> int:
    """Rows of `size` that `rank` of `ranks` has: equally many, the last ranks fewer."""
    each = -(-size // ranks)
    return max(0, min(size, (rank + 1) * each) - rank * each)
