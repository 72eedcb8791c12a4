"""What a rank writes of a checkpoint: hashed as it is written, some of it brought when its turn comes."""

import dataclasses
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.planner import WriteItem

from train.checkpoint.compress.rounding import Rounding
from train.checkpoint.digests import Digest, digest

Path = tuple[str, ...]
"""Keys from the root of a tree of tensors to one of them."""
ReadInto = Callable[[dict[str, Any]], None]
"""Give the tensors of a tree, in place, the values that a checkpoint has for them."""


@dataclass(frozen=True)
class Stored:
    """The values of a tensor that lie elsewhere."""

    order: int
    """Those with a lower one are cheaper to read first."""
    read: Callable[[], Tensor]
    """Bring what this rank has of it; valid until the next one is brought."""


class HashingPlanner(DefaultSavePlanner):
    """Saves a tree in which some tensors may only have a shape, brings their values one by one, and hashes all.

    For a writer that writes each before it asks for the next: `FileSystemWriter(per_thread_copy_ahead=0)`.
    """

    def __init__(self, stored: Mapping[Path, Stored], rounding: Rounding | None = None) -> None:
        """`rounding`: of what is written; None leaves it as it is."""
        super().__init__()
        self._rounding = rounding
        self._stored = stored
        self.digests: list[Digest] = []
        """Of the slices that were written so far."""
        self.rounded: dict[str, float] = {}
        """The largest relative error by which values were rounded so far, by role."""

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Put the items in the order in which they are cheap to read; see torch."""
        items = sorted(new_plan.items, key=self._order)
        return super().finish_plan(dataclasses.replace(new_plan, items=items))

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return what is to be written, and keep its hash; see torch."""
        stored = self._stored.get(self._path(write_item))
        data = super().resolve_data(write_item) if stored is None else stored.read()
        # Anything else would be pickled, and a pickle can run any code when it is read.
        assert isinstance(data, Tensor), f"{write_item.index.fqn} is no tensor"
        tensor = self._round(write_item.index.fqn, packed(data))
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        value = digest(as_bytes(tensor))
        self.digests.append(Digest(write_item.index.fqn, tuple(chunk.offsets), tuple(chunk.sizes), value))
        return tensor

    def _round(self, name: str, tensor: Tensor) -> Tensor:
        role = (
            None
            if self._rounding is None
            else self._rounding.role(name, str(tensor.dtype).removeprefix("torch."))
        )
        if self._rounding is None or role is None or tensor.numel() == 0:
            return tensor
        values, error = self._rounding.round(role, tensor.itemsize, as_bytes(tensor))
        self.rounded[role] = max(error, self.rounded.get(role, 0.0))
        return torch.from_numpy(values).view(tensor.dtype).view(tensor.shape)

    def _order(self, item: WriteItem) -> int:
        stored = self._stored.get(self._path(item))
        return -1 if stored is None else stored.order

    def _path(self, item: WriteItem) -> Path:
        return tuple(str(key) for key in self.mappings[item.index.fqn])


def packed(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, contiguous, in memory that holds nothing else: as it will lie in a file."""
    tensor = tensor.detach().cpu().contiguous()
    alone = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if alone else tensor.clone(memory_format=torch.contiguous_format)


def as_bytes(tensor: Tensor) -> Any:
    """The bytes of a contiguous tensor of the CPU, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy()
