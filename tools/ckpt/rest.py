"""Are the bytes of a file that are no values those that were written?"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from tools.ckpt.findings import DamageError, Finding, error
from tools.ckpt.pieces import Piece
from tools.ckpt.source import Source
from train.checkpoint.digests import Rest


class Rests:
    """Collects where values lie in each file, and checks what is left of it."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._values: dict[Path, list[tuple[int, int]]] = defaultdict(list)
        self._unknown: set[Path] = set()

    def located(self, pieces: Iterable[Piece]) -> None:
        """Take plain pieces: the places of values."""
        for piece in pieces:
            self._values[piece.path].append((piece.offset, piece.nbytes if piece.elements else 0))

    def lost(self, pieces: Iterable[Piece]) -> None:
        """Leave out the files of pieces that could not be located: that was said."""
        self._unknown |= {piece.path for piece in pieces}

    def findings(self) -> Iterator[Finding]:
        """Say which files have other bytes beside their values than were written."""
        if not self._source.rests:
            return  # of a format without, or of before there were any
        for path, values in sorted(self._values.items()):
            if path in self._unknown:
                continue
            name = self._source.name_of(path)
            wanted = self._source.rests.get(name)
            if wanted is None:
                yield error("has no hash of what it holds beside values", file=name)
                continue
            try:
                yield from self._compare(path, values, wanted)
            except DamageError as damage:
                yield damage.finding

    def _compare(self, path: Path, values: list[tuple[int, int]], wanted: str) -> Iterator[Finding]:
        name = self._source.name_of(path)
        rest = Rest(self._source.size_of(path), values)
        if rest.digest(partial(self._source.read, path)) == wanted:
            return
        broken = list(self._broken(path))
        yield from broken
        if broken:
            return
        gaps = list(rest.gaps())
        begin, end = (gaps[0][0], gaps[-1][1]) if gaps else (0, 0)
        text = f"its bytes beside values, between {begin} and {end}, do not have the hash that they were saved with"
        yield error(text, file=name, offset=begin)

    def _broken(self, path: Path) -> Iterator[Finding]:
        """Say in which archives of a file torch would not find the values that were found without looking at these."""
        for entry in self._source.entries:
            for piece in entry.pieces:
                if piece.path != path or piece.values is None:
                    continue
                try:
                    self._source.locate(entry, piece._replace(values=None))
                except DamageError as damage:
                    yield damage.finding
