"""Our steps: torch's distributed checkpoint, with a manifest and (since format 2) hashes beside it.

`digests/rank_R.json` has the hash of each slice that rank R wrote, `manifest.json` those of whole tensors.
"""

import json
import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import xxhash

from contract.run_folder import STEP_FOLDER
from tools.ckpt.dcp import METADATA, read_dcp
from tools.ckpt.findings import DamageError, Finding, UnreadableError, error, note
from tools.ckpt.pieces import Entry, Piece
from tools.ckpt.source import Source
from tools.ckpt.stored import Stored, check_leftovers, lacks
from train.checkpoint.compress.step import leftovers
from train.checkpoint.manifest import NAME as MANIFEST
from train.checkpoint.manifest import Manifest, says_how_stored, sealed

DIGESTS = "digests"
_NEWEST_FORMAT = 2

SliceKey = tuple[str, tuple[int, ...], tuple[int, ...]]
_Told = tuple[str | None, int | None]
"""Of a slice: its hash, and where in its file its values begin."""


def read_ours(folder: Path, instead: dict[str, Any] | None = None) -> Source:
    """Open a step with a manifest; raises `UnreadableError` if its directory cannot be read.

    `instead`: fields of another manifest than that of the folder.
    """
    try:
        manifest = instead or json.loads((folder / MANIFEST).read_text())
        parts = {name: manifest.get(name, {}) for name in ("model", "data", "files", "layout")}
        step, version = manifest["step"], manifest.get("format", 1)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as reason:
        raise UnreadableError(f"{MANIFEST} of {folder} cannot be read ({reason}): it is damaged") from reason
    if not isinstance(step, int) or not all(isinstance(part, dict) for part in parts.values()):
        raise UnreadableError(f"{MANIFEST} of {folder} is damaged: put the file back")
    if version not in range(1, _NEWEST_FORMAT + 1):
        raise UnreadableError(
            f"{folder} has the format {version}, this version reads up to {_NEWEST_FORMAT}: use a newer one"
        )
    source = read_dcp(folder, manifest.get("metadata"))
    _check_manifest(source, manifest)
    _check_metadata(source, manifest.get("metadata"))
    source.format, source.step = f"trierarch {version}", step
    source.layout = parts["layout"]
    source.facts |= {name: parts[name] for name in ("model", "data")}
    told = set(manifest) - {"tensors", "digests", "files", "model", "data", "layout"}
    source.facts["manifest"] = {name: manifest[name] for name in sorted(told)}
    source.facts["sizes"] = parts["files"]
    _add_stored(source, manifest)
    source.facts["steps"] = _steps(source, step)
    if version >= 2:
        _add_hashes(source, manifest)
    else:
        source.findings.append(note("is of format 1: no hashes, its slices have a CRC-32"))
    return source


def _check_manifest(source: Source, manifest: dict[str, Any]) -> None:
    strange = sorted(set(manifest) - {one.name for one in fields(Manifest)})
    if strange:
        source.findings.append(error(f"has the field {strange[0]!r:.40}, which is not known", file=MANIFEST))
    if manifest.get("xxh3") not in (None, sealed(manifest)):
        source.findings.append(error("does not have the hash that it was saved with", file=MANIFEST))


def _check_metadata(source: Source, hexed: object) -> None:
    if hexed is not None and xxhash.xxh3_128_hexdigest((source.path / METADATA).read_bytes()) != hexed:
        source.findings.append(error(f"does not have the hash that {MANIFEST} says", file=METADATA))


def _steps(source: Source, step: int) -> dict[str, int]:
    told = {MANIFEST: step}
    if named := STEP_FOLDER.match(source.path.name):
        told["the folder's name"] = int(named[1])
    entry = next((one for one in source.entries if one.name == "progress.step"), None)
    if entry is not None and entry.dtype == "int64" and entry.shape == ():
        # That it cannot be read is told by whoever looks at files and bytes.
        with suppress(DamageError):
            told["progress.step"] = int(source.rows(entry, 0, 1))
    return told


def _add_stored(source: Source, told: dict[str, Any]) -> None:
    """See to how the step is stored, and what else lies in its folder."""
    files = told.get("files", {})
    names = ("metadata", "digests", "compressed", "parent", "parent_identity", "rounded")
    given = {name: told[name] for name in names if name in told}
    manifest = Manifest(source.facts["manifest"]["step"], 0, {}, {}, files, **given)
    if not says_how_stored(manifest):
        source.findings.append(error("does not say how the step is stored", file=MANIFEST))
        source.facts["manifest"] |= {"compressed": {}, "parent": None, "rounded": {}}
        return
    if manifest.compressed:
        source.stored = Stored(source.path, manifest)
    source.lacks = lacks(source.path, manifest)
    if source.lacks is not None:
        source.findings.append(error(f"cannot be decoded: {source.lacks}"))
    source.findings += check_leftovers(source.path, manifest)
    source.findings += _strays(source.path, manifest)


def _strays(folder: Path, manifest: Manifest) -> Iterator[Finding]:
    known = {name.partition("/")[0] for name in manifest.files} | {MANIFEST, DIGESTS, METADATA}
    strays = sorted(path.name for path in folder.iterdir() if path.name not in known)
    # In this order: while the step is stored anew, files come and go.
    left = leftovers(folder, manifest) if strays else []
    for name in strays:
        if name not in left and not name.endswith(".distcp") and os.path.lexists(folder / name):
            yield error(f"is not of this step: {MANIFEST} does not list it", file=name)


def _add_hashes(source: Source, manifest: dict[str, Any]) -> None:
    """Give pieces and entries the hashes that they should have."""
    source.checked_by = "xxh3-128 of each slice and of each tensor"
    try:
        found = [_slices_of(source, name, hexed) for name, hexed in manifest["digests"].items()]
        slices = {key: told for one in found for key, told in (one or {}).items()}
        tensors: dict[str, dict[str, Any]] = dict(manifest["tensors"])
        # A place within an archive is as good as the hash of the bytes of the archive.
        sure = {source.root / name for name in source.rests}
        entries = [
            _hashed(source, entry, tensors.pop(entry.name, None), slices, sure) for entry in source.entries
        ]
    except (KeyError, TypeError, AttributeError, ValueError) as reason:
        source.findings.append(error(f"is damaged ({type(reason).__name__}: {reason})", file=MANIFEST))
        return
    source.entries = entries
    source.findings += [
        error(f"is in {MANIFEST} and not in the checkpoint", tensor=name) for name in sorted(tensors)
    ]
    if None in found:
        return  # Said already; all its slices would follow.
    source.findings += [
        error(f"its part at {list(piece.start)} has no hash", tensor=entry.name, rank=piece.rank)
        for entry in entries
        for piece in entry.pieces
        if piece.xxh3 is None
    ]
    source.findings += [
        error(f"has a hash for a part at {list(start)} that is not in the checkpoint", tensor=name)
        for name, start, _ in sorted(slices)
    ]


def _slices_of(source: Source, name: str, hexed: str) -> dict[SliceKey, _Told] | None:
    """What a file of `digests` says of slices; None, and a finding, if it is damaged.

    Those of the rest of files go to the source.
    """
    file = f"{DIGESTS}/{name}"
    try:
        raw = (source.path / DIGESTS / Path(name).name).read_bytes()
    except OSError as reason:
        source.findings.append(error(f"cannot be read ({reason.strerror})", file=file))
        return None
    if xxhash.xxh3_128_hexdigest(raw) != hexed:
        source.findings.append(error(f"does not have the hash that {MANIFEST} says", file=file))
        return None
    told = json.loads(raw)
    source.rests |= {str(name): str(rest) for name, rest in told.get("rest", {}).items()}
    return {
        (one["tensor"], tuple(one["start"]), tuple(one["shape"])): (str(one["xxh3"]), one.get("offset"))
        for one in told["slices"]
    }


def _hashed(
    source: Source,
    entry: Entry,
    saved: dict[str, Any] | None,
    slices: dict[SliceKey, _Told],
    sure: Collection[Path],
) -> Entry:
    pieces = []
    for piece in entry.pieces:
        hexed, values = slices.pop((entry.name, piece.start, piece.shape), (None, None))
        if values is not None and not _is_within(piece, values, entry.nbytes_of(piece)):
            text = f"its part at {list(piece.start)} is said to begin at {values!r:.40}, which is not in its archive"
            where = {"file": source.name_of(piece.path), "offset": piece.offset, "rank": piece.rank}
            source.findings.append(error(text, tensor=entry.name, **where))
            values = None
        pieces.append(piece._replace(xxh3=hexed, values=values if piece.path in sure else None))
    if saved is None:
        source.findings.append(error(f"is not in {MANIFEST}", tensor=entry.name))
    elif (saved["dtype"], tuple(saved["shape"])) != (entry.dtype, entry.shape):
        text = f"is {entry.dtype} {list(entry.shape)}, {MANIFEST} says {saved['dtype']} {saved['shape']}"
        source.findings.append(error(text, tensor=entry.name))
    return entry._replace(pieces=tuple(pieces), xxh3=None if saved is None else str(saved["xxh3"]))


def _is_within(archive: Piece, values: object, nbytes: int) -> bool:
    end = archive.offset + archive.nbytes
    return isinstance(values, int) and archive.offset <= values <= values + nbytes <= end
