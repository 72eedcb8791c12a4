"""Store steps of ours in less room, in place, and bring the plain files back. Imports no torch."""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tools.ckpt.chains import manifest_of, needs, refuse_parent
from tools.ckpt.checks import Advance
from tools.ckpt.convert_place import draft
from tools.ckpt.dtypes import BITS
from tools.ckpt.guard import Check, committing, held, in_threads, refuse, refuse_full, told
from tools.ckpt.ours import read_ours
from tools.ckpt.source import Source
from tools.ckpt.steady import steadily
from tools.ckpt.validate import check, validate
from train.checkpoint.compress.step import (
    Compressed,
    Gain,
    Parent,
    Place,
    Places,
    commit_compressed,
    commit_plain,
    compress_file,
    plain_manifest,
    plain_names,
    restore_file,
)
from train.checkpoint.config import DELTA_CHAIN
from train.checkpoint.digests import FOLDER
from train.checkpoint.manifest import METADATA, Manifest, sealed

_LARGEST_WORD = 8


@dataclass(frozen=True)
class Done:
    """What has become of a step."""

    folder: Path
    before_bytes: int
    """Of its files of tensors, as they were stored."""
    after_bytes: int
    plain_bytes: int
    parent: str | None
    """The step that it needs now."""
    gains: list[tuple[str, Gain]]
    """Of each slice, with its role."""
    seconds: float
    changed: bool = True
    """Whether there was anything to do."""


class Compressor:
    """Does one step after the other."""

    def __init__(self, begin: Callable[[int], Advance] = lambda total: lambda nbytes: None) -> None:
        """`begin` is given the number of bytes to read, for a progress bar of each step."""
        self._begin = begin
        self._whole: set[Path] = set()

    def compress(self, folder: Path) -> Done:
        """Store a step by itself; raises `UserError`, and it is as it was then. So do the others."""
        with held(folder) as manifest:
            if manifest.compressed and manifest.parent is None:
                return _nothing(folder, manifest)
            return self._store(folder, manifest, None)

    def delta(self, folder: Path, parent: Path, limit: int = DELTA_CHAIN, with_children: bool = True) -> Done:
        """Store a step as the difference to `parent`; see `chains.refuse_parent`."""
        with held(folder) as manifest:
            other = refuse_parent(folder, parent, limit, with_children)
            if manifest.parent == parent.name and manifest.parent_identity == other.identity:
                return _nothing(folder, manifest)
            self._refuse_damaged(parent)
            with read_ours(parent) as source:
                found = Parent(parent, other, _places(source))
            return self._store(
                folder, manifest, found, lambda: refuse_parent(folder, parent, limit, with_children)
            )

    def restore(self, folder: Path) -> Done:
        """Store a step as plain files again."""
        began_s = time.monotonic()
        with held(folder) as manifest:
            if not manifest.compressed:
                return _nothing(folder, manifest)
            nbytes = _plain_bytes(folder)
            refuse_full(folder, nbytes)
            self._restore(folder, manifest, folder)
            self._refuse_different(folder, folder, plain_manifest(folder, manifest))
            with committing(folder, manifest):
                commit_plain(folder, manifest)
        seconds = time.monotonic() - began_s
        return Done(folder, _stored_bytes(manifest), nbytes, nbytes, None, [], seconds)

    def restore_to(self, folder: Path, target: Path) -> Done:
        """Write a step with plain files to a new folder."""
        return steadily([folder], lambda: self._restore_to(folder, target))

    def _restore_to(self, folder: Path, target: Path) -> Done:
        began_s = time.monotonic()
        manifest = manifest_of(folder)
        with draft(target) as temporary, told(folder):
            nbytes = _plain_bytes(folder)
            refuse_full(target.parent, nbytes)
            temporary.mkdir()
            shutil.copy(folder / METADATA, temporary)
            shutil.copytree(folder / FOLDER, temporary / FOLDER)
            self._restore(folder, manifest, temporary)
            new = plain_manifest(temporary, manifest)
            self._refuse_different(folder, temporary, new)
            new.rewrite(temporary)
        seconds = time.monotonic() - began_s
        return Done(target, _stored_bytes(manifest), nbytes, nbytes, None, [], seconds)

    def compress_draft(self, folder: Path, name: Path) -> Done:
        """Store a step by itself that nobody else knows of yet, and which is whole; call it `name` in what is said."""
        began_s = time.monotonic()
        manifest = manifest_of(folder)
        with told(name):
            made, roles = self._made(folder, manifest, None)
            new = commit_compressed(folder, manifest, made, None)
        return _done(name, manifest, new, made, roles, time.monotonic() - began_s)

    def _store(
        self,
        folder: Path,
        manifest: Manifest,
        parent: Parent | None,
        still_right: Callable[[], object] = lambda: None,
    ) -> Done:
        began_s = time.monotonic()
        self._refuse_damaged(folder)
        refuse_full(folder, _plain_bytes(folder))
        made, roles = self._made(folder, manifest, parent)
        with committing(folder, manifest):
            still_right()
            new = commit_compressed(folder, manifest, made, None if parent is None else parent.manifest)
        return _done(folder, manifest, new, made, roles, time.monotonic() - began_s)

    def _made(
        self, folder: Path, manifest: Manifest, parent: Parent | None
    ) -> tuple[list[Compressed], dict[str, str]]:
        """Compressed files, and roles of tensors."""
        with read_ours(folder) as source:
            places = _places(source)
            roles = {entry.name: entry.role for entry in source.entries}
            sizes = {name: source.size_of(folder / name) for name in plain_names(manifest)}
        advance = self._begin(sum(sizes.values()))

        def one(name: str, check: Check) -> Compressed:
            found = compress_file(folder, manifest, name, places, parent, check)
            advance(sizes[name])
            return found

        return in_threads([partial(one, name) for name in plain_names(manifest)]), roles

    def _restore(self, folder: Path, manifest: Manifest, target: Path) -> None:
        advance = self._begin(_plain_bytes(folder))

        def one(name: str, check: Check) -> None:
            check()
            restore_file(folder, manifest, name, target / name)
            advance((target / name).stat().st_size)

        in_threads([partial(one, name) for name in plain_names(manifest)])

    def _refuse_damaged(self, folder: Path) -> None:
        """What is stored anew is what was saved: a step that lacks something may get it back as it is stored now."""
        if folder not in self._whole:
            refuse(folder, validate(folder))
            self._whole.add(folder)

    def _refuse_different(self, folder: Path, target: Path, manifest: Manifest) -> None:
        """Read plain files back, those of `target`, which `manifest` tells of."""
        fields = asdict(manifest)
        fields["xxh3"] = sealed(fields)
        with read_ours(target, fields) as source:
            refuse(folder, check(source))


def delta_run(
    compressor: Compressor, steps: Sequence[Path], limit: int, told: Callable[[Done], None]
) -> None:
    """Store each of a run's steps as the difference to the one before, one by itself after at most `limit`."""
    for before, folder in zip([None, *steps[:-1]], steps, strict=True):
        alone = before is None or len(needs(before, manifest_of(before))) >= limit
        if alone or before is None:
            told(compressor.compress(folder))
        else:
            # Those that need this one follow.
            told(compressor.delta(folder, before, limit, with_children=False))


def _places(source: Source) -> Places:
    """Where the values of a step's slices lie in its plain files."""
    found: dict[tuple[str, tuple[int, ...]], Place] = {}
    for entry in source.entries:
        if entry.dtype == "object":
            continue
        itemsize = BITS[entry.dtype].itemsize
        for piece in (source.locate(entry, one) for one in entry.pieces):
            if piece.strides is None and piece.elements > 0:
                place = Place(
                    source.name_of(piece.path),
                    piece.offset,
                    piece.elements * itemsize,
                    min(itemsize, _LARGEST_WORD),
                    piece.xxh3,
                )
                found[entry.name, piece.start] = place
    return found


def _plain_bytes(folder: Path) -> int:
    with read_ours(folder) as source:
        return sum(source.size_of(folder / name) for name in source.files if name != METADATA)


def _stored_bytes(manifest: Manifest) -> int:
    """Of the files that hold tensors, as they are stored."""
    compressed = {str(one["file"]) for one in manifest.compressed.values()}
    return sum(
        nbytes
        for name, nbytes in manifest.files.items()
        if name in compressed or name in plain_names(manifest)
    )


def _nothing(folder: Path, manifest: Manifest) -> Done:
    stored = _stored_bytes(manifest)
    return Done(folder, stored, stored, _plain_bytes(folder), manifest.parent, [], 0.0, changed=False)


def _done(
    folder: Path,
    before: Manifest,
    after: Manifest,
    made: Sequence[Compressed],
    roles: dict[str, str],
    seconds: float,
) -> Done:
    gains = [(roles.get(gain.tensor, "between tensors"), gain) for one in made for gain in one.gains]
    plain = sum(gain.nbytes for _, gain in gains)
    return Done(folder, _stored_bytes(before), _stored_bytes(after), plain, after.parent, gains, seconds)


def role_table(done: Sequence[Done]) -> list[dict[str, Any]]:
    """Sum up what has become of slices by role: bytes before and after, and how many were stored in which way."""
    found: dict[str, dict[str, Any]] = {}
    for role, gain in (one for each in done for one in each.gains):
        row = found.setdefault(role, {"role": role, "before": 0, "after": 0, "methods": {}})
        row["before"] += gain.nbytes
        row["after"] += gain.stored_bytes
        row["methods"][gain.method] = row["methods"].get(gain.method, 0) + 1
    return list(found.values())
