"""Write torch's distributed checkpoints as one rank would: values without torch, `.metadata` with its classes."""

import math
import pickle
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from tools.ckpt.convert_read import RawBytes, Tensor
from tools.ckpt.dcp import METADATA
from tools.ckpt.pieces import Shape
from tools.ckpt.write_archive import Stored, write_archive
from tools.ckpt.write_torch import paths_of
from train.checkpoint.digests import Digest

FILE_BYTES = 4 * 10**9
"""Largest file, unless one slice alone is larger."""
_ARCHIVE_BYTES = 2048
"""What an archive takes beside its values, at most."""
SLICE_BYTES = 512 << 20
"""Most of a tensor in one slice, or one of its rows: who reads a part of a slice reads all of it."""


@dataclass
class Written:
    """Hashes of what was written."""

    slices: list[Digest] = field(default_factory=list)
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    """As `train.checkpoint.manifest.Manifest` has them."""
    values: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """(first byte, number of bytes) of the values of each slice, by file."""


@dataclass(frozen=True)
class _Place:
    """Where a slice lies."""

    file: str
    offset: int
    nbytes: int


def write_dcp(
    folder: Path, tensors: Sequence[Tensor], file_bytes: int = FILE_BYTES, slice_bytes: int = SLICE_BYTES
) -> Written:
    """Make `folder` and write `tensors` to it; raises OSError."""
    folder.mkdir()
    written = Written()
    places: list[_Place] = []
    files = _Files(folder, file_bytes)
    try:
        for one in tensors:
            places += _write_tensor(files, one, slice_bytes, written)
    finally:
        files.close()
    (folder / METADATA).write_bytes(_metadata(tensors, written.slices, places))
    return written


class _Files:
    """Files of bounded size, one after the other."""

    def __init__(self, folder: Path, file_bytes: int) -> None:
        self._folder, self._file_bytes = folder, file_bytes
        self._count = 0
        self._file: BinaryIO | None = None

    def with_room(self, nbytes: int) -> tuple[str, BinaryIO]:
        """Return the name of the file that takes the next slice, and the file."""
        if self._file is not None and self._file.tell() > 0 and self._file.tell() + nbytes > self._file_bytes:
            self.close()
        if self._file is None:
            self._file = (self._folder / f"__0_{self._count}.distcp").open("xb")
            self._count += 1
        return Path(self._file.name).name, self._file

    def close(self) -> None:
        """Close the one that is open."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _write_tensor(files: _Files, one: Tensor, slice_bytes: int, written: Written) -> Iterator[_Place]:
    feed = _Feed(one.stream())
    for start, shape in slices_of(one, slice_bytes):
        nbytes = one.nbytes * math.prod(shape) // max(1, math.prod(one.shape))
        name, file = files.with_room(nbytes + _ARCHIVE_BYTES)
        begin = file.tell()
        own = xxhash.xxh3_128()
        storage = ("0", nbytes, _hashing(feed.take(nbytes), own))
        begins = write_archive(file, Stored("0", one.dtype, shape), [storage])
        values = begin + begins["0"]
        written.values[name].append((values, nbytes))
        written.slices.append(Digest(one.name, start, shape, own.hexdigest(), values))
        yield _Place(name, begin, file.tell() - begin)
    feed.finish()
    whole = {"dtype": one.dtype, "shape": list(one.shape), "xxh3": feed.hash.hexdigest()}
    written.tensors[one.name] = whole


def slices_of(one: Tensor, slice_bytes: int) -> Iterator[tuple[Shape, Shape]]:
    """Cut a tensor by rows, as `write_dcp` does: (start, shape)."""
    if one.nbytes <= slice_bytes or not one.shape:
        yield (0,) * len(one.shape), one.shape
        return
    rows = max(1, slice_bytes * one.shape[0] // one.nbytes)
    for begin in range(0, one.shape[0], rows):
        yield (
            (begin, *(0 for _ in one.shape[1:])),
            (min(rows, one.shape[0] - begin), *one.shape[1:]),
        )


class _Feed:
    """Hands a stream out in pieces of other sizes, and hashes it."""

    def __init__(self, parts: Iterator[RawBytes]) -> None:
        self._parts = parts
        self._left: RawBytes = np.empty(0, np.uint8)
        self.hash = xxhash.xxh3_128()

    def take(self, nbytes: int) -> Iterator[RawBytes]:
        """Yield the next `nbytes`."""
        while nbytes > 0:
            if self._left.nbytes == 0:
                self._left = next(self._parts)
            part, self._left = self._left[:nbytes], self._left[nbytes:]
            nbytes -= part.nbytes
            self.hash.update(part)  # type: ignore[arg-type]
            yield part

    def finish(self) -> None:
        """Go to the end of the stream, where it says whether it was right."""
        rest = next(self._parts, None)
        assert rest is None and self._left.nbytes == 0, "more bytes than the shape has"


def _hashing(parts: Iterator[RawBytes], own: Any) -> Iterator[RawBytes]:
    for part in parts:
        own.update(part)
        yield part


def _metadata(tensors: Sequence[Tensor], slices: Sequence[Digest], places: Sequence[_Place]) -> bytes:
    import torch
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

    forms = {
        one.name: dcp.TensorStorageMetadata(
            dcp.TensorProperties(dtype=getattr(torch, one.dtype)), torch.Size(one.shape), []
        )
        for one in tensors
    }
    stored = {}
    for part, place in zip(slices, places, strict=True):
        chunks = forms[part.tensor].chunks
        index = dcp.MetadataIndex(part.tensor, part.start, len(chunks))
        chunks.append(dcp.ChunkStorageMetadata(torch.Size(part.start), torch.Size(part.shape)))
        stored[index] = _StorageInfo(place.file, place.offset, place.nbytes)
    return pickle.dumps(
        dcp.Metadata(
            state_dict_metadata=dict(forms),
            # Keys in the tree, for whoever loads without having one.
            planner_data=paths_of([one.name for one in tensors]),
            storage_data=stored,
            storage_meta=dcp.StorageMeta(),
            version=CURRENT_DCP_VERSION,
        )
    )
