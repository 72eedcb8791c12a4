"""Copies of a state in memory of the host, from which a checkpoint is written while training changes the original."""

from collections.abc import Callable, Collection, Iterator
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.tensor import DTensor

from contract.errors import NodeError
from train.offload.nvme.files import round_up
from train.offload.nvme.pool import BufferPool, bytes_of

Key = tuple[str, ...]
_ALIGN = 64
"""Each buffer begins at a multiple of so many bytes."""


class Share:
    """Which tensors of a state it is that this rank writes: of those that several ranks have one writes each."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._forms: dict[Key, tuple[torch.Size, torch.dtype]] = {}
        self._keys: set[Key] = set()

    def of(self, tree: dict[str, Any]) -> set[Key]:
        """Ask torch, as saving will, and again only where the tree is another than before. Collective."""
        forms = {key: (tensor.shape, tensor.dtype) for key, tensor in leaves_of(tree)}
        changed = torch.tensor([forms != self._forms], dtype=torch.int32)
        dist.all_reduce(changed, group=self._group)
        if changed.item():
            self._forms, self._keys = forms, self._plan(tree)
        return self._keys

    def _plan(self, tree: dict[str, Any]) -> set[Key]:
        rank, ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        planner = DefaultSavePlanner()
        planner.set_up_planner(tree, is_coordinator=rank == 0)
        plans: list[Any] = [None] * ranks
        dist.gather_object(planner.create_local_plan(), plans if rank == 0 else None, group=self._group)
        if rank == 0:
            plans, _ = planner.create_global_plan(plans)
        own: list[Any] = [None]
        dist.scatter_object_list(own, plans if rank == 0 else None, group=self._group)
        return {tuple(map(str, planner.mappings[item.index.fqn])) for item in own[0].items}


class Staging:
    """Memory for one copy, taken at the first and used again for each further one.

    Page-locked where tensors come from a GPU, so that they are copied at full speed.
    """

    def __init__(self, room_bytes: Callable[[], int], pinned: bool) -> None:
        """`room_bytes`: tells how much memory of the host this rank may still take."""
        self._room_bytes = room_bytes
        self._pinned = pinned
        self._pool: BufferPool | None = None
        self._buffers: dict[Key, Tensor] = {}
        self._rest: list[tuple[Tensor, Tensor]] = []
        """Buffers that are to be filled yet, each with what goes into it."""

    @property
    def held_bytes(self) -> int:
        """Memory that is taken."""
        return 0 if self._pool is None else self._pool.held_bytes

    def copy(
        self,
        tree: dict[str, Any],
        chosen: Collection[Key],
        later: Callable[[Key], bool] = lambda key: False,
    ) -> dict[str, Any] | None:
        """Return a copy of a tree of tensors; None where there is no room for it.

        Those of which `later` is true are copied by `fill`, and must not change until then. The copy is overwritten by
        the next. Tensors that are not `chosen` have a shape and no values. Sharded ones keep their
        place in the layout; of each only what is here is copied.
        """
        leaves = dict(leaves_of(tree))
        here = {key: local_part(leaves[key]) for key in leaves if key in chosen}
        forms = {key: (tensor.shape, tensor.dtype) for key, tensor in here.items()}
        if forms != {key: (buffer.shape, buffer.dtype) for key, buffer in self._buffers.items()}:
            self.close()
            try:
                self._take(here)
            except NodeError:  # memory that cannot be page-locked
                self.close()
            if self._pool is None:
                return None
        for key, tensor in here.items():
            if not later(key):
                self._buffers[key].copy_(tensor, non_blocking=True)
        self._rest = [(self._buffers[key], tensor) for key, tensor in here.items() if later(key)]
        if self._pinned:
            torch.cuda.current_stream().synchronize()
        copied = {
            key: _like(
                leaf, self._buffers[key] if key in here else torch.empty_like(local_part(leaf), device="meta")
            )
            for key, leaf in leaves.items()
        }
        return _tree(tree, (), copied)

    def fill(self) -> None:
        """Copy what `copy` has left for later; from any thread, one at a time."""
        rest, self._rest = self._rest, []
        if not self._pinned:
            for buffer, tensor in rest:
                buffer.copy_(tensor)
            return
        # Beside what the GPU computes: nothing that was asked of it before `copy` is still under way.
        device = next((tensor.device for _, tensor in rest if tensor.is_cuda), None)
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            for buffer, tensor in rest:
                buffer.copy_(tensor, non_blocking=True)
        stream.synchronize()

    def close(self) -> None:
        """Give the memory up; nothing may read a copy any more."""
        self._buffers = {}
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _take(self, tensors: dict[Key, Tensor]) -> None:
        """Take memory for tensors of these forms, if there is room."""
        begins = [0, *accumulate(_ALIGN * -(-tensor.nbytes // _ALIGN) for tensor in tensors.values())]
        if round_up(begins[-1]) > self._room_bytes():
            return
        self._pool = BufferPool(1, max(1, begins[-1]), self._pinned)
        memory = bytes_of(self._pool.acquire())
        for (key, tensor), begin in zip(tensors.items(), begins, strict=False):
            if tensor.numel() == 0:
                self._buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
                continue
            # Each a storage of its own: the whole storage of a tensor is what would be written.
            values = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=begin)
            self._buffers[key] = values.view(tensor.shape)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def _like(tensor: Tensor, values: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return values
    # Not `DTensor.from_local`, which moves what it is given to the device of the mesh.
    return DTensor(values, tensor._spec, requires_grad=False)


def leaves_of(tree: dict[str, Any], above: Key = ()) -> Iterator[tuple[Key, Tensor]]:
    """The tensors of a tree, each with the keys that lead to it."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves_of(value, (*above, name))
        else:
            assert isinstance(value, Tensor), f"{(*above, name)} is no tensor"
            yield (*above, name), value


def _tree(tree: dict[str, Any], above: Key, leaves: dict[Key, Tensor]) -> dict[str, Any]:
    return {
        name: _tree(value, (*above, name), leaves) if isinstance(value, dict) else leaves[(*above, name)]
        for name, value in tree.items()
    }
