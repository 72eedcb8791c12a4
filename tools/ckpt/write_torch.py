"""Write one file that `torch.load(..., weights_only=True)` reads."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.ckpt.convert_read import RawBytes, Tensor
from tools.ckpt.write_archive import Stored, write_archive

_PARTS = ("model", "optimizer", "progress", "rng", "precision")
"""Of a whole state of training, as the trainer has it."""


def write_torch(path: Path, tensors: Sequence[Tensor]) -> None:
    """Write `tensors` as a dict, nested where they are a state of training; tied ones share a storage.

    Raises OSError.
    """
    paths = paths_of([one.name for one in tensors])
    keys: dict[str, str] = {}
    tree: dict[str, Any] = {}
    for number, one in enumerate(tensors):
        keys[one.name] = str(number) if one.tied_to is None else keys[one.tied_to]
        inner = tree
        for key in paths[one.name][:-1]:
            inner = inner.setdefault(key, {})
        inner[paths[one.name][-1]] = Stored(keys[one.name], one.dtype, one.shape)
    with path.open("xb") as file:
        write_archive(file, tree, _storages(tensors, keys))


def _storages(
    tensors: Iterable[Tensor], keys: dict[str, str]
) -> Iterator[tuple[str, int, Iterator[RawBytes]]]:
    return ((keys[one.name], one.nbytes, one.stream()) for one in tensors if one.tied_to is None)


def paths_of(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the keys under which each tensor lies in a tree.

    A state of training is one by its parts, as the trainer has it: `load_state_dict` takes `tree["model"]`. Anything
    else is flat.
    """
    found = {name: _path(name) for name in names}
    if not any(name.startswith("optimizer.") for name in names) or _crossing(found.values()):
        return {name: (name,) for name in names}
    return found


def _path(name: str) -> tuple[str, ...]:
    part, _, rest = name.partition(".")
    if part not in _PARTS or not rest:
        return (name,)
    outer, _, last = rest.rpartition(".")
    return (part, rest) if part == "model" or not outer else (part, outer, last)


def _crossing(paths: Iterable[tuple[str, ...]]) -> bool:
    """Whether something would be a tensor and a dict at once."""
    listed = list(paths)
    inner = {path[:depth] for path in listed for depth in range(1, len(path))}
    return any(path in inner for path in listed)
