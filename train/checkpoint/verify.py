"""Read back what was written, and hash it by slices and by whole tensors.

The hash of a whole tensor is over its bytes in row-major order: it is the same however the tensor was cut. A box of
a tensor, gone through in the tensor's order, comes in its own order too, so that one reading gives both hashes.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from torch.distributed.checkpoint.metadata import Metadata

from train.checkpoint.compress.files import StepFiles
from train.checkpoint.digests import Box, Digest, Listed
from train.checkpoint.errors import DamagedError
from train.checkpoint.rest import check_rests
from train.checkpoint.slices import Slice, position, slices, tensors, told_of
from train.durable import drop_from_memory

WINDOW_BYTES = 4 << 20
"""How much of a tensor is in memory at a time; one row of it, where that is more. What is hashed is in the caches."""

_Placed = tuple[Slice, int, xxhash.xxh3_128]
"""A part of a tensor, where its values begin in its file, and its hash in the making."""


@dataclass
class ReadBack:
    """What one rank has read of a step."""

    slices: list[Digest] = field(default_factory=list)
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    """`dtype`, `shape` and `xxh3` by name."""


def deal(metadata: Metadata, ranks: int) -> list[list[str]]:
    """Share the tensors of a checkpoint out, so that each rank has about as many bytes to read."""
    sizes = {name: found.size.numel() * found.properties.dtype.itemsize for name, found in tensors(metadata)}
    loads = [0] * ranks
    shares: list[list[str]] = [[] for _ in range(ranks)]
    for name in sorted(sizes, key=lambda one: (-sizes[one], one)):
        rank = loads.index(min(loads))
        # Opening a slice costs something too.
        loads[rank] += sizes[name] + (64 << 10)
        shares[rank].append(name)
    return shares


def read_back(
    folder: Path, metadata: Metadata, names: Iterable[str], found: ReadBack, digests: Iterable[str] = ()
) -> None:
    """Add to `found` the hashes of tensors of the checkpoint in `folder`, read from its disk.

    Then read what lies beside the values of those ranks whose files in the folder `digests` are given. Raises
    `DamagedError`, or OSError.
    """
    dropped: set[Path] = set()
    forms = dict(tensors(metadata))
    listed = Listed(folder, None)
    with closing(StepFiles(folder)) as files:
        for name in names:
            parts = slices(files, metadata, name)
            for path in {part.path for part in parts} - dropped:
                drop_from_memory(path)
                dropped.add(path)
            shape = tuple(forms[name].size)
            whole, hashes = hash_tensor(
                shape, parts, [position(part, told_of(part, listed)) for part in parts]
            )
            found.slices += [
                Digest(name, part.start, part.shape, value) for part, value in zip(parts, hashes, strict=True)
            ]
            dtype = str(parts[0].dtype).removeprefix("torch.")
            found.tensors[name] = {"dtype": dtype, "shape": list(shape), "xxh3": whole}
        for name in digests:
            check_rests(files, metadata, name)


def hash_tensor(shape: Box, parts: list[Slice], positions: list[int]) -> tuple[str, list[str]]:
    """Return the hash of a tensor that consists of `parts`, and that of each; their values begin at `positions`."""
    held = sum(math.prod(part.shape) for part in parts)
    if held != math.prod(shape):
        raise DamagedError(f"{parts[0].tensor} has {held} values instead of {math.prod(shape)}")
    hashes = [xxhash.xxh3_128() for _ in parts]
    order = sorted(zip(parts, positions, hashes, strict=True), key=lambda one: one[0].start)
    if len(parts) == 1:
        _hash_rows(order, [])
        return hashes[0].hexdigest(), [hashes[0].hexdigest()]
    whole = xxhash.xxh3_128()
    if all(part.shape[1:] == shape[1:] for part in parts):
        _hash_rows(order, [whole])
    else:
        _hash_boxes(shape, order, whole)
    return whole.hexdigest(), [own.hexdigest() for own in hashes]


def _hash_rows(order: list[_Placed], more: list[xxhash.xxh3_128]) -> None:
    """Hash parts that have whole rows, in the order of the tensor: their bytes follow each other in it."""
    buffer = np.empty(min(WINDOW_BYTES, max(part.nbytes for part, *_ in order)), np.uint8)
    for part, first_byte, own in order:
        for begin, end in _windows(0, part.nbytes, WINDOW_BYTES):
            values: Any = buffer[: end - begin]
            part.read_into(first_byte + begin, values)
            for made in (own, *more):
                made.update(values)


def _hash_boxes(shape: Box, order: list[_Placed], whole: xxhash.xxh3_128) -> None:
    """Hash parts of any kind, band by band of rows of the tensor."""
    itemsize = order[0][0].dtype.itemsize
    row_bytes = math.prod(shape[1:]) * itemsize
    for begin, end in _bands([part for part, *_ in order], max(1, WINDOW_BYTES // max(1, row_bytes))):
        band: Any = np.empty((end - begin, *shape[1:], itemsize), np.uint8)
        for part, first_byte, own in order:
            if part.nbytes == 0 or part.start[0] > begin or part.end[0] < end:
                continue
            part_row_bytes = part.nbytes // part.shape[0]
            values: Any = np.empty((end - begin) * part_row_bytes, np.uint8)
            part.read_into(first_byte + (begin - part.start[0]) * part_row_bytes, values)
            own.update(values)
            columns = tuple(
                slice(first, last) for first, last in zip(part.start[1:], part.end[1:], strict=True)
            )
            where = (slice(None), *columns)
            band[where] = values.reshape(band[where].shape)
        whole.update(band)


def mismatch(written: Mapping[int, list[Digest]], read: Iterable[Digest]) -> str | None:
    """Say in a clause where what was read differs from what each rank has written; None when it does not."""
    expected = {(one.tensor, one.start): (one, rank) for rank, listed in written.items() for one in listed}
    for one in read:
        known, rank = expected.pop((one.tensor, one.start), (None, -1))
        place = f"the slice of {one.tensor} at {list(one.start)}"
        if known is None:
            return f"{place} is not what any rank has written"
        if known != one:
            return f"{place}, which rank {rank} wrote, does not read back as it was written"
    left = [f"{tensor} at {list(start)}" for tensor, start in expected]
    return f"the slice of {left[0]} is missing" if left else None


def _bands(parts: list[Slice], rows: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most so many rows, such that each part has all rows of a range or none."""
    edges = sorted({edge for part in parts if part.nbytes for edge in (part.start[0], part.end[0])})
    for first, last in pairwise(edges):
        yield from _windows(first, last, rows)


def _windows(begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    for first in range(begin, end, size):
        yield first, min(end, first + size)
