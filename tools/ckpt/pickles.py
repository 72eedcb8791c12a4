"""Read pickles without running what somebody may have put into them.

Nothing that a pickle names is imported or called: tensors become a description of where their bytes lie, the few
plain containers become themselves, and everything else becomes an `Opaque` that does nothing. Python's own
unpickler in Python is used, since the one in C takes tens of gigabytes for one flipped bit in a memo index: that one
only reads what has the hash that it was saved with.
"""

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_PLAIN_PACKAGES = ("torch", "numpy", "collections", "pathlib", "argparse", "deepspeed", "megatron", "enum")
"""What checkpoints of training are made of, as far as it is seen; other names are worth telling."""
_HARMLESS = {("_codecs", "encode"), ("copyreg", "_reconstructor")} | {
    (module, name)
    for module in ("builtins", "__builtin__")
    for name in (
        "set",
        "frozenset",
        "bytearray",
        "complex",
        "slice",
        "range",
        "object",
        "list",
        "dict",
        "tuple",
    )
}
_DEEPEST = 64

STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
}


@dataclass(frozen=True)
class Dtype:
    """A type of torch, by its name."""

    name: str


@dataclass(frozen=True)
class Storage:
    """Bytes of tensors, by their key in the archive; `numel` elements of `dtype`."""

    dtype: str
    key: str
    numel: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that was not loaded."""

    storage: Storage
    offset: int
    """In elements."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class Opaque:
    """An object whose class is not known here: what it was made of, without its behaviour."""

    kind = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Opaque":
        """Make one of anything; `__init__` may never be called."""
        self = object.__new__(cls)
        self.args, self.state, self.parts = args, kwargs or None, []
        return self

    args: tuple[Any, ...]
    state: Any
    """What `__setstate__` would have been given."""
    parts: list[Any]
    """What was appended or set."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take anything."""

    def append(self, value: Any) -> None:
        """Keep it."""
        self.parts.append(value)

    def extend(self, values: list[Any]) -> None:
        """Keep them."""
        self.parts.extend(values)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    add = append

    def __setitem__(self, key: Any, value: Any) -> None:
        self.parts.append((key, value))


class Record:
    """As `Opaque`, for a class of which objects are no more than fields with names: there are many of them."""

    kind = ""

    @property
    def state(self) -> dict[str, Any]:
        """The fields."""
        return self.__dict__


class Reader(pickle._Unpickler):
    """An unpickler that cannot call foreign code."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)
        super().__init__(self._data)
        self.foreign: set[str] = set()
        """Names that no training checkpoint needs."""
        self.opaque: set[str] = set()
        """All names that are not known here."""
        self._classes: dict[str, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for `module.name`; nothing is imported."""
        known = _known(module, name)
        if known is not None:
            return known
        full = f"{module}.{name}"
        if module.split(".")[0] not in _PLAIN_PACKAGES and (module, name) not in _HARMLESS:
            self.foreign.add(full)
        self.opaque.add(full)
        if full not in self._classes:
            self._classes[full] = type("Opaque", (Opaque,), {"kind": full})
        return self._classes[full]

    def persistent_load(self, pid: Any) -> Any:
        """Return the description of a storage."""
        kind, storage_type, key, _, numel = pid
        if kind != "storage":
            raise pickle.UnpicklingError(f"asks for a persistent {kind}")
        return Storage(storage_type.name, str(key), int(numel))

    def _build(self) -> None:
        state = self.stack.pop()  # type: ignore[attr-defined]
        if isinstance(self.stack[-1], Opaque):  # type: ignore[attr-defined]
            self.stack[-1].state = state  # type: ignore[attr-defined]

    def _frame(self) -> None:
        (nbytes,) = struct.unpack("<Q", self.read(8))  # type: ignore[attr-defined]
        if nbytes > self._data.getbuffer().nbytes - self._data.tell():
            raise EOFError("it ends too early")
        self._unframer.load_frame(nbytes)  # type: ignore[attr-defined]

    dispatch = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _build, pickle.FRAME[0]: _frame}  # type: ignore[dict-item]


def _known(module: str, name: str) -> Any:
    if module == "collections" and name == "OrderedDict":
        return OrderedDict
    if module == "torch" and name == "Size":
        return tuple
    if module in ("torch", "torch.storage") and name in STORAGES:
        return Dtype(STORAGES[name])
    if module == "torch":
        from tools.ckpt.dtypes import BITS

        return Dtype(name) if name in BITS and name != "object" else None
    return _REBUILDERS.get((module, name))


class _Call:
    """A function that a pickle may call. Has no attributes that it could set."""

    __slots__ = ("__function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__function = function

    def __call__(self, *args: Any) -> Any:
        return self.__function(*args)


def _tensor(storage: Storage, offset: int, size: Any, strides: Any, *rest: Any) -> StoredTensor:
    return StoredTensor(storage, int(offset), _ints(size), _ints(strides), storage.dtype)


def _tensor_with_type(
    storage: Storage, offset: int, size: Any, strides: Any, grad: Any, hooks: Any, dtype: Dtype, *rest: Any
) -> StoredTensor:
    return StoredTensor(storage, int(offset), _ints(size), _ints(strides), dtype.name)


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


_REBUILDERS: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor"): _Call(_tensor),
    ("torch._utils", "_rebuild_tensor_v2"): _Call(_tensor),
    ("torch._utils", "_rebuild_tensor_v3"): _Call(_tensor_with_type),
    ("torch._utils", "_rebuild_parameter"): _Call(lambda data, *rest: data),
    ("torch._utils", "_rebuild_parameter_with_state"): _Call(lambda data, *rest: data),
    ("torch._tensor", "_rebuild_from_type_v2"): _Call(lambda function, kind, args, state: function(*args)),
}


def read_pickle(data: bytes, known: frozenset[str] | None = None) -> tuple[Any, set[str]]:
    """Return what a pickle holds, and foreign names that it asks for: those not in `known`, if that is given.

    Raises `ValueError` with a clause for anything that is no pickle.
    """
    reader = Reader(data)
    try:
        tree = reader.load()
        return tree, reader.foreign if known is None else reader.opaque - known
    except Exception as reason:  # damaged bytes raise anything
        text = str(reason).splitlines()[0] if str(reason) else "it ends too early"
        raise ValueError(f"the pickle is damaged ({type(reason).__name__}: {text})") from reason


def read_intact_pickle(
    data: bytes, known: frozenset[str], records: frozenset[str] = frozenset()
) -> tuple[Any, set[str]]:
    """Do what `read_pickle` does, many times as fast; for bytes that are those that were written, by their hash.

    `records`: those known names of which objects become a `Record`.
    """
    try:
        return _IntactReader(data, known, records).load(), set()
    except Exception:  # it asks for other names than those `known`, or is no pickle: that is to be told
        return read_pickle(data, known)


class _IntactReader(pickle.Unpickler):
    """Knows types, sizes, and the names that it is given; these become classes without behaviour."""

    def __init__(self, data: bytes, known: frozenset[str], records: frozenset[str]) -> None:
        super().__init__(io.BytesIO(data))
        self._classes: dict[str, Any] = {name: type("Opaque", (Opaque,), {"kind": name}) for name in known}
        self._classes |= {name: type("Record", (Record,), {"kind": name}) for name in records}

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for `module.name`; nothing is imported."""
        found = _known(module, name) if module == "torch" else self._classes.get(f"{module}.{name}")
        if found is None:
            raise pickle.UnpicklingError(f"asks for {module}.{name}")
        return found


def leaves(tree: Any, most: int) -> Iterator[tuple[str, Any]]:
    """Yield (keys joined by dots, value) of all that is no container, objects of unknown classes opened.

    Raises `ValueError` for a tree that is too deep, or has more than `most` values and containers: it refers to itself.
    """
    count = 0
    stack: list[tuple[str, Any, int]] = [("", tree, 0)]
    while stack:
        name, value, depth = stack.pop()
        count += 1
        if depth > _DEEPEST or count > most:
            raise ValueError("the pickle refers to itself")
        inner = _children(value)
        if inner is None:
            yield name, value
            continue
        below = [(f"{name}.{key}" if name else str(key), child, depth + 1) for key, child in inner]
        stack.extend(reversed(below))


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if isinstance(value, Opaque):
        own = value.state if isinstance(value.state, dict) else {}
        return [*own.items(), *enumerate(value.parts)] or None
    return None
