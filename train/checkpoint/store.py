"""Save and restore a `TrainState` through torch's distributed checkpoint.

A step is written to a folder beside its final place, listed in a manifest, and published by one rename.
Saves are collective: every rank calls, on a CPU group of their own, so that a slow disk cannot run into the
time limit of the training collectives.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from contract.errors import UserError
from contract.run_folder import Event, RunFolder, job_identity
from train.checkpoint.manifest import Manifest, read_manifest
from train.durable import sync_folder
from train.state import TrainState

T = TypeVar("T")

TEMPORARY = ".tmp-"
REPLACED = ".replaced-"
ATTEMPTS = 2


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
    """Called on rank 0 before a step is published: raises when another process has taken the run over."""

    @property
    def _leader(self) -> bool:
        return dist.get_rank(self.group) == 0

    def clean(self) -> None:
        """Remove what killed saves have left behind. Rank 0 only, while it owns the run."""
        for entry in self.run.checkpoints.iterdir():
            if TEMPORARY in entry.name or REPLACED in entry.name:
                shutil.rmtree(entry, ignore_errors=True)

    def save(self, state: TrainState) -> bool:
        """Write and publish the state of `state.step`; return whether that worked.

        A failed save is tried once more and then given up with a warning event: it must not end the training,
        the checkpoints before it are whole.
        """
        for attempt in range(ATTEMPTS):
            reason = self._save_once(state)
            if reason is None:
                if self._leader:
                    self.run.append_event(Event.SAVED, step=state.step)
                    self._retain()
                return True
            if self._leader:
                self.run.append_event(
                    Event.WARNING,
                    step=state.step,
                    reason=f"saving step {state.step} failed ({reason}), attempt {attempt + 1} of {ATTEMPTS}",
                )
        return False

    def _save_once(self, state: TrainState) -> str | None:
        """Save once; return None or the reason of the failure, the same on every rank."""
        job, restart = job_identity()
        final = self.run.checkpoints / f"step_{state.step}"
        temporary = final.with_name(f"{final.name}{TEMPORARY}{job}.r{restart}")
        try:
            dcp.save(
                state.state_dict(),
                storage_writer=dcp.FileSystemWriter(temporary, sync_files=True),
                process_group=self.group,
            )
            reason = None
        except CheckpointException as error:
            reason = "; ".join(sorted({f"{type(e[0]).__name__}: {e[0]}" for e in error.failures.values()}))
        if self._leader:
            try:
                if reason is None:
                    self.manifest.step = state.step
                    self._publish(temporary, final)
            except OSError as error:
                reason = str(error)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        return broadcast(reason, self.group)

    def _publish(self, temporary: Path, final: Path) -> None:
        self.manifest.write(temporary)
        sync_folder(temporary)
        self.check_owner()
        if final.exists():
            # Only a damaged step can stand here: restoring chose an older one and the run came by again.
            final.rename(final.with_name(f"{final.name}{REPLACED}{os.getpid()}"))
        temporary.rename(final)
        sync_folder(final.parent)

    def _retain(self) -> None:
        if self.keep_last <= 0:
            return
        for step in self.run.published_steps()[: -self.keep_last]:
            shutil.rmtree(self.run.checkpoints / f"step_{step}", ignore_errors=True)
        self.clean()

    def newest(self) -> Manifest | None:
        """Return the manifest of the newest whole step, the same on every rank, or None if there is no step.

        Damaged steps are passed over with a warning event. When there are steps but none is whole, that is
        an error: starting from nothing would throw the run away.
        """
        found: Manifest | None = None
        problems: list[str] = []
        if self._leader:
            for step in reversed(self.run.published_steps()):
                try:
                    found = read_manifest(self.run.checkpoints / f"step_{step}")
                    break
                except ValueError as error:
                    problems.append(f"checkpoint step_{step} of run {self.run.name} is damaged: {error}")
                    self.run.append_event(Event.WARNING, step=step, reason=problems[-1])
                    print(f"trierarch: {problems[-1]}", flush=True)
        found, problems = broadcast((found, problems), self.group)
        if found is None and problems:
            raise UserError(
                f"{problems[0]}, and no older one is whole: put the file back, or move "
                f"{self.run.checkpoints} away to start again"
            )
        return found

    def load(self, state: TrainState, manifest: Manifest) -> None:
        """Restore `state` from a step that `newest` returned."""
        folder = self.run.checkpoints / f"step_{manifest.step}"
        reader = dcp.FileSystemReader(folder)
        tree = state.state_dict()
        saved = reader.read_metadata().state_dict_metadata
        if not any(key.startswith(f"rng.rank_{state.rank}.") for key in saved):
            tree["rng"] = {}
        try:
            dcp.load(tree, storage_reader=reader, planner=DefaultLoadPlanner(), process_group=self.group)
        except CheckpointException as error:
            causes = "; ".join(sorted({str(e[0]).splitlines()[0] for e in error.failures.values()}))
            raise UserError(
                f"checkpoint {folder} cannot be loaded ({causes}): the model or optimizer of this configuration "
                "differs from the one that was saved, give the run another run.name"
            ) from error
        state.load_state_dict(tree)


def broadcast(value: T, group: dist.ProcessGroup) -> T:
    """Return rank 0's `value` on every rank of `group`."""
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]
