"""`manifest.json` of a published step: what a whole checkpoint consists of. Imports no torch.

It is written last, before the folder is published by one rename: a folder without it was never finished, and
a folder whose files differ from it was damaged later.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from contract.run_folder import STEP_FOLDER
from train.checkpoint.digests import FOLDER, digest, write_durably
from train.durable import sync_folder

NAME = "manifest.json"
TEMPORARY = ".tmp-"
LONGEST_CHAIN = 64
"""Steps that a step may need, one after the other: more than that is no chain but a ring."""
METADATA = ".metadata"
FORMAT = 2
READABLE = (1, 2)
"""Format 1 has no hashes."""


@dataclass
class Manifest:
    """Contents of a step."""

    step: int
    world_size: int
    model: dict[str, Any]
    """The model's shape, vocabulary resolved."""
    data: dict[str, Any]
    """Fingerprint of the token files that the run has read."""
    files: dict[str, int] = field(default_factory=dict)
    """Size in bytes of every other file of the folder, by its path within."""
    layout: dict[str, int] = field(default_factory=dict)
    """Degrees and ZeRO stage of the ranks that wrote it, for people: any layout restores any other."""
    samples_per_step: int | None = None
    """Of the step that was saved; None in checkpoints of before this was written down."""
    format: int = FORMAT
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    """`dtype`, `shape` and `xxh3` of each whole tensor, as it was read back: the same in any layout."""
    digests: dict[str, str] = field(default_factory=dict)
    """Hash of each file of the folder `digests`, by its name."""
    metadata: str | None = None
    """Hash of the file `.metadata`."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of the libraries that wrote it."""
    config: str | None = None
    """Hash of the text of the run's `config.yaml`."""
    parent: str | None = None
    """The step that this one is stored as the difference to; None for one that stands by itself."""
    parent_identity: str | None = None
    """That step's `identity`: another one may have taken its name."""
    compressed: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By the name of each file that is stored compressed now: `file`, that which holds it, and its hash `xxh3`."""
    rounded: dict[str, float] = field(default_factory=dict)
    """The largest relative error by which values were rounded before they were saved, by role; see `Rounding`."""
    began: float | None = None
    """When rank 0 began with the step, s since the epoch by its own clock; None where nobody has written it down."""
    xxh3: str | None = None
    """Of all of the above, see `sealed`; None in manifests of before this was written down."""

    @property
    def verified(self) -> bool:
        """Whether it was read back, and found to be what was written, before it was published."""
        return self.format >= 2

    @property
    def bytes(self) -> int:
        """Size of the folder, but for the manifest."""
        return sum(self.files.values())

    @property
    def seal(self) -> str:
        """What it says, `xxh3` or not."""
        return sealed(asdict(self))

    @property
    def identity(self) -> str:
        """What makes it this step's and no other's, however it is stored."""
        return digest(json.dumps([self.step, self.metadata, sorted(self.digests.items())]).encode())

    def rewrite(self, folder: Path) -> None:
        """Replace the manifest of a step by this one, at once and durably. The files that it lists are there."""
        temporary = folder / f"{NAME}{TEMPORARY}{os.getpid()}"
        self._write_to(temporary)
        temporary.replace(folder / NAME)
        sync_folder(folder)

    def _write_to(self, path: Path) -> None:
        fields = asdict(self)
        fields["xxh3"] = self.xxh3 = sealed(fields)
        write_durably(path, json.dumps(fields, indent=1) + "\n")

    def write(self, folder: Path) -> None:
        """List the files of `folder` and write the manifest beside them, durably."""
        files = {
            path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()
        }
        self.files = {name: path.stat().st_size for name, path in files.items() if name != NAME}
        self.digests = {
            path.name: digest(path.read_bytes()) for path in sorted((folder / FOLDER).glob("*.json"))
        }
        self.metadata = digest((folder / METADATA).read_bytes())
        self._write_to(folder / NAME)


def sealed(fields: Mapping[str, Any]) -> str:
    """Return the hash of a manifest's fields, whichever way they are laid out in the file, but for `xxh3` itself."""
    others = {name: value for name, value in fields.items() if name != "xxh3"}
    return digest(json.dumps(others, sort_keys=True, separators=(",", ":")).encode())


def read_manifest(folder: Path, depth: int = 0) -> Manifest:
    """Read and check a step's manifest; raise `ValueError` with what is wrong with the folder.

    So are those of the steps that it needs: `depth` of them are done.

    Compares the names and sizes of the files, and the hashes of the small ones; the bytes of the tensors are not
    looked at.
    """
    manifest = parse_manifest(folder)
    named = STEP_FOLDER.match(folder.name)
    if named is not None and int(named[1]) != manifest.step:
        raise ValueError(f"{NAME} is that of step {manifest.step}")
    for name, size in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{name} is missing")
        if path.stat().st_size != size:
            raise ValueError(f"{name} has {path.stat().st_size} bytes instead of {size}")
    expected = {f"{FOLDER}/{name}": value for name, value in manifest.digests.items()}
    if manifest.metadata is not None:
        expected[METADATA] = manifest.metadata
    for name, value in expected.items():
        if digest((folder / name).read_bytes()) != value:
            raise ValueError(f"{name} is not what was written")
    if manifest.parent is not None:
        if depth >= LONGEST_CHAIN:
            raise ValueError(f"the steps that it needs ({manifest.parent}, ...) need each other")
        read_parent(folder, manifest)
        try:
            read_manifest(folder.with_name(manifest.parent), depth + 1)
        except ValueError as error:
            raise ValueError(f"{manifest.parent}, which it is the difference to: {error}") from error
    return manifest


def read_parent(folder: Path, manifest: Manifest) -> Manifest:
    """Return the manifest of the step that `manifest`, of the step in `folder`, needs; raise `ValueError`."""
    assert manifest.parent is not None
    try:
        parent = parse_manifest(folder.with_name(manifest.parent))
    except ValueError as error:
        raise ValueError(f"{manifest.parent}, which it is the difference to: {error}") from error
    if parent.identity != manifest.parent_identity:
        raise ValueError(f"{manifest.parent} is not the step that it is the difference to")
    return parent


def is_bare_name(name: object) -> bool:
    """Whether this is the name of something within a folder, and no path, nor what drives a terminal."""
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and name.isprintable()


def _is_step(name: object) -> bool:
    return isinstance(name, str) and STEP_FOLDER.match(name) is not None


def _is_form_of(name: str, stored: Mapping[str, Any]) -> bool:
    file = stored.get("file")
    mark, digits = f"{name}.z", str(file).rpartition(".z")[2]
    return isinstance(file, str) and file == mark + digits and digits.isdecimal() and len(digits) < 10


def says_how_stored(manifest: Manifest) -> bool:
    """Whether the fields that say how a step is stored are what they should be."""
    tables = (manifest.compressed, manifest.rounded, manifest.files)
    if not all(isinstance(table, dict) for table in tables):
        return False
    files = manifest.compressed.items()
    return (
        all(is_bare_name(name) and isinstance(one, dict) and _is_form_of(name, one) for name, one in files)
        and all(
            role.isprintable() and isinstance(error, float | int) for role, error in manifest.rounded.items()
        )
        and (manifest.parent is None or _is_step(manifest.parent))
    )


def parse_manifest(folder: Path) -> Manifest:
    """Read a step's manifest and compare it with its own hash; raise `ValueError`."""
    try:
        fields = json.loads((folder / NAME).read_text())
        version = fields.get("format")
        if version not in READABLE:
            raise ValueError(
                f"its format is {version}, this version reads {' and '.join(map(str, READABLE))}"
            )
        manifest = Manifest(**fields)
        if manifest.xxh3 not in (None, sealed(fields)):
            raise ValueError("its content is not what was written")
    except FileNotFoundError as error:
        raise ValueError(f"{NAME} is missing") from error
    except (OSError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{NAME} cannot be read ({error})") from error
    tables = (manifest.model, manifest.data, manifest.files, manifest.tensors, manifest.digests)
    began = isinstance(manifest.began, int | float | None)
    if not (isinstance(manifest.step, int) and began and all(isinstance(table, dict) for table in tables)):
        raise ValueError(f"{NAME} is damaged")
    if not says_how_stored(manifest):
        raise ValueError(f"{NAME} is damaged: it does not say how the step is stored")
    if manifest.verified and not (manifest.tensors and manifest.digests and manifest.metadata):
        raise ValueError(f"{NAME} is damaged: it has no hashes")
    return manifest
