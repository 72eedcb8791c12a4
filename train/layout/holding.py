"""What each rank holds of a model: layers, heads, rows, parameters. By arithmetic alone; imports no torch."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from train.layout.activations import StageLayers
from train.layout.dims import ParallelDims
from train.layout.stages import schedule_of, stage_layers, stages_of

if TYPE_CHECKING:
    from train.config import TrainConfig

Matrix = tuple[int, int]
"""A parameter of a rank: what ZeRO deals out, in a matrix rows, and the size of each."""


@dataclass(frozen=True)
class Unit:
    """Parameters of a rank that travel together where ZeRO shares them: a layer, the embedding, the head."""

    matrices: tuple[Matrix, ...]
    stays: bool
    """Whether it is kept from forward to backward even where parameters are freed."""
    gathers: int
    """How often a micro-batch needs it gathered where parameters are freed."""
    is_table: bool = False
    """Whether it is the embedding alone."""

    @functools.cached_property
    def parameters(self) -> int:
        """Number of them."""
        return sum(rows * each for rows, each in self.matrices)

    def shares(self, ranks: int, rank: int) -> list[int]:
        """What `rank` of `ranks` has of each parameter."""
        return [share(rows, ranks, rank) * each for rows, each in self.matrices]

    def padded_share(self, ranks: int) -> int:
        """What the first of `ranks` has of all; torch takes as much memory on the others."""
        return sum(self.shares(ranks, 0))


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


def zero_of_gradients(config: "TrainConfig", dims: ParallelDims) -> int:
    """The ZeRO stage as far as gradients go: whole ones wait for the end of a step where a backward is split."""
    split = dims.pp > 1 and schedule_of(config.parallel).splits_backward
    return min(config.parallel.zero, 1) if split else config.parallel.zero


def units(config: "TrainConfig", dims: ParallelDims, stage: StageLayers, tp_rank: int) -> list[Unit]:
    """What ZeRO shares one by one of a stage, as `train.parallel.data.shard` groups it."""
    model = config.model
    table = _dealt_out(dims, model.vocabulary, share(model.vocabulary, dims.tp, tp_rank), model.dim)
    norm = (model.dim, 1)
    # One object for all layers: what is counted of it is counted once.
    found = [Unit(layer_matrices(config, dims, tp_rank), stays=False, gathers=2)] * len(stage.layers)
    # A tied model that is in one piece has no head of its own: its embedding is needed at both ends.
    tied = stage.first and stage.last and model.tie_embeddings
    if tied:
        return [*found, Unit((table, norm), stays=True, gathers=1)]
    if stage.first:
        # The backward of a lookup needs no weights.
        found.insert(0, Unit((table,), stays=False, gathers=1, is_table=True))
    if stage.last:
        found.append(Unit((norm, table), stays=True, gathers=1))
    return found


def layer_matrices(config: "TrainConfig", dims: ParallelDims, tp_rank: int) -> tuple[Matrix, ...]:
    """Parameters of one layer on a rank."""
    model, tp = config.model, dims.tp
    kv_heads = model.kv_dim // model.head_dim
    kv_width = model.kv_dim // tp if kv_heads % tp == 0 else model.kv_dim
    hidden = share(model.ffn_dim, tp, tp_rank)
    into_hidden = _dealt_out(dims, model.ffn_dim, hidden, model.dim)
    return (
        (model.dim, 1),
        (model.dim // tp, model.dim),
        (kv_width, model.dim),
        (kv_width, model.dim),
        (model.dim, model.dim // tp),
        (model.dim, 1),
        into_hidden,
        into_hidden,
        (model.dim, hidden),
    )


def _dealt_out(dims: ParallelDims, whole_rows: int, rows: int, columns: int) -> Matrix:
    """A matrix whose rows tensor parallelism has cut: ZeRO shares its columns where it could not do so evenly."""
    return (columns, rows) if whole_rows % dims.tp else (rows, columns)


def share(size: int, ranks: int, rank: int) -> int:
    """Rows of `size` that `rank` of `ranks` has: equally many, the last ranks fewer."""
    each = -(-size // ranks)
    return max(0, min(size, (rank + 1) * each) - rank * each)
