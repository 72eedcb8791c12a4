"""LiveBytes: what stays in memory of the tensors that a piece of code makes."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from train.precision.rows import Rows


class LiveBytes(TorchDispatchMode):
    """While entered, note the memory of every tensor that comes into being; count later what of it still lives.

    Around a forward pass that is what autograd keeps for the backward, wherever it keeps it. Each piece of memory
    counts once, however many tensors share it; tensors without data (FakeTensorMode) count as if they had it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_key(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        for tensor in tree_leaves(result):
            # A view of a tensor from before brings no memory with it.
            if isinstance(tensor, Tensor) and not tensor.is_meta and _key(tensor) not in given:
                self._seen[_key(tensor)] = StorageWeakRef(local(tensor).untyped_storage())
        return result

    def count(self, without: Iterable[Tensor] = ()) -> int:
        """Bytes that still live, those of the tensors `without` left out."""
        left_out = storages(without)
        total = 0
        for key, reference in self._seen.items():
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None and key not in left_out:
                total += storage.nbytes()  # as it is now: fully_shard empties what it keeps
        return total


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of this rank's share of `tensors`."""
    return sum(local(tensor).nbytes for tensor in tensors)


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of the memory behind `tensors`, each piece once, by what identifies it while it lives."""
    return {_key(tensor): local(tensor).untyped_storage().nbytes() for tensor in tensors}


def local(tensor: Tensor) -> Tensor:
    """The plain tensor behind one that a wrapper spreads over ranks, waits for, or holds in fewer bits."""
    if isinstance(tensor, AsyncCollectiveTensor):
        return local(tensor.elem)
    if isinstance(tensor, Rows):
        return tensor.packed
    return local(tensor._local_tensor) if isinstance(tensor, DTensor) else tensor


def _key(tensor: Tensor) -> int:
    key: int = local(tensor).untyped_storage()._cdata
    return key
