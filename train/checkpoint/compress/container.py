"""A compressed file: what a plain file holds, in blocks that are decoded one by one, with an index at its end.

    magic | blocks of region 0 | blocks of region 1 | ... | index (JSON, zstd) | where the index is, its hash, magic

A region is a part of the plain file: the values of one slice, or what lies between two. The index has of each the
method, the parent's place that it is compared with, and the lengths of its blocks.
"""

import json
import os
import struct
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
import zstandard

from train.checkpoint.compress.methods import MOST_BLOCK_BYTES, Method, decode, encode
from train.checkpoint.compress.rounding import Bytes
from train.checkpoint.errors import DamagedError
from train.checkpoint.manifest import is_bare_name

MAGIC = b"TRIERZ01"
BLOCK_BYTES = 1 << 20
"""Of the plain file. A multiple of all groups and words."""
_FOOTER = struct.Struct("<QQ16s8s")
_MOST_INDEX_BYTES = 256 << 20
"""Also when it is decompressed: enough for a file of many TB."""
_MOST_NUMBER = 1 << 62
_ITEMSIZES = (1, 2, 4, 8)
_ROUNDED_ITEMSIZES = (2, 4)
_KEPT_BLOCKS = 2
_STRANGE = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RecursionError,
    struct.error,
    zstandard.ZstdError,
)
"""What an index raises that is not what a writer makes."""

ReadParent = Callable[[str, int, Bytes], None]
"""Fill bytes from a place of one of the parent's files, as it was before it was compressed."""


@dataclass(frozen=True)
class Region:
    """A part of a plain file."""

    begin: int
    nbytes: int
    itemsize: int
    """Of its words, bytes."""
    method: Method
    parent_file: str | None = None
    """The plain file of the parent that has the same slice; None where the method needs none."""
    parent_begin: int = 0

    @property
    def block_count(self) -> int:
        """How many blocks it has."""
        return -(-self.nbytes // BLOCK_BYTES)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Where each block begins in the region, and its size in bytes."""
        for at in range(0, self.nbytes, BLOCK_BYTES):
            yield at, min(BLOCK_BYTES, self.nbytes - at)


class ContainerWriter:
    """Writes a compressed file; the caller opens, syncs and closes it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._at = 0
        self._hash = xxhash.xxh3_128()
        self._index: list[dict[str, Any]] = []
        self._end = 0
        self._write(MAGIC)

    @property
    def hexdigest(self) -> str:
        """Of all that was written."""
        return self._hash.hexdigest()

    def add(
        self, region: Region, read: Callable[[int, Bytes], None], read_parent: ReadParent | None
    ) -> tuple[int, str]:
        """Append a region, which begins where the last one ended; return its size as stored, and its hash as it was.

        `read` fills bytes from a place of the plain file.
        """
        assert region.begin == self._end, "a gap between regions"
        self._end += region.nbytes
        lengths = []
        plain = xxhash.xxh3_128()
        for at, size in region.blocks():
            raw = np.empty(size, np.uint8)
            read(region.begin + at, raw)
            plain.update(raw)  # type: ignore[arg-type]
            other = parent_block(region, at, size, read_parent)
            data = encode(raw, region.itemsize, region.method, other)
            lengths.append(len(data))
            self._write(data)
        self._index.append(asdict(region) | {"lengths": lengths})
        return sum(lengths), plain.hexdigest()

    def finish(self) -> None:
        """Append the index."""
        text = json.dumps({"nbytes": self._end, "regions": self._index})
        index = zstandard.ZstdCompressor(level=3).compress(text.encode())
        place, value = self._at, xxhash.xxh3_128_digest(index)
        self._write(index)
        self._write(_FOOTER.pack(place, len(index), value, MAGIC))

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._at += len(data)


class Container:
    """An open compressed file: reads any part of what the plain file held. For one thread."""

    def __init__(self, path: Path, read_parent: ReadParent | None) -> None:
        """Read the index; raises `DamagedError`, or OSError. `read_parent`: None where there is no parent."""
        self._path = path
        self._read_parent = read_parent
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._kept: OrderedDict[tuple[int, int], Bytes] = OrderedDict()
        try:
            self.nbytes, self.regions, self._places = self._read_index()
        except BaseException:
            self.close()
            raise
        self._begins = [region.begin for region in self.regions]

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def read_into(self, offset: int, out: Bytes) -> None:
        """Fill `out` from a place of the plain file; raises `DamagedError`, or OSError."""
        if offset < 0 or offset + out.nbytes > self.nbytes:
            raise DamagedError(f"{self._path.name} ends after {self.nbytes} bytes")
        done = 0
        while done < out.nbytes:
            number = bisect_right(self._begins, offset + done) - 1
            region = self.regions[number]
            inner = offset + done - region.begin
            block, skipped = divmod(inner, BLOCK_BYTES)
            size = min(BLOCK_BYTES, region.nbytes - block * BLOCK_BYTES)
            count = min(size - skipped, out.nbytes - done)
            target = out[done : done + count]
            if count == size:
                self._decode(number, block, target)
            else:
                target[...] = self._block(number, block, size)[skipped : skipped + count]
            done += count

    def _block(self, number: int, block: int, size: int) -> Bytes:
        """A whole block, which may be asked for again."""
        key = (number, block)
        if key not in self._kept:
            values = np.empty(size, np.uint8)
            self._decode(number, block, values)
            self._kept[key] = values
            if len(self._kept) > _KEPT_BLOCKS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _decode(self, number: int, block: int, out: Bytes) -> None:
        region = self.regions[number]
        begin, end = self._places[number][block : block + 2]
        data = _pread(self._descriptor, begin, end - begin)
        if len(data) != end - begin:
            raise DamagedError(f"{self._path.name} ends too early")
        other = parent_block(region, block * BLOCK_BYTES, out.nbytes, self._read_parent)
        try:
            decode(data, region.itemsize, region.method, other, out)
        except DamagedError as error:
            raise DamagedError(f"{self._path.name} is damaged at byte {begin}: {error}") from error

    def _read_index(self) -> tuple[int, list[Region], list[list[int]]]:
        """The plain file's size, its regions, and where the blocks of each begin and the last one ends."""
        total = os.fstat(self._descriptor).st_size
        try:
            footer = _pread(self._descriptor, max(0, total - _FOOTER.size), _FOOTER.size)
            place, length, value, magic = _FOOTER.unpack(footer)
            if magic != MAGIC or place + length + _FOOTER.size != total or length > _MOST_INDEX_BYTES:
                raise ValueError("it does not end with an index")
            index = _pread(self._descriptor, place, length)
            if xxhash.xxh3_128_digest(index) != value:
                raise ValueError("its index is not what was written")
            if not 0 <= zstandard.frame_content_size(index) <= _MOST_INDEX_BYTES:
                raise ValueError("its index is too large")
            told = json.loads(zstandard.ZstdDecompressor().decompress(index))
            regions, places = [], []
            at, end = len(MAGIC), 0
            for one in told["regions"]:
                lengths = one.pop("lengths")
                region = Region(**one | {"method": Method(one["method"])})
                _check_region(region, lengths)
                if region.begin != end:
                    raise ValueError("its index has gaps")
                regions.append(region)
                places.append(list(accumulate(lengths, initial=at)))
                at, end = places[-1][-1], end + region.nbytes
            if at != place or end != told["nbytes"]:
                raise ValueError("its index has gaps")
        except _STRANGE as error:
            raise DamagedError(f"{self._path.name} is damaged: {error}") from error
        return end, regions, places


def _check_region(region: Region, lengths: list[int]) -> None:
    """Raise `ValueError` for what no writer makes: what it says is not believed, and must not take all memory."""
    numbers = (region.begin, region.nbytes, region.itemsize, region.parent_begin)
    right = (
        all(type(number) is int and 0 <= number < _MOST_NUMBER for number in numbers)
        and region.itemsize in (_ROUNDED_ITEMSIZES if region.method is Method.ROUNDED else _ITEMSIZES)
        and region.nbytes > 0
        and region.nbytes % region.itemsize == 0
        and (region.parent_file is None or is_bare_name(region.parent_file))
        and type(lengths) is list
        and len(lengths) == region.block_count
        and all(type(length) is int and 0 <= length <= MOST_BLOCK_BYTES for length in lengths)
    )
    if not right:
        raise ValueError("its index has a region that cannot be")


def parent_block(region: Region, at: int, size: int, read_parent: ReadParent | None) -> Bytes | None:
    """The bytes that a block of a region is compared with; None where its method needs none."""
    if not region.method.needs_parent:
        return None
    if read_parent is None or region.parent_file is None:
        raise DamagedError("it is stored as the difference to a step that it does not name")
    other = np.empty(size, np.uint8)
    read_parent(region.parent_file, region.parent_begin + at, other)
    return other


def _pread(descriptor: int, offset: int, nbytes: int) -> bytes:
    parts = []
    while nbytes > 0 and (part := os.pread(descriptor, nbytes, offset)):
        parts.append(part)
        offset, nbytes = offset + len(part), nbytes - len(part)
    return b"".join(parts)
