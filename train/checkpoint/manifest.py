"""`manifest.json` of a published step: what a whole checkpoint consists of. Imports no torch.

It is written last, before the folder is published by one rename: a folder without it was never finished, and
a folder whose files differ from it was damaged later.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

NAME = "manifest.json"
FORMAT = 1


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
    """Size in bytes of every other file of the folder."""
    layout: dict[str, int] = field(default_factory=dict)
    """Degrees and ZeRO stage of the ranks that wrote it, for people: any layout restores any other."""
    samples_per_step: int | None = None
    """Of the step that was saved; None in checkpoints of before this was written down."""
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """List the files of `folder` and write the manifest beside them."""
        self.files = {
            path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != NAME
        }
        (folder / NAME).write_text(json.dumps(asdict(self), indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Read and check a step's manifest; raise `ValueError` with what is wrong with the folder."""
    try:
        fields = json.loads((folder / NAME).read_text())
        manifest = Manifest(**fields)
    except FileNotFoundError as error:
        raise ValueError(f"{NAME} is missing") from error
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"{NAME} cannot be read ({error})") from error
    whole_types = isinstance(manifest.step, int) and all(
        isinstance(part, dict) for part in (manifest.model, manifest.data, manifest.files)
    )
    if not whole_types:
        raise ValueError(f"{NAME} is damaged")
    if manifest.format != FORMAT:
        raise ValueError(f"its format is {manifest.format}, this version reads {FORMAT}")
    for name, size in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{name} is missing")
        if path.stat().st_size != size:
            raise ValueError(f"{name} has {path.stat().st_size} bytes instead of {size}")
    return manifest
