"""ParallelDims: the degrees of a layout and where each rank stands in it. The only place that multiplies degrees."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from contract.errors import ConfigError
from train.layout.config import ParallelConfig

if TYPE_CHECKING:
    from train.config import TrainConfig

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Outermost first: neighbouring ranks, which share a node, differ in the last axis."""


@dataclass(frozen=True)
class ParallelDims:
    """Degrees of parallelism of a run; their product is the number of ranks."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @classmethod
    def of(cls, config: ParallelConfig, ranks: int) -> "ParallelDims":
        """Fill the degrees that `config` leaves open; raise `ConfigError` when they do not multiply to `ranks`."""
        inner = config.tp * config.pp * config.cp
        dp, rest = divmod(ranks, inner)
        named = f"parallel.tp={config.tp} x pp={config.pp} x cp={config.cp}"
        if rest or dp == 0:
            raise ConfigError(f"{named} is {inner}, which does not divide {ranks} ranks: change one of them")
        if config.dp is not None and config.dp != dp:
            raise ConfigError(
                f"parallel.dp={config.dp} with {named} is {config.dp * inner} ranks, but there are {ranks}: change one"
            )
        replicate, shard = config.dp_replicate, config.dp_shard
        if replicate is None and shard is None:
            replicate, shard = (dp, 1) if config.zero == 0 else (1, dp)
        elif replicate is None:
            assert shard is not None
            replicate = dp // shard
        elif shard is None:
            shard = dp // replicate
        if replicate * shard != dp:
            raise ConfigError(
                f"parallel.dp_replicate={config.dp_replicate} and dp_shard={config.dp_shard} do not make up the "
                f"{dp} data-parallel ranks that {named} leave of {ranks}: change one, or leave one null"
            )
        return cls(pp=config.pp, dp_replicate=replicate, dp_shard=shard, cp=config.cp, tp=config.tp)

    @property
    def shape(self) -> tuple[int, ...]:
        """Degrees in the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    @property
    def dp(self) -> int:
        """Ranks that take different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def ranks_per_stage(self) -> int:
        """Ranks that hold one pipeline stage between them."""
        return self.ranks // self.pp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of `rank` on each axis."""
        position = {}
        for axis in reversed(AXES):
            rank, position[axis] = divmod(rank, getattr(self, axis))
        return {axis: position[axis] for axis in AXES}

    def rank(self, **coordinates: int) -> int:
        """Rank at a position; axes that are not given are 0."""
        found = 0
        for axis in AXES:
            found = found * getattr(self, axis) + coordinates.get(axis, 0)
        return found

    def group(self, axes: str | Sequence[str], rank: int = 0) -> list[int]:
        """Ranks that differ from `rank` in nothing but `axes` (one or several), in order; `rank` is one of them."""
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        groups = [self.coordinates(rank)]
        for axis in AXES:
            if axis in names:
                groups = [{**place, axis: index} for place in groups for index in range(getattr(self, axis))]
        return [self.rank(**place) for place in groups]

    def spans_nodes(self, axis: str, ranks_per_node: int) -> bool:
        """Whether some group of `axis` has ranks on several nodes."""
        stride = math.prod(self.shape[AXES.index(axis) + 1 :])
        block = stride * getattr(self, axis)
        if getattr(self, axis) == 1:
            return False
        # Groups of one axis lie in blocks of neighbouring ranks.
        return any(
            {first // ranks_per_node}
            != {(first + k * stride) // ranks_per_node for k in range(block // stride)}
            for start in range(0, self.ranks, block)
            for first in range(start, start + stride)
        )

    def __str__(self) -> str:
        return (
            " x ".join(f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1)
            or "1 rank"
        )


def is_sharded(config: "TrainConfig", dims: ParallelDims) -> bool:
    """Whether torch's `fully_shard` or `replicate` acts on the parts of a model; else they are plain, or DDP's."""
    alone = dims.dp * dims.cp == 1
    needed = config.has_masters or config.precision.needs_policy
    return needed or (not alone and (config.parallel.zero > 0 or dims.tp * dims.pp > 1))
