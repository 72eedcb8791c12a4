"""One shard of work: read its documents, tokenise them, publish the result as one file by rename."""

import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import numpy as np

from contract.errors import UserError
from train.data.indexed import LARGEST_DOCUMENT, Tokens, dtype_for
from train.data.sources import Piece, Shard, fingerprint
from train.data.tokenizer import Tokenizer, load_tokenizer

EXAMPLES = 5
"""File names that a report of skipped documents carries."""


@dataclass(frozen=True)
class Job:
    """What is the same for all shards of one preparation."""

    tokenizer: str
    eod: str | None
    json_key: str
    recipe: str
    parts: Path
    """Folder of the finished shards."""

    def part(self, shard: Shard) -> Path:
        """The file that holds a shard once it is finished."""
        return self.parts / f"{fingerprint(self.recipe, shard)}.npz"


@dataclass
class Skipped:
    """Documents left out, by reason, and a few examples."""

    reasons: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def add(self, reason: str, path: Path) -> None:
        """Count one document."""
        self.reasons[reason] += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append(f"{path} ({reason})")

    def merge(self, other: "Skipped") -> None:
        """Add the counts of another shard."""
        self.reasons += other.reasons
        self.examples = (self.examples + other.examples)[:EXAMPLES]


@dataclass
class Part:
    """The tokens of one shard."""

    tokens: Tokens
    lengths: Tokens
    """Tokens of each document, its end included."""
    text_bytes: int
    skipped: Skipped


def finish_shard(job: Job, shard: Shard) -> None:
    """Tokenise a shard and publish it. Raises `UserError` for what is wrong with its files."""
    tokenizer = _tokenizer(job.tokenizer, job.eod)
    skipped, text_bytes = Skipped(), 0
    documents = []
    for piece in shard:
        for text in read_documents(piece, job.json_key, skipped):
            documents.append(_encode(tokenizer, text, piece.path))
            text_bytes += len(text.encode())
        _check_unchanged(piece)
    dtype = dtype_for(tokenizer.vocab_size)
    tokens = np.concatenate([np.zeros(0, dtype), *documents]).astype(dtype)
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    facts = np.array(json.dumps([text_bytes, skipped.reasons, skipped.examples]))
    aside = job.part(shard).with_suffix(".partial")
    try:
        with aside.open("wb") as file:
            np.savez(file, tokens=tokens, lengths=lengths, facts=facts)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(job.part(shard))
    finally:
        aside.unlink(missing_ok=True)


def read_part(path: Path) -> Part:
    """Read a finished shard; the checksums inside are checked. Raises `UserError` when it is damaged."""
    try:
        with np.load(path) as part:
            text_bytes, reasons, examples = json.loads(str(part["facts"]))
            return Part(part["tokens"], part["lengths"], text_bytes, Skipped(Counter(reasons), examples))
    except Exception:  # a damaged zip shows itself as any of a dozen exceptions
        path.unlink(missing_ok=True)
        raise UserError(f"{path} was damaged and is removed: run the same command again to redo it") from None


def read_documents(piece: Piece, json_key: str, skipped: Skipped) -> Iterator[str]:
    """Yield the texts of a piece; count those that are left out in `skipped`."""
    try:
        for text in _read_jsonl(piece, json_key) if piece.is_jsonl else (piece.path.read_bytes(),):
            reason = _reason_to_skip(text)
            if reason:
                skipped.add(reason, piece.path)
            else:
                yield text if isinstance(text, str) else text.decode()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{piece.path} is a broken gzip file ({error}): copy it again") from None
    except OSError as error:
        raise UserError(f"{piece.path} cannot be read ({error.strerror}): check its rights") from None


@lru_cache(maxsize=1)
def _tokenizer(spec: str, eod: str | None) -> Tokenizer:
    return load_tokenizer(spec, eod)


def _encode(tokenizer: Tokenizer, text: str, path: Path) -> Tokens:
    try:
        ids = tokenizer.encode(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if len(ids) >= LARGEST_DOCUMENT:
        raise UserError(f"{path} has a document of {len(ids)} tokens, more than an index can hold: split it")
    return np.append(ids, np.int32(tokenizer.eod_id))


def _reason_to_skip(text: str | bytes) -> str | None:
    if not text:
        return "empty"
    try:
        if isinstance(text, str):
            text.encode("utf-8")  # JSON can hold half a surrogate pair, which is no text
            return None
        text.decode("utf-8")
    except UnicodeError:
        return "binary" if isinstance(text, bytes) and b"\0" in text else "not UTF-8"
    return "binary" if b"\0" in text else None


def _check_unchanged(piece: Piece) -> None:
    """A file that is written while it is read would be published under the fingerprint of its older self."""
    try:
        stat = piece.path.stat()
        unchanged = (stat.st_size, stat.st_mtime_ns) == (piece.size_bytes, piece.mtime_ns)
    except FileNotFoundError:
        unchanged = False
    if not unchanged:
        raise UserError(f"{piece.path} changed while it was read: run again when nothing writes to it")


def _open(piece: Piece) -> IO[bytes]:
    compressed = piece.path.suffix == ".gz"
    return gzip.open(piece.path, "rb") if compressed else piece.path.open("rb")  # type: ignore[return-value]


def _read_jsonl(piece: Piece, json_key: str) -> Iterator[str]:
    """Yield the documents of the lines that start inside the piece; blank lines are none."""
    for position, line in _lines(piece):
        if not line.strip():
            continue
        try:
            record: Any = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise _line_error(piece, position, f"is not JSON in UTF-8 ({error})") from None
        if not isinstance(record, dict) or not isinstance(record.get(json_key), str):
            raise _line_error(piece, position, f'has no text under the key "{json_key}" (--json-key)')
        yield record[json_key]


def _line_error(piece: Piece, position: int, fault: str) -> UserError:
    """Say which line is wrong: lines are counted only now, as a piece starts in the middle of a file."""
    before = 0
    with _open(piece) as file:
        while position > 0 and (block := file.read(min(position, 2**20))):
            before += block.count(b"\n")
            position -= len(block)
    return UserError(f"{piece.path} line {before + 1} {fault}: correct or remove the line")


def _lines(piece: Piece) -> Iterator[tuple[int, bytes]]:
    """Yield the position and content of each line that starts in [start, end), however far it reaches."""
    compressed = piece.path.suffix == ".gz"
    with _open(piece) as file:
        position = 0 if compressed else _first_line_start(file, piece)
        while compressed or position < piece.end:
            line = file.readline()
            if not line:
                return
            yield position, line
            position += len(line)


def _first_line_start(file: IO[bytes], piece: Piece) -> int:
    """Move to the first line that starts at or after the piece's start, or to its end if there is none.

    Never reads beyond the piece: pieces inside one huge line would each read all the rest of it.
    """
    if piece.start == 0:
        return 0
    file.seek(piece.start - 1)
    position = piece.start - 1
    while position < piece.end:
        block = file.readline(piece.end - position)
        position += len(block)
        if block.endswith(b"\n") or not block:
            break
    return position
