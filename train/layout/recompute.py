"""Which results each layer keeps under `parallel.recompute`: the choice within a budget. Imports no torch."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from contract.errors import ConfigError
from train.layout.activations import (
    RESULTS,
    Keep,
    LayerCost,
    boundary_bytes,
    layer_cost,
    outside_bytes,
    outside_halfway_bytes,
    stages_of_rank,
)
from train.layout.config import Recompute
from train.layout.dims import ParallelDims
from train.layout.in_flight import InFlight, in_flight, received_early
from train.offload.config import Tier

if TYPE_CHECKING:
    from train.config import TrainConfig

_GB = 1e9


@dataclass(frozen=True)
class Plan:
    """What each layer of a rank keeps."""

    layers: Mapping[int, Keep]
    """By the layer's number in the whole model."""
    kept_bytes: int
    """Of the whole rank when it is most, with all micro-batches that are under way."""
    host_bytes: int
    """The same in memory of the host."""
    forward_flops: int
    """Of the rank's layers, for one micro-batch."""
    budget_bytes: int | None = None

    @property
    def recomputed_flops(self) -> int:
        """Of the rank's layers, for one micro-batch."""
        return sum(keep.recomputed_flops for keep in self.layers.values())

    def __str__(self) -> str:
        """One line for a person."""
        of = "" if self.budget_bytes is None else f" of {self.budget_bytes / _GB:.3g}"
        size = f"activations: {self.kept_bytes / _GB:.3g}{of} GB a rank"
        if self.host_bytes:
            size += f" and {self.host_bytes / _GB:.3g} GB on the host"
        if not self.layers:
            return size
        # Backward costs twice what forward does.
        more = self.recomputed_flops / (3 * self.forward_flops)
        kept = "; ".join(_describe(keep, numbers) for keep, numbers in self._alike())
        return f"{size}, {more:.0%} more compute in the layers; {kept}"

    def _alike(self) -> list[tuple[Keep, list[int]]]:
        groups: dict[Keep, list[int]] = {}
        for number, keep in sorted(self.layers.items()):
            groups.setdefault(keep, []).append(number)
        return list(groups.items())


def check_recompute(config: "TrainConfig", dims: ParallelDims, micro_batches: int) -> None:
    """Raise `ConfigError` for a choice that the layout or the compiler cannot follow.

    `micro_batches`: that a rank takes in one step.
    """
    parallel = config.parallel
    if parallel.recompute in (Recompute.none, Recompute.full):
        return
    if parallel.compile:
        raise ConfigError(
            f"parallel.recompute={parallel.recompute} tells operators apart which parallel.compile melts together: "
            "set parallel.recompute=full, or parallel.compile=false"
        )
    # Where layers go depends on the vocabulary, which may still wait for the data.
    if parallel.recompute is Recompute.auto and (dims.pp == 1 or config.model.vocab_size is not None):
        for pp_rank in range(dims.pp):
            # Which device it will be is not known yet: what suffices on a CPU does so on a GPU.
            _Room(config, dims, pp_rank, micro_batches, "cpu").check_budget()


def plan(
    config: "TrainConfig",
    dims: ParallelDims,
    pp_rank: int = 0,
    micro_batches: int = 1,
    device_type: str = "cuda",
) -> Plan:
    """Return what the layers of a rank at `pp_rank` of the pipeline keep under `parallel.recompute`.

    `micro_batches`: that a rank takes in one step. With a budget each stage of the rank gets the same room for each of
    its layers, in which the choice is the best.
    Raises `ConfigError` for a budget that is too small, with the smallest that works.
    """
    cost = layer_cost(config, dims, device_type)
    room = _Room(config, dims, pp_rank, micro_batches, device_type)
    if config.parallel.recompute is Recompute.auto:
        room.check_budget()
        options, layer_bytes = cost.frontier(), room.of_layer_bytes()
        chosen = [
            choose(options, len(stage.layers), len(stage.layers) * layer_bytes) for stage in room.stages
        ]
    else:
        offload = config.offload.activations is not Tier.none
        keep = cost.keep(_fixed_choice(config.parallel.recompute, cost), offload)
        chosen = [[keep] * len(stage.layers) for stage in room.stages]
    numbers = [number for stage in room.stages for number in stage.layers]
    return Plan(
        layers=dict(zip(numbers, itertools.chain(*chosen), strict=True)),
        kept_bytes=room.most_bytes([sum(keep.kept_bytes for keep in of_stage) for of_stage in chosen]),
        host_bytes=room.most_host_bytes([sum(keep.host_bytes for keep in of_stage) for of_stage in chosen]),
        forward_flops=len(numbers) * cost.forward_flops,
        budget_bytes=room.budget_bytes,
    )


def most_bytes(times: Sequence[InFlight], kept_bytes: Sequence[int], halfway_bytes: Sequence[int]) -> int:
    """Most that a rank keeps at one of `times`, of micro-batches in each of its stages.

    `kept_bytes`: of one from its forward on, by stage; `halfway_bytes`: more of one whose backward is halfway.
    """
    return max(
        sum(
            count * size
            for count, size in zip(time.kept + time.halfway, (*kept_bytes, *halfway_bytes), strict=True)
        )
        for time in times
    )


class _Room:
    """What a rank keeps beside the choice of its layers, and what is left to that."""

    def __init__(
        self, config: "TrainConfig", dims: ParallelDims, pp_rank: int, micro_batches: int, device_type: str
    ) -> None:
        self.stages = stages_of_rank(config, dims, pp_rank)
        self.budget_bytes: int | None = None
        if config.parallel.recompute is Recompute.auto:
            assert config.parallel.recompute_budget_gb is not None, "lay_out asks for it"
            self.budget_bytes = int(config.parallel.recompute_budget_gb * _GB)
        self._times = in_flight(config.parallel, pp_rank, micro_batches)
        self._received_bytes = received_early(config.parallel) * boundary_bytes(config, dims)
        self._outside_bytes = [outside_bytes(config, dims, stage, device_type) for stage in self.stages]
        cost = layer_cost(config, dims, device_type)
        # On the host nothing of a layer takes memory of the device.
        self._input_bytes = cost.input_bytes if cost.flops_a_byte is None else 0
        # The first stage's whole backward is in the second half.
        self._halfway_bytes = [
            0
            if stage.first
            else len(stage.layers) * cost.halfway_bytes
            + outside_halfway_bytes(config, dims, stage, device_type)
            for stage in self.stages
        ]

    def most_bytes(self, layers_bytes: Sequence[int]) -> int:
        """Most that the rank keeps when the layers of each stage keep `layers_bytes` of a micro-batch."""
        kept = [outside + layers for outside, layers in zip(self._outside_bytes, layers_bytes, strict=True)]
        return self._received_bytes + most_bytes(self._times, kept, self._halfway_bytes)

    def most_host_bytes(self, layers_bytes: Sequence[int]) -> int:
        """Most that the rank has on the host when the layers of each stage have `layers_bytes` there."""
        return most_bytes(self._times, layers_bytes, [0] * len(layers_bytes))

    def of_layer_bytes(self) -> int:
        """What a layer may keep of a micro-batch, on average in its stage, so that the budget is never exceeded."""
        assert self.budget_bytes is not None
        left_bytes = self.budget_bytes - self.most_bytes([0] * len(self.stages))
        return left_bytes // max(1, self._layers())

    def check_budget(self) -> None:
        """Raise `ConfigError` for a budget that is too small even if layers keep only their input."""
        assert self.budget_bytes is not None
        least_bytes = self._layers() * self._input_bytes + self.most_bytes([0] * len(self.stages))
        if self.budget_bytes < least_bytes:
            raise ConfigError(
                f"parallel.recompute_budget_gb={self.budget_bytes / _GB:g}: a rank keeps at least "
                f"{up_gb(least_bytes):g} GB even if every layer computes everything again: set it to that or more, or "
                "lower parallel.micro_batch_size"
            )

    def _layers(self) -> int:
        """Most layers that have a micro-batch under way, each as often as it has."""
        depths = [len(stage.layers) for stage in self.stages]
        return most_bytes(self._times, depths, [0] * len(depths))


def choose(options: Sequence[Keep], layers: int, budget_bytes: int) -> list[Keep]:
    """Choose an option for each of `layers` equal layers so that they cost least within the budget.

    The choice is exact. Dynamic programming over bytes in units of their greatest common divisor (the multiple-choice
    knapsack: Kellerer, Pferschy and Pisinger 2004). The largest option, which keeps odd bits of everything, has no
    part in the divisor: how many layers take it is tried one by one. The leanest option must fit for all layers.
    """
    import numpy as np  # a tenth of a second that a login node need not spend

    *others, largest = sorted(options, key=lambda keep: keep.kept_bytes)
    if not others:
        return [largest] * layers
    leanest_bytes = others[0].kept_bytes
    room_bytes = budget_bytes - leanest_bytes * layers
    assert room_bytes >= 0, "even the leanest choice is beyond the budget"
    extra_bytes = [option.kept_bytes - leanest_bytes for option in others]
    unit_bytes = math.gcd(*extra_bytes) or 1
    sizes = [extra // unit_bytes for extra in extra_bytes]
    room = min(room_bytes // unit_bytes, max(sizes) * layers)

    least = np.zeros(
        (layers + 1, room + 1), dtype=np.int64
    )  # work, by layers and the room that they use at most
    taken = np.zeros((layers + 1, room + 1), dtype=np.int16)
    for count in range(1, layers + 1):
        least[count] = np.iinfo(np.int64).max
        for index, (option, size) in enumerate(zip(others, sizes, strict=True)):
            if size <= room:
                total = least[count - 1, : room + 1 - size] + option.price_flops
                better = total < least[count, size:]
                least[count, size:][better] = total[better]
                taken[count, size:][better] = index

    def left(largest_ones: int) -> int:
        used_bytes = largest_ones * (largest.kept_bytes - leanest_bytes)
        return min(room, (room_bytes - used_bytes) // unit_bytes)

    def work(largest_ones: int) -> int:
        rest = int(least[layers - largest_ones, left(largest_ones)])
        return largest_ones * largest.price_flops + rest

    largest_ones = min((count for count in range(layers + 1) if left(count) >= 0), key=work)
    chosen, room = [largest] * largest_ones, left(largest_ones)
    for count in range(layers - largest_ones, 0, -1):
        index = int(taken[count, room])
        chosen.append(others[index])
        room -= sizes[index]
    return chosen


def _fixed_choice(recompute: Recompute, cost: LayerCost) -> frozenset[str] | None:
    if recompute is Recompute.none:
        return None
    return frozenset(cost.kept_bytes) if recompute is Recompute.selective else frozenset()


def up_gb(size_bytes: int) -> float:
    """Gigabytes with three digits, rounded up: a number that works when it is given back."""
    digits: float = 10.0 ** (math.floor(math.log10(size_bytes)) - 2)
    return math.ceil(size_bytes / digits) * digits / _GB


def _describe(keep: Keep, numbers: list[int]) -> str:
    layers, where = (
        f"layer{'s' * (len(numbers) > 1)} {_ranges(numbers)}",
        " on the host" * (keep.host_bytes > 0),
    )
    if keep.results is None:
        return f"{layers} keep everything{where}"
    results = ", ".join(name for name in RESULTS if name in keep.results)
    if not results:
        return f"{layers} keep their input{where}"
    return f"{layers} keep {results}{' and their input' if where else ''}{where}"


def _ranges(numbers: list[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
