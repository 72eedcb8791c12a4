"""What a rank keeps where: on its device, in memory of the host, on NVMe. By arithmetic alone; imports no torch."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

from contract.errors import ConfigError
from train.layout.batch import micro_batches
from train.layout.config import Recompute
from train.layout.dims import ParallelDims, is_sharded
from train.layout.holding import Holding, Unit, holdings, units, zero_of_gradients
from train.layout.recompute import Plan, plan, up_gb
from train.offload.config import STAGED, WRITERS, OffloadConfig, Tier
from train.offload.nvme.files import round_up
from train.precision.config import Moments, Table

if TYPE_CHECKING:
    from train.config import TrainConfig

MASTER_BYTES = 12
"""A parameter in the blocks of `train.offload.states`: weight and both moments in fp32."""
_GB = 1e9


class Role(StrEnum):
    """What memory is for, as it is written in a table."""

    parameters = "parameters"
    """Weights at rest."""
    gradients = "gradients"
    """When the optimizer steps."""
    optimizer = "optimizer state"
    """Moments, and weights in fp32 where those that compute are in another type or elsewhere."""
    accumulated = "gradients added up"
    """Whole gradients that add up until the last micro-batch of a step, where ZeRO stages 0 and 1 reduce them."""
    gathered = "gathered parameters"
    """Weights of all ranks, in the type of the matrix products, that stay from forward to backward."""
    activations = "activations"
    """Kept from forward to backward, of all micro-batches that are under way, when that is most."""
    under_way = "under way"
    """Of single layers: what is gathered, reduced, copied, read or written while others compute."""
    checkpoint = "copy for a save"
    """Of the state, from which a checkpoint is written in the background; without room for it saves take longer."""


OFFLOADED = tuple(role for role in Role if role is not Role.checkpoint)
"""What `offload.host_budget_gb` is for."""
STATE = (Role.parameters, Role.gradients, Role.optimizer, Role.accumulated, Role.gathered)
"""What is known to the byte; activations and what is under way are reckoned less exactly."""


@dataclass(frozen=True)
class Bytes:
    """Of one role on each tier."""

    device: int = 0
    host: int = 0
    nvme: int = 0

    @property
    def total(self) -> int:
        """On all tiers."""
        return self.device + self.host + self.nvme

    def __add__(self, other: "Bytes") -> "Bytes":
        """Both."""
        return Bytes(self.device + other.device, self.host + other.host, self.nvme + other.nvme)


TIERS = tuple(field.name for field in fields(Bytes))
Memory = Mapping[Role, Bytes]
"""Of one rank."""


def total(memory: Memory, roles: Iterable[Role] = Role) -> Bytes:
    """Add up roles."""
    return sum((memory[role] for role in roles), Bytes())


def as_tree(memory: Memory) -> dict[str, dict[str, int]]:
    """Plain data."""
    return {
        role.name: {f"{tier}_bytes": getattr(sizes, tier) for tier in TIERS} for role, sizes in memory.items()
    }


def memory(config: "TrainConfig", dims: ParallelDims, rank: int, device_type: str) -> dict[Role, Bytes]:
    """Return what `rank` keeps in a layout that `lay_out` has passed, on a "cuda" device or a "cpu".

    Needs `model.vocab_size`. A CPU's device is the host's memory, but what is offloaded is counted under host.
    """
    (holding,) = holdings(config, dims, [rank])
    kept = plan(config, dims, holding.coordinates["pp"], micro_batches(config, dims), device_type)
    return memory_of(config, dims, holding, kept, device_type)


def memory_of(
    config: "TrainConfig", dims: ParallelDims, holding: Holding, kept: Plan, device_type: str
) -> dict[Role, Bytes]:
    """Return what `memory` does for a rank that has `holding` and keeps `kept` of activations."""
    rank_memory = _RankMemory(config, dims, holding, device_type)
    return {
        Role.parameters: rank_memory.parameters(),
        Role.gradients: rank_memory.gradients(),
        Role.optimizer: rank_memory.optimizer(),
        Role.accumulated: rank_memory.accumulated(),
        Role.gathered: rank_memory.gathered(),
        Role.activations: Bytes(device=kept.kept_bytes, host=kept.host_bytes),
        Role.under_way: rank_memory.under_way(kept),
        Role.checkpoint: rank_memory.checkpoint(),
    }


def state_bytes(config: "TrainConfig", dims: ParallelDims, holding: Holding) -> int:
    """Weights and the optimizer's state that a rank keeps between two steps, wherever they are."""
    rank_memory = _RankMemory(config, dims, holding, "cuda")
    return (rank_memory.parameters() + rank_memory.optimizer()).total


def heaviest(config: "TrainConfig", dims: ParallelDims, device_type: str) -> tuple[int, dict[Role, Bytes]]:
    """Return the rank that keeps most, and what: the first one of a stage of the pipeline."""
    each = dims.ranks // dims.pp
    found = {
        rank: memory(config, dims, rank, device_type) for rank in range(0, dims.ranks, each)
    }  # pp is the outermost axis
    rank = max(found, key=lambda one: (total(found[one]).device, total(found[one]).host))
    return rank, found[rank]


def check_host_budget(config: "TrainConfig", dims: ParallelDims, device_type: str) -> None:
    """Raise `ConfigError` if some rank needs more memory of the host than `offload.host_budget_gb`."""
    budget_gb = config.offload.host_budget_gb
    # What a rank holds depends on the vocabulary, which may still wait for the data.
    if budget_gb is None or config.model.vocab_size is None:
        return
    each = dims.ranks // dims.pp
    for rank in range(0, dims.ranks, each):
        found = memory(config, dims, rank, device_type)
        if total(found, OFFLOADED).host > budget_gb * _GB:
            raise ConfigError(
                f"offload.host_budget_gb={budget_gb:g}: rank {rank} needs {on_host(found)}: raise it, or "
                f"{advice(config, found)}"
            )


def lines(
    rank: int, memory: Memory, offload: OffloadConfig, limits: Mapping[str, int] = MappingProxyType({})
) -> list[str]:
    """Write a table for people; `limits`: what there is on a tier, where that is known. Says what doesn't fit."""
    sums = total(memory)
    shown = [tier for tier in TIERS if tier == "device" or getattr(sums, tier)]
    unit, unit_bytes = _unit(max(getattr(sums, tier) for tier in shown))

    def row(head: str, sizes: Bytes) -> list[str]:
        return [head, *(_written(getattr(sizes, tier), unit_bytes) for tier in shown)]

    table = [[f"{unit} of rank {rank}", *(_HEADS[tier] for tier in shown)]]
    table += [row(role.value, memory[role]) for role in Role if memory[role].total]
    table.append(row("in all", sums))
    budget = {} if offload.host_budget_gb is None else {"host": int(offload.host_budget_gb * _GB)}
    for head, given in (("budget", budget), ("there is", limits)):
        if any(tier in given for tier in shown):
            table.append(
                [head, *(f"{given[tier] / unit_bytes:,.2f}" if tier in given else "" for tier in shown)]
            )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    found = ["  ".join([one[0].ljust(widths[0]), *map(str.rjust, one[1:], widths[1:])]) for one in table]
    # Disks are held against what is free when what dead processes have left there is gone.
    found += [
        f"{_HEADS[tier]}: more than there is, which may end in a lack of memory"
        for tier in shown
        if tier != "nvme" and getattr(sums, tier) > limits.get(tier, math.inf)
    ]
    return [line.rstrip() for line in found]


_HEADS = {"device": "device", "host": "host", "nvme": "NVMe"}


class _RankMemory:
    """The roles one by one."""

    def __init__(self, config: "TrainConfig", dims: ParallelDims, holding: Holding, device_type: str) -> None:
        self._config, self._dims = config, dims
        self._precision, self._offload = config.precision, config.offload
        place = holding.coordinates
        self._sharers = holding.sharers
        self._index = place["dp_shard"] * dims.cp + place["cp"] if holding.sharers > 1 else 0
        self._units = [unit for stage in holding.stages for unit in units(config, dims, stage, place["tp"])]
        self._shares_of: dict[int, list[int]] = {}
        self._share = sum(map(self._own, self._units))
        self._whole = sum(unit.parameters for unit in self._units)
        # A device that computes in the host's memory sends nothing there.
        self._crosses = device_type == "cuda" and self._offload.optimizer is not Tier.none
        self._held_bytes = {"float32": 4}.get(config.held.value, 2)

    def parameters(self) -> Bytes:
        """Weights between their uses."""
        if self._offload.parameters is Tier.none:
            return Bytes(device=sum(self._at_rest(unit, self._own(unit)) for unit in self._units))
        return _on(self._offload.parameters, sum(self._blocks()))

    def gradients(self) -> Bytes:
        """One set."""
        return _on(self._offload.gradients, self._precision.accumulate.bytes * self._share)

    def optimizer(self) -> Bytes:
        """Moments and fp32 weights."""
        if not self._config.has_masters:
            return Bytes(device=sum(map(self._moments, self._units)))
        return _on(self._offload.optimizer, MASTER_BYTES * self._share)

    def checkpoint(self) -> Bytes:
        """Copy of weights and moments: of those that several ranks have one rank writes each."""
        elsewhere = self._config.has_masters or self._precision.compact
        if not self._config.checkpoint.background or elsewhere:
            return Bytes()
        copies = self._dims.dp * self._dims.cp // self._sharers
        return Bytes(host=(self.parameters() + self.optimizer()).total // copies)

    def accumulated(self) -> Bytes:
        """Whole gradients."""
        if not accumulates(self._config, self._dims):
            return Bytes()
        return Bytes(device=self._precision.accumulate.bytes * self._whole)

    def gathered(self) -> Bytes:
        """Weights that are not freed between forward and backward."""
        if not is_sharded(self._config, self._dims):
            return Bytes()
        stay = [unit for unit in self._units if unit.stays or self._config.parallel.zero < 3]
        return Bytes(device=sum(map(self._computing, stay)))

    def under_way(self, kept: Plan) -> Bytes:
        """What single layers need for a while, and what waits for a copy."""
        found = self._gathering() + self._fetching(kept) + self._on_disks()
        if self._offload.delayed_update:
            # An update reads the gradients of one step, and writes new weights, while the next computes.
            found += self.gradients() + Bytes(host=self._held_bytes * self._share)
        if self._crosses:
            found += self._crossing()
        return found

    def _gathering(self) -> Bytes:
        if not is_sharded(self._config, self._dims):
            return Bytes()
        # A gradient in the type of its product, and in that in which it travels: what goes and, where one rank has all
        # that comes out of it, as much again.
        travels = 2 if self._sharers == 1 else 1
        gradient_bytes = self._precision.arriving_bytes + travels * self._precision.reduce.bytes
        size = gradient_bytes * max((unit.parameters for unit in self._units), default=0)
        if self._config.parallel.zero == 3:
            # One computes, one has been asked for.
            freed = [self._computing(unit) for unit in self._units if not unit.stays]
            size += 2 * max(freed, default=0)
        return Bytes(device=size)

    def _fetching(self, kept: Plan) -> Bytes:
        """Activations that leave, and that are brought back."""
        sizes = [keep.host_bytes for keep in kept.layers.values()]
        return Bytes(device=min(self._offload.prefetch_layers + 2, len(sizes)) * max(sizes, default=0))

    def _on_disks(self) -> Bytes:
        """Memory of the host for what is read, used and written."""
        ahead, size = self._offload.prefetch_layers, 0
        if self._offload.optimizer is Tier.nvme:
            blocks = [round_up(max(1, MASTER_BYTES * elements)) for elements in self._buckets()]
            size += sum(each * min(blocks.count(each), ahead + 2) for each in set(blocks))
        if self._offload.parameters is Tier.nvme:
            blocks = self._blocks()
            for each in set(blocks):
                size += each * (min(blocks.count(each), ahead + 2) + min(blocks.count(each), WRITERS))
        return Bytes(host=size)

    def _crossing(self) -> Bytes:
        """Between a device with memory of its own and an update on the host."""
        bucket = max(self._buckets(), default=0)
        host = device = 0
        if self._offload.gradients is Tier.none:
            host += STAGED * round_up(4 * bucket)
        if self._offload.parameters is not Tier.none:
            blocks = self._blocks()
            device += min(self._offload.prefetch_layers + 1, len(blocks)) * max(blocks, default=0)
        elif not self._offload.delayed_update:
            host += STAGED * round_up(self._held_bytes * bucket)
        return Bytes(device=device, host=host)

    def _own(self, unit: Unit) -> int:
        return sum(self._shares(unit))

    def _shares(self, unit: Unit) -> list[int]:
        """What the rank has of each parameter; layers are one object, and asked for many times."""
        if id(unit) not in self._shares_of:
            self._shares_of[id(unit)] = unit.shares(self._sharers, self._index)
        return self._shares_of[id(unit)]

    def _blocks(self) -> list[int]:
        """Bytes of each unit on a shelf."""
        return [round_up(self._held_bytes * unit.padded_share(self._sharers)) for unit in self._units]

    def _buckets(self) -> list[int]:
        """Elements of each bucket of an update: a layer, or a single parameter outside of layers."""
        found = []
        for unit in self._units:
            own = self._shares(unit)
            found += own if unit.stays or unit.is_table else [sum(own)]
        return found

    def _at_rest(self, unit: Unit, elements: int) -> int:
        if unit.is_table and self._precision.embedding is not None:
            return self._table_bytes(elements)
        return self._held_bytes * elements

    def _computing(self, unit: Unit) -> int:
        if unit.is_table and self._precision.embedding is not None:
            return self._table_bytes(unit.parameters)
        return self._precision.compute_bytes * unit.parameters

    def _table_bytes(self, elements: int) -> int:
        return Table.bytes(elements, self._config.model.dim)

    def _moments(self, unit: Unit) -> int:
        shares = self._shares(unit)
        return sum(
            (self._precision.optimizer_state if each > 1 else Moments.float32).bytes(size)
            for size, (_rows, each) in zip(shares, unit.matrices, strict=True)
        )


def _on(tier: Tier, size: int) -> Bytes:
    return Bytes(**{{Tier.none: "device", Tier.cpu: "host", Tier.nvme: "nvme"}[tier]: size})


def accumulates(config: "TrainConfig", dims: ParallelDims) -> bool:
    """Whether gradients add up apart from those that the optimizer sees: whole ones, before they are reduced."""
    # Plain replicas add theirs up where they reduce them.
    return (
        is_sharded(config, dims) and zero_of_gradients(config, dims) < 2 and micro_batches(config, dims) > 1
    )


def on_host(memory: Memory) -> str:
    """Say how much memory of the host what is offloaded takes, and what for."""
    parts = [f"{role.value} {up_gb(memory[role].host):.3g}" for role in OFFLOADED if memory[role].host]
    return f"{up_gb(total(memory, OFFLOADED).host):.3g} GB of memory of the host ({', '.join(parts)})"


def advice(config: "TrainConfig", memory: Memory) -> str:
    """Say what takes most away of what a rank has on the host."""
    offload = config.offload
    largest = max(OFFLOADED, key=lambda role: memory[role].host)
    if largest in (Role.optimizer, Role.parameters):
        return f"move that to disks (offload.{largest.name}=nvme)"
    if largest is Role.gradients:
        return "set offload.gradients=none"
    if largest is Role.activations:
        if config.parallel.recompute is Recompute.auto:
            return f"have less go there by a lower offload.link_gb_s={offload.link_gb_s:g}"
        return "lower parallel.micro_batch_size, or set parallel.recompute=full"
    fewer = f"lower offload.prefetch_layers={offload.prefetch_layers}, or " * (offload.prefetch_layers > 1)
    return f"{fewer}share the state among more ranks (parallel.zero, parallel.tp, parallel.pp)"


def _unit(size: int) -> tuple[str, float]:
    """The largest unit of which there is one."""
    units = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    return next((unit for unit in units if size >= unit[1]), units[-1])


def _written(size: int, unit_bytes: float) -> str:
    return f"{size / unit_bytes:,.2f}" if size else "-"
