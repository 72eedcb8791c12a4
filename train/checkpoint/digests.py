"""`digests/rank_R.json` of a step: what each slice that rank R wrote must hash to. Imports no torch.

The hash is xxh3-128 (https://xxhash.com), made for speed: it finds damage, it is no defence against forgery.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from train.durable import sync_folder

FOLDER = "digests"
WINDOW_BYTES = 1 << 20
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
) -> None:
    """Write what `rank` has hashed beside the checkpoint in `folder`, durably.

    `rest`: the hash of `Rest`, by file. `rounded`: the largest relative error of what was rounded, by role.
    """
    target = folder / FOLDER
    target.mkdir(exist_ok=True)
    text = json.dumps({"slices": [asdict(one) for one in slices], "rest": rest, "rounded": rounded or {}})
    write_durably(target / file_name(rank), text + "\n")
    sync_folder(target)


def read_digests(path: Path, expected: str | None) -> list[Digest]:
    """Read such a file; raise `ValueError` where it is damaged. `expected`: its own hash, None where not known."""
    try:
        data = path.read_bytes()
        if expected is not None and digest(data) != expected:
            raise ValueError("its content is not what was written")
        slices = [
            Digest(str(one["tensor"]), tuple(one["start"]), tuple(one["shape"]), str(one["xxh3"]))
            for one in json.loads(data)["slices"]
        ]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{FOLDER}/{path.name} is damaged: {error}") from error
    return slices


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
