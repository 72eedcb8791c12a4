"""Write archives of `torch.save` without torch, in a stream: zip files whose members are stored as they are."""

import io
import math
import pickle
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from tools.ckpt.dtypes import BITS
from tools.ckpt.pickles import STORAGES
from tools.ckpt.pieces import Shape, row_major

_ROOT = "archive"
_ALIGNMENT = 64
"""Of the bytes of each storage, as torch has it: a file that is mapped has its values where they may be used."""
_LOCAL_HEADER_BYTES, _ZIP64_BYTES, _EXTRA_HEADER_BYTES = 30, 20, 4
_LARGE_BYTES = 1 << 30
"""From here on a member has the fields for files beyond 4 GB. zipfile would choose by itself, but not say."""


@dataclass(frozen=True)
class Stored:
    """A tensor that fills a storage by itself."""

    key: str
    """Of its storage."""
    dtype: str
    shape: Shape


def write_archive(
    file: BinaryIO, tree: Any, storages: Iterable[tuple[str, int, Iterator[NDArray[np.uint8]]]]
) -> dict[str, int]:
    """Append an archive to `file`, which can seek; return where in it the bytes of each storage begin, by key.

    `tree`: dicts with `Stored` at their ends, or one. `storages`: (key, bytes, the bytes in parts), each used before
    the next is asked for.
    """
    begins: dict[str, int] = {}
    with zipfile.ZipFile(_Rest(file), "w", zipfile.ZIP_STORED) as archive:  # type: ignore[call-overload]
        _write(archive, "data.pkl", _pickled(tree))
        _write(archive, ".format_version", b"1")
        _write(archive, ".storage_alignment", str(_ALIGNMENT).encode())
        _write(archive, "byteorder", b"little")
        for key, nbytes, parts in storages:
            info = zipfile.ZipInfo(f"{_ROOT}/data/{key}")
            large = nbytes >= _LARGE_BYTES
            begin = archive.fp.tell() + _LOCAL_HEADER_BYTES + len(info.filename) + _EXTRA_HEADER_BYTES
            padding = -(begin + (_ZIP64_BYTES if large else 0)) % _ALIGNMENT
            info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
            info.file_size = nbytes
            with archive.open(info, "w", force_zip64=large) as member:
                begins[key] = archive.fp.tell()
                for part in parts:
                    member.write(part)
        _write(archive, "version", b"3\n")
    return begins


def _write(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    archive.writestr(zipfile.ZipInfo(f"{_ROOT}/{name}"), content)


class _Rest:
    """The rest of a file, from where it is now on, as a file: places in an archive count from its own beginning."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._begin = file, file.tell()
        self.write, self.flush = file.write, file.flush

    def tell(self) -> int:
        return self._file.tell() - self._begin

    def seek(self, offset: int) -> int:
        return self._file.seek(self._begin + offset) - self._begin


@dataclass(frozen=True)
class _Name:
    """Something that whoever unpickles imports."""

    module: str
    name: str


@dataclass(frozen=True)
class _Call:
    """Something that whoever unpickles calls."""

    function: _Name
    arguments: tuple[Any, ...]


_TYPES = {dtype: name for name, dtype in STORAGES.items() if name != "UntypedStorage"}


class _Pickler(pickle._Pickler):
    """Writes names and calls of torch's functions, which need not be here."""

    def persistent_id(self, obj: Any) -> Any:
        """Say which storage it is; see pickle."""
        if not isinstance(obj, _Storage):
            return None
        return ("storage", obj.kind, obj.key, "cpu", obj.numel)

    def _name(self, name: _Name) -> None:
        self.write(f"c{name.module}\n{name.name}\n".encode())  # type: ignore[attr-defined]

    def _call(self, call: _Call) -> None:
        self.save(call.function)  # type: ignore[attr-defined]
        self.save(call.arguments)  # type: ignore[attr-defined]
        self.write(pickle.REDUCE)  # type: ignore[attr-defined]

    def _tensor(self, tensor: Stored) -> None:
        hooks = _Call(_Name("collections", "OrderedDict"), ())
        form = (0, tensor.shape, row_major(tensor.shape), False, hooks)
        elements = math.prod(tensor.shape)
        if tensor.dtype in _TYPES:
            storage = _Storage(_Name("torch", _TYPES[tensor.dtype]), tensor.key, elements)
            self._call(_Call(_Name("torch._utils", "_rebuild_tensor_v2"), (storage, *form)))
            return
        nbytes = elements * BITS[tensor.dtype].itemsize
        storage = _Storage(_Name("torch.storage", "UntypedStorage"), tensor.key, nbytes)
        arguments = (storage, *form, _Name("torch", tensor.dtype))
        self._call(_Call(_Name("torch._utils", "_rebuild_tensor_v3"), arguments))

    dispatch = {**pickle._Pickler.dispatch, _Name: _name, _Call: _call, Stored: _tensor}  # type: ignore[dict-item]


@dataclass(frozen=True)
class _Storage:
    """Bytes of a tensor, by their key."""

    kind: _Name
    key: str
    numel: int


def _pickled(tree: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(tree)
    return buffer.getvalue()
