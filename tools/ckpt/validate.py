"""Is a checkpoint whole? By structure, by every byte against its hash, or by what the values say."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.ckpt.checks import Advance, Checks, check_blocks
from tools.ckpt.deep import Deep, Values, relations
from tools.ckpt.findings import DamageError, Finding, Severity, error, note
from tools.ckpt.foreign import foreign_names
from tools.ckpt.open import open_source
from tools.ckpt.pieces import Entry, Piece, Shape
from tools.ckpt.report import Depth, Report
from tools.ckpt.rest import Rests
from tools.ckpt.source import Source
from tools.ckpt.steady import steadily
from tools.ckpt.stored import check_stored, stored_bytes
from tools.ckpt.threads import cores, for_each
from tools.ckpt.torch_files import ZIP_MAGIC
from tools.ckpt.torch_zip import TorchArchive

ShapesOf = Callable[[dict[str, Any]], dict[str, Shape] | None]
"""The shape of each parameter of a manifest's model, or None if it is not known."""


def validate(
    path: Path,
    depth: Depth = Depth.FULL,
    shapes_of: ShapesOf = lambda model: None,
    begin: Callable[[int], Advance] = lambda total: lambda nbytes: None,
    threads: int | None = None,
) -> Report:
    """Check one checkpoint (of a run, its newest step); what is wrong with it is in the report, and never raised.

    `begin` is given the number of bytes to read, for a progress bar. Holds a few MiB per thread (default: one for each
    core that this process may use, 8 at most).
    """
    from contract.errors import UserError

    def look() -> Report:
        with open_source(path) as source:
            return check(source, depth, shapes_of, begin, threads)

    try:
        return steadily([path], look, _is_suspicious)
    except UserError as reason:
        return Report(path, depth, unreadable=str(reason))


def _is_suspicious(report: Report) -> bool:
    return any(one.severity is not Severity.NOTE for one in report.findings)


def check(
    source: Source,
    depth: Depth = Depth.FULL,
    shapes_of: ShapesOf = lambda model: None,
    begin: Callable[[int], Advance] = lambda total: lambda nbytes: None,
    threads: int | None = None,
) -> Report:
    """Check a checkpoint that is open, as `validate` does."""
    report = Report(source.path, depth, source.format, source.step, source.checked_by, len(source.entries))
    report.findings = [*source.problems(), *relations(source, shapes_of)]
    if depth is not Depth.QUICK and source.lacks is None:
        _read(source, report, begin, threads or cores())
    elif depth is not Depth.QUICK:
        advance = begin(stored_bytes(source))
        report.findings += check_stored(source, advance)
        report.read_bytes += stored_bytes(source)
    if source.stored is not None:
        report.findings = [source.stored.told(one) for one in report.findings]
    return report


def _read(source: Source, report: Report, begin: Callable[[int], Advance], threads: int) -> None:
    blocks = {block.path for block in source.blocks}
    # What checksums of files cover is read with these, and for its values only if they are asked for.
    entries = [
        entry
        for entry in source.entries
        if report.depth is Depth.DEEP
        or any(piece.packed or piece.path not in blocks for piece in entry.pieces)
    ]
    total = sum(entry.nbytes for entry in entries) + sum(block.nbytes for block in source.blocks)
    advance = begin(total + stored_bytes(source))
    rests = Rests(source)
    deep = Deep(source) if report.depth is Depth.DEEP else None
    # Where a file is missing or cut, that was said once: not for each tensor in it again.
    cut = _cut(source) if report.errors else set()
    reached = []
    for entry in entries:
        if cut and any(piece.path in cut and not _reaches(source, piece) for piece in entry.pieces):
            rests.lost(entry.pieces)
        else:
            reached.append(entry)
    for looked in for_each(source, reached, lambda own, entry: _entry(own, entry, deep, advance), threads):
        report.findings += looked.findings
        report.read_bytes += looked.entry.nbytes
        if looked.located:
            rests.located(looked.entry.pieces)
        else:
            rests.lost(looked.entry.pieces)
    reliable = [block for block in source.blocks if block.path not in cut]
    report.findings += check_blocks(source, reliable, advance)
    report.read_bytes += sum(block.nbytes for block in source.blocks)
    report.findings += rests.findings()
    report.findings += check_stored(source, advance)
    report.read_bytes += stored_bytes(source)
    if deep is not None:
        report.findings += deep.ties()


def _cut(source: Source) -> set[Path]:
    """Files that do not have all of their pieces."""
    last: dict[Path, Piece] = {}
    for entry in source.entries:
        for piece in entry.pieces:
            known = last.setdefault(piece.path, piece)
            if piece.offset + piece.nbytes > known.offset + known.nbytes:
                last[piece.path] = piece
    return {path for path, piece in last.items() if not _reaches(source, piece)}


def _reaches(source: Source, piece: Piece) -> bool:
    try:
        return source.size_of(piece.path) >= piece.offset + piece.nbytes
    except DamageError:
        return False


@dataclass(frozen=True)
class _Looked:
    """What was found of one tensor."""

    entry: Entry
    located: bool
    """Whether it has the places of its bytes."""
    findings: Sequence[Finding]


def _entry(source: Source, entry: Entry, deep: Deep | None, advance: Advance) -> _Looked:
    """Look at a tensor."""
    try:
        said = list(_object(source, entry)) if entry.dtype == "object" else []
        entry = source.located(entry)
    except DamageError as damage:
        return _Looked(entry, False, [damage.finding])
    try:
        return _Looked(entry, True, [*said, *_values(source, entry, deep, advance)])
    except DamageError as damage:
        return _Looked(entry, True, [*said, _with(damage.finding, entry)])


def _values(source: Source, entry: Entry, deep: Deep | None, advance: Advance) -> list[Finding]:
    """Read a tensor once, in its order; both its own hash and those of its pieces come from the same bytes."""
    checks = Checks(source, entry)
    values = Values(entry) if deep is not None else None

    def tap(piece: Piece, raw: NDArray[np.uint8], offset: int) -> None:
        checks.tap(piece, raw)
        if values is not None:
            values.pages(raw, offset)
        advance(raw.nbytes)

    for window in source.windows(entry, tap=tap):
        checks.add(window)
        if values is not None:
            values.add(window)
    damaged = checks.findings()
    if values is None or deep is None or damaged:
        return damaged
    deep.keep(entry, values)
    return list(values.findings(source))


def _with(finding: Finding, entry: Entry) -> Finding:
    return Finding(finding.severity, finding.text, entry.name, finding.file, finding.offset, finding.rank)


def _object(source: Source, entry: Entry) -> Iterator[Finding]:
    """A pickled object: an archive of `torch.save` has checksums, a bare pickle has none."""
    (piece,) = entry.pieces
    first = source.rows(entry, 0, min(4, entry.elements))
    if first.tobytes() != ZIP_MAGIC:
        yield note("is a pickle: its bytes have no checksum", tensor=entry.name)
        return
    try:
        _, foreign = TorchArchive(source.pread(piece.path), piece.offset, piece.nbytes).load()
    except (OSError, ValueError) as reason:
        where = {"tensor": entry.name, "file": source.name_of(piece.path), "offset": piece.offset}
        raise DamageError(error(str(reason), rank=piece.rank, **where)) from reason
    yield from foreign_names(foreign, tensor=entry.name, file=source.name_of(piece.path))
