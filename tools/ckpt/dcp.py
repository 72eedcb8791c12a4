"""Torch's distributed checkpoints, and ours and Megatron's, which are such with files beside them."""

import json
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import xxhash

from tools.ckpt.findings import Finding, UnreadableError, error, note
from tools.ckpt.pickles import Dtype, Opaque, Record, read_intact_pickle, read_pickle
from tools.ckpt.pieces import Entry, Piece
from tools.ckpt.roles import role_of
from tools.ckpt.source import Source
from tools.ckpt.torch_files import add_archive, add_tensors

METADATA = ".metadata"
_MEGATRON_COMMON = "common.pt"
_MEGATRON_STEP = re.compile(r"iter_(\d+)")
_RANK_FILE = re.compile(r"__(\d+)_\d+\.distcp")

_TORCH = "torch.distributed.checkpoint"
_KNOWN = frozenset(
    [
        *(f"{_TORCH}.metadata.{kind}StorageMetadata" for kind in ("Bytes", "Chunk", "Tensor")),
        *(f"{_TORCH}.metadata.{kind}" for kind in ("Metadata", "MetadataIndex", "StorageMeta")),
        *(f"{_TORCH}.metadata.{kind}" for kind in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
        # Of a save that Megatron repeats without planning anew.
        *(f"{_TORCH}.planner.{kind}" for kind in ("SavePlan", "WriteItem", "WriteItemType")),
        *(f"{_TORCH}.planner.{kind}WriteData" for kind in ("Tensor", "BytesIO")),
        f"{_TORCH}.filesystem._StorageInfo",
        "torch.serialization._get_layout",
        *(f"pathlib.{kind}" for kind in ("Path", "PosixPath", "PurePosixPath")),
    ]
)
"""What `.metadata` is made of, beside types and sizes."""
_RECORDS = frozenset(
    [
        *(f"{_TORCH}.metadata.{kind}" for kind in ("ChunkStorageMetadata", "MetadataIndex")),
        f"{_TORCH}.filesystem._StorageInfo",
    ]
)
"""Those of which there is one for each slice."""


def read_dcp(folder: Path, xxh3: object = None) -> Source:
    """Open a folder with `.metadata`; raises `UnreadableError` if that cannot be read.

    `xxh3`: the hash that this file should have, where it is known; it is not compared, but for what may be spared.
    """
    try:
        data = (folder / METADATA).read_bytes()
        intact = xxh3 is not None and xxhash.xxh3_128_hexdigest(data) == xxh3
        tree, foreign = read_intact_pickle(data, _KNOWN, _RECORDS) if intact else read_pickle(data, _KNOWN)
        fields = _fields(tree, "Metadata")
        tensors, findings = _tensors(folder, fields)
    except FileNotFoundError as reason:
        raise UnreadableError(f"{folder} has no {METADATA}: it was never finished, or lost it") from reason
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as reason:
        raise UnreadableError(
            f"{METADATA} of {folder} cannot be read ({_clause(reason)}): the folder is damaged, or is none of "
            "torch's distributed checkpoints"
        ) from reason
    foreign = {name for name in foreign if not name.startswith("megatron.core.")}
    if foreign:
        findings.append(
            error(f"asks for {', '.join(sorted(foreign))}, which no checkpoint needs", file=METADATA)
        )
    source = Source(folder, "dcp", tensors, "CRC-32 of each slice", findings=findings)
    paths = {piece.path for entry in tensors for piece in entry.pieces}
    source.files = {METADATA} | {source.name_of(path) for path in paths}
    megatron = _json(folder / "metadata.json")
    if isinstance(megatron, dict) and "sharded_backend" in megatron:
        _add_megatron(source)
    source.findings += _orphans(source)
    return source


def _clause(reason: Exception) -> str:
    text = str(reason).splitlines()[0] if str(reason) else ""
    return (
        text
        if isinstance(reason, (ValueError, OSError)) and text
        else f"{type(reason).__name__} {text}".strip()
    )


def _add_megatron(source: Source) -> None:
    """What is the same on all ranks lies in a file of `torch.save`: the iteration, the arguments."""
    source.format = "megatron torch_dist"
    path = source.path / _MEGATRON_COMMON
    source.files.add(path.name)
    if not path.is_file():
        source.findings.append(error("is missing", file=path.name))
        return
    archive, tree = add_archive(source, path)
    add_tensors(source, path, archive, tree)
    iteration = source.facts["values"].get("iteration")
    told = {f"iteration in {path.name}": iteration} if isinstance(iteration, int) else {}
    if named := _MEGATRON_STEP.fullmatch(source.path.name):
        told["the folder's name"] = int(named[1])
    source.facts["steps"] = told
    source.step = next(iter(told.values()), None)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _fields(value: Any, kind: str) -> dict[str, Any]:
    """Fields of a dataclass of torch's metadata."""
    if (
        not isinstance(value, Opaque | Record)
        or not value.kind.endswith(f".{kind}")
        or not isinstance(value.state, dict)
    ):
        raise ValueError(f"it holds a {getattr(value, 'kind', type(value).__name__)} in place of a {kind}")
    return value.state


def _tensors(folder: Path, fields: dict[str, Any]) -> tuple[list[Entry], list[Finding]]:
    places: dict[tuple[str, tuple[int, ...] | None], dict[str, Any]] = {}
    for index, storage in fields["storage_data"].items():
        key = _fields(index, "MetadataIndex")
        offset = key.get("offset")
        place = (str(key["fqn"]), None if offset is None else _sizes(offset))
        places[place] = _fields(storage, "_StorageInfo")
    findings: list[Finding] = []
    entries: list[Entry] = []
    made: Iterable[Entry | Finding]
    for name, meta in fields["state_dict_metadata"].items():
        kind = meta.kind.rpartition(".")[2]
        if kind == "BytesStorageMetadata":
            made = _bytes_entry(folder, str(name), places.pop((name, None), None))
        else:
            made = _tensor_entry(folder, str(name), _fields(meta, "TensorStorageMetadata"), places)
        for one in made:
            if isinstance(one, Entry):
                entries.append(one)
            else:
                findings.append(one)
    findings += [
        error("lies in a file and is no tensor's part", tensor=name, file=str(place.get("relative_path")))
        for (name, _), place in places.items()
    ]
    return entries, findings


def _bytes_entry(folder: Path, name: str, place: dict[str, Any] | None) -> list[Entry | Finding]:
    if place is None:
        return [error("is listed and lies in no file", tensor=name)]
    path, offset, nbytes = _place(folder, place)
    piece = Piece(path, offset, nbytes, (0,), (nbytes,), rank=_rank(path))
    return [Entry(name, role_of(name, "object"), "object", (nbytes,), (piece,))]


def _tensor_entry(
    folder: Path, name: str, meta: dict[str, Any], places: dict[Any, dict[str, Any]]
) -> Iterator[Entry | Finding]:
    properties = meta["properties"].state
    dtype, shape = (
        properties[0] if isinstance(properties, tuple) else properties["dtype"],
        _sizes(meta["size"]),
    )
    if not isinstance(dtype, Dtype):
        yield note(f"is of a type that is not known here ({getattr(dtype, 'kind', dtype)})", tensor=name)
        return
    pieces = []
    for chunk in meta["chunks"]:
        box = _fields(chunk, "ChunkStorageMetadata")
        start, size = _sizes(box["offsets"]), _sizes(box["sizes"])
        place = places.pop((name, start), None)
        if place is None:
            yield error(f"its part at {list(start)} lies in no file", tensor=name)
            continue
        if place.get("transform_descriptors"):
            yield note(f"is stored transformed by {place['transform_descriptors']}", tensor=name)
            continue
        path, offset, nbytes = _place(folder, place)
        pieces.append(Piece(path, offset, nbytes, start, size, packed=True, rank=_rank(path)))
    yield Entry(name, role_of(name, dtype.name), dtype.name, shape, tuple(pieces))


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not all(
        isinstance(value, int) and 0 <= value < 1 << 62 for value in values
    ):
        raise ValueError(f"it has {values!r:.60} for a size")
    return values


def _place(folder: Path, place: dict[str, Any]) -> tuple[Path, int, int]:
    offset, nbytes = _sizes((place["offset"], place["length"]))
    return _file(folder, place["relative_path"]), offset, nbytes


@lru_cache(maxsize=4096)
def _file(folder: Path, name: object) -> Path:
    if not isinstance(name, str) or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"it names the file {name!r:.60}")
    return folder / name


@lru_cache(maxsize=4096)
def _rank(path: Path) -> int | None:
    found = _RANK_FILE.fullmatch(path.name)
    return int(found[1]) if found else None


def _orphans(source: Source) -> Iterator[Finding]:
    for path in sorted(source.path.glob("*.distcp")):
        if path.name not in source.files:
            text = "belongs to no tensor: left from another save, of more ranks perhaps"
            yield error(text, file=path.name, rank=_rank(path))
