"""Steps of a run that are stored as the difference to others: which need which."""

from collections.abc import Iterator
from pathlib import Path

from contract.errors import UserError
from contract.run_folder import STEP_FOLDER, RunFolder
from tools.ckpt.findings import UnreadableError
from train.checkpoint.manifest import LONGEST_CHAIN, METADATA, Manifest, parse_manifest, read_parent
from train.checkpoint.manifest import NAME as MANIFEST


class NotOursError(UserError):
    """Something that is no step of ours, or an old one."""


def steps_in(path: Path) -> list[Path]:
    """Return the steps that a path means: a step of ours itself, of a run folder all, oldest first.

    Raises `UnreadableError`, `NotOursError`.
    """
    run = RunFolder(path)
    if run.checkpoints.is_dir() and not (path / METADATA).exists():
        steps = run.published_steps()
        if not steps:
            raise UnreadableError(f"run {path} has no checkpoint yet")
        return [run.checkpoints / f"step_{step}" for step in steps]
    if (path / MANIFEST).is_file():
        return [path]
    if not path.exists():
        raise UnreadableError(f"{path} does not exist: give a step or a run")
    raise NotOursError(
        f"{path} is no step of a run: write it as one with `trierarch ckpt convert {path} step_N --to trierarch`"
    )


def manifest_of(folder: Path) -> Manifest:
    """Return the manifest of a step that may be stored in another way; raises `UnreadableError`, `NotOursError`."""
    try:
        manifest = parse_manifest(folder)
    except ValueError as reason:
        raise UnreadableError(
            f"{folder} cannot be read ({reason}): look at it with `trierarch ckpt validate`"
        ) from reason
    if not manifest.verified:
        raise NotOursError(
            f"{folder} is of format {manifest.format}, without hashes: write it anew with `trierarch ckpt convert "
            f"{folder} step_N --to trierarch`"
        )
    return manifest


def needs(folder: Path, manifest: Manifest) -> list[str]:
    """Name the steps that a step needs, the next one first; raises `UnreadableError`."""
    found: list[str] = []
    while manifest.parent is not None:
        found.append(manifest.parent)
        if len(found) > LONGEST_CHAIN:
            raise UnreadableError(
                f"{folder} is damaged: the steps that it needs ({found[0]}, ...) need each other"
            )
        try:
            manifest = read_parent(folder, manifest)
        except ValueError as reason:
            raise UnreadableError(f"{folder} cannot be decoded ({reason}): put that step back") from reason
    return found


def needed_by(folder: Path) -> int:
    """How many steps one after the other need this one."""
    longest = 0
    for other, chain in _chains(folder.parent):
        if other != folder.name and folder.name in chain:
            longest = max(longest, chain.index(folder.name) + 1)
    return longest


def _chains(checkpoints: Path) -> Iterator[tuple[str, list[str]]]:
    for path in checkpoints.iterdir():
        if STEP_FOLDER.match(path.name):
            try:
                yield path.name, needs(path, parse_manifest(path))
            except (ValueError, UserError):
                continue  # Damaged: that is not made worse.


def refuse_parent(folder: Path, parent: Path, limit: int, with_children: bool) -> Manifest:
    """Return the manifest of a step that another may be stored as the difference to; raises `UserError` if not.

    `limit`: most steps that a step may need; `with_children` counts those that need `folder` too.
    """
    if parent.resolve().parent != folder.resolve().parent:
        raise UserError(f"{folder} and {parent} are not of one run: --parent is a step of the same folder")
    if parent.name == folder.name:
        raise UserError(f"{folder} cannot be the difference to itself: give another --parent")
    manifest = manifest_of(parent)
    if parent.name != f"step_{manifest.step}":
        raise UserError(f"{parent} holds step {manifest.step}: call it step_{manifest.step} first")
    chain = needs(parent, manifest)
    if folder.name in chain:
        raise UserError(
            f"{parent} itself needs {folder.name}: store it without, with `trierarch ckpt compress {parent}`"
        )
    length = 1 + len(chain) + (needed_by(folder) if with_children else 0)
    if length > limit:
        raise UserError(
            f"{folder.name} as the difference to {parent.name} makes a chain of {length} differences, more than "
            f"--chain {limit}: give a --parent that needs none, or raise --chain"
        )
    return manifest
