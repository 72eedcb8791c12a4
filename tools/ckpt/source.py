"""One form for every checkpoint: global tensors, made of pieces that lie as plain bytes in files.

Readers (`dcp`, `safetensors_files`, `torch_files`, ...) make it from metadata alone. Bytes are read in windows, in
row-major order of the global tensor, so that memory stays bounded and nothing depends on how a tensor was cut.
"""

import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tools.ckpt.dtypes import BITS, Bits
from tools.ckpt.findings import DamageError, Finding, UnreadableError, error
from tools.ckpt.pieces import Block, Entry, Piece, Shape, boxes, in_order

if TYPE_CHECKING:
    from tools.ckpt.stored import Stored

WINDOW_BYTES = 4 << 20
"""Most that is held of one tensor at a time, by default. What is hashed comes from the caches then: 64 MiB take twice
as long."""
_OPEN_FILES = 32


class Window(NamedTuple):
    """Part of a tensor in row-major order."""

    begin: int
    """Number of its first element in the tensor."""
    values: Bits
    """One dim; elements as `dtypes.BITS` has them."""


Tap = Callable[[Piece, NDArray[np.uint8], int], None]
"""Is shown each piece's bytes in their order, as they are read: (piece, bytes, offset in the file)."""
Pread = Callable[[int, int], bytes]
"""Reads as `os.pread` does: (number of bytes, place in the file), fewer at its end."""


@dataclass
class Source:
    """An open checkpoint."""

    path: Path
    format: str
    """For people: trierarch 2, dcp, safetensors, torch, ..."""
    entries: list[Entry]
    checked_by: str | None
    """What its bytes can be checked against; None if there is nothing."""
    step: int | None = None
    layout: dict[str, int] = field(default_factory=dict)
    """Degrees it was saved in."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else is known: plain values by name. `model` and `data` are those of a manifest."""
    findings: list[Finding] = field(default_factory=list)
    """What was wrong with the directory of the checkpoint."""
    blocks: list[Block] = field(default_factory=list)
    files: set[str] = field(default_factory=set)
    """Names of files that hold pieces, missing ones included."""
    rests: dict[str, str] = field(default_factory=dict)
    """Hash that the bytes of a file outside of values should have, by its name."""
    stored: "Stored | None" = None
    """Of a step of ours with compressed files: pieces have their places in the plain ones."""
    lacks: str | None = None
    """Why none of its tensors can be decoded, as a clause: a step that it needs is not there, or not whole."""
    _scratch: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8), repr=False)
    _window: NDArray[np.uint8] | None = field(default=None, repr=False)
    _open: "OrderedDict[Path, int]" = field(default_factory=OrderedDict, repr=False)

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def twin(self) -> "Source":
        """Return the same checkpoint with files and buffers of its own, for another thread."""
        stored = None if self.stored is None else self.stored.twin()
        return replace(self, stored=stored, _scratch=np.empty(0, np.uint8), _window=None, _open=OrderedDict())

    def close(self) -> None:
        """Close its files."""
        if self.stored is not None:
            self.stored.close()
        while self._open:
            os.close(self._open.popitem()[1])

    def refuse_undecodable(self) -> None:
        """Raise `UnreadableError` for a step that lacks another one, of which there is nothing to read."""
        if self.lacks is not None:
            raise UnreadableError(f"{self.path} cannot be decoded ({self.lacks}): put that step back")

    @property
    def root(self) -> Path:
        """The folder that names of files are relative to."""
        return self.path if self.path.is_dir() else self.path.parent

    def problems(self) -> list[Finding]:
        """Say what is wrong as far as metadata and sizes of files tell."""
        from tools.ckpt.structure import structure

        return [*self.findings, *structure(self)]

    def name_of(self, path: Path) -> str:
        """Name a file of the checkpoint."""
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)

    def locate(self, entry: Entry, piece: Piece) -> Piece:
        """Return where the bytes of a piece are; raises `DamageError` where they should be and are not."""
        if not piece.packed:
            return piece
        if piece.values is not None:
            return piece._replace(offset=piece.values, nbytes=entry.nbytes_of(piece), packed=False)
        from tools.ckpt.torch_zip import unpacked

        return unpacked(self, entry, piece)

    def located(self, entry: Entry) -> Entry:
        """Return a tensor with the places of its bytes, which need not be looked up again; raises `DamageError`."""
        return entry._replace(pieces=tuple(self.locate(entry, piece) for piece in entry.pieces))

    def windows(
        self, entry: Entry, limit_elements: int | None = None, tap: Tap | None = None
    ) -> Iterator[Window]:
        """Yield a whole tensor in row-major order. A window is valid until the next one is asked for.

        `limit_elements`: most in one; `WINDOW_BYTES` by default. Tensors of one shape with the same limit come
        in the same windows, whatever their types. Raises `DamageError` for a file that ends too early.
        """
        itemsize = BITS[entry.dtype].itemsize
        limit = max(1, limit_elements or WINDOW_BYTES // itemsize)
        pieces = [self.locate(entry, piece) for piece in entry.pieces]
        runs = in_order(entry.shape, pieces) if limit_elements is None else None
        largest = entry.elements if runs is None else max((run.elements for run in runs), default=0)
        wanted = min(limit, max(largest, 1)) * itemsize
        # One at a time has the bytes that are kept.
        spare, self._window = self._window, None
        if spare is None or spare.nbytes < wanted:
            spare = np.empty(wanted, np.uint8)
        buffer = spare[:wanted].view(BITS[entry.dtype])
        try:
            if runs is None:
                for begin, start, shape in boxes(entry.shape, limit):
                    values = buffer[: math.prod(shape)]
                    self._fill(entry, pieces, begin, start, values.reshape(shape), tap)
                    yield Window(begin, values)
            else:
                yield from self._run_windows(runs, buffer, tap)
        finally:
            self._window = spare

    def _run_windows(self, runs: Iterable[Piece], buffer: Bits, tap: Tap | None) -> Iterator[Window]:
        """Yield the windows of pieces that follow each other in the tensor, as they lie in their files."""
        begin = 0
        for piece in runs:
            for position in range(0, piece.elements, buffer.size):
                values = buffer[: min(buffer.size, piece.elements - position)]
                self._read_run(piece, position, values, tap)
                yield Window(begin, values)
                begin += values.size

    def rows(self, entry: Entry, begin: int, end: int) -> Bits:
        """Return rows [begin, end) of the first dim; of a tensor without dims, its value."""
        shape = (end - begin, *entry.shape[1:]) if entry.shape else ()
        out = np.empty(shape, BITS[entry.dtype])
        pieces = [self.locate(entry, piece) for piece in entry.pieces]
        start = (begin, *(0 for _ in entry.shape[1:])) if entry.shape else ()
        self._fill(entry, pieces, begin * math.prod(entry.shape[1:]), start, out, None)
        return out

    def read(self, path: Path, offset: int, out: NDArray[np.uint8] | bytearray) -> None:
        """Fill `out` with bytes of a file; raises `DamageError`.

        By pread: a mapped file whose disk fails, or which is cut while it is read, kills the process instead.
        """
        if self.stored is not None and self.stored.has(path):
            self.stored.read_into(path, offset, np.asarray(memoryview(out)))  # type: ignore[arg-type]
            return
        done, view = 0, memoryview(out)  # type: ignore[arg-type]
        try:
            while done < len(view):
                got = os.preadv(self._descriptor(path), [view[done:]], offset + done)
                if got == 0:
                    raise DamageError(error("ends too early", file=self.name_of(path), offset=offset + done))
                done += got
        except OSError as reason:
            raise DamageError(
                error(f"cannot be read ({reason.strerror})", file=self.name_of(path), offset=offset + done)
            ) from reason

    def size_of(self, path: Path) -> int:
        """Return the size of a file in bytes; raises `DamageError`, also for what is no file."""
        if self.stored is not None and self.stored.has(path):
            return self.stored.size_of(path)
        try:
            found = path.stat()
        except OSError as reason:
            raise DamageError(error("is missing", file=self.name_of(path))) from reason
        if not S_ISREG(found.st_mode):
            raise DamageError(error("is missing", file=self.name_of(path)))
        return found.st_size

    def pread(self, path: Path) -> Pread:
        """Return what reads the file, as long as no other one is asked for; raises `OSError`, and so does that."""
        if self.stored is not None and self.stored.has(path):
            return self.stored.pread(path)
        return partial(os.pread, self._descriptor(path))

    def _descriptor(self, path: Path) -> int:
        """Return the open file, which stays the source's; raises `OSError`."""
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        if len(self._open) >= _OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._open[path]

    def _fill(
        self, entry: Entry, pieces: list[Piece], begin: int, start: Shape, out: Bits, tap: Tap | None
    ) -> None:
        """Fill a box whose elements follow each other in the tensor, from element `begin` on."""
        covered = 0
        for piece in pieces:
            covered += self._copy_range(piece, begin, out, tap) if piece.flat else 0
            covered += 0 if piece.flat else self._copy_box(piece, start, out, tap)
        if covered < out.size:
            raise DamageError(error("has no bytes for some of its elements", tensor=entry.name))

    def _copy_range(self, piece: Piece, begin: int, out: Bits, tap: Tap | None) -> int:
        first, count = piece.start[0], piece.elements
        low, high = max(begin, first), min(begin + out.size, first + count)
        if high <= low:
            return 0
        target = out.reshape(-1)[low - begin : high - begin]
        self._read_run(piece, low - first, target, tap)
        return high - low

    def _copy_box(self, piece: Piece, start: Shape, out: Bits, tap: Tap | None) -> int:
        low = tuple(map(max, start, piece.start))
        high = tuple(
            min(a + n, b + m) for a, n, b, m in zip(start, out.shape, piece.start, piece.shape, strict=True)
        )
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return 0
        box = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))
        target = out[box] if box else out  # indexing would copy what has no dims
        inner = tuple(a - s for a, s in zip(low, piece.start, strict=True))
        if piece.strides is not None:
            view = self._strided(piece, out.dtype)
            target[...] = view[tuple(slice(a, a + n) for a, n in zip(inner, target.shape, strict=True))]
            return target.size
        # The box has one index in its outer dims and all of the inner ones: within the piece, too, it is one run.
        position = 0
        for index, size in zip(inner, piece.shape, strict=True):
            position = position * size + index
        if target.flags.c_contiguous:
            self._read_run(piece, position, target.reshape(-1), tap)
        else:
            values = self._spare(target.nbytes).view(out.dtype)
            self._read_run(piece, position, values, tap)
            target[...] = values.reshape(target.shape)
        return target.size

    def _spare(self, nbytes: int) -> NDArray[np.uint8]:
        """Bytes that are kept from call to call: fresh ones cost a page fault each."""
        if self._scratch.nbytes < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch[:nbytes]

    def _read_run(self, piece: Piece, position: int, target: Bits, tap: Tap | None) -> None:
        offset = piece.offset + position * target.itemsize
        raw = target.view(np.uint8)
        self.read(piece.path, offset, raw)
        if tap is not None:
            tap(piece, raw, offset)

    def _strided(self, piece: Piece, dtype: np.dtype[np.generic]) -> Bits:
        assert piece.strides is not None
        try:
            mapped = np.memmap(piece.path, np.uint8, "r", offset=piece.offset, shape=(piece.nbytes,))
        except (OSError, ValueError) as reason:
            raise DamageError(
                error("ends too early", file=self.name_of(piece.path), offset=piece.offset)
            ) from reason
        steps = tuple(step * dtype.itemsize for step in piece.strides)
        return np.ndarray(piece.shape, dtype, mapped, 0, steps)
