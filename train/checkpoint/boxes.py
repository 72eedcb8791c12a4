"""Which slices of a checkpoint a rank needs, and where their values go."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from train.checkpoint.errors import DamagedError, UnfitError
from train.checkpoint.staging import local_part

Inner = tuple[slice, ...]


@dataclass(frozen=True)
class Part:
    """What one slice gives to one tensor."""

    index: MetadataIndex
    """Of the slice."""
    inner: Inner | None
    """Which part of the slice; None for all of it."""
    target: Tensor
    """Of what is here: takes the values."""


class Boxes:
    """Finds parts; what torch says of a layout is asked once, for many tensors have the same."""

    def __init__(self) -> None:
        self._known: dict[object, list[ChunkStorageMetadata]] = {}

    def parts(self, metadata: Metadata, name: str, tensor: Tensor) -> Iterator[Part]:
        """Yield what a tensor, of which this rank may have a part only, takes from a checkpoint.

        Raises `UnfitError`, or `DamagedError` for what is no tensor there.
        """
        form = metadata.state_dict_metadata.get(name)
        if form is None:
            raise UnfitError(f"it has no {name}")
        if not isinstance(form, TensorStorageMetadata):
            raise DamagedError("it holds something that is no tensor")
        if form.size != tensor.shape:
            raise UnfitError(f"{name} has the shape {list(form.size)} there, and {list(tensor.shape)} here")
        own, target = self._own(tensor), local_part(tensor)
        for number, chunk in enumerate(form.chunks):
            if own == [chunk]:
                yield Part(MetadataIndex(name, chunk.offsets, number), None, target)
                return
        for item in create_read_items_for_chunk_list(name, form, own):
            inner = _box(item.storage_offsets, item.lengths)
            yield Part(item.storage_index, inner, target[_box(item.dest_offsets, item.lengths)])

    def _own(self, tensor: Tensor) -> list[ChunkStorageMetadata]:
        """The box of a tensor that is here; none for a rank that its mesh leaves out."""
        if not isinstance(tensor, DTensor):
            shape = tensor.shape
            return [ChunkStorageMetadata(type(shape)([0] * len(shape)), shape)]
        layout = (tensor.device_mesh, tensor.placements, tensor.shape)
        if layout not in self._known:
            here = tensor.device_mesh.get_coordinate() is not None
            self._known[layout] = tensor.__create_chunk_list__() if here else []
        return self._known[layout]


def _box(start: tuple[int, ...], shape: tuple[int, ...]) -> Inner:
    return tuple(slice(begin, begin + size) for begin, size in zip(start, shape, strict=True))
