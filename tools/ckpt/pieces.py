"""What tensors of a checkpoint are made of, and where that lies."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools.ckpt.dtypes import BITS

Shape = tuple[int, ...]


class Piece(NamedTuple):
    """A part of a tensor: a box, or a range of its elements in row-major order."""

    path: Path
    offset: int
    """Of its first byte in the file. If `packed`, of the zip archive that holds it."""
    nbytes: int
    start: Shape
    """Of the box in the tensor; of a range, (first element,)."""
    shape: Shape
    """Of the box; of a range, (number of elements,)."""
    flat: bool = False
    """Whether it is a range."""
    strides: Shape | None = None
    """Elements between neighbours of each dim in the file; None is row-major."""
    packed: bool = False
    """Whether the bytes are those of `torch.save` of the piece: `Source.locate` finds it in there."""
    xxh3: str | None = None
    """Hash that its bytes should have."""
    crc32: int | None = None
    """Checksum that its bytes should have."""
    rank: int | None = None
    """Who wrote it."""
    values: int | None = None
    """Where in the file its values begin, row-major, if that is known of one that is `packed`."""

    @property
    def elements(self) -> int:
        """How many there are in it."""
        return math.prod(self.shape)


class Entry(NamedTuple):
    """One global tensor."""

    name: str
    role: str
    """See `roles.role_of`."""
    dtype: str
    """torch's name, without `torch.`; `object` for pickled bytes."""
    shape: Shape
    pieces: tuple[Piece, ...]
    tied_to: str | None = None
    """An earlier entry that has the same bytes in the same file."""
    xxh3: str | None = None
    """Hash that the whole tensor should have, in row-major order."""

    @property
    def elements(self) -> int:
        """How many it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its size, as values."""
        return self.elements * BITS[self.dtype].itemsize

    def nbytes_of(self, piece: Piece) -> int:
        """Size of a piece of it, as values."""
        return piece.elements * BITS[self.dtype].itemsize


@dataclass(frozen=True)
class Block:
    """Bytes with a checksum that are no piece of a tensor as they stand."""

    path: Path
    offset: int
    nbytes: int
    crc32: int
    what: str


def row_major(shape: Shape) -> Shape:
    """Return the strides of a tensor without gaps, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def relocated(piece: Piece, offset: int, nbytes: int, strides: Shape, crc32: int | None) -> Piece:
    """Return `piece` as plain bytes: `nbytes` from `offset` on, laid out by `strides` (in elements)."""
    plain = row_major(piece.shape)
    is_plain = all(
        size <= 1 or own == other for size, own, other in zip(piece.shape, plain, strides, strict=True)
    )
    return piece._replace(
        packed=False,
        offset=offset,
        nbytes=nbytes,
        strides=None if is_plain or piece.elements == 0 else strides,
        crc32=crc32,
    )


def in_order(shape: Shape, pieces: Sequence[Piece]) -> list[Piece] | None:
    """Return the pieces of a tensor in its order, if each is one run of its elements that follows the one before.

    So it is where a tensor is cut by rows, or not at all. None where it is not so, or not known.
    """
    elements = math.prod(shape)
    row = 1 if not shape else math.prod(shape[1:])
    runs = []
    for piece in pieces:
        whole_rows = piece.flat or piece.shape[1:] == shape[1:]
        if piece.packed or piece.strides is not None or not whole_rows:
            return None
        begin = piece.start[0] if piece.start else 0
        runs.append((begin if piece.flat else begin * row, piece.elements, piece))
    runs = sorted((run for run in runs if run[1] > 0), key=lambda run: run[0])
    ends = list(accumulate((count for _, count, _ in runs), initial=0))
    follow = ends[-1] == elements and all(run[0] == end for run, end in zip(runs, ends, strict=False))
    return [piece for _, _, piece in runs] if follow else None


def boxes(shape: Shape, limit: int) -> Iterator[tuple[int, Shape, Shape]]:
    """Cut a tensor into boxes of at most `limit` elements that follow each other: (first element, start, shape)."""
    if math.prod(shape) == 0:
        return
    if not shape:
        yield 0, (), ()
        return
    axis = next(k for k in range(len(shape)) if math.prod(shape[k + 1 :]) <= limit or k == len(shape) - 1)
    inner = math.prod(shape[axis + 1 :])
    rows = max(1, limit // inner)
    begin = 0
    for outer in np.ndindex(*shape[:axis]):
        for row in range(0, shape[axis], rows):
            count = min(rows, shape[axis] - row)
            start = (*map(int, outer), row, *(0 for _ in shape[axis + 1 :]))
            box = (*(1 for _ in outer), count, *shape[axis + 1 :])
            yield begin, start, box
            begin += count * inner
