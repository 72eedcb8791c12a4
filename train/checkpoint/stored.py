"""Tensors of a checkpoint that are brought when their turn comes: none but the current one need be in memory."""

import dataclasses
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.planner import WriteItem

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


class StoredPlanner(DefaultSavePlanner):
    """Saves a tree in which some tensors only have a shape, and brings their values one by one.

    With a writer that writes each before it asks for the next: see `copy_ahead`.
    """

    def __init__(self, stored: Mapping[Path, Stored]) -> None:
        super().__init__()
        self._stored = stored

    @property
    def copy_ahead(self) -> int:
        """For `FileSystemWriter.per_thread_copy_ahead`: how much it may copy from a GPU ahead of writing, in bytes."""
        return 0 if self._stored else 10_000_000

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Put the items in the order in which they are cheap to read; see torch."""
        items = sorted(new_plan.items, key=self._order)
        return super().finish_plan(dataclasses.replace(new_plan, items=items))

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return what is to be written; see torch."""
        stored = self._stored.get(self._path(write_item))
        return super().resolve_data(write_item) if stored is None else stored.read()

    def _order(self, item: WriteItem) -> int:
        stored = self._stored.get(self._path(item))
        return -1 if stored is None else stored.order

    def _path(self, item: WriteItem) -> Path:
        return tuple(str(key) for key in self.mappings[item.index.fqn])
