"""Weights that lie in memory of the host or on NVMe and come when a layer needs them (ZeRO-Infinity, arXiv 2104.07857).

Each group of parameters that `fully_shard` gathers together is a block of a `Shelf`: this rank's shards, one after
the other. Blocks are asked for some layers ahead, and let go as soon as torch has taken its copy for the other ranks.
"""

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from train.config import TrainConfig
from train.model.config import ModelConfig
from train.model.llama import Llama, rope_tables
from train.offload.buckets import Bucket
from train.offload.config import Tier
from train.offload.disks import store_of
from train.offload.seam import around_read, groups_of, in_backward, read_again, sharded_modules
from train.offload.shelf import DiskShelf, MemoryShelf, Shelf
from train.offload.staging import Far, Near, Staging
from train.offload.transfer import Event, Transfer
from train.offload.weights import Arrived
from train.parallel.fill import Read, global_name, local_part


@dataclass(frozen=True)
class _Place:
    """Where a parameter's shard lies in the block of its unit, in elements."""

    held: FSDPParam
    start: int
    width: int
    """With what torch pads shards to, so that all ranks have equally many rows."""
    size: int
    nothing: Tensor
    """What torch has in place of the shard between uses."""


class _Pass(Enum):
    """What a unit is read for."""

    TRAIN = auto()
    EVALUATE = auto()
    BACKWARD = auto()


class _Unit:
    """The parameters of one group."""

    def __init__(self, number: int, group: FSDPParamGroup, device: torch.device) -> None:
        self.number = number
        self.group = group
        self.places: dict[nn.Parameter, _Place] = {}
        self.elements = 0
        for held in group.fsdp_params:
            self._take_over(held, device)
        # What torch would make of stand-ins when it first looks at them.
        group._reset_sharded_params = True
        (self.dtype,) = {parameter.dtype for parameter in self.places}
        self.lend(None)
        self.ahead: dict[_Pass, list[int]] = {}
        """Units that are read after this one in a pass, the next first."""
        self.edited: Tensor | None = None
        """While new values are written: the block."""
        self.unwritten: set[nn.Parameter] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""
        return self.elements * self.dtype.itemsize

    def lend(self, block: Tensor | None) -> None:
        """Have torch find the shards in a flat block, or with None nothing."""
        for place in self.places.values():
            data = place.nothing
            if block is not None:
                data = block[place.start : place.start + place.width]
            place.held._sharded_param_data = data

    def _take_over(self, held: FSDPParam, device: torch.device) -> None:
        """Put a stand-in in the place of a shard that has no memory yet: of its shape, without its size.

        Whoever reads it by mistake gets NaN, and to write to it is an error.
        """
        old = held.sharded_param
        width = math.prod(held.padded_sharded_param_size)
        nan = torch.full((), math.nan, dtype=old.dtype, device=device)
        stand_in = held.to_sharded_dtensor(nan.expand(held.sharded_size))
        parameter = nn.Parameter(stand_in, requires_grad=old.requires_grad)
        held.sharded_param = parameter
        held._setattr_on_modules(parameter)
        size = math.prod(held.sharded_size)
        self.places[parameter] = _Place(held, self.elements, width, size, nan.expand(width))
        self.elements += width


class Shelved:
    """The weights of this rank's parts, on a shelf."""

    def __init__(
        self,
        parts: Iterable[nn.Module],
        make_shelf: Callable[[Sequence[int]], Shelf],
        ahead: int,
        device: torch.device,
        stages: bool | None = None,
    ) -> None:
        """Take over all parameters of sharded parts that have no memory yet; values are given by `fill` or an update.

        `make_shelf` is given the bytes of each block. `ahead`: blocks that are asked for before they are needed.
        `stages`: whether blocks are copied to the device first; by default where that has memory of its own.
        """
        self._units: list[_Unit] = []
        for part in parts:
            groups = [group for module in sharded_modules(part) for group in groups_of(module)]
            units = [_Unit(len(self._units) + index, group, device) for index, group in enumerate(groups)]
            _order(units, ahead)
            self._units += units
        self._unit_of = {parameter: unit for unit in self._units for parameter in unit.places}
        self._shelf = make_shelf([unit.nbytes for unit in self._units])
        self._staging: Staging = Near(self._shelf)
        if device.type != "cpu" if stages is None else stages:
            self._staging = Far(self._shelf, Transfer(device))
        self._lock = threading.RLock()
        """Of all that an update on another thread changes too."""
        for unit in self._units:
            around_read(unit.group, partial(self._bring, unit), partial(self._let_go, unit))

    @property
    def host_bytes(self) -> int:
        """Memory of the host that is taken for weights."""
        return self._shelf.host_bytes

    def totals(self) -> dict[str, float]:
        """What has been moved so far, and the seconds of it that nothing hid."""
        traffic = self._shelf.traffic()
        return {
            "offload_parameters_from_cpu_bytes": float(self._staging.moved_bytes),
            "offload_parameters_copies_s": self._staging.copies_s,
            "offload_parameters_from_nvme_bytes": float(traffic.read_bytes),
            "offload_parameters_to_nvme_bytes": float(traffic.written_bytes),
            "offload_parameters_nvme_busy_s": traffic.busy_s,
            "offload_parameters_nvme_exposed_s": traffic.waited_s,
        }

    def weights(self, buckets: Sequence[Bucket]) -> "ShelvedWeights":
        """The same as an update sees them."""
        return ShelvedWeights(self, buckets)

    def open(self, parameter: nn.Parameter) -> Tensor:
        """Return a flat tensor for the new values of this rank's share of a parameter, with any content.

        From then on, until all parameters of its unit are `done`, nothing may gather that.
        """
        unit = self._unit_of[parameter]
        with self._lock:
            if unit.edited is None:
                self._staging.forget(unit.number)
                unit.edited = self._shelf.edit(unit.number).view(unit.dtype)
                unit.unwritten = set(unit.places)
            place = unit.places[parameter]
            return unit.edited[place.start : place.start + place.size]

    def done(self, parameter: nn.Parameter) -> None:
        """Say that all new values of a parameter are written."""
        unit = self._unit_of[parameter]
        with self._lock:
            unit.unwritten.remove(parameter)
            if not unit.unwritten:
                unit.edited = None
                self._shelf.keep(unit.number)

    @torch.no_grad()
    def fill(self, part: nn.Module, config: ModelConfig, read: Read) -> None:
        """Fill every parameter of a part from `read`."""
        for name, parameter in part.named_parameters():
            values = self.open(parameter)
            if values.numel():
                where = local_part(parameter)[1]
                values.copy_(read(global_name(name, config), tuple(parameter.shape), where).reshape(-1))
            self.done(parameter)

    def close(self) -> None:
        """Give up all weights."""
        self._shelf.close()

    def _bring(self, unit: _Unit) -> None:
        """Have torch find the shards of a unit, and ask for those that are needed next."""
        following = unit.ahead[_current_pass(unit.group)]
        with self._lock:
            assert unit.edited is None, "its weights are being written"
            self._shelf.want([unit.number, *following])
            unit.lend(self._staging.take(unit.number, unit.group).view(unit.dtype))
            for number in following:
                if self._units[number].edited is None and self._shelf.ready(number):
                    self._staging.begin(number)

    def _let_go(self, unit: _Unit) -> None:
        with self._lock:
            unit.lend(None)
            self._staging.release(unit.number)


def shelve(parts: Sequence[Llama], config: TrainConfig, device: torch.device) -> Shelved:
    """Put the weights of sharded parts, which have no memory yet, where `offload.parameters` says.

    Buffers get their memory on `device`. Raises `ConfigError` or `NodeError`, in a sentence, for disks that won't do.
    """
    pinned, ahead = device.type == "cuda", config.offload.prefetch_layers

    def make_shelf(sizes: Sequence[int]) -> Shelf:
        if config.offload.parameters is Tier.cpu:
            return MemoryShelf(sizes, pinned)
        return DiskShelf(store_of(config, "parameters"), sizes, ahead, pinned)

    shelved = Shelved(parts, make_shelf, ahead, device)
    for part in parts:
        part.rope_cos, part.rope_sin = rope_tables(part.config, device)
    return shelved


class ShelvedWeights:
    """Weights on a shelf, as the update of a bucket sees them; see `train.offload.weights.Weights`."""

    later = False

    def __init__(self, shelved: Shelved, buckets: Sequence[Bucket]) -> None:
        self._shelved = shelved
        self._buckets = buckets

    def get(self, index: int) -> list[Tensor]:
        """See `Weights`."""
        return [self._shelved.open(slot.parameter) for slot in self._buckets[index]]

    def send(self, index: int) -> Event:
        """See `Weights`: whoever gathers them finds them."""
        for slot in self._buckets[index]:
            self._shelved.done(slot.parameter)
        return Arrived()

    def totals(self) -> dict[str, float]:
        """See `Weights`."""
        return self._shelved.totals()

    def close(self) -> None:
        """See `Weights`."""
        self._shelved.close()


def _order(units: Sequence[_Unit], ahead: int) -> None:
    """Tell the units of a part which are read after each, as far as that can be known."""
    backward = [unit for unit in reversed(units) if read_again(unit.group)]
    step = [*units, *backward]
    for place, unit in enumerate(units):
        unit.ahead[_Pass.EVALUATE] = _next(units, place, ahead)
        unit.ahead[_Pass.TRAIN] = _next(step, place, ahead)
        # Unless several micro-batches are under way, those that are not freed are not read.
        unit.ahead[_Pass.BACKWARD] = [one.number for one in backward[:ahead]]
    for place, unit in enumerate(backward, len(units)):
        unit.ahead[_Pass.BACKWARD] = _next(step, place, ahead)


def _next(order: Sequence[_Unit], place: int, ahead: int) -> list[int]:
    """Numbers of the units after a place, which begin anew after the last."""
    following = [*order[place + 1 :], *order[:place]][:ahead]
    return [unit.number for unit in following if unit is not order[place]]


def _current_pass(group: FSDPParamGroup) -> _Pass:
    if in_backward(group):
        return _Pass.BACKWARD
    return _Pass.TRAIN if torch.is_grad_enabled() else _Pass.EVALUATE
