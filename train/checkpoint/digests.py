"""`digests/rank_R.json` of a step: what each slice that rank R wrote must hash to. Imports no torch.

The hash is xxh3-128 (https://xxhash.com), made for speed: it finds damage, it is no defence against forgery.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from train.durable import sync_folder

FOLDER = "digests"
WINDOW_BYTES = 1 << 20
_MOST_BYTES = 1 << 62
Box = tuple[int, ...]
"""Where something begins in a tensor, or how much of it there is: one number for each dimension."""


@dataclass(frozen=True)
class Digest:
    """One slice of a tensor."""

    tensor: str
    """Its name in `.metadata`."""
    start: Box
    shape: Box
    xxh3: str
    """Of the slice's bytes, contiguous and row-major, in hexadecimal digits."""
    offset: int | None = field(default=None, compare=False)
    """Of its first value in its file; None in steps of before this was written down."""

    @property
    def values(self) -> int:
        """How many there are."""
        return math.prod(self.shape)


def digest(data: Any) -> str:
    """Hash what has a buffer."""
    found: str = xxhash.xxh3_128_hexdigest(data)
    return found


def file_name(rank: int) -> str:
    """Name, within `FOLDER`, of the file that `rank` writes."""
    return f"rank_{rank}.json"


def write_digests(
    folder: Path,
    rank: int,
    slices: Iterable[Digest],
    rest: Mapping[str, str],
    rounded: Mapping[str, float] | None = None,
    metadata: str | None = None,
) -> None:
    """Write what `rank` has hashed beside the checkpoint in `folder`, durably.

    `rest`: the hash of `Rest`, by file. `rounded`: the largest relative error of what was rounded, by role. `metadata`:
    the hash of `.metadata`, by who wrote it.
    """
    target = folder / FOLDER
    target.mkdir(exist_ok=True)
    told = {"slices": [vars(one) for one in slices], "rest": rest, "rounded": rounded or {}}
    text = json.dumps(told if metadata is None else told | {"metadata": metadata})
    write_durably(target / file_name(rank), text + "\n")
    sync_folder(target)


def read_digests(path: Path, expected: str | None) -> list[Digest]:
    """Read such a file; raise `ValueError` where it is damaged. `expected`: its own hash, None where not known."""
    try:
        data = path.read_bytes()
        if expected is not None and digest(data) != expected:
            raise ValueError("its content is not what was written")
        return [_digest(one) for one in json.loads(data)["slices"]]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{FOLDER}/{path.name} is damaged: {error}") from error


def _digest(told: Mapping[str, Any]) -> Digest:
    offset = told.get("offset")
    if not (offset is None or (isinstance(offset, int) and 0 <= offset < _MOST_BYTES)):
        raise ValueError(f"a slice of {told['tensor']} lies at {offset!r:.40}")
    return Digest(str(told["tensor"]), tuple(told["start"]), tuple(told["shape"]), str(told["xxh3"]), offset)


class Listed:
    """The slices of a step as the ranks that wrote them have listed them; each file is read when it is needed."""

    def __init__(self, folder: Path, expected: Mapping[str, str] | None) -> None:
        """`expected`: the hash of each file, by its name; None where they are not known (yet)."""
        self._folder = folder
        self._expected = expected
        self._by_rank: dict[int, dict[tuple[str, Box], Digest]] = {}

    def find(self, rank: int, tensor: str, start: Box) -> Digest | None:
        """Return what `rank` says of a slice, None where that is nothing; raises `ValueError` for a damaged file."""
        if rank not in self._by_rank:
            name = file_name(rank)
            expected = None if self._expected is None else self._expected.get(name)
            listed = read_digests(self._folder / FOLDER / name, expected)
            self._by_rank[rank] = {(one.tensor, one.start): one for one in listed}
        return self._by_rank[rank].get((tensor, start))


def read_rest(path: Path) -> dict[str, str]:
    """The hash of `Rest`, by file, of what the rank of such a file has written; raises `ValueError`, OSError."""
    found: dict[str, str] = json.loads(path.read_bytes()).get("rest", {})
    return found


def read_metadata_hash(path: Path) -> str | None:
    """The hash that `.metadata` had when it was written, by such a file; None where that is not known."""
    try:
        found = json.loads(path.read_bytes()).get("metadata")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def read_rounded(path: Path) -> dict[str, float]:
    """The largest relative error of what the rank of such a file has rounded, by role; raises `ValueError`, OSError."""
    found: dict[str, float] = json.loads(path.read_bytes()).get("rounded", {})
    return found


@dataclass
class Rest:
    """Hashes the bytes of one file that are no values, in their order."""

    nbytes: int
    """Of the file."""
    values: list[tuple[int, int]] = field(default_factory=list)
    """(first byte, number of bytes) of the values of each slice in it."""

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Yield (begin, end) of what lies between values."""
        at = 0
        for begin, count in sorted(one for one in self.values if one[1]):
            if at < begin:
                yield at, begin
            at = max(at, begin + count)
        if at < self.nbytes:
            yield at, self.nbytes

    def digest(self, read: Callable[[int, Any], None]) -> str:
        """Return the hash; `read` fills a buffer from a place of the file."""
        made = xxhash.xxh3_128()
        for begin, end in self.gaps():
            for first in range(begin, end, WINDOW_BYTES):
                buffer = bytearray(min(WINDOW_BYTES, end - first))
                read(first, buffer)
                made.update(buffer)
        return made.hexdigest()


def write_durably(path: Path, text: str) -> None:
    """Write a file that is on its disk when this returns; its name is, once the folder was synced."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
