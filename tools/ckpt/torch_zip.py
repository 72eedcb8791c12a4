"""Archives of `torch.save`: where the bytes of tensors lie in them, without loading one."""

import io
import struct
import zipfile
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tools.ckpt.dtypes import BITS
from tools.ckpt.findings import DamageError, error
from tools.ckpt.pickles import StoredTensor, read_pickle

if TYPE_CHECKING:
    from tools.ckpt.pieces import Entry, Piece
    from tools.ckpt.source import Pread, Source

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL_BYTES = 46
_LENGTHS = struct.Struct("<3H")
_END = struct.Struct("<4s4H2IH")
_END_64 = struct.Struct("<4sQ4x2I4Q")
_LOCATOR_64 = struct.Struct("<4sIQI")
_LONGEST_TAIL_BYTES = _END_64.size + _LOCATOR_64.size + _END.size
_FLAGS = 0x0808
"""Sizes follow the data; names are UTF-8: all that torch's archives set."""
_FOLDER = 0x10
_SMALL_BYTES = 1 << 16
_BLOCK_BYTES = 2048
_MOST_PICKLE_BYTES = 1 << 30


class ArchiveError(ValueError):
    """What is wrong with an archive, as a clause."""


@dataclass(frozen=True)
class Member:
    """A file in an archive, not compressed."""

    offset: int
    """Of its first byte, in the file that holds the archive."""
    nbytes: int
    crc32: int


class _Part(io.RawIOBase):
    """Bytes [offset, offset + nbytes) of a file as a file."""

    def __init__(self, pread: "Pread", offset: int, nbytes: int) -> None:
        super().__init__()
        self._pread, self._offset, self._nbytes, self._at = pread, offset, nbytes, 0
        self._blocks: list[tuple[int, bytes]] = []
        """(first byte, bytes) of what was read last: of the archive's begin and end, mostly."""
        self.failure: OSError | None = None
        """Why it could not be read: zipfile only says then that this is none of its files."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, to: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence]
        if base + to < 0:
            raise ValueError("seek before the start")
        self._at = base + to
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        wanted = max(0, min(len(buffer), self._nbytes - self._at))
        data = self._bytes(self._at, wanted)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _bytes(self, at: int, count: int) -> bytes:
        """Read; of what is little, with what lies around it, which is asked for next."""
        try:
            return self._read_bytes(at, count)
        except OSError as reason:
            self.failure = reason
            raise

    def _read_bytes(self, at: int, count: int) -> bytes:
        if count > _BLOCK_BYTES:
            return self._pread(count, self._offset + at)
        for begin, block in self._blocks:
            if begin <= at and at + count <= begin + len(block):
                return block[at - begin : at - begin + count]
        begin = max(0, min(at, self._nbytes - _BLOCK_BYTES))
        block = self._pread(min(_BLOCK_BYTES, self._nbytes - begin), self._offset + begin)
        self._blocks = [*self._blocks[-1:], (begin, block)]
        return block[at - begin : at - begin + count]


def _told(directory: bytes, count: int) -> int:
    """Bytes that a directory of `count` members says that it has: zipfile takes fewer for the last one."""
    at = 0
    for _ in range(count):
        if at + _CENTRAL_BYTES > len(directory):
            return -1
        at += _CENTRAL_BYTES + sum(_LENGTHS.unpack_from(directory, at + 28))
    return at


def _is_tail(tail: bytes, count: int, size: int, offset: int) -> bool:
    """Whether this is what follows a directory of `count` members, `size` bytes, that begins at `offset`."""
    short = (min(count, 0xFFFF), min(count, 0xFFFF), min(size, 0xFFFFFFFF), min(offset, 0xFFFFFFFF))
    if tail == _END.pack(b"PK\x05\x06", 0, 0, *short, 0):
        return True
    if len(tail) != _LONGEST_TAIL_BYTES or tail[-_END.size :] != _END.pack(b"PK\x05\x06", 0, 0, *short, 0):
        return False
    long = _END_64.unpack_from(tail)
    locator = _LOCATOR_64.unpack_from(tail, _END_64.size)
    return long == (b"PK\x06\x06", _END_64.size - 12, 0, 0, count, count, size, offset) and locator == (
        b"PK\x06\x07",
        0,
        offset + size,
        1,
    )


class TorchArchive:
    """An archive that `torch.save` wrote: a file, or a part of one."""

    def __init__(self, pread: "Pread", offset: int, nbytes: int) -> None:
        """Read its directory; raises `ArchiveError`. `pread` reads the file, now and later."""
        self._part = _Part(pread, offset, nbytes)
        try:
            self._zip = zipfile.ZipFile(self._part)
            self.members = {
                info.filename.partition("/")[2]: self._member(info, offset, nbytes)
                for info in self._zip.infolist()
            }
        except ArchiveError:
            raise
        except Exception as reason:  # zipfile raises anything for damaged bytes
            if self._part.failure is not None:
                raise ArchiveError(f"cannot be read: {self._part.failure}") from reason
            raise ArchiveError(f"is no whole archive of torch.save ({reason})") from reason
        self._check_directory(nbytes)

    def _check_directory(self, nbytes: int) -> None:
        """Be as strict as torch, which zipfile is not."""
        infos = self._zip.infolist()
        size = sum(
            _CENTRAL_BYTES + len(one.filename.encode()) + len(one.extra + one.comment) for one in infos
        )
        self._part.seek(self._zip.start_dir)
        directory = self._part.read(size) or b""
        tail = self._part.read(_LONGEST_TAIL_BYTES + 1) or b""
        if _told(directory, len(infos)) != size or not _is_tail(tail, len(infos), size, self._zip.start_dir):
            raise ArchiveError("is no whole archive of torch.save (it does not end with its directory)")
        roots = {info.filename.partition("/")[0] for info in infos}
        if len(roots) != 1 or len(self.members) != len(infos):
            raise ArchiveError("is no whole archive of torch.save (its members are not of one folder)")
        if "data.pkl" not in self.members:
            raise ArchiveError("is no archive of torch.save (it has no data.pkl)")
        # What was appended or lost before the archive shifts it, and torch reads where its directory says.
        if min(info.header_offset for info in infos) != 0:
            raise ArchiveError("is no whole archive of torch.save (it does not begin with its first member)")
        self.root = roots.pop()

    def _member(self, info: zipfile.ZipInfo, offset: int, nbytes: int) -> Member:
        self._part.seek(info.header_offset)
        raw = self._part.read(_LOCAL.size)
        if raw is None or len(raw) < _LOCAL.size:
            raise ArchiveError(f"is no whole archive of torch.save (no header of {info.filename})")
        magic, _, flags, method, *_, name_bytes, extra_bytes = _LOCAL.unpack(raw)
        name = self._part.read(name_bytes)
        start = info.header_offset + _LOCAL.size + name_bytes + extra_bytes
        whole = (
            magic == b"PK\x03\x04"
            and name == info.filename.encode()
            and method == info.compress_type == zipfile.ZIP_STORED
            and flags == info.flag_bits
            and flags & ~_FLAGS == 0
            and info.external_attr & _FOLDER == 0
            and info.volume == 0
            and info.compress_size == info.file_size
            and start + info.file_size <= nbytes
        )
        if not whole:
            raise ArchiveError(f"is no whole archive of torch.save (header of {info.filename})")
        return Member(offset + start, info.file_size, info.CRC)

    def small(self, name: str) -> bytes:
        """Return a member that is no tensor, checked; raises `ArchiveError`."""
        member = self.members[name]
        if member.nbytes > _MOST_PICKLE_BYTES:
            raise ArchiveError(f"has a {name} of {member.nbytes} bytes")
        self._part.seek(member.offset - self._part._offset)
        data = self._part.read(member.nbytes) or b""
        while len(data) < member.nbytes and (more := self._part.read(member.nbytes - len(data))):
            data += more
        if len(data) != member.nbytes or zlib.crc32(data) != member.crc32:
            raise ArchiveError(f"has a damaged {name} (CRC-32)")
        return data

    def load(self) -> tuple[Any, set[str]]:
        """Return what was saved, tensors as `StoredTensor`, and foreign names; raises `ValueError`."""
        return read_pickle(self._pickle())

    def saved_alone(self) -> Any:
        """Return what was saved where that is one tensor, or else anything; raises `ValueError`."""
        return _read_again(self._pickle())

    def _pickle(self) -> bytes:
        for name, member in self.members.items():
            if not name.startswith("data/") and member.nbytes <= _SMALL_BYTES:
                self.small(name)
        if "byteorder" in self.members and self.small("byteorder") != b"little":
            raise ArchiveError("was written on a big-endian machine")
        return self.small("data.pkl")

    def storage(self, tensor: StoredTensor) -> Member:
        """Return the member that a tensor lies in; raises `ArchiveError` if it isn't within one."""
        member = self.members.get(f"data/{tensor.storage.key}")
        if member is None:
            raise ArchiveError(f"lacks the storage {tensor.storage.key}")
        if tensor.dtype not in BITS or len(tensor.shape) != len(tensor.strides):
            raise ArchiveError(f"has a tensor of the type {tensor.dtype}")
        if tensor.offset < 0 or min((*tensor.shape, *tensor.strides, 0)) < 0:
            raise ArchiveError("has a tensor with a negative size")
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.strides, strict=True))
        end = (tensor.offset + last + 1) * BITS[tensor.dtype].itemsize
        if 0 not in tensor.shape and end > member.nbytes:
            raise ArchiveError(
                f"has a tensor that reaches beyond its storage of {member.nbytes} bytes, to byte {end}"
            )
        return member


@lru_cache(maxsize=256)
def _read_again(data: bytes) -> Any:
    """Read a pickle: those of slices of one shape are the same."""
    return read_pickle(data)[0]


def unpacked(source: "Source", entry: "Entry", piece: "Piece") -> "Piece":
    """Return a piece that was written by `torch.save` of it as plain bytes; raises `DamageError`."""
    from tools.ckpt.pieces import relocated

    try:
        archive = TorchArchive(source.pread(piece.path), piece.offset, piece.nbytes)
        tensor = archive.saved_alone()
        if not isinstance(tensor, StoredTensor):
            raise ArchiveError(f"holds a {type(tensor).__name__} and no tensor")
        if tensor.dtype != entry.dtype or tensor.shape != piece.shape:
            raise ArchiveError(
                f"holds a {tensor.dtype} of shape {list(tensor.shape)}, and {entry.dtype} of shape "
                f"{list(piece.shape)} is expected"
            )
        member = archive.storage(tensor)
    except (ValueError, OSError) as reason:
        where = {"tensor": entry.name, "file": source.name_of(piece.path), "offset": piece.offset}
        raise DamageError(error(str(reason), rank=piece.rank, **where)) from reason
    itemsize = np.dtype(BITS[entry.dtype]).itemsize
    skipped = tensor.offset * itemsize
    # A checksum of the storage is one of the piece where that is all there is in it.
    whole = skipped == 0 and member.nbytes == piece.elements * itemsize
    return relocated(
        piece,
        member.offset + skipped,
        member.nbytes - skipped,
        tensor.strides,
        member.crc32 if whole else None,
    )
