"""What a conversion writes: tensors as streams of bytes, checked while they are read."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from contract.errors import UserError
from tools.ckpt.checks import Advance, Checks, check_blocks
from tools.ckpt.convert_dtype import RangeError, converted, convertible
from tools.ckpt.dtypes import BITS
from tools.ckpt.findings import DamageError, Finding, Severity
from tools.ckpt.pieces import Block, Entry, Piece, Shape
from tools.ckpt.roles import FIRST, SECOND, WEIGHTS
from tools.ckpt.source import Source

RawBytes = NDArray[np.uint8]
_CONVERTED = (WEIGHTS, FIRST, SECOND)
"""Roles that a conversion of types concerns; step counts and master weights need their digits."""

_CONVERTED_ELEMENTS = 1 << 16
"""At a time: what comes in between stays in the caches."""


class DamagedSourceError(UserError):
    """What is to be converted is not what was saved."""

    exit_code = 1


@dataclass(frozen=True)
class Tensor:
    """One tensor to write."""

    name: str
    dtype: str
    shape: Shape
    nbytes: int
    stream: Callable[[], Iterator[RawBytes]]
    """Its bytes in row-major order; each part is valid until the next. Raises when all was read and some was wrong."""
    tied_to: str | None = None
    """A tensor before it that has the same bytes."""


def tensors_of(source: Source, weights_only: bool, dtype: str | None, force: bool) -> list[Tensor]:
    """Choose what to write of a checkpoint; `dtype`: of floating weights and moments, None for their own.

    Raises `DamagedSourceError` for what is wrong with its directory, unless `force`; `UnreadableError` for a step that
    cannot be decoded.
    """
    source.refuse_undecodable()
    errors = [one for one in source.problems() if one.severity is Severity.ERROR]
    if errors and not force:
        raise damaged(source, errors)
    crc32 = {(block.path, block.offset, block.nbytes): block.crc32 for block in source.blocks}
    made: dict[str, Tensor] = {}
    for entry in source.entries:
        if entry.dtype == "object" or (weights_only and entry.role != WEIGHTS):
            continue
        if entry.name in made:
            raise DamagedSourceError(f"{source.path} has {entry.name} twice: remove one of the two")
        pieces = tuple(_with_checksum(entry, piece, crc32) for piece in entry.pieces)
        made[entry.name] = _tensor(source, entry._replace(pieces=pieces), dtype, force, made)
    return list(made.values())


def check_storages(source: Source, tensors: list[Tensor], advance: Advance) -> None:
    """Check the storages that hold several tensors, which these do not tell by themselves; `DamagedSourceError`."""
    names = {one.name for one in tensors}
    pieces = [piece for entry in source.entries if entry.name in names for piece in entry.pieces]
    found = list(check_blocks(source, _shared(source.blocks, pieces), advance))
    if found:
        raise damaged(source, found)


def damaged(source: Source, found: list[Finding]) -> DamagedSourceError:
    """Say so in a sentence."""
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return DamagedSourceError(
        f"{source.path} is damaged ({found[0]}{more}): look at it with `trierarch ckpt validate`, or convert it as it "
        "is with --force"
    )


def _with_checksum(entry: Entry, piece: Piece, crc32: dict[tuple[Path, int, int], int]) -> Piece:
    """Of a storage that holds this piece and nothing else."""
    nbytes = piece.elements * BITS[entry.dtype].itemsize
    found = crc32.get((piece.path, piece.offset, nbytes))
    return piece if piece.packed or piece.nbytes != nbytes or found is None else piece._replace(crc32=found)


def _shared(blocks: list[Block], pieces: list[Piece]) -> Iterator[Block]:
    """Yield the blocks that have a piece within them which is not all of it."""
    places = sorted((piece.path, piece.offset, piece.nbytes) for piece in pieces if piece.nbytes > 0)
    for block in blocks:
        first = bisect_left(places, (block.path, block.offset, 0))
        last = bisect_left(places, (block.path, block.offset + block.nbytes, 0))
        if any(place[1:] != (block.offset, block.nbytes) for place in places[first:last]):
            yield block


def _tensor(
    source: Source, entry: Entry, dtype: str | None, force: bool, before: dict[str, Tensor]
) -> Tensor:
    changes = (
        dtype is not None and dtype != entry.dtype and entry.role in _CONVERTED and convertible(entry.dtype)
    )
    wanted = dtype if changes and dtype is not None else entry.dtype
    tied = before.get(entry.tied_to or "")
    return Tensor(
        name=entry.name,
        dtype=wanted,
        shape=entry.shape,
        nbytes=entry.elements * BITS[wanted].itemsize,
        stream=lambda: _stream(source, entry, wanted, force),
        tied_to=tied.name if tied is not None and tied.dtype == wanted else None,
    )


def _stream(source: Source, entry: Entry, dtype: str, force: bool) -> Iterator[RawBytes]:
    try:
        entry = source.located(entry)
        checks = Checks(source, entry)
        limit = None if dtype == entry.dtype else _CONVERTED_ELEMENTS
        for window in source.windows(entry, limit, tap=lambda piece, raw, offset: checks.tap(piece, raw)):
            checks.add(window)
            values = window.values if dtype == entry.dtype else converted(window.values, entry.dtype, dtype)
            yield values.view(np.uint8)
        found = checks.findings()
    except DamageError as damage:
        # There are no bytes to write, whoever insists.
        where = replace(damage.finding, tensor=entry.name)
        raise DamagedSourceError(
            f"{source.path} cannot be read ({where}): give a whole checkpoint"
        ) from damage
    except RangeError as reason:
        raise UserError(f"{entry.name} of {source.path}: {reason}: give another --dtype") from reason
    if found and not force:
        raise damaged(source, found)
