"""Where the bytes of each slice of a tensor lie in torch's distributed checkpoint."""

import io
import math
import os
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from train.checkpoint.compress.files import StepFiles
from train.checkpoint.digests import Box, Digest, Listed
from train.checkpoint.errors import DamagedError

_LOCAL_HEADER_BYTES = 30
_BLOCK_BYTES = 2048


@dataclass(frozen=True)
class Slice:
    """A box of a tensor, and the part of a file that holds it as a zip archive of `torch.save`."""

    tensor: str
    start: Box
    shape: Box
    dtype: torch.dtype
    file: str
    """Its name in the step."""
    offset: int
    length: int
    files: StepFiles = field(compare=False, repr=False)
    """Of the step."""

    @property
    def nbytes(self) -> int:
        """Of its values."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def path(self) -> Path:
        """Of the file, where that is plain."""
        return self.files.folder / self.file

    @property
    def rank(self) -> int:
        """The one that wrote it."""
        return int(self.file.split("_")[2])

    @property
    def end(self) -> Box:
        """The first place after it, in each dimension."""
        return tuple(begin + size for begin, size in zip(self.start, self.shape, strict=True))

    def __str__(self) -> str:
        return (
            f"the slice of {self.tensor} at {list(self.start)}, which rank {self.rank} wrote to {self.file},"
        )

    def position(self) -> int:
        """Where its values begin in the file, by the archive; raise `DamagedError` where they are not found."""
        if self.nbytes == 0:
            return self.offset
        try:
            return self.offset + self._position(_Part(self.read_into, self.offset, self.length))
        except Exception as error:  # a damaged archive raises anything
            raise DamagedError(f"{self} cannot be found in it ({error})") from error

    def read_into(self, position: int, buffer: Any) -> None:
        """Fill `buffer`, any writable one of bytes, from a place of the file; raises `DamagedError`, or OSError."""
        self.files.read_into(self.file, position, np.frombuffer(buffer, np.uint8))

    def _position(self, view: Any) -> int:
        position, nbytes = _values_in(view)
        if nbytes != self.nbytes:
            raise ValueError(f"it has {nbytes} bytes instead of {self.nbytes}")
        return position


def values_at(files: StepFiles, name: str, offset: int, length: int) -> tuple[int, int]:
    """Find the values of a slice by its place in a plain file: (first byte, number of bytes); raises `DamagedError`."""

    def read(position: int, buffer: Any) -> None:
        files.read_into(name, position, np.frombuffer(buffer, np.uint8))

    try:
        position, nbytes = _values_in(_Part(read, offset, length))
    except Exception as error:  # a damaged archive raises anything
        raise DamagedError(f"{name} has no slice at {offset} ({error})") from error
    return offset + position, nbytes


def told_of(piece: Slice, listed: Listed) -> Digest | None:
    """What the rank that wrote a slice has listed of it, None where that is nothing; raises `DamagedError`."""
    try:
        return listed.find(piece.rank, piece.tensor, piece.start)
    except ValueError as error:
        raise DamagedError(str(error)) from error


def position(piece: Slice, told: Digest | None) -> int:
    """Where the values of a slice begin in its file, by what is told of it, or else by the archive.

    What is told is true if the bytes there have the hash of the slice. Raises `DamagedError`.
    """
    return piece.position() if told is None or told.offset is None else told.offset


def _values_in(view: Any) -> tuple[int, int]:
    with zipfile.ZipFile(view) as archive:
        (entry,) = [one for one in archive.infolist() if one.filename.endswith("/data/0")]
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError("it is compressed")
    view.seek(entry.header_offset)
    header = view.read(_LOCAL_HEADER_BYTES)
    names_bytes = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return entry.header_offset + _LOCAL_HEADER_BYTES + names_bytes, entry.file_size


class _Part(io.RawIOBase):
    """Part of a file, as a file."""

    def __init__(self, read: Callable[[int, Any], None], offset: int, length: int) -> None:
        self._read, self._offset, self._length, self._at = read, offset, length, 0
        self._block, self._block_at = b"", 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if begin + offset < 0:
            raise ValueError(f"a place {-begin - offset} bytes before the slice is asked for")
        self._at = begin + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Take what is asked for from what was read around the place that was asked for before: it is near."""
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        if len(view) > _BLOCK_BYTES:
            self._read(self._offset + self._at, view)
        else:
            first = self._at - self._block_at
            if not 0 <= first <= first + len(view) <= len(self._block):
                self._block_at = max(0, min(self._at, self._length - _BLOCK_BYTES))
                block = bytearray(min(_BLOCK_BYTES, self._length - self._block_at))
                self._read(self._offset + self._block_at, block)
                self._block, first = bytes(block), self._at - self._block_at
            view[:] = self._block[first : first + len(view)]
        self._at += len(view)
        return len(view)


def slices(files: StepFiles, metadata: Metadata, tensor: str) -> list[Slice]:
    """All slices of a tensor, in the order of `.metadata`."""
    found = metadata.state_dict_metadata[tensor]
    assert isinstance(found, TensorStorageMetadata)
    return [_slice(files, metadata, tensor, chunk) for chunk in found.chunks]


def indexed_slice(files: StepFiles, metadata: Metadata, index: MetadataIndex) -> Slice:
    """The slice that a plan for reading means."""
    found = metadata.state_dict_metadata[index.fqn]
    assert isinstance(found, TensorStorageMetadata) and index.index is not None
    return _slice(files, metadata, index.fqn, found.chunks[index.index])


def _slice(files: StepFiles, metadata: Metadata, tensor: str, chunk: ChunkStorageMetadata) -> Slice:
    found = metadata.state_dict_metadata[tensor]
    assert isinstance(found, TensorStorageMetadata)
    stored = metadata.storage_data[MetadataIndex(tensor, chunk.offsets)]
    return Slice(
        tensor=tensor,
        start=tuple(chunk.offsets),
        shape=tuple(chunk.sizes),
        dtype=found.properties.dtype,
        file=stored.relative_path,
        offset=stored.offset,
        length=stored.length,
        files=files,
    )


def tensors(metadata: Metadata) -> Iterator[tuple[str, TensorStorageMetadata]]:
    """Names and forms of all tensors of a checkpoint."""
    for name, found in metadata.state_dict_metadata.items():
        if isinstance(found, TensorStorageMetadata):
            yield name, found
