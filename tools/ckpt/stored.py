"""Steps of ours that are stored compressed: their files as they were, and whether all is there that these need."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from tools.ckpt.checks import Advance, bytes_of
from tools.ckpt.findings import DamageError, Finding, Severity, error, warning
from tools.ckpt.source import Pread, Source
from train.checkpoint.compress.files import StepFiles
from train.checkpoint.compress.lock import locked_folder
from train.checkpoint.compress.step import leftovers
from train.checkpoint.errors import DamagedError
from train.checkpoint.manifest import Manifest, read_manifest, read_parent


class Stored:
    """Reads compressed files, by the paths that they have when they are plain. For one thread."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._folder = folder
        self._names = {folder / name: name for name in manifest.compressed}
        self._files = StepFiles(folder, manifest)

    def twin(self) -> "Stored":
        """Return the same for another thread."""
        return Stored(self._folder, self.manifest)

    def close(self) -> None:
        """Close all files."""
        self._files.close()

    def has(self, path: Path) -> bool:
        """Whether a plain file is stored compressed."""
        return path in self._names

    def size_of(self, path: Path) -> int:
        """Return the size of the plain file in bytes; raises `DamageError`."""
        with self._told(path):
            return self._files.size(self._names[path])

    def read_into(self, path: Path, offset: int, out: NDArray[np.uint8]) -> None:
        """Fill `out` from a place of the plain file; raises `DamageError`."""
        with self._told(path):
            self._files.read_into(self._names[path], offset, out)

    def pread(self, path: Path) -> Pread:
        """Return what reads the plain file as `os.pread` does, and raises OSError."""
        name = self._names[path]

        def read(nbytes: int, offset: int) -> bytes:
            try:
                size = self._files.size(name)
                out = np.empty(max(0, min(nbytes, size - offset)), np.uint8)
                self._files.read_into(name, offset, out)
            except DamagedError as damage:
                raise OSError(str(damage)) from damage
            return out.tobytes()

        return read

    def told(self, finding: Finding) -> Finding:
        """Return a finding that names a plain file with where that is now, and what it needs."""
        stored = self.manifest.compressed.get(finding.file or "")
        if stored is None or finding.severity is not Severity.ERROR:
            return finding
        parent = self.manifest.parent
        needs = "" if parent is None else f" as the difference to {parent}, which it needs"
        return replace(finding, text=f"{finding.text}; it is stored in {stored['file']}{needs}")

    @contextmanager
    def _told(self, path: Path) -> Iterator[None]:
        file = str(self.manifest.compressed[self._names[path]]["file"])
        try:
            yield
        except FileNotFoundError as reason:
            raise DamageError(error("is missing", file=file)) from reason
        except OSError as reason:
            raise DamageError(error(f"cannot be read ({reason.strerror})", file=file)) from reason
        except DamagedError as reason:
            raise DamageError(error(f"cannot be read: {reason}", file=file)) from reason


def lacks(folder: Path, manifest: Manifest) -> str | None:
    """Say what a step lacks of the steps that it needs, as metadata and sizes of files tell; None if nothing."""
    if manifest.parent is None:
        return None
    try:
        read_parent(folder, manifest)
    except ValueError as reason:
        return str(reason)
    try:
        read_manifest(folder.with_name(manifest.parent), 1)
    except (OSError, ValueError) as reason:
        return f"{manifest.parent}, which it is the difference to: {reason}"
    return None


def check_leftovers(folder: Path, manifest: Manifest) -> Iterator[Finding]:
    """Say what a command that was ended has left in a step; what one that goes on makes there is no leftover yet."""
    if not leftovers(folder, manifest):
        return
    try:
        with locked_folder(folder):
            found = leftovers(folder, manifest)
    except TimeoutError:
        return
    for name in found:
        text = "is left of a command that was ended: `trierarch ckpt compress` or `restore` removes it"
        yield warning(text, file=name)


def check_stored(source: Source, advance: Advance) -> Iterator[Finding]:
    """Compare compressed files, as they are, with their hashes."""
    for path, wanted in _stored_files(source):
        made = xxhash.xxh3_128()
        try:
            for raw in bytes_of(source, path, 0, source.size_of(path)):
                made.update(raw)  # type: ignore[arg-type]
                advance(raw.nbytes)
        except DamageError:
            continue  # Its size, or that it is missing, was said already.
        if made.hexdigest() != wanted:
            text = "does not have the hash (xxh3-128) that it was stored with"
            yield error(text, file=source.name_of(path))


def stored_bytes(source: Source) -> int:
    """How many bytes `check_stored` reads."""
    found = 0
    for path, _ in _stored_files(source):
        try:
            found += source.size_of(path)
        except DamageError:
            continue
    return found


def plain_bytes(source: Source) -> int | None:
    """Size of a step's compressed files as they were, bytes; None where that cannot be told."""
    if source.stored is None:
        return None
    try:
        return sum(source.size_of(source.root / name) for name in source.stored.manifest.compressed)
    except DamageError:
        return None


def form_of(source: Source) -> str:
    """Say how a step is stored: `compressed 0.80`, `delta of step_90, 0.31`, `rounded`; nothing for a plain one."""
    manifest = source.facts.get("manifest", {})
    told = []
    if manifest.get("compressed"):
        plain = plain_bytes(source)
        ratio = "" if not plain else f" {stored_bytes(source) / plain:.2f}"
        parent = manifest.get("parent")
        told.append(f"compressed{ratio}" if parent is None else f"delta of {parent},{ratio}")
    if manifest.get("rounded"):
        told.append("rounded")
    return ", ".join(told)


def rounding_of(source: Source) -> dict[str, float]:
    """The largest relative error by which values were rounded before they were saved, by role."""
    found: dict[str, float] = source.facts.get("manifest", {}).get("rounded", {})
    return found


def _stored_files(source: Source) -> list[tuple[Path, object]]:
    if source.stored is None:
        return []
    files = source.stored.manifest.compressed.values()
    return sorted((source.root / one["file"], one.get("xxh3")) for one in files)
