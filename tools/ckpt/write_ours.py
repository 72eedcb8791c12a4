"""Write a step that a run of the trainer can continue from: torch's distributed checkpoint, hashes, manifest."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from tools.ckpt.convert_read import Tensor
from tools.ckpt.findings import Severity
from tools.ckpt.source import Source
from tools.ckpt.summary import position
from tools.ckpt.validate import validate
from tools.ckpt.write_dcp import Written, write_dcp
from train.checkpoint.digests import Rest, write_digests
from train.checkpoint.manifest import Manifest


class NotWrittenError(OSError):
    """What was written does not read back as it should."""


@dataclass(frozen=True)
class Told:
    """What a manifest says that is not seen from tensors."""

    step: int
    model: dict[str, Any]
    data: dict[str, Any]
    more: dict[str, Any]
    """Other fields, as far as they are known."""


def told_by(source: Source, like: Source) -> Told:
    """Return the manifest's part of `like`, a step of ours, with the step of `source`; empty where there is none."""
    manifest = like.facts.get("manifest", {})
    step = source.step if source.step is not None else position(source).get("step", 0)
    kept = ("samples_per_step", "config")
    more = {name: manifest[name] for name in kept if name in manifest}
    return Told(step, like.facts.get("model", {}), like.facts.get("data", {}), more)


def write_ours(
    folder: Path, tensors: Sequence[Tensor], told: Told, rounded: Mapping[str, float] | None = None
) -> None:
    """Make `folder`, write the step to it, and read it back; raises OSError.

    `rounded`: see `Manifest.rounded`; what it holds once all streams have ended counts.
    """
    written = write_dcp(folder, tensors)
    write_digests(folder, 0, written.slices, _rests(folder, written))
    manifest = Manifest(
        step=told.step,
        world_size=1,
        model=told.model,
        data=told.data,
        layout={"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "zero": 0},
        versions=_versions(),
        tensors=dict(sorted(written.tensors.items())),
        rounded=dict(rounded or {}),
        **told.more,
    )
    manifest.write(folder)
    report = validate(folder, threads=1)  # memory counts here
    wrong = [str(one) for one in report.findings if one.severity is Severity.ERROR]
    if report.exit_code:
        raise NotWrittenError(f"it does not read back as it was written: {report.unreadable or wrong[0]}")


def _rests(folder: Path, written: Written) -> dict[str, str]:
    rests = {}
    for name, values in written.values.items():
        path = folder / name
        rests[name] = Rest(path.stat().st_size, values).digest(partial(_read, path))
    return rests


def _read(path: Path, offset: int, buffer: bytearray) -> None:
    with path.open("rb") as file:
        file.seek(offset)
        if file.readinto(buffer) != len(buffer):
            raise NotWrittenError(f"{path.name} ends too early")


def _versions() -> dict[str, str]:
    """Of what writes a checkpoint."""
    found = {"torch": metadata.version("torch")}
    with suppress(metadata.PackageNotFoundError):  # run from a copy of the sources
        found["trierarch"] = metadata.version("trierarch")
    return found
