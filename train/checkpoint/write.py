"""Write one step: to a folder of its own, hashed, read back, then published by one rename.

Collective: every rank calls, on a CPU group of their own with its own time limit, so that a slow disk does not run
into that of the training collectives.
"""

import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import WriteResult

from contract.errors import PeerError
from train.checkpoint.compress.rounding import Rounding
from train.checkpoint.digests import (
    FOLDER,
    Digest,
    digest,
    file_name,
    read_digests,
    read_metadata_hash,
    read_rounded,
    write_digests,
)
from train.checkpoint.errors import DamagedError
from train.checkpoint.manifest import METADATA, Manifest
from train.checkpoint.reader import SafeReader
from train.checkpoint.rest import PlacingWriter, located
from train.checkpoint.stored import HashingPlanner, Stored
from train.checkpoint.stored import Path as TreePath
from train.checkpoint.verify import ReadBack, deal, mismatch, read_back
from train.durable import sync_folder

T = TypeVar("T")

REPLACED = ".replaced-"


@dataclass(frozen=True)
class Snapshot:
    """What there is to save."""

    step: int
    tree: dict[str, Any]
    """Of tensors; see `TrainState.state_dict`."""
    stored: Mapping[TreePath, Stored] = field(default_factory=dict)
    """The values of those that have none."""
    began: float = field(default_factory=time.time)
    """When this rank began with the step, s since the epoch; rank 0's counts."""


@dataclass(frozen=True)
class Written:
    """What this rank has written of a step."""

    results: list[WriteResult]
    """Where each slice lies."""
    digests: list[Digest]


@dataclass(frozen=True)
class Writer:
    """Writes steps of one run, seen from one rank."""

    group: dist.ProcessGroup
    manifest: Manifest
    """Of any step; what depends on the step is filled in."""
    check_owner: Callable[[], None]
    """Called on rank 0 before a step is published: raises `PeerError` when another process has the run."""
    rounding: Rounding | None = None
    """Of what is written; None writes what there is."""

    def write(self, snapshot: Snapshot, temporary: Path, final: Path) -> str | None:
        """Write and publish; return None or the reason of a failure in a clause, the same on every rank.

        `temporary` lies beside `final` and is gone afterwards. Raises `PeerError` when another process has taken the
        run over.
        """
        reason = self.agree(lambda: self.write_files(snapshot, temporary))
        writer = replace(self, manifest=replace(self.manifest, began=snapshot.began))
        return writer.publish(snapshot.step, temporary, final, reason)

    def publish(self, step: int, temporary: Path, final: Path, reason: str | None = None) -> str | None:
        """Read back what the ranks have put into `temporary`, unless that has failed for a `reason`, and publish it.

        Returns, and raises, as `write` does.
        """
        own = ReadBack()
        if reason is None:
            reason = self.agree(lambda: self._read_back(temporary, own))
        found = self.gather(own)
        lost: str | None = None
        if dist.get_rank(self.group) == 0:
            try:
                if reason is None:
                    self._check(temporary, found)
                    self._publish(step, temporary, final, found)
            except PeerError as error:
                lost = str(error)
            except (OSError, ValueError, DamagedError) as error:
                reason = str(error)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        reason, lost = broadcast((reason, lost), self.group)
        if lost is not None:
            raise PeerError(lost)
        return reason

    def write_files(self, snapshot: Snapshot, folder: Path) -> Written:
        """Write this rank's files of a step, and their hashes, to `folder`, which need not be there. Collective.

        Raises `CheckpointException` or OSError. Rank 0's files are those of torch's metadata too.
        """
        planner = HashingPlanner(snapshot.stored, self.rounding)
        # Nothing is copied ahead: what was stored is valid until the next is brought.
        writer = PlacingWriter(folder, sync_files=True, per_thread_copy_ahead=0)
        dcp.save(snapshot.tree, storage_writer=writer, planner=planner, process_group=self.group)
        digests, rest = located(folder, writer.written, planner.digests)
        rank = dist.get_rank(self.group)
        metadata = digest((folder / METADATA).read_bytes()) if rank == 0 else None
        write_digests(folder, rank, digests, rest, planner.rounded, metadata)
        return Written(list(writer.written), digests)

    def _read_back(self, temporary: Path, found: ReadBack) -> None:
        try:
            written = read_metadata_hash(temporary / FOLDER / file_name(0))
            metadata = SafeReader(temporary, metadata=written).read_metadata()
        except Exception as error:  # a damaged pickle raises anything
            raise DamagedError(f"{METADATA} cannot be read ({error})") from error
        rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        own = range(self.manifest.world_size)[rank::ranks]
        read_back(temporary, metadata, deal(metadata, ranks)[rank], found, map(file_name, own))

    def _check(self, temporary: Path, found: list[ReadBack]) -> None:
        """Compare what was read with what was written, by the files in which a reader will look that up."""
        written = {
            rank: read_digests(temporary / FOLDER / file_name(rank), None)
            for rank in range(self.manifest.world_size)
        }
        problem = mismatch(written, [one for each in found for one in each.slices])
        if problem is not None:
            raise DamagedError(problem)

    def _publish(self, step: int, temporary: Path, final: Path, found: list[ReadBack]) -> None:
        tensors = {name: values for each in found for name, values in each.tensors.items()}
        rounded: dict[str, float] = {}
        for rank in range(self.manifest.world_size):
            for role, error in read_rounded(temporary / FOLDER / file_name(rank)).items():
                rounded[role] = max(error, rounded.get(role, 0.0))
        manifest = replace(
            self.manifest,
            step=step,
            tensors=dict(sorted(tensors.items())),
            rounded=dict(sorted(rounded.items())),
        )
        manifest.write(temporary)
        sync_folder(temporary)
        self.check_owner()
        if final.exists():
            # A damaged step, or one of a run that went on from an older step: never the one that is in use.
            final.rename(final.with_name(f"{final.name}{REPLACED}{os.getpid()}"))
        temporary.rename(final)
        sync_folder(final.parent)

    def agree(self, action: Callable[[], object]) -> str | None:
        """Run `action` on every rank; return None, or the reasons for which it failed on some."""
        reason: str | None = None
        try:
            action()
        except CheckpointException as error:
            reason = causes(error)
        except (OSError, DamagedError) as error:
            reason = str(error)
        failures = torch.tensor([reason is not None], dtype=torch.int32)
        dist.all_reduce(failures, group=self.group)
        if not failures.item():
            return None
        reasons: list[str | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(reasons, reason, group=self.group)
        return "; ".join(sorted({one for one in reasons if one is not None}))

    def gather(self, value: T) -> list[T]:
        """Every rank's `value` on rank 0; nothing elsewhere."""
        leads = dist.get_rank(self.group) == 0
        values = [value] * dist.get_world_size(self.group) if leads else []
        dist.gather_object(value, values if leads else None, dst=0, group=self.group)
        return values


def broadcast(value: T, group: dist.ProcessGroup) -> T:
    """Return rank 0's `value` on every rank of `group`."""
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def causes(error: CheckpointException) -> str:
    """Say in a clause why torch could not save or load."""
    causes = (failure[0] for failure in error.failures.values())
    return "; ".join(sorted({f"{type(cause).__name__}: {cause}".splitlines()[0] for cause in causes}))
