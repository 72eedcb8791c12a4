"""Faults that metadata and sizes of files show, without reading a tensor."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from tools.ckpt.findings import DamageError, Finding, error, warning
from tools.ckpt.pieces import Entry, Piece
from tools.ckpt.source import Source

_MOST_BOXES = 4096
"""Overlaps among more pieces than that of one tensor are judged by their sum alone."""


def structure(source: Source) -> list[Finding]:
    """Return what is wrong with files and with the way in which pieces make tensors."""
    return [*_files(source), *_pieces(source), *_steps(source)]


def _files(source: Source) -> Iterator[Finding]:
    """Missing, cut, or of another size than the manifest says."""
    reach: dict[Path, tuple[int, Entry, Piece]] = {}
    for entry in source.entries:
        for piece in entry.pieces:
            end = piece.offset + piece.nbytes
            if piece.path not in reach or end > reach[piece.path][0]:
                reach[piece.path] = (end, entry, piece)
    said: set[str] = set()
    listed: dict[str, int] = source.facts.get("sizes", {})
    for path, (end, entry, piece) in sorted(reach.items()):
        name = source.name_of(path)
        try:
            size = source.size_of(path)
        except DamageError as damage:
            said |= {name, damage.finding.file or name}
            yield replace(damage.finding, tensor=entry.name, rank=piece.rank)
            continue
        if size < end:
            said.add(name)
            cut, part = _first_beyond(source, path, size)
            yield error(
                f"has {size} bytes, tensors want {end}", tensor=cut, file=name, offset=size, rank=part.rank
            )
    for name, size in listed.items():
        if name in said:
            continue
        try:
            found = source.size_of(source.root / name)
        except DamageError as damage:
            yield damage.finding
            continue
        if found != size:
            yield error(f"has {found} bytes instead of {size}", file=name)


def _first_beyond(source: Source, path: Path, size: int) -> tuple[str, Piece]:
    beyond = (
        (piece.offset, entry.name, piece)
        for entry in source.entries
        for piece in entry.pieces
        if piece.path == path and piece.offset + piece.nbytes > size
    )
    _, name, piece = min(beyond, key=lambda item: item[:2])
    return name, piece


def _pieces(source: Source) -> Iterator[Finding]:
    for entry in source.entries:
        yield from _cover(source, entry)


def _cover(source: Source, entry: Entry) -> Iterator[Finding]:
    for piece in entry.pieces:
        bounds = (entry.elements,) if piece.flat else entry.shape
        fits = len(piece.start) == len(piece.shape) == len(bounds) and all(
            first >= 0 and size >= 0 and first + size <= bound
            for first, size, bound in zip(piece.start, piece.shape, bounds, strict=True)
        )
        if not fits:
            text = f"a part at {list(piece.start)} of shape {list(piece.shape)} is not within {list(entry.shape)}"
            yield error(
                text,
                tensor=entry.name,
                file=source.name_of(piece.path),
                offset=piece.offset,
                rank=piece.rank,
            )
            return
    found = sum(piece.elements for piece in entry.pieces)
    pair = _overlap(entry)
    if pair is not None:
        ranks = " and ".join(
            f"rank {one.rank}" if one.rank is not None else source.name_of(one.path) for one in pair
        )
        text = f"parts of {ranks} overlap, at {list(pair[0].start)} and {list(pair[1].start)}"
        yield error(text, tensor=entry.name, file=source.name_of(pair[1].path), offset=pair[1].offset)
    elif found < entry.elements:
        yield error(f"has {found} of its {entry.elements} elements: parts are missing", tensor=entry.name)
    elif found > entry.elements:
        yield error(f"has {found} elements in place of {entry.elements}: parts overlap", tensor=entry.name)


def _overlap(entry: Entry) -> tuple[Piece, Piece] | None:
    """Find two parts that share an element: by the first dim, in which most layouts cut."""
    pieces = sorted((piece for piece in entry.pieces if piece.elements), key=lambda piece: piece.start)
    if len(pieces) < 2 or len({piece.flat for piece in pieces}) > 1 or not pieces[0].start:
        return (pieces[0], pieces[1]) if len(pieces) > 1 and not pieces[0].start else None
    if len(pieces) > _MOST_BOXES:
        return next((pair for pair in pairwise(pieces) if _intersect(*pair)), None)
    for index, one in enumerate(pieces):
        end = one.start[0] + one.shape[0]
        for other in pieces[index + 1 :]:
            if other.start[0] >= end:
                break
            if _intersect(one, other):
                return one, other
    return None


def _intersect(one: Piece, other: Piece) -> bool:
    return all(
        a < b + m and b < a + n
        for a, n, b, m in zip(one.start, one.shape, other.start, other.shape, strict=True)
    )


def _steps(source: Source) -> Iterator[Finding]:
    """The places that name the step must agree."""
    told: dict[str, int] = source.facts.get("steps", {})
    if len(set(told.values())) > 1:
        yield error(
            "mixes steps: " + ", ".join(f"{place} says {step}" for place, step in sorted(told.items()))
        )
    if source.step is None and source.format.startswith("trierarch"):
        yield warning("its step is not known")
