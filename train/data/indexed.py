"""Token files in Megatron's layout: `<prefix>.bin` holds the tokens, `<prefix>.idx` where documents lie.

The index, little-endian: magic (9 bytes), version 1 (u64), dtype code (u8), number of sequences (u64), number
of document boundaries (u64), then the length of each sequence (i32), the byte offset of each sequence (i64)
and the boundaries, counted in sequences (i64). Source: `megatron/core/datasets/indexed_dataset.py`.
"""

import hashlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from contract.errors import UserError
from train.durable import sync_folder

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
VERSION = 1
DTYPES = {
    code: np.dtype(name).newbyteorder("<") for code, name in ((1, "u1"), (4, "i4"), (5, "i8"), (8, "u2"))
}
LARGEST_DOCUMENT = 2**31 - 1
"""Tokens of one document that the index can express."""

Tokens = npt.NDArray[np.integer[Any]]
Int64Array = npt.NDArray[np.int64]


def with_ending(prefix: Path, ending: str) -> Path:
    """Return `<prefix><ending>`, whatever dots the prefix has."""
    return prefix.parent / (prefix.name + ending)


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Return the type that Megatron would store tokens of this vocabulary in."""
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


class IndexedTokens:
    """Memory-mapped tokens and the boundaries of their documents.

    Raises `UserError` when a file is missing, empty, cut, foreign, or does not belong to the other.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        index = _map_file(with_ending(prefix, ".idx"))
        self.dtype, lengths, boundaries = _read_index(with_ending(prefix, ".idx"), index)
        ends = np.cumsum(lengths, dtype=np.int64)
        self.document_offsets: Int64Array = np.concatenate([np.zeros(1, np.int64), ends])[boundaries]
        """Token at which each document starts, and the total: documents + 1."""
        self._tokens = self._map_tokens(with_ending(prefix, ".bin"), int(ends[-1]))

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self._tokens)

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.document_offsets) - 1

    def __getitem__(self, span: slice) -> Tokens:
        """Tokens [a:b] as a view of the file."""
        return self._tokens[span]

    def _map_tokens(self, path: Path, expected: int) -> Tokens:
        data = _map_file(path)
        wanted_bytes = expected * self.dtype.itemsize
        if len(data) != wanted_bytes:
            state = "is cut" if len(data) < wanted_bytes else "does not belong to its index"
            raise UserError(
                f"{path} {state}: it has {len(data)} bytes where its .idx says {wanted_bytes}; copy it again, "
                f"or make it anew with `trierarch data prepare`"
            )
        return data.view(self.dtype)


def _map_file(path: Path) -> npt.NDArray[np.uint8]:
    try:
        if path.stat().st_size == 0:
            raise UserError(f"{path} is empty: make it anew with `trierarch data prepare`")
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist: make it with `trierarch data prepare`, or correct data.prefix"
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check the path and its rights") from None


def _read_index(path: Path, data: npt.NDArray[np.uint8]) -> tuple[np.dtype[Any], Tokens, Int64Array]:
    """Return dtype, length of each sequence, and the document boundaries counted in sequences."""
    again = "copy it again, or make it anew with `trierarch data prepare`"
    if len(data) < HEADER.size and data[: len(MAGIC)].tobytes() == MAGIC[: len(data)]:
        raise UserError(f"{path} is cut: its header is incomplete; {again}")
    magic, version, code, sequences, boundaries = HEADER.unpack(
        data[: HEADER.size].tobytes().ljust(HEADER.size)
    )
    if magic != MAGIC or version != VERSION:
        raise UserError(
            f"{path} is no index of token files (Megatron's .idx, version 1): correct data.prefix"
        )
    if code not in DTYPES:
        raise UserError(
            f"{path} names an unknown token type (code {code}): tokens must be uint8, uint16, int32 or int64; {again}"
        )
    wanted_bytes = HEADER.size + 12 * sequences + 8 * boundaries
    if len(data) < wanted_bytes:
        raise UserError(
            f"{path} is cut: it has {len(data)} bytes where its header says {wanted_bytes}; {again}"
        )
    if sequences == 0 or boundaries < 2:
        raise UserError(f"{path} lists no documents: make it anew with `trierarch data prepare`")
    lengths = np.frombuffer(data, "<i4", sequences, HEADER.size)
    pointers = np.frombuffer(data, "<i8", sequences, HEADER.size + 4 * sequences)
    documents = np.frombuffer(data, "<i8", boundaries, HEADER.size + 12 * sequences)
    ends = np.cumsum(lengths, dtype=np.int64) * DTYPES[code].itemsize
    whole = (
        lengths.min() >= 0
        and pointers[0] == 0
        and np.array_equal(pointers[1:], ends[:-1])
        and documents[0] == 0
        and documents[-1] == sequences
        and bool(np.all(np.diff(documents) >= 0))
    )
    if not whole:
        raise UserError(f"{path} contradicts itself (offsets, lengths or documents): {again}")
    return DTYPES[code], lengths, documents


class IndexedWriter:
    """Writes a pair of token files aside and publishes them by rename, the index last.

    Use as a context: leaving it without `publish()` removes what was written. OSErrors are the caller's to
    explain. Each document is one sequence.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self.prefix, self.dtype = prefix, dtype
        self._lengths: list[npt.NDArray[np.int32]] = []
        self._hash = hashlib.blake2b(digest_size=16)
        self._bin = with_ending(prefix, ".bin.partial")
        self._idx = with_ending(prefix, ".idx.partial")
        self._file = self._bin.open("wb")

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        finally:
            self._bin.unlink(missing_ok=True)
            self._idx.unlink(missing_ok=True)

    def append(self, tokens: Tokens, lengths: Sequence[int] | Tokens) -> None:
        """Add documents: all their tokens, and the number of tokens of each."""
        counts = np.asarray(lengths, dtype=np.int64)
        assert counts.sum() == len(tokens), "lengths do not add up to the tokens"
        assert counts.size == 0 or counts.max() <= LARGEST_DOCUMENT, "a document is too long for the index"
        data = np.ascontiguousarray(tokens, dtype=self.dtype)
        self._file.write(data.data)
        self._hash.update(data.data)
        self._lengths.append(counts.astype("<i4"))

    def finish(self) -> str:
        """Bring both files to the disk, still aside.

        Returns the fingerprint of the content: BLAKE2b (128 bits) over the tokens as stored, then the
        length of each document (i32), in hexadecimal.
        """
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        lengths = np.concatenate([np.zeros(0, "<i4"), *self._lengths])
        ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        code = next(code for code, dtype in DTYPES.items() if dtype == self.dtype)
        with self._idx.open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(lengths) + 1))
            file.write(lengths.tobytes())
            file.write((ends - lengths.astype("<i8") * self.dtype.itemsize).tobytes())
            file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
            file.flush()
            os.fsync(file.fileno())
        self._hash.update(lengths.tobytes())
        return self._hash.hexdigest()

    def publish(self) -> None:
        """Give the finished files their names. Between the two renames there is no index, so no torn pair."""
        index = with_ending(self.prefix, ".idx")
        index.unlink(missing_ok=True)
        self._bin.rename(with_ending(self.prefix, ".bin"))
        self._idx.rename(index)
        sync_folder(self.prefix.parent)
