"""Compare what is read of a checkpoint with its hashes and checksums."""

import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from tools.ckpt.findings import DamageError, Finding, error
from tools.ckpt.pieces import Block, Entry, Piece
from tools.ckpt.source import WINDOW_BYTES, Source, Window

Advance = Callable[[int], None]
"""Is told how many bytes were read since it was called last."""


class _Hash(Protocol):
    """A hash or a checksum in the making."""

    def update(self, data: Any, /) -> None: ...

    def hexdigest(self) -> str: ...


class _Crc32:
    """zlib's CRC-32 with the interface of a hash."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Any, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


class Checks:
    """Hashes a tensor while it is read once, in its order: the whole, and each of its pieces, from the same bytes."""

    def __init__(self, source: Source, entry: Entry) -> None:
        """`entry` has its pieces located."""
        self._source, self._entry = source, entry
        pieces = entry.pieces
        self._hashes: dict[int, _Hash] = {}
        """By the identity of a piece."""
        for piece in pieces:
            if piece.xxh3 is not None or piece.crc32 is not None:
                self._hashes[id(piece)] = _Crc32() if piece.xxh3 is None else xxhash.xxh3_128()
        # What lies in one piece has one hash: of the piece, and of the whole.
        same = len(pieces) == 1 and pieces[0].xxh3 == entry.xxh3 and pieces[0].strides is None
        self._whole = xxhash.xxh3_128() if entry.xxh3 is not None and not same else None

    def tap(self, piece: Piece, raw: NDArray[np.uint8]) -> None:
        """Take the next bytes of a piece."""
        made = self._hashes.get(id(piece))
        if made is not None:
            made.update(raw)

    def add(self, window: Window) -> None:
        """Take the next values of the tensor."""
        if self._whole is not None:
            self._whole.update(window.values.view(np.uint8))  # type: ignore[arg-type]

    def findings(self) -> list[Finding]:
        """Say what differs, once all was read; raises `DamageError`."""
        found = [
            _compare(self._source, self._entry, piece, self._hashes.get(id(piece)))
            for piece in self._entry.pieces
        ]
        damaged = [finding for finding in found if finding is not None]
        if not damaged and self._whole is not None and self._whole.hexdigest() != self._entry.xxh3:
            text = "does not have the hash of the whole tensor, though its parts have theirs"
            return [error(text, tensor=self._entry.name)]
        return damaged


def check_blocks(source: Source, blocks: Iterable[Block], advance: Advance) -> Iterator[Finding]:
    """Check storages, which several tensors may share."""
    for block in blocks:
        checksum = _Crc32()
        try:
            for raw in bytes_of(source, block.path, block.offset, block.nbytes):
                checksum.update(raw)
                advance(raw.nbytes)
        except DamageError as damage:
            yield damage.finding
            continue
        if checksum.hexdigest() != f"{block.crc32:08x}":
            tensors = _tensors_in(source, block)
            text = f"{block.what} does not have the checksum (CRC-32) that it was saved with"
            name = source.name_of(block.path)
            yield error(text, tensor=", ".join(tensors) or None, file=name, offset=block.offset)


def _compare(source: Source, entry: Entry, piece: Piece, made: _Hash | None) -> Finding | None:
    if made is None:
        return None
    wanted = piece.xxh3 if piece.xxh3 is not None else f"{piece.crc32:08x}"
    if piece.strides is not None:
        made = _straight(source, piece, made)
    if made.hexdigest() == wanted:
        return None
    kind = "hash (xxh3-128)" if piece.xxh3 is not None else "checksum (CRC-32)"
    where = {"tensor": entry.name, "file": source.name_of(piece.path), "offset": piece.offset}
    return error(
        f"its part at {list(piece.start)} of shape {list(piece.shape)} does not have the {kind} that it was saved with",
        rank=piece.rank,
        **where,
    )


def _straight(source: Source, piece: Piece, made: _Hash) -> _Hash:
    """Hash a piece in the order of the file, which is not that of the tensor."""
    for raw in bytes_of(source, piece.path, piece.offset, piece.nbytes):
        made.update(raw)
    return made


def bytes_of(source: Source, path: Path, offset: int, nbytes: int) -> Iterator[NDArray[np.uint8]]:
    """Yield a part of a file in windows, each valid until the next; raises `DamageError`."""
    buffer = np.empty(min(nbytes, WINDOW_BYTES), np.uint8)
    for at in range(0, nbytes, WINDOW_BYTES):
        part = buffer[: min(WINDOW_BYTES, nbytes - at)]
        source.read(path, offset + at, part)
        yield part


def _tensors_in(source: Source, block: Block) -> list[str]:
    return [
        entry.name
        for entry in source.entries
        for piece in entry.pieces
        if piece.path == block.path and block.offset <= piece.offset < block.offset + max(block.nbytes, 1)
    ]
