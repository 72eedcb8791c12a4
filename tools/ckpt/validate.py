"""Is a checkpoint whole? By structure, by every byte against its hash, or by what the values say."""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from tools.ckpt.deep import Deep, Values, relations
from tools.ckpt.findings import DamageError, Finding, error, note
from tools.ckpt.foreign import foreign_names
from tools.ckpt.open import open_source
from tools.ckpt.pieces import Entry, Piece, Shape
from tools.ckpt.report import Depth, Report
from tools.ckpt.source import WINDOW_BYTES, Source
from tools.ckpt.torch_files import ZIP_MAGIC
from tools.ckpt.torch_zip import TorchArchive

_BYTES = np.dtype(np.uint8)


ShapesOf = Callable[[dict[str, Any]], dict[str, Shape] | None]
"""The shape of each parameter of a manifest's model, or None if it is not known."""
Advance = Callable[[int], None]
"""Is told how many bytes were read since it was called last."""


def validate(
    path: Path,
    depth: Depth = Depth.FULL,
    shapes_of: ShapesOf = lambda model: None,
    begin: Callable[[int], Advance] = lambda total: lambda nbytes: None,
) -> Report:
    """Check one checkpoint (of a run, its newest step); what is wrong with it is in the report, and never raised.

    `begin` is given the number of bytes to read, for a progress bar.
    """
    from contract.errors import UserError

    report = Report(path, depth)
    try:
        with open_source(path) as source:
            report.path, report.format, report.step = source.path, source.format, source.step
            report.checked_by, report.tensors = source.checked_by, len(source.entries)
            report.findings = [*source.problems(), *relations(source, shapes_of)]
            if depth is not Depth.QUICK:
                _read(source, report, begin)
    except UserError as reason:
        report.unreadable = str(reason)
    return report


def _read(source: Source, report: Report, begin: Callable[[int], Advance]) -> None:
    blocks = {block.path for block in source.blocks}
    # What checksums of files cover is read with these, and for its values only if they are asked for.
    entries = [
        entry
        for entry in source.entries
        if report.depth is Depth.DEEP
        or any(piece.packed or piece.path not in blocks for piece in entry.pieces)
    ]
    total = sum(entry.nbytes for entry in entries) + sum(block.nbytes for block in source.blocks)
    advance = begin(total)
    deep = Deep(source) if report.depth is Depth.DEEP else None
    # Where a file is missing or cut, that was said once: not for each tensor in it again.
    unreliable = {one.file for one in report.errors if one.file is not None and one.file in source.files}
    unreliable = {name for name in unreliable if _is_cut(source, name)}
    for entry in entries:
        if any(source.name_of(piece.path) in unreliable and _beyond(piece) for piece in entry.pieces):
            continue
        report.findings += _entry(source, entry, deep, advance)
        report.read_bytes += entry.nbytes
    report.findings += _blocks(source, unreliable, advance)
    report.read_bytes += sum(block.nbytes for block in source.blocks)
    if deep is not None:
        report.findings += deep.ties()


def _is_cut(source: Source, name: str) -> bool:
    ends = (
        piece.offset + piece.nbytes
        for entry in source.entries
        for piece in entry.pieces
        if source.name_of(piece.path) == name
    )
    path = source.root / name
    return not path.is_file() or path.stat().st_size < max(ends, default=0)


def _beyond(piece: Piece) -> bool:
    return not piece.path.is_file() or piece.path.stat().st_size < piece.offset + piece.nbytes


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


def _entry(source: Source, entry: Entry, deep: Deep | None, advance: Advance) -> Iterator[Finding]:
    """Read a tensor once, in its order; both its own hash and those of its pieces come from the same bytes."""
    try:
        if entry.dtype == "object":
            yield from _object(source, entry)
        located = [source.locate(entry, piece) for piece in entry.pieces]
        entry = replace(entry, pieces=tuple(located))  # found once, and not again for reading
    except DamageError as damage:
        yield damage.finding
        return
    hashes: dict[Piece, _Hash] = {}
    for piece in located:
        if piece.xxh3 is not None or piece.crc32 is not None:
            hashes[piece] = _Crc32() if piece.xxh3 is None else xxhash.xxh3_128()
    # What lies in one piece has one hash: of the piece, and of the whole.
    same = len(located) == 1 and located[0].xxh3 == entry.xxh3 and located[0].strides is None
    whole = xxhash.xxh3_128() if entry.xxh3 is not None and not same else None
    values = Values(entry) if deep is not None else None

    def tap(piece: Piece, raw: NDArray[np.uint8], offset: int) -> None:
        if piece in hashes:
            hashes[piece].update(raw)
        if values is not None:
            values.pages(raw, offset)
        advance(raw.nbytes)

    try:
        for window in source.windows(entry, tap=tap):
            if whole is not None:
                whole.update(window.values.view(_BYTES))  # type: ignore[arg-type]
            if values is not None:
                values.add(window)
    except DamageError as damage:
        yield _with(damage.finding, entry)
        return
    damaged = [
        finding for piece in located if (finding := _compare(source, entry, piece, hashes)) is not None
    ]
    yield from damaged
    if whole is not None and whole.hexdigest() != entry.xxh3 and not damaged:
        text = "does not have the hash of the whole tensor, though its parts have theirs"
        yield error(text, tensor=entry.name)
    if values is not None and deep is not None and not damaged:
        yield from values.findings(source)
        deep.keep(entry, values)


def _with(finding: Finding, entry: Entry) -> Finding:
    return Finding(finding.severity, finding.text, entry.name, finding.file, finding.offset, finding.rank)


def _compare(source: Source, entry: Entry, piece: Piece, hashes: dict[Piece, _Hash]) -> Finding | None:
    wanted = piece.xxh3 if piece.xxh3 is not None else None if piece.crc32 is None else f"{piece.crc32:08x}"
    if wanted is None:
        return None
    made = hashes[piece]
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
    for raw in _bytes(source, piece.path, piece.offset, piece.nbytes):
        made.update(raw)
    return made


def _bytes(source: Source, path: Path, offset: int, nbytes: int) -> Iterator[NDArray[np.uint8]]:
    buffer = np.empty(min(nbytes, WINDOW_BYTES), np.uint8)
    for at in range(0, nbytes, WINDOW_BYTES):
        part = buffer[: min(WINDOW_BYTES, nbytes - at)]
        source.read(path, offset + at, part)
        yield part


def _object(source: Source, entry: Entry) -> Iterator[Finding]:
    """A pickled object: an archive of `torch.save` has checksums, a bare pickle has none."""
    (piece,) = entry.pieces
    first = source.rows(entry, 0, min(4, entry.elements))
    if first.tobytes() != ZIP_MAGIC:
        yield note("is a pickle: its bytes have no checksum", tensor=entry.name)
        return
    try:
        _, foreign = TorchArchive(source.descriptor(piece.path), piece.offset, piece.nbytes).load()
    except (OSError, ValueError) as reason:
        where = {"tensor": entry.name, "file": source.name_of(piece.path), "offset": piece.offset}
        raise DamageError(error(str(reason), rank=piece.rank, **where)) from reason
    yield from foreign_names(foreign, tensor=entry.name, file=source.name_of(piece.path))


def _blocks(source: Source, unreliable: set[str], advance: Advance) -> Iterator[Finding]:
    """Checksums of storages, which several tensors may share."""
    for block in source.blocks:
        name = source.name_of(block.path)
        if name in unreliable:
            continue
        checksum = _Crc32()
        try:
            for raw in _bytes(source, block.path, block.offset, block.nbytes):
                checksum.update(raw)
                advance(raw.nbytes)
        except DamageError as damage:
            yield damage.finding
            continue
        if checksum.hexdigest() != f"{block.crc32:08x}":
            tensors = _tensors_in(source, block.path, block.offset, block.nbytes)
            text = f"{block.what} does not have the checksum (CRC-32) that it was saved with"
            yield error(text, tensor=", ".join(tensors) or None, file=name, offset=block.offset)


def _tensors_in(source: Source, path: Path, offset: int, nbytes: int) -> list[str]:
    return [
        entry.name
        for entry in source.entries
        for piece in entry.pieces
        if piece.path == path and offset <= piece.offset < offset + max(nbytes, 1)
    ]
