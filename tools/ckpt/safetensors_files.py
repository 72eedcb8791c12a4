"""safetensors: one file, or several with an index, as Hugging Face writes them.

The format has no checksum: sizes and the header are all that can be checked.
"""

import json
import math
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from tools.ckpt.dtypes import BITS
from tools.ckpt.findings import Finding, UnreadableError, error, note
from tools.ckpt.pieces import Entry, Piece
from tools.ckpt.roles import role_of
from tools.ckpt.source import Source

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_MOST_HEADER_BYTES = 100 << 20
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "BOOL": "bool",
    **{f"I{width}": f"int{width}" for width in (8, 16, 32, 64)},
    **{f"U{width}": f"uint{width}" for width in (8, 16, 32, 64)},
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "C64": "complex64",
}

_PACKED = ("F4", "F6_E2M3", "F6_E3M2")
"""Types of which several values share a byte."""


def read_safetensors_file(path: Path) -> Source:
    """Open one file; raises `UnreadableError` if its header cannot be read."""
    entries, findings, facts = _entries(path)
    source = Source(path, "safetensors", entries, None, findings=findings, facts=facts, files={path.name})
    source.findings.append(_no_hash())
    return source


def read_safetensors_folder(folder: Path) -> Source:
    """Open a folder of files, with an index or without; raises `UnreadableError` if nothing in it can be read."""
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    source = Source(folder, "safetensors", [], None, findings=[_no_hash()])
    for path in paths:
        try:
            entries, findings, _ = _entries(path)
        except UnreadableError as reason:
            if len(paths) == 1:
                raise
            source.findings.append(error(f"cannot be read ({reason})", file=path.name))
            continue
        source.entries += entries
        source.findings += findings
        source.files.add(path.name)
    source.findings += _twice(source)
    for index in sorted(folder.glob(f"*{INDEX_SUFFIX}")):
        source.findings += _against_index(source, index)
    config = _json(folder / "config.json")
    if isinstance(config, dict):
        source.format = "huggingface"
        kept = ("model_type", "architectures", "hidden_size", "num_hidden_layers", "tie_word_embeddings")
        source.facts["config.json"] = {name: config[name] for name in kept if name in config}
    return source


def _no_hash() -> Finding:
    return note("safetensors has no checksum: a changed value cannot be told from a right one")


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _entries(path: Path) -> tuple[list[Entry], list[Finding], dict[str, Any]]:
    try:
        size = path.stat().st_size
        header, data = _header(path, size)
    except (OSError, ValueError, RecursionError) as reason:
        raise UnreadableError(f"{path} cannot be read as safetensors ({reason}): it is damaged") from reason
    entries: list[Entry] = []
    findings: list[Finding] = []
    facts = header.pop("__metadata__", {})
    for name, meta in header.items():
        made = _entry(path, name, meta, data)
        if isinstance(made, Finding):
            findings.append(made)
        else:
            entries.append(made)
    findings += _gaps(path, entries, data, size, bool(findings))
    return entries, findings, {"metadata": facts} if facts else {}


def _header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    """Return the header and where data begin; raises `ValueError` with a clause."""
    with path.open("rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 2 <= length <= min(_MOST_HEADER_BYTES, size - 8):
            raise ValueError(f"its header should have {length} bytes, the file has {size}")
        raw = file.read(length)
    pairs: list[list[tuple[str, Any]]] = []

    def keep(found: list[tuple[str, Any]]) -> dict[str, Any]:
        pairs.append(found)
        return dict(found)

    header = json.loads(raw.decode(), object_pairs_hook=keep)
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    if len(header) != len(pairs[-1]):
        raise ValueError("its header names a tensor twice")
    return header, 8 + length


def _entry(path: Path, name: str, meta: Any, data: int) -> Entry | Finding:
    try:
        dtype, shape, (begin, end) = meta["dtype"], tuple(meta["shape"]), meta["data_offsets"]
        if not all(type(value) is int and 0 <= value < 1 << 62 for value in (*shape, begin, end)):
            raise ValueError("sizes")
    except (KeyError, TypeError, ValueError):
        return error("its entry in the header is damaged", tensor=name, file=path.name)
    if dtype not in DTYPES and dtype not in _PACKED:
        return error(f"is of the type {dtype!r:.20}, which there is not", tensor=name, file=path.name)
    if dtype not in DTYPES:
        return note(f"is of the type {dtype}, which is not known here", tensor=name, file=path.name)
    own = DTYPES[dtype]
    if end - begin != math.prod(shape) * BITS[own].itemsize:
        text = f"has {end - begin} bytes for {dtype} of shape {list(shape)}"
        return error(text, tensor=name, file=path.name, offset=data + begin)
    piece = Piece(path, data + begin, end - begin, (0,) * len(shape), shape)
    return Entry(name, role_of(name, own), own, shape, (piece,))


def _gaps(path: Path, entries: list[Entry], data: int, size: int, partial: bool) -> Iterator[Finding]:
    """The tensors must fill the file, one after the other."""
    spans = sorted((entry.pieces[0].offset, entry.pieces[0].nbytes, entry.name) for entry in entries)
    for (offset, nbytes, name), (begin, _, other) in pairwise([(data, 0, ""), *spans]):
        if begin < offset + nbytes:
            yield error(f"overlaps {name}", tensor=other, file=path.name, offset=begin)
        elif begin > offset + nbytes and not partial:
            text = f"{begin - offset - nbytes} bytes before it belong to no tensor"
            yield error(text, tensor=other, file=path.name, offset=offset + nbytes)
    end = max((offset + nbytes for offset, nbytes, _ in spans), default=data)
    if size > end and not partial:
        yield error(f"{size - end} bytes at its end belong to no tensor", file=path.name, offset=end)


def _twice(source: Source) -> Iterator[Finding]:
    seen: dict[str, str] = {}
    for entry in source.entries:
        file = source.name_of(entry.pieces[0].path)
        if entry.name in seen:
            yield error(f"is in {seen[entry.name]} too", tensor=entry.name, file=file)
        seen[entry.name] = file


def _against_index(source: Source, index: Path) -> Iterator[Finding]:
    """The index says which tensor lies in which file."""
    where = _json(index)
    listed = where.get("weight_map") if isinstance(where, dict) else None
    if not isinstance(listed, dict):
        yield error("cannot be read", file=index.name)
        return
    found = {entry.name: source.name_of(entry.pieces[0].path) for entry in source.entries}
    for file in sorted({str(file) for file in listed.values()} - source.files):
        if not (source.path / file).is_file():
            yield error("is missing", file=file)
    for name, file in listed.items():
        if name not in found:
            yield error("is missing", tensor=name, file=str(file))
        elif found[name] != file:
            yield error(f"is in {found[name]}, the index says {file}", tensor=name, file=index.name)
    # Another set of files, with an index of its own, may lie beside this one.
    own = set(listed.values())
    for name in found:
        if name not in listed and found[name] in own:
            yield error("is not in the index", tensor=name, file=found[name])
    others = {file for other in source.path.glob(f"*{INDEX_SUFFIX}") for file in _files_of(other)}
    for file in sorted(source.files - others):
        yield error("belongs to no index: left from another save perhaps", file=file)


def _files_of(index: Path) -> set[str]:
    where = _json(index)
    listed = where.get("weight_map") if isinstance(where, dict) else None
    return {str(file) for file in listed.values()} if isinstance(listed, dict) else set()
