"""Have the ranks compress published steps, each the files that fall to it. Collective."""

import threading
import time
from collections.abc import Collection, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from train.checkpoint.compress.files import StepFiles
from train.checkpoint.compress.lock import locked_folder
from train.checkpoint.compress.plan import Job, Step, Wish, jobs
from train.checkpoint.compress.step import (
    Compressed,
    Parent,
    Place,
    Places,
    commit_compressed,
    compress_file,
    leftovers,
    plain_names,
    remove_leftovers,
)
from train.checkpoint.errors import DamagedError
from train.checkpoint.manifest import Manifest, parse_manifest, read_manifest
from train.checkpoint.reader import SafeReader
from train.checkpoint.slices import slices, tensors

LOCK_WAIT_S = 60.0
"""For another process that changes steps: moments, for it writes files before."""


class _HurriedError(Exception):
    """Somebody waits."""


@dataclass(frozen=True)
class Done:
    """What has become of one step, the same on every rank."""

    step: int
    seconds: float
    share: float
    """Of the bytes that it took when it was plain."""
    reason: str | None
    """Why it stays as it was, as a clause; None where it does not."""


@dataclass
class Compression:
    """How the steps of a run are stored once they are published, seen from one rank."""

    group: dist.ProcessGroup
    checkpoints: Path
    wish: Wish
    _hurry: threading.Event = field(default_factory=threading.Event)

    def hurry(self) -> None:
        """Give up what is being compressed, from another thread: training waits for this one."""
        self._hurry.set()

    def begin(self) -> None:
        """Take the time that it needs, from now on."""
        self._hurry.clear()

    def plan(self, whole: Mapping[int, Manifest], removed: Collection[int]) -> list[Job]:
        """Return what is to be done, by the manifests of all whole steps, before `removed` can go."""
        steps = {step: storage(manifest) for step, manifest in whole.items() if manifest.verified}
        return jobs(steps, set(removed), self.wish)

    def run(self, job: Job) -> Done | None:
        """Compress one step; None where somebody is in a hurry. Collective."""
        began_s = time.monotonic()
        folder = self.checkpoints / f"step_{job.step}"
        made: list[Compressed] = []
        manifest: Manifest | None = None
        reason: str | None = None
        try:
            manifest = read_manifest(folder)
            made = self._compress(folder, manifest, job)
        except _HurriedError:
            reason = ""
        except Exception as error:  # damaged files raise anything, and the other ranks wait for this one
            reason = str(error) or type(error).__name__
        ranks = dist.get_world_size(self.group)
        all_: list[Any] = [None] * ranks
        dist.all_gather_object(
            all_, (made, manifest.identity if manifest else None, reason), group=self.group
        )
        reasons = {one[2] for one in all_ if one[2] is not None}
        outcome: list[Any] = ["; ".join(sorted(reasons)) if reasons else None, 1.0]
        if dist.get_rank(self.group) == 0 and not reasons:
            assert manifest is not None
            outcome = self._commit(folder, manifest, [file for one in all_ for file in one[0]], job)
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        if outcome[0] is not None and "" in reasons and len(reasons) == 1:
            return None
        return Done(job.step, time.monotonic() - began_s, outcome[1], outcome[0])

    def clean(self) -> None:
        """Remove what compressions that were killed have left in steps. Rank 0 only, while nothing is compressed."""
        for folder in self.checkpoints.glob("step_*"):
            try:
                manifest = parse_manifest(folder)
            except ValueError:
                continue
            if not leftovers(folder, manifest):
                continue
            # A command that works on the step holds it, and tidies up itself.
            with (
                suppress(TimeoutError),
                locked_folder(folder),
                locked_folder(self.checkpoints, LOCK_WAIT_S),
            ):
                remove_leftovers(folder, parse_manifest(folder))

    def _compress(self, folder: Path, manifest: Manifest, job: Job) -> list[Compressed]:
        """Compress this rank's share of the files."""
        rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        names = plain_names(manifest)[rank::ranks]
        places = places_in(folder, manifest, names)
        parent = None
        if job.parent is not None:
            other = folder.with_name(f"step_{job.parent}")
            known = read_manifest(other)
            parent = Parent(other, known, places_in(other, known, plain_names(known), set(places)))
        return [compress_file(folder, manifest, name, places, parent, self._check) for name in names]

    def _check(self) -> None:
        if self._hurry.is_set():
            raise _HurriedError

    def _commit(self, folder: Path, manifest: Manifest, made: list[Compressed], job: Job) -> list[Any]:
        """Rank 0: have the compressed files count; return the reason for which not, and the share of bytes."""
        try:
            with locked_folder(self.checkpoints, LOCK_WAIT_S):
                if parse_manifest(folder) != manifest:
                    raise ValueError(f"step_{job.step} was changed meanwhile")
                parent = None if job.parent is None else read_manifest(folder.with_name(f"step_{job.parent}"))
                plain_bytes = sum(gain.nbytes for one in made for gain in one.gains)
                new = commit_compressed(folder, manifest, sorted(made, key=lambda one: one.name), parent)
        except (OSError, ValueError, DamagedError) as error:
            return [str(error), 1.0]
        stored_bytes = sum(new.files[str(one["file"])] for one in new.compressed.values())
        return [None, stored_bytes / max(1, plain_bytes)]


def places_in(
    folder: Path, manifest: Manifest, names: Collection[str], wanted: Collection[Any] | None = None
) -> Places:
    """Find the slices in some files of a step, by their plain names; `wanted`: of which tensors and places, or all.

    Raises `DamagedError`, or OSError.
    """
    chosen = set(names)
    found = {}
    with closing(StepFiles(folder, manifest)) as files:
        metadata = SafeReader(folder, manifest).read_metadata()
        for tensor, _ in tensors(metadata):
            for part in slices(files, metadata, tensor):
                key = (tensor, part.start)
                if part.path.name in chosen and (wanted is None or key in wanted):
                    place = Place(part.path.name, part.position(), part.nbytes, part.dtype.itemsize)
                    found[key] = place
    return found


def storage(manifest: Manifest) -> Step:
    """How a step is stored."""
    parent = None if manifest.parent is None else int(manifest.parent.removeprefix("step_"))
    return Step(bool(manifest.compressed), parent)
