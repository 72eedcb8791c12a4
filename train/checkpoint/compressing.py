"""Have the ranks compress published steps, each the files that fall to it. Collective."""

import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from contract.errors import PeerError
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
from train.checkpoint.slices import position, slices, tensors
from train.checkpoint.write import broadcast

HOLD_WAIT_S = 1.0
"""For a command that only looks at a step."""
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
    check_owner: Callable[[], None]
    """Called on rank 0 before a compressed step counts: raises `PeerError` when another process has the run."""
    blocks: int = 0
    """That this rank has gone through so far: it changes as long as something goes on."""
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
        """Compress one step; None where somebody is in a hurry. Collective.

        Raises `PeerError` when another process has taken the run over.
        """
        began_s = time.monotonic()
        folder = self.checkpoints / f"step_{job.step}"
        with ExitStack() as held:
            leads = dist.get_rank(self.group) == 0
            own = self._attempt(lambda: self._hold(held, folder)) if leads else _Share()
            begins: _Share = broadcast(own, self.group)
            if begins.reason is not None:
                return Done(job.step, time.monotonic() - began_s, 1.0, begins.reason)
            mine = self._attempt(lambda: self._compress(folder, job))
            shares = [mine] * dist.get_world_size(self.group) if leads else None
            dist.gather_object(mine, shares, dst=0, group=self.group)
            outcome = broadcast(
                _Outcome() if shares is None else self._commit(folder, shares, job), self.group
            )
        if outcome.lost is not None:
            raise PeerError(outcome.lost)
        if outcome.hurried:
            return None
        return Done(job.step, time.monotonic() - began_s, outcome.share, outcome.reason)

    def _attempt(self, action: Callable[[], "_Share"]) -> "_Share":
        """Never raises: the other ranks wait for this one, and damaged files raise anything."""
        try:
            return action()
        except _HurriedError:
            return _Share(hurried=True)
        except Exception as error:
            return _Share(reason=self._clause(error))

    def _clause(self, error: Exception) -> str:
        """What went wrong, and on which disk: a write that fails does not say that by itself."""
        if isinstance(error, OSError) and error.strerror and error.filename is None:
            return f"{error.strerror}: {self.checkpoints}"
        return str(error) or type(error).__name__

    def _hold(self, held: ExitStack, folder: Path) -> "_Share":
        """Keep commands away from a step."""
        try:
            held.enter_context(locked_folder(folder, HOLD_WAIT_S))
        except TimeoutError:
            return _Share(reason="a command works on it")
        return _Share()

    def clean(self) -> None:
        """Remove what compressions that were killed have left in steps. Rank 0 only, while nothing is compressed."""
        for folder in self.checkpoints.glob("step_*"):
            # A command that works on a step holds it, and tidies up itself; what cannot be read is not touched.
            with suppress(TimeoutError, ValueError):
                if leftovers(folder, parse_manifest(folder)):
                    with locked_folder(folder), locked_folder(self.checkpoints, LOCK_WAIT_S):
                        remove_leftovers(folder, parse_manifest(folder))

    def _compress(self, folder: Path, job: Job) -> "_Share":
        """Compress this rank's share of the files."""
        manifest = read_manifest(folder)
        rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        names = plain_names(manifest)[rank::ranks]
        places = places_in(folder, manifest, names)
        parent = None
        if job.parent is not None:
            other = folder.with_name(f"step_{job.parent}")
            known = read_manifest(other)
            parent = Parent(other, known, places_in(other, known, plain_names(known), set(places)))
        made = [compress_file(folder, manifest, name, places, parent, self._check) for name in names]
        return _Share((manifest.seal, None if parent is None else parent.manifest.seal), made)

    def _check(self) -> None:
        self.blocks += 1
        if self._hurry.is_set():
            raise _HurriedError

    def _commit(self, folder: Path, shares: list["_Share"], job: Job) -> "_Outcome":
        """Rank 0: have the compressed files count, unless something is not as all ranks have found it."""
        reasons = {one.reason for one in shares if one.reason is not None}
        if reasons or any(one.hurried for one in shares):
            return _Outcome("; ".join(sorted(reasons)) or None, hurried=not reasons)
        made = sorted((one for share in shares for one in share.made), key=lambda one: one.name)
        try:
            with locked_folder(self.checkpoints, LOCK_WAIT_S):
                self.check_owner()
                now = parse_manifest(folder)
                parent = None if job.parent is None else read_manifest(folder.with_name(f"step_{job.parent}"))
                seals = (now.seal, None if parent is None else parent.seal)
                if any(share.seals != seals for share in shares):
                    return _Outcome(f"step_{job.step}, or what it needs, was changed meanwhile")
                new = commit_compressed(folder, now, made, parent)
        except PeerError as error:
            return _Outcome(lost=str(error))
        except (OSError, ValueError, DamagedError) as error:
            return _Outcome(self._clause(error))
        plain_bytes = sum(gain.nbytes for one in made for gain in one.gains)
        stored_bytes = sum(new.files[str(one["file"])] for one in new.compressed.values())
        return _Outcome(share=stored_bytes / max(1, plain_bytes))


@dataclass(frozen=True)
class _Share:
    """What one rank has done of a job."""

    seals: tuple[str, str | None] = ("", None)
    """Hashes of the manifests of the step and of its parent, as this rank has read them."""
    made: list[Compressed] = field(default_factory=list)
    reason: str | None = None
    """Why it could not."""
    hurried: bool = False


@dataclass(frozen=True)
class _Outcome:
    """What has become of a job."""

    reason: str | None = None
    lost: str | None = None
    """Who has the run now, where that is another process."""
    share: float = 1.0
    hurried: bool = False


def places_in(
    folder: Path, manifest: Manifest, names: Collection[str], wanted: Collection[Any] | None = None
) -> Places:
    """Find the slices in some files of a step, by their plain names; `wanted`: of which tensors and places, or all.

    Raises `DamagedError`, or OSError.
    """
    chosen = set(names)
    found = {}
    with closing(StepFiles(folder, manifest)) as files:
        reader = SafeReader(folder, manifest)
        metadata = reader.read_metadata()
        for tensor, _ in tensors(metadata):
            for part in slices(files, metadata, tensor):
                key = (tensor, part.start)
                if part.file in chosen and (wanted is None or key in wanted):
                    told = reader.told(part)
                    found[key] = Place(
                        file=part.file,
                        begin=position(part, told),
                        nbytes=part.nbytes,
                        itemsize=part.dtype.itemsize,
                        xxh3=told.xxh3,
                    )
    return found


def storage(manifest: Manifest) -> Step:
    """How a step is stored."""
    parent = None if manifest.parent is None else int(manifest.parent.removeprefix("step_"))
    return Step(bool(manifest.compressed), parent)
