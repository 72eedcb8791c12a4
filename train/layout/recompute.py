"""Which results each layer keeps under `parallel.recompute`: the choice within a budget. Imports no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from contract.errors import ConfigError
from train.layout.activations import (
    RESULTS,
    Keep,
    LayerCost,
    StageLayers,
    layer_cost,
    outside_bytes,
    stages_of_rank,
)
from train.layout.config import Recompute
from train.layout.dims import ParallelDims
from train.layout.stages import schedule_of

if TYPE_CHECKING:
    from train.config import TrainConfig

_GB = 1e9


@dataclass(frozen=True)
class Plan:
    """What each layer of a rank keeps."""

    layers: Mapping[int, Keep]
    """By the layer's number in the whole model."""
    kept_bytes: int
    """Of the whole rank, with as many micro-batches as are under way at once."""
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
    """Raise `ConfigError` for a choice that the layout, its schedule or the compiler cannot follow.

    `micro_batches`: that a rank takes in one step.
    """
    parallel = config.parallel
    if parallel.recompute in (Recompute.none, Recompute.full):
        return
    if dims.pp > 1 and schedule_of(parallel).splits_backward:
        raise ConfigError(
            f"parallel.recompute={parallel.recompute} gives what it has kept to one backward pass, and "
            f"schedule={parallel.schedule} makes two: set parallel.recompute=full, or choose 1f1b or interleaved_1f1b"
        )
    if parallel.compile:
        raise ConfigError(
            f"parallel.recompute={parallel.recompute} tells operators apart which parallel.compile melts together: "
            "set parallel.recompute=full, or parallel.compile=false"
        )
    # Where layers go depends on the vocabulary, which may still wait for the data.
    if parallel.recompute is Recompute.auto and (dims.pp == 1 or config.model.vocab_size is not None):
        for pp_rank in range(dims.pp):
            _check_budget(config, dims, stages_of_rank(config, dims, pp_rank, micro_batches))


def _check_budget(config: "TrainConfig", dims: ParallelDims, stages: Sequence[StageLayers]) -> None:
    # Which device it will be is not known yet: what suffices on a CPU does so on a GPU.
    device_type = "cpu"
    asked_gb = config.parallel.recompute_budget_gb
    assert asked_gb is not None, "lay_out asks for it"
    input_bytes = layer_cost(config, dims, device_type).input_bytes
    least_bytes = sum(
        stage.in_flight * (len(stage.layers) * input_bytes + outside_bytes(config, dims, stage, device_type))
        for stage in stages
    )
    if int(asked_gb * _GB) < least_bytes:
        raise ConfigError(
            f"parallel.recompute_budget_gb={asked_gb}: a rank keeps at least {_up(least_bytes):g} GB even if every "
            "layer computes everything again: set it to that or more, or lower parallel.micro_batch_size"
        )


def plan(
    config: "TrainConfig", dims: ParallelDims, stages: Sequence[StageLayers], device_type: str = "cuda"
) -> Plan:
    """Return what the layers of a rank that holds `stages` keep under `parallel.recompute`.

    The stages of a rank have equally many micro-batches under way.
    Raises `ConfigError` for a budget that is too small, with the smallest that works.
    """
    cost = layer_cost(config, dims, device_type)
    fixed_bytes = sum(outside_bytes(config, dims, stage, device_type) for stage in stages)
    numbers = [number for stage in stages for number in stage.layers]
    (in_flight,) = {stage.in_flight for stage in stages}
    budget_bytes = None
    if config.parallel.recompute is Recompute.auto:
        _check_budget(config, dims, stages)
        assert config.parallel.recompute_budget_gb is not None
        budget_bytes = int(config.parallel.recompute_budget_gb * _GB)
        chosen = choose(cost.frontier(), len(numbers), budget_bytes // in_flight - fixed_bytes)
    else:
        chosen = [cost.keep(_fixed_choice(config.parallel.recompute, cost))] * len(numbers)
    return Plan(
        layers=dict(zip(numbers, chosen, strict=True)),
        kept_bytes=in_flight * (fixed_bytes + sum(keep.kept_bytes for keep in chosen)),
        forward_flops=len(numbers) * cost.forward_flops,
        budget_bytes=budget_bytes,
    )


def choose(options: Sequence[Keep], layers: int, budget_bytes: int) -> list[Keep]:
    """Choose an option for each of `layers` equal layers so that the least work is repeated within the budget.

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
                total = least[count - 1, : room + 1 - size] + option.recomputed_flops
                better = total < least[count, size:]
                least[count, size:][better] = total[better]
                taken[count, size:][better] = index

    def left(largest_ones: int) -> int:
        used_bytes = largest_ones * (largest.kept_bytes - leanest_bytes)
        return min(room, (room_bytes - used_bytes) // unit_bytes)

    def work(largest_ones: int) -> int:
        rest = int(least[layers - largest_ones, left(largest_ones)])
        return largest_ones * largest.recomputed_flops + rest

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


def _up(size_bytes: int) -> float:
    """Gigabytes with three digits, rounded up: a number that works when it is given back."""
    digits: float = 10.0 ** (math.floor(math.log10(size_bytes)) - 2)
    return math.ceil(size_bytes / digits) * digits / _GB


def _describe(keep: Keep, numbers: list[int]) -> str:
    layers = f"layer{'s' * (len(numbers) > 1)} {_ranges(numbers)}"
    if keep.results is None:
        return f"{layers} keep everything"
    if not keep.results:
        return f"{layers} keep their input"
    return f"{layers} keep {', '.join(name for name in RESULTS if name in keep.results)}"


def _ranges(numbers: list[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
