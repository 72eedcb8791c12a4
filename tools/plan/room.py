"""What a layout of ours needs on the GPU that holds most, and whether that fits: exact, as the trainer's dry run says.

`train.layout.memory` does the counting. A search asks for thousands of layouts: only ranks that can hold most are
looked at, and what does not depend on ZeRO is counted once.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tools.plan.constants import Constants
from train.layout.activations import layer_cost
from train.layout.batch import micro_batches as count_micro_batches
from train.layout.config import Recompute
from train.layout.dims import ParallelDims, is_sharded
from train.layout.holding import Holding, holdings, zero_of_gradients
from train.layout.memory import Bytes, Role, memory_of, total
from train.layout.recompute import Plan, plan
from train.layout.stages import Placement, schedule_of, stage_layers, stages_of
from train.offload.config import Tier

if TYPE_CHECKING:
    from train.config import TrainConfig

LOSS_BYTES = 8
"""Of a logit in the backward pass of the loss, beside the 4 that are kept until then: gradients in fp32 and in 16 bits,
and a copy (as published figures of other trainers show, see `activations.LOSS_BYTES`)."""
LOOSE = (Role.activations, Role.under_way)
"""What comes and goes, so that the allocator holds more than is asked for."""


@dataclass(frozen=True)
class Room:
    """What the fullest rank needs."""

    rank: int
    roles: Mapping[Role, Bytes]
    passing_bytes: float
    """While the backward pass is in the loss, or in one layer: gradients, and what is computed again."""
    fragmentation_bytes: float
    """What the allocator holds besides."""
    context_bytes: float
    """CUDA, libraries, NCCL."""
    capacity_bytes: float
    """Of a GPU."""

    @property
    def device_bytes(self) -> float:
        """All of it on the GPU."""
        return total(self.roles).device + self.passing_bytes + self.fragmentation_bytes + self.context_bytes

    @property
    def fits(self) -> bool:
        """Whether there is so much."""
        return self.device_bytes <= self.capacity_bytes

    @property
    def host_bytes(self) -> int:
        """In memory of the host, by one rank."""
        return total(self.roles).host

    @property
    def nvme_bytes(self) -> int:
        """In files, by one rank."""
        return total(self.roles).nvme


@dataclass(frozen=True)
class Part:
    """Of one rank."""

    parameters: int
    """Before ZeRO shares them."""
    loose_bytes: float
    """Activations, and what the allocator holds for them besides."""


class Rooms:
    """Counts what layouts of one configuration need."""

    def __init__(self, capacity_bytes: float, known: Constants) -> None:
        self._capacity, self._known = capacity_bytes, known
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._holdings: dict[tuple[object, ...], list[Holding]] = {}

    def of(self, config: "TrainConfig", dims: ParallelDims) -> Room:
        """Return what a layout that `lay_out` has passed needs."""
        return max(
            (self._room(config, dims, holding) for holding in self._held(config, dims)),
            key=lambda room: (room.device_bytes, room.host_bytes, -room.rank),
        )

    def available_bytes(self, dims: ParallelDims) -> float:
        """What of a GPU is left to the trainer."""
        return self._capacity - self._context_bytes(dims)

    def parts(self, config: "TrainConfig", dims: ParallelDims) -> list[Part]:
        """What of the first rank's memory does not depend on who shares the state: enough for a bound."""
        return [
            Part(
                holding.parameters,
                self._kept(config, dims, holding.coordinates["pp"]).kept_bytes
                * (1 + self._known.fragmentation),
            )
            for holding in self._held(config, dims)[:1]
        ]

    def _context_bytes(self, dims: ParallelDims) -> float:
        axes = sum(size > 1 for size in dims.shape)
        # And one of all ranks.
        communicators = axes + (axes > 0)
        return (self._known.context_gb + self._known.communicator_gb * communicators) * 2**30

    def _room(self, config: "TrainConfig", dims: ParallelDims, holding: Holding) -> Room:
        kept = self._kept(config, dims, holding.coordinates["pp"])
        roles = memory_of(config, dims, holding, kept, "cuda")
        passing = passing_bytes(config, dims, holding, kept)
        loose = sum(roles[role].device for role in LOOSE) + passing
        return Room(
            holding.rank,
            roles,
            passing,
            loose * self._known.fragmentation,
            self._context_bytes(dims),
            self._capacity,
        )

    def _held(self, config: "TrainConfig", dims: ParallelDims) -> list[Holding]:
        """What ranks hold of which one holds most."""
        parallel = config.parallel
        shape = (
            parallel.schedule,
            parallel.stages_per_rank,
            parallel.sequence_parallel,
            tuple(parallel.split or ()),
        )
        key = (dims.tp, dims.pp, dims.cp, dims.dp, *shape)
        if key not in self._holdings:
            each = dims.ranks // dims.pp
            ranks = [each * pp_rank for pp_rank in fullest(config, dims)]
            self._holdings[key] = holdings(config, dims, ranks)
        sharers = dims.dp_shard * dims.cp if parallel.zero > 0 else 1
        # The first rank of a stage is the first of its copy, however many share that.
        return [
            dataclasses.replace(one, sharers=sharers, coordinates=dims.coordinates(one.rank))
            for one in self._holdings[key]
        ]

    def _kept(self, config: "TrainConfig", dims: ParallelDims, pp_rank: int) -> Plan:
        parallel = config.parallel
        count = count_micro_batches(config, dims)
        key = (
            *(dims.tp, dims.pp, dims.cp, pp_rank, count, is_sharded(config, dims)),
            *(parallel.micro_batch_size, parallel.schedule, parallel.stages_per_rank, parallel.recompute),
            *(parallel.sequence_parallel, parallel.loss_parallel, parallel.context),
            *(config.offload.activations, config.offload.link_gb_s, tuple(parallel.split or ())),
        )
        if key not in self._plans:
            self._plans[key] = plan(config, dims, pp_rank, count, "cuda")
        return self._plans[key]


def passing_bytes(config: "TrainConfig", dims: ParallelDims, holding: Holding, kept: Plan) -> float:
    """What a rank needs for a while in a backward pass, of the loss or of the layer that needs most."""
    model, parallel = config.model, config.parallel
    tokens = parallel.micro_batch_size * config.data.sequence_length / dims.cp
    logits = holding.vocabulary if parallel.loss_parallel else model.vocabulary
    loss = tokens * logits * LOSS_BYTES if holding.has_head else 0.0
    if not kept.layers:
        return loss
    again = layer_cost(config, dims).everything_bytes - min(keep.kept_bytes for keep in kept.layers.values())
    if config.offload.activations is not Tier.none or all(
        keep.results is None for keep in kept.layers.values()
    ):
        again = 0
    gradients = tokens * config.precision.compute_bytes * (2 * model.dim + 3 * holding.hidden_units)
    return max(loss, again + gradients)


def fullest(config: "TrainConfig", dims: ParallelDims) -> list[int]:
    """Ranks of the pipeline of which one holds most.

    Those of equally many layers that come first have most micro-batches under way; where stages lie as a V the count
    does not fall from rank to rank, and the last of them is looked at too.
    """
    if dims.pp == 1:
        return [0]
    parallel = config.parallel
    if parallel.recompute is Recompute.auto:
        return list(range(dims.pp))
    layers = stage_layers(parallel, config.model, config.data.sequence_length)
    last = len(layers) - 1
    folded = schedule_of(parallel).placement is Placement.v
    found: dict[tuple[object, ...], list[int]] = {}
    for pp_rank in range(dims.pp):
        own = stages_of(parallel, pp_rank)
        likes = tuple((len(layers[stage]), stage == 0, stage == last, stage + 1 in own) for stage in own)
        found.setdefault(likes, []).append(pp_rank)
    several = folded or schedule_of(parallel).splits_backward
    return sorted(
        {rank for alike in found.values() for rank in ((alike[0], alike[-1]) if several else alike[:1])}
    )


@dataclass(frozen=True)
class StateBytes:
    """A bound from below of weights, gradients and optimizer state on a GPU, for a parameter of its rank."""

    whole: float
    """Of each parameter before ZeRO shares them."""
    shared: float
    """Of each that the rank has of its own."""

    def of(self, parameters: float, sharers: int) -> float:
        """Bytes for so many parameters."""
        return parameters * (self.whole + self.shared / sharers)


def least_state_bytes(config: "TrainConfig", dims: ParallelDims, micro_batches: int) -> StateBytes:
    """Return the bound for a layout in which a rank takes `micro_batches` in a step."""
    precision, offload = config.precision, config.offload
    held = {"float32": 4}.get(config.held.value, 2)
    # A table of one byte a value, and moments of one byte each, are the least that there can be.
    shared = 0.0 if offload.parameters is not Tier.none else 1.0 if precision.embedding else held
    whole = 0.0
    if offload.gradients is Tier.none:
        shared += precision.accumulate.bytes
    if offload.optimizer is Tier.none:
        shared += 12 if config.has_masters else 2 if precision.compact else 8
    if is_sharded(config, dims):
        if zero_of_gradients(config, dims) < 2 and micro_batches > 1:
            whole += precision.accumulate.bytes
        if config.parallel.zero < 3:
            whole += 1 if precision.embedding else precision.compute_bytes
    return StateBytes(whole, shared)
