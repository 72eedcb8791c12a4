"""Compress the files of a published step in place, and bring the plain ones back.

A compressed file is written beside the plain one and read back. What counts is the manifest: one replacement of it
makes the new files the step's, and the old ones leftovers. Whenever this ends, the step is whole.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from train.checkpoint.compress.container import (
    BLOCK_BYTES,
    Container,
    ContainerWriter,
    ReadParent,
    Region,
    parent_block,
)
from train.checkpoint.compress.files import StepFiles
from train.checkpoint.compress.methods import Method, encode
from train.checkpoint.compress.rounding import Bytes
from train.checkpoint.digests import Box
from train.checkpoint.errors import DamagedError
from train.checkpoint.manifest import NAME, TEMPORARY, Manifest
from train.durable import drop_from_memory, sync_folder

PLAIN_SUFFIX = ".distcp"
_MARK = ".z"
"""Followed by a number: a file that is compressed anew must not take the name of the one that counts."""
_SAMPLES = 4
_SAMPLE_BYTES = 64 << 10
_WINDOW_BYTES = 4 << 20
_ROUNDED_ITEMSIZES = (2, 4)


@dataclass(frozen=True)
class Place:
    """Where the values of a slice lie in a plain file."""

    file: str
    begin: int
    nbytes: int
    itemsize: int
    xxh3: str | None = None
    """The hash that they should have."""


Places = Mapping[tuple[str, Box], Place]
"""By the slice's tensor and where it begins in it."""


@dataclass(frozen=True)
class Parent:
    """A step that another may be compared with."""

    folder: Path
    manifest: Manifest
    places: Places


@dataclass(frozen=True)
class Gain:
    """What has become of one slice."""

    tensor: str
    """"" for what lies between slices."""
    method: Method
    nbytes: int
    stored_bytes: int


@dataclass(frozen=True)
class Compressed:
    """A file that was written beside the plain one, and does not count yet."""

    name: str
    """Of the plain file."""
    file: str
    nbytes: int
    xxh3: str
    gains: list[Gain]


def plain_names(manifest: Manifest) -> list[str]:
    """Names of the step's files that hold tensors, as they are when none is compressed."""
    plain = {name for name in manifest.files if name.endswith(PLAIN_SUFFIX)}
    return sorted(plain | set(manifest.compressed))


def compress_file(
    folder: Path,
    manifest: Manifest,
    name: str,
    places: Places,
    parent: Parent | None,
    check: Callable[[], None] = lambda: None,
) -> Compressed:
    """Write the compressed form of a step's file `name` beside it, durably, and read it back.

    `places`: of the slices in it, those in other files are passed over. Each slice is stored in the way that gains
    most, as samples of it tell; `parent` is compared with where it has the same slice. `check` is called every now and
    then: what it raises ends this, and leaves nothing. Raises `DamagedError`, or OSError.
    """
    target = _new_file(folder, manifest, name)
    with closing(StepFiles(folder, manifest)) as source:
        other = None if parent is None else StepFiles(parent.folder, parent.manifest)
        try:
            regions = _regions(source, name, places, parent, other, bool(manifest.rounded))
            with target.open("wb") as file:
                writer = ContainerWriter(file)
                gains = []
                for tensor, region, expected in regions:
                    stored, found = writer.add(
                        region, _reader(source, name, check), None if other is None else other.read_into
                    )
                    # What is stored anew hides what was there: damage would never be found again.
                    if expected not in (None, found):
                        raise DamagedError(f"a slice of {tensor} in {name} is not what was written")
                    gains.append(Gain(tensor, region.method, region.nbytes, stored))
                writer.finish()
                file.flush()
                os.fsync(file.fileno())
            drop_from_memory(target)
            read_parent = None if other is None else other.read_into
            _compare(_reader(source, name, check), source.size(name), target, read_parent)
        except BaseException:
            target.unlink(missing_ok=True)
            raise
        finally:
            if other is not None:
                other.close()
    return Compressed(name, target.name, target.stat().st_size, writer.hexdigest, gains)


def restore_file(folder: Path, manifest: Manifest, name: str, target: Path) -> None:
    """Write a file of a step to `target` as it was before it was compressed, durably. Raises as `compress_file`."""
    with closing(StepFiles(folder, manifest)) as source, target.open("wb") as file:
        for begin, size in _windows(source.size(name)):
            values = np.empty(size, np.uint8)
            source.read_into(name, begin, values)
            file.write(memoryview(values))  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    drop_from_memory(target)


def commit_compressed(
    folder: Path, manifest: Manifest, made: Sequence[Compressed], parent: Manifest | None
) -> Manifest:
    """Make compressed files, one for each plain one, those that count; return the new manifest.

    Raises `DamagedError`, or OSError. Whoever calls it holds the lock, see `locked_folder`.
    """
    assert [one.name for one in made] == plain_names(manifest)
    for one in made:
        if (folder / one.file).stat().st_size != one.nbytes:
            raise DamagedError(f"{one.file} is not what was written")
    needs = any(gain.method.needs_parent for one in made for gain in one.gains)
    kept = {name: size for name, size in manifest.files.items() if name not in _tensor_files(manifest)}
    new = replace(
        manifest,
        files=dict(sorted((kept | {one.file: one.nbytes for one in made}).items())),
        compressed={one.name: {"file": one.file, "xxh3": one.xxh3} for one in made},
        parent=f"step_{parent.step}" if parent is not None and needs else None,
        parent_identity=parent.identity if parent is not None and needs else None,
    )
    return _commit(folder, new)


def commit_plain(folder: Path, manifest: Manifest) -> Manifest:
    """Make the plain files, which were all written again, those that count; return the new manifest."""
    return _commit(folder, plain_manifest(folder, manifest))


def plain_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """What `commit_plain` makes of a manifest; `folder` has the plain files."""
    kept = {name: size for name, size in manifest.files.items() if name not in _tensor_files(manifest)}
    plain = {name: (folder / name).stat().st_size for name in plain_names(manifest)}
    files = dict(sorted((kept | plain).items()))
    return replace(manifest, files=files, compressed={}, parent=None, parent_identity=None)


def remove_leftovers(folder: Path, manifest: Manifest) -> list[str]:
    """Remove what a compression, or a restoration, that was ended has left in a step; return the names."""
    gone = leftovers(folder, manifest)
    for name in gone:
        (folder / name).unlink(missing_ok=True)
    return gone


def leftovers(folder: Path, manifest: Manifest) -> list[str]:
    """Names of files of which there is another form that counts, and of manifests that never counted."""
    found = []
    for path in folder.iterdir():
        plain = path.name.rpartition(_MARK)[0] if _MARK in path.suffix else path.name
        other_form = plain in plain_names(manifest) and path.name not in manifest.files
        if other_form or path.name.startswith(f"{NAME}{TEMPORARY}"):
            found.append(path.name)
    return sorted(found)


def _commit(folder: Path, new: Manifest) -> Manifest:
    sync_folder(folder)
    new.rewrite(folder)
    remove_leftovers(folder, new)
    return new


def _tensor_files(manifest: Manifest) -> set[str]:
    """Names of the files that hold tensors now."""
    compressed = {str(one["file"]) for one in manifest.compressed.values()}
    return compressed | {name for name in plain_names(manifest) if name not in manifest.compressed}


def _new_file(folder: Path, manifest: Manifest, name: str) -> Path:
    """Make an empty file: another process may store the step anew at the same time, and one of them commits."""
    stored = manifest.compressed.get(name)
    number = 0 if stored is None else int(str(stored["file"]).rpartition(_MARK)[2]) + 1
    while True:
        target = folder / f"{name}{_MARK}{number}"
        try:
            target.touch(exist_ok=False)
        except FileExistsError:
            number += 1
            continue
        return target


def _regions(
    source: StepFiles,
    name: str,
    places: Places,
    parent: Parent | None,
    other: StepFiles | None,
    rounded: bool,
) -> list[tuple[str, Region, str | None]]:
    """Cut a file into slices' values and what lies between, each with the method that gains most, and hash."""
    own = sorted(
        ((place, key) for key, place in places.items() if place.file == name and place.nbytes),
        key=lambda one: one[0].begin,
    )
    regions: list[tuple[str, Region, str | None]] = []
    at = 0
    for place, key in own:
        if place.begin < at or place.nbytes % place.itemsize:
            raise DamagedError(f"the slices of {name} overlap at byte {place.begin}")
        if place.begin > at:
            regions.append(("", Region(at, place.begin - at, 1, Method.PLAIN), None))
        same = None if parent is None else parent.places.get(key)
        if same is not None and (same.nbytes, same.itemsize) != (place.nbytes, place.itemsize):
            same = None
        candidates = [Region(place.begin, place.nbytes, place.itemsize, Method.PLAIN)]
        if same is not None:
            candidates += [
                replace(candidates[0], method=method, parent_file=same.file, parent_begin=same.begin)
                for method in (Method.XOR, Method.DIFFERENCE)
            ]
        if rounded and place.itemsize in _ROUNDED_ITEMSIZES:
            candidates.append(replace(candidates[0], method=Method.ROUNDED))
        regions.append((key[0], _best(source, name, candidates, other), place.xxh3))
        at = place.begin + place.nbytes
    end = source.size(name)
    if at > end:
        raise DamagedError(f"{name} ends after {end} bytes")
    if end > at:
        regions.append(("", Region(at, end - at, 1, Method.PLAIN), None))
    return regions


def _best(source: StepFiles, name: str, candidates: list[Region], other: StepFiles | None) -> Region:
    """The candidate that makes samples of a slice smallest; the first of equal ones."""
    if len(candidates) == 1:
        return candidates[0]
    read_parent = None if other is None else other.read_into
    nbytes = candidates[0].nbytes
    blocks = -(-nbytes // BLOCK_BYTES)
    stored = [0] * len(candidates)
    for number in sorted({sample * blocks // _SAMPLES for sample in range(_SAMPLES)}):
        at = number * BLOCK_BYTES
        size = min(_SAMPLE_BYTES, nbytes - at)
        raw = np.empty(size, np.uint8)
        source.read_into(name, candidates[0].begin + at, raw)
        for index, region in enumerate(candidates):
            block = parent_block(region, at, size, read_parent)
            stored[index] += len(encode(raw, region.itemsize, region.method, block))
    return candidates[stored.index(min(stored))]


def _compare(
    read: Callable[[int, Bytes], None], size: int, target: Path, read_parent: ReadParent | None
) -> None:
    """Raise `DamagedError` where a compressed file does not read as the plain one."""
    with closing(Container(target, read_parent)) as container:
        same = container.nbytes == size
        for begin, count in _windows(size):
            plain, decoded = np.empty(count, np.uint8), np.empty(count, np.uint8)
            read(begin, plain)
            container.read_into(begin, decoded)
            same = same and bool((plain == decoded).all())
    if not same:
        raise DamagedError(f"{target.name} does not read back as it was written")


def _windows(nbytes: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, nbytes, _WINDOW_BYTES):
        yield begin, min(_WINDOW_BYTES, nbytes - begin)


def _reader(files: StepFiles, name: str, check: Callable[[], None]) -> Callable[[int, Bytes], None]:
    def read(offset: int, out: Bytes) -> None:
        check()
        files.read_into(name, offset, out)

    return read
