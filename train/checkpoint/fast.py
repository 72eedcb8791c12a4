"""The fast tier: a step is first written to a disk of each node, then copied from there to the shared folder.

What lies on the nodes is no checkpoint yet: only what is published counts. A step that was whole on the nodes when its
run was killed is published at the next start (`train.checkpoint.recover`).

    <folder of the run>/step_<N>.<token>/     all ranks of the node write to it
        .metadata  __R_0.distcp  digests/rank_R.json    as in the shared folder; `.metadata` on rank 0's node only
        kept_R.json                                     written last: the files of rank R are whole (`Note`)
"""

import json
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
import xxhash

from contract.run_folder import Event, RunFolder
from train.checkpoint.compress.files import StepFiles
from train.checkpoint.digests import FOLDER, digest, file_name, write_durably
from train.checkpoint.errors import DamagedError
from train.checkpoint.manifest import METADATA, Manifest, sealed
from train.checkpoint.slices import values_at
from train.checkpoint.write import Snapshot, Writer, Written, broadcast
from train.durable import drop_from_memory, sync_folder

_NOTE = "kept_{}.json"
_WINDOW_BYTES = 16 << 20


@dataclass(frozen=True)
class Note:
    """`kept_R.json`: what one rank has kept of a step."""

    rank: int
    began: float
    """When rank 0 began with the step, s since the epoch."""
    files: dict[str, int]
    """Size in bytes of each file, by its path within the folder."""
    hashes: dict[str, str]
    """Of those that are no slices."""
    manifest: dict[str, Any]
    """Of the step, as far as it is known: what goes on with it may have another layout."""

    @property
    def step(self) -> int:
        """Whose files they are."""
        return int(self.manifest["step"])

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(self.files.values())

    def base(self) -> Manifest:
        """The manifest to publish the step with."""
        return replace(Manifest(**self.manifest), began=self.began)

    def write(self, folder: Path) -> None:
        """Write it beside the files, durably."""
        fields = asdict(self)
        write_durably(folder / _NOTE.format(self.rank), json.dumps(fields | {"xxh3": sealed(fields)}) + "\n")
        sync_folder(folder)
        sync_folder(folder.parent)


def read_notes(folder: Path) -> Iterator[Note]:
    """Yield the notes of ranks whose files are all there, with their sizes; the bytes of slices are not looked at."""
    for path in sorted(folder.glob(_NOTE.format("*"))):
        try:
            fields = json.loads(path.read_text())
            if fields.pop("xxh3") != sealed(fields):
                continue
            note = Note(**fields)
            note.base()
            sizes = {name: (folder / name).stat().st_size for name in note.files}
            hashes = {name: digest((folder / name).read_bytes()) for name in note.hashes}
        except (OSError, AttributeError, KeyError, TypeError, ValueError):
            continue
        if sizes == note.files and hashes == note.hashes:
            yield note


@dataclass
class FastTier:
    """What one rank's node has kept of the steps of one run."""

    root: Path
    """The run's own folder on this node, see `train.checkpoint.fast_folder`."""
    run: RunFolder
    others: set[str] = field(default_factory=set)
    """Names of folders that are removed when a newer step is kept, or one is published."""
    _kept: tuple[Path, Note] | None = None
    """The newest step that is whole on the nodes and not published, as this rank has it."""
    _unkept_step: int | None = None
    """That could not be kept: it is not tried again."""

    def save(self, writer: Writer, snapshot: Snapshot, temporary: Path, final: Path) -> str | None:
        """Keep a step on the nodes, unless it is, and publish it from there; as `Writer.write`, collective too.

        Where it cannot be kept it is written to the shared folder at once.
        """
        if self.keep(writer, snapshot):
            return self._flush(writer, temporary, final)
        reason = writer.write(snapshot, temporary, final)
        if reason is None:
            self._remove_all()
        return reason

    def keep(self, writer: Writer, snapshot: Snapshot) -> bool:
        """Have a step on the nodes' disks, written and read back once; return whether that worked, on all ranks.

        Collective.
        """
        if self._kept is None or self._kept[1].step != snapshot.step:
            if self._unkept_step == snapshot.step:
                return False
            if not self._write(writer, snapshot):
                self._unkept_step = snapshot.step
                return False
        return True

    def _write(self, writer: Writer, snapshot: Snapshot) -> bool:
        began_s = time.monotonic()
        token, began = broadcast((uuid.uuid4().hex[:12], snapshot.began), writer.group)
        folder = self.root / f"step_{snapshot.step}.{token}"
        notes: list[Note] = []
        # Before the ranks begin to exchange anything: one without a disk must not leave the others waiting.
        reason = writer.agree(partial(folder.mkdir, parents=True, exist_ok=True))
        if reason is None:
            reason = writer.agree(lambda: notes.append(_keep(writer, snapshot, folder, began)))
        leads = dist.get_rank(writer.group) == 0
        if reason is not None:
            shutil.rmtree(folder, ignore_errors=True)
            if leads:
                said = (
                    f"step {snapshot.step} is not kept on the nodes' disks ({reason}): it is written to the run folder "
                    "at once"
                )
                self.run.try_event(Event.WARNING, step=snapshot.step, reason=said)
            return False
        self._remove_all()
        self._kept = folder, notes[0]
        if leads:
            seconds = round(time.monotonic() - began_s, 3)
            self.run.try_event(Event.SAVED_LOCALLY, step=snapshot.step, seconds=seconds)
        return True

    def remove(self, names: Iterable[str]) -> None:
        """Remove folders of steps from this node; other ranks may do so at the same time."""
        for name in names:
            shutil.rmtree(self.root / name, ignore_errors=True)

    def _flush(self, writer: Writer, temporary: Path, final: Path) -> str | None:
        assert self._kept is not None
        folder, note = self._kept
        reason = writer.agree(lambda: copy_files(folder, temporary, note.files))
        reason = replace(writer, manifest=note.base()).publish(note.step, temporary, final, reason)
        if reason is None:
            self._remove_all()
        return reason

    def _remove_all(self) -> None:
        """Only of what this start knows: a later start's folders are none of its business."""
        self.remove(self.others | ({self._kept[0].name} if self._kept is not None else set()))
        self.others, self._kept = set(), None


def copy_files(folder: Path, target: Path, names: Iterable[str]) -> None:
    """Copy files of a step to another folder, durably; raises OSError."""
    parents: set[Path] = set()
    for name in names:
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        parents |= {target, copy.parent}
        shutil.copyfile(folder / name, copy)
        with copy.open("rb") as file:
            os.fsync(file.fileno())
    for parent in parents:
        sync_folder(parent)


def _keep(writer: Writer, snapshot: Snapshot, folder: Path, began: float) -> Note:
    """Write this rank's files, compare what the disk gives back, and leave a note."""
    rank = dist.get_rank(writer.group)
    written = writer.write_files(snapshot, folder)
    slices = {result.storage_data.relative_path for result in written.results}
    small = {f"{FOLDER}/{file_name(rank)}"} | ({METADATA} if rank == 0 else set())
    _read_back(folder, written)
    manifest = asdict(replace(writer.manifest, step=snapshot.step))
    note = Note(
        rank=rank,
        began=began,
        files={name: (folder / name).stat().st_size for name in sorted(slices | small)},
        hashes={name: digest((folder / name).read_bytes()) for name in sorted(small)},
        manifest=manifest,
    )
    note.write(folder)
    return note


def _read_back(folder: Path, written: Written) -> None:
    expected = {(one.tensor, one.start): one.xxh3 for one in written.digests}
    places = sorted(
        (
            result.storage_data.relative_path,
            result.storage_data.offset,
            result.storage_data.length,
            result.index,
        )
        for result in written.results
    )
    for name in {name for name, *_ in places}:
        drop_from_memory(folder / name)
    with closing(StepFiles(folder)) as files:
        for name, offset, length, index in places:
            begin, nbytes = values_at(files, name, offset, length)
            if _hash(files, name, begin, nbytes) != expected[index.fqn, tuple(index.offset or ())]:
                raise DamagedError(
                    f"the slice of {index.fqn} at {list(index.offset or ())} does not read back from {folder / name} "
                    "as it was written"
                )


def _hash(files: StepFiles, name: str, begin: int, nbytes: int) -> str:
    made = xxhash.xxh3_128()
    for first in range(begin, begin + nbytes, _WINDOW_BYTES):
        buffer = np.empty(min(_WINDOW_BYTES, begin + nbytes - first), np.uint8)
        files.read_into(name, first, buffer)
        made.update(buffer)  # type: ignore[arg-type]
    return made.hexdigest()
