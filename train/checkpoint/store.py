"""Save and restore a `TrainState` through torch's distributed checkpoint.

A step is written to a folder beside its final place, listed in a manifest, and published by one rename.
Saves are collective: every rank calls, on a CPU group of their own with its own time limit, so that a slow
disk does not run into that of the training collectives.
"""

import os
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from contract.errors import PeerError, UserError
from contract.run_folder import Event, RunFolder, job_identity, start_number
from train.checkpoint.manifest import Manifest, read_manifest
from train.checkpoint.reader import SafeReader, damage
from train.checkpoint.stored import StoredPlanner
from train.durable import sync_folder
from train.monitor.progress import tell
from train.resilience.pulse import Phase, beat
from train.state import TrainState

T = TypeVar("T")

TEMPORARY = ".tmp-"
REPLACED = ".replaced-"
DAMAGED = ".damaged"
ATTEMPTS = 2
PAUSE_S = 1.0


@dataclass
class CheckpointStore:
    """The checkpoints of one run, seen from one rank."""

    run: RunFolder
    group: dist.ProcessGroup
    """A gloo group of all ranks, for nothing but checkpoints."""
    manifest: Manifest
    """Of the next step to save; its step and files are filled in then."""
    keep_last: int
    check_owner: Callable[[], None]
    """Called on rank 0 before a step is published: raises `PeerError` when another process has the run."""
    newest_step: int | None = None
    """The step that was restored or saved last."""
    _damaged: list[int] = field(default_factory=list)
    """On rank 0: steps newer than the restored one, which are not whole."""

    @property
    def _leader(self) -> bool:
        return dist.get_rank(self.group) == 0

    def _folder(self, step: int) -> Path:
        return self.run.checkpoints / f"step_{step}"

    def _temporary(self, step: int) -> Path:
        """Where a step is written at first: a folder of this start alone.

        A rank of an earlier start, on a node that stood still, may wake up within a save of the same step.
        """
        job, restart = job_identity()
        return self._folder(step).with_name(f"step_{step}{TEMPORARY}{job}.r{restart}-{start_number()}")

    def clean(self) -> None:
        """Remove what killed saves have left behind. Rank 0 only, while it owns the run."""
        for entry in self.run.checkpoints.iterdir():
            if TEMPORARY in entry.name or REPLACED in entry.name:
                shutil.rmtree(entry, ignore_errors=True)

    def save(self, state: TrainState) -> bool:
        """Write and publish the state of `state.step`; return whether that worked, the same on every rank.

        A failed save is tried once more and then given up with a warning event: the caller decides whether
        training can go on without it. Raises `PeerError` when another process has taken the run over.
        """
        if self.newest_step == state.step:
            return True
        for attempt in range(ATTEMPTS):
            if attempt > 0:
                time.sleep(PAUSE_S)
            beat(Phase.SAVE)
            began_s = time.monotonic()
            reason = self._save_once(state)
            if reason is None:
                self.newest_step = state.step
                if self._leader:
                    seconds = round(time.monotonic() - began_s, 3)
                    self.run.try_event(Event.SAVED, step=state.step, seconds=seconds)
                    self._retain()
                return True
            if self._leader:
                said = f"saving step {state.step} failed ({reason}), attempt {attempt + 1} of {ATTEMPTS}"
                self.run.try_event(Event.WARNING, step=state.step, reason=said)
        return False

    def _save_once(self, state: TrainState) -> str | None:
        """Save once; return None or the reason of the failure, the same on every rank."""
        final = self._folder(state.step)
        temporary = self._temporary(state.step)
        reason: str | None = None
        lost: str | None = None
        try:
            tree, planner = state.state_dict(), StoredPlanner(state.stored())
            writer = dcp.FileSystemWriter(
                temporary, sync_files=True, per_thread_copy_ahead=planner.copy_ahead
            )
            dcp.save(tree, storage_writer=writer, planner=planner, process_group=self.group)
        except CheckpointException as error:
            reason = _causes(error)
        if self._leader:
            try:
                if reason is None:
                    self.manifest.step = state.step
                    self._publish(temporary, final)
            except PeerError as error:
                lost = str(error)
            except OSError as error:
                reason = str(error)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        reason, lost = broadcast((reason, lost), self.group)
        if lost is not None:
            raise PeerError(lost)
        return reason

    def _publish(self, temporary: Path, final: Path) -> None:
        self.manifest.write(temporary)
        sync_folder(temporary)
        self.check_owner()
        if final.exists():
            # A damaged step, or one of a run that went on from an older step: never the one that is in use.
            final.rename(final.with_name(f"{final.name}{REPLACED}{os.getpid()}"))
        temporary.rename(final)
        sync_folder(final.parent)

    def _retain(self) -> None:
        """Remove whole steps beyond the newest `keep_last`; damaged ones do not count and stay to be looked at."""
        self.clean()
        if self.keep_last <= 0:
            return
        whole = [step for step in self.run.published_steps() if damage(self._folder(step)) is None]
        for step in whole[: -self.keep_last]:
            shutil.rmtree(self._folder(step), ignore_errors=True)

    def newest(self) -> Manifest | None:
        """Return the manifest of the newest whole step, the same on every rank, or None if there is no step.

        Damaged steps are passed over with a warning. When there are steps but none is whole, that is an
        error: starting from nothing would throw the run away.
        """
        found: Manifest | None = None
        problems: list[str] = []
        if self._leader:
            self._damaged = []
            for step in reversed(self.run.published_steps()):
                problem = damage(self._folder(step))
                if problem is None:
                    found = read_manifest(self._folder(step))
                    break
                self._damaged.append(step)
                problems.append(f"checkpoint step_{step} of run {self.run.name} is damaged: {problem}")
        found, problems = broadcast((found, problems), self.group)
        if found is None and problems:
            raise UserError(
                f"{problems[0]}, and no older one is whole: put the file back, or move "
                f"{self.run.checkpoints} away to start again"
            )
        if self._leader:
            for step, problem in zip(self._damaged, problems, strict=True):
                tell(problem)
                self.run.try_event(Event.WARNING, step=step, reason=problem)
        return found

    def load(self, state: TrainState, manifest: Manifest) -> None:
        """Restore `state` from a step that `newest` returned.

        Not collective: raises `UserError` on the ranks that cannot.
        """
        folder = self._folder(manifest.step)
        reader = SafeReader(folder)

        def read(tree: dict[str, Any]) -> None:
            # Each rank plans and reads what it needs: all there is to agree on is whether all came through.
            dcp.load(tree, storage_reader=reader, no_dist=True)

        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                state.load(read, reader.read_metadata().state_dict_metadata)
        except CheckpointException as error:
            raise UserError(
                f"checkpoint {folder} cannot be loaded ({_causes(error)}): put its files back, or move the folder "
                "away to continue from an older step"
            ) from error
        self.newest_step = manifest.step

    def set_aside_damaged(self) -> None:
        """Rename steps newer than the restored one, which are not whole. Rank 0 only, while it owns the run.

        They must neither count as progress nor push whole steps out.
        """
        for step in self._damaged:
            path = self._folder(step)
            shutil.rmtree(path.with_name(path.name + DAMAGED), ignore_errors=True)
            path.rename(path.with_name(path.name + DAMAGED))


def broadcast(value: T, group: dist.ProcessGroup) -> T:
    """Return rank 0's `value` on every rank of `group`."""
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def _causes(error: CheckpointException) -> str:
    causes = (failure[0] for failure in error.failures.values())
    return "; ".join(sorted({f"{type(cause).__name__}: {cause}".splitlines()[0] for cause in causes}))
