"""Files of `torch.save`."""

from pathlib import Path
from typing import Any

from tools.ckpt.dtypes import BITS
from tools.ckpt.findings import Finding, UnreadableError, error, note
from tools.ckpt.foreign import foreign_names
from tools.ckpt.pickles import Opaque, StoredTensor, leaves
from tools.ckpt.pieces import Block, Entry, Piece, relocated
from tools.ckpt.roles import role_of
from tools.ckpt.source import Source
from tools.ckpt.torch_zip import TorchArchive

_STEP_NAMES = ("step", "global_step", "global_steps", "iteration", "iter")
_MOST_VALUES = 1000
_LEAVES_PER_BYTE = 4
"""Of a pickle: none would have one for each byte, if it did not repeat parts of itself."""
ZIP_MAGIC = b"PK\x03\x04"


def read_torch_file(path: Path) -> Source:
    """Open a file of `torch.save`; raises `UnreadableError` if its directory cannot be read."""
    source = Source(path, "torch", [], "CRC-32 of each storage", files={path.name})
    archive, tree = add_archive(source, path)
    add_tensors(source, path, archive, tree)
    source.step = _step(source)
    if not isinstance(tree, dict):
        source.facts["holds"] = getattr(tree, "kind", type(tree).__name__)
    return source


def add_archive(source: Source, path: Path) -> tuple[TorchArchive, Any]:
    """Open a file of `torch.save` that is part of `source`; return it, and what it holds.

    Raises `UnreadableError`.
    """
    try:
        archive = TorchArchive(source.pread(path), 0, path.stat().st_size)
        tree, foreign = archive.load()
    except (OSError, ValueError) as reason:
        raise UnreadableError(f"{path} {reason}: it is damaged, or of another format") from reason
    source.findings += foreign_names(foreign, file=source.name_of(path))
    source.blocks += [
        Block(path, member.offset, member.nbytes, member.crc32, key)
        for key, member in archive.members.items()
    ]
    return archive, tree


def add_tensors(source: Source, path: Path, archive: TorchArchive, tree: Any) -> None:
    """Add the tensors of a tree to `source`, and its other values to the facts; raises `UnreadableError`."""
    seen: dict[tuple[Any, ...], str] = {}
    values: dict[str, Any] = source.facts.setdefault("values", {})
    try:
        found = list(leaves(tree, _LEAVES_PER_BYTE * max(archive.members["data.pkl"].nbytes, 1000)))
    except ValueError as reason:
        raise UnreadableError(f"{path} cannot be read ({reason}): it is damaged") from reason
    for key, value in found:
        if isinstance(value, StoredTensor):
            made = _entry(archive, path, key or "tensor", value, seen)
            if isinstance(made, Finding):
                source.findings.append(made)
            else:
                source.entries.append(made)
        elif isinstance(value, Opaque):
            _note_tensor(source, key, value, source.name_of(path))
        elif isinstance(value, (str, int, float, bool)) and len(values) < _MOST_VALUES:
            values[key] = value


def _note_tensor(source: Source, key: str, value: Opaque, file: str) -> None:
    if value.kind.startswith("torch._utils._rebuild"):
        kind = value.kind.rpartition(".")[2].removeprefix("_rebuild_")
        source.findings.append(note(f"is a {kind}, which is not read here", tensor=key, file=file))


def _entry(
    archive: TorchArchive, path: Path, name: str, tensor: StoredTensor, seen: dict[tuple[Any, ...], str]
) -> Entry | Finding:
    try:
        piece = piece_of(archive, path, tensor)
    except ValueError as reason:
        return error(str(reason), tensor=name, file=path.name)
    same = (tensor.storage.key, tensor.offset, tensor.shape, tensor.strides, tensor.dtype)
    tied_to = seen.get(same)
    if tied_to is None:
        seen[same] = name
    role = role_of(name, tensor.dtype)
    return Entry(name, role, tensor.dtype, tensor.shape, (piece,), tied_to=tied_to)


def piece_of(archive: TorchArchive, path: Path, tensor: StoredTensor) -> Piece:
    """Return where a whole tensor lies; raises `ValueError` if it isn't within its storage."""
    member = archive.storage(tensor)
    skipped = tensor.offset * BITS[tensor.dtype].itemsize
    piece = Piece(path, 0, 0, (0,) * len(tensor.shape), tensor.shape)
    return relocated(piece, member.offset + skipped, member.nbytes - skipped, tensor.strides, None)


def _step(source: Source) -> int | None:
    values = source.facts["values"]
    found = (values[name] for name in _STEP_NAMES if isinstance(values.get(name), int))
    return next(found, None)
