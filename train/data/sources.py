"""What is to be tokenised: files found, and cut into shards of work that depend on nothing but the sources."""

import hashlib
import sysconfig
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from contract.errors import UserError

STDLIB_EXCLUDED = frozenset(
    {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "encodings"}
)
"""Folders of the standard library that are left out of the demo: other people's packages, tests (more than half
of all), and large tables that are no prose of a programmer."""
SMALLEST_SHARD_BYTES, LARGEST_SHARD_BYTES = 2**20, 2**26
SHARDS = 64
"""Shards aimed at: enough for an even load and a moving progress bar, few enough files for a shared disk."""


@dataclass(frozen=True)
class Piece:
    """A file, or of JSON lines those that start in [start, end): the bytes of one file in one shard."""

    path: Path
    size_bytes: int
    mtime_ns: int
    start: int
    end: int

    @property
    def is_jsonl(self) -> bool:
        """Whether it has one document a line."""
        return self.path.name.endswith((".jsonl", ".jsonl.gz"))


Shard = tuple[Piece, ...]


def python_stdlib() -> Path:
    """Return the folder of Python's standard library: text that every machine has."""
    return Path(sysconfig.get_path("stdlib"))


def find_files(
    sources: Sequence[Path], glob: str, exclude: Collection[str], shuffle_seed: int | None, own: Path
) -> list[Path]:
    """List the files of all sources; those of a folder sorted by name, or shuffled under a seed.

    A file or folder below a source whose name is in `exclude` is left out, and so is what starts with the
    path `own`: the files that this very command writes. Raises `UserError` for a source that does not exist.
    """
    files = []
    for source in sources:
        if source.is_dir():
            files += _in_folder(source, glob, exclude, shuffle_seed, own)
        elif source.is_file():
            files.append(source)
        else:
            raise UserError(f"source {source} is neither a file nor a folder: correct the path")
    return files


def _in_folder(
    folder: Path, glob: str, exclude: Collection[str], shuffle_seed: int | None, own: Path
) -> list[Path]:
    try:
        found = [path for path in folder.glob(glob) if path.is_file()]
    except (ValueError, NotImplementedError) as error:
        raise UserError(
            f"--glob {glob}: {error}; give a pattern relative to the source, like **/*.txt"
        ) from None
    kept = {
        path.relative_to(folder).as_posix(): path
        for path in found
        if not set(path.relative_to(folder).parts) & set(exclude) and not _belongs_to(own, path)
    }
    if shuffle_seed is None:
        return [kept[name] for name in sorted(kept)]
    # A hash of the name, not a shuffled list: one more file leaves the order of the others as it was.
    return [kept[name] for name in sorted(kept, key=lambda name: _shuffle_key(shuffle_seed, name))]


def _belongs_to(own: Path, path: Path) -> bool:
    """Whether a path is one of `<own>.*`, or in the folder `<own>.parts`."""
    return str(path.resolve()).startswith(f"{own.resolve()}.")


def _shuffle_key(seed: int, name: str) -> bytes:
    return hashlib.blake2b(f"{seed}/{name}".encode("utf-8", "surrogateescape"), digest_size=16).digest()


def cut_into_shards(files: Sequence[Path]) -> list[Shard]:
    """Cut files into shards of about equal bytes: a power of two, so that it rarely changes with the input.

    JSON lines are cut anywhere (a reader finds the line starts); other files, and compressed ones, stay whole.
    """
    pieces = [_whole(path) for path in files]
    total = sum(piece.size_bytes for piece in pieces)
    size = min(max(2 ** (total // SHARDS).bit_length(), SMALLEST_SHARD_BYTES), LARGEST_SHARD_BYTES)
    shards: list[Shard] = []
    group: list[Piece] = []
    group_bytes = 0
    for piece in (part for whole in pieces for part in _split(whole, size)):
        group.append(piece)
        group_bytes += piece.end - piece.start
        if group_bytes >= size:
            shards.append(tuple(group))
            group, group_bytes = [], 0
    return [*shards, tuple(group)] if group else shards


def _whole(path: Path) -> Piece:
    try:
        stat = path.stat()
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}): check its rights, or exclude it"
        ) from None
    return Piece(path.absolute(), stat.st_size, stat.st_mtime_ns, 0, stat.st_size)


def _split(piece: Piece, size: int) -> list[Piece]:
    if piece.path.suffix != ".jsonl" or piece.size_bytes <= size:
        return [piece]
    starts = range(0, piece.size_bytes, size)
    return [
        Piece(piece.path, piece.size_bytes, piece.mtime_ns, start, min(start + size, piece.size_bytes))
        for start in starts
    ]


def fingerprint(recipe: str, shard: Shard) -> str:
    """Tell apart shards of work: by what is done, and by path, size, time and bytes of what it is done to."""
    digest = hashlib.blake2b(recipe.encode(), digest_size=16)
    for piece in shard:
        facts = (piece.path, piece.size_bytes, piece.mtime_ns, piece.start, piece.end)
        digest.update(repr(facts).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
