"""`manifest.json` of a published step: what a whole checkpoint consists of. Imports no torch.

It is written last, before the folder is published by one rename: a folder without it was never finished, and
a folder whose files differ from it was damaged later.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from train.checkpoint.digests import FOLDER, digest, write_durably

NAME = "manifest.json"
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

    @property
    def verified(self) -> bool:
        """Whether it was read back, and found to be what was written, before it was published."""
        return self.format >= 2

    @property
    def bytes(self) -> int:
        """Size of the folder, but for the manifest."""
        return sum(self.files.values())

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
        write_durably(folder / NAME, json.dumps(asdict(self), indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Read and check a step's manifest; raise `ValueError` with what is wrong with the folder.

    Compares the names and sizes of the files, and the hashes of the small ones; the bytes of the tensors are not
    looked at.
    """
    manifest = _parse(folder)
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
    return manifest


def _parse(folder: Path) -> Manifest:
    try:
        fields = json.loads((folder / NAME).read_text())
        version = fields.get("format")
        if version not in READABLE:
            raise ValueError(
                f"its format is {version}, this version reads {' and '.join(map(str, READABLE))}"
            )
        manifest = Manifest(**fields)
    except FileNotFoundError as error:
        raise ValueError(f"{NAME} is missing") from error
    except (OSError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{NAME} cannot be read ({error})") from error
    tables = (manifest.model, manifest.data, manifest.files, manifest.tensors, manifest.digests)
    if not isinstance(manifest.step, int) or not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"{NAME} is damaged")
    if manifest.verified and not (manifest.tensors and manifest.digests and manifest.metadata):
        raise ValueError(f"{NAME} is damaged: it has no hashes")
    return manifest
