"""What becomes of the steps of a run after one was published: which stay, and how they are stored. Collective."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from contract.errors import PeerError
from contract.run_folder import Event, RunFolder
from train.checkpoint.compress.lock import locked_folder
from train.checkpoint.compress.plan import Job, Step, removable, stranded
from train.checkpoint.compressing import LOCK_WAIT_S, Compression, storage
from train.checkpoint.errors import DamagedError
from train.checkpoint.manifest import Manifest
from train.checkpoint.reader import whole
from train.checkpoint.retain import Retention, Whole, eval_losses
from train.checkpoint.write import REPLACED, broadcast

T = TypeVar("T")

TEMPORARY = ".tmp-"
REMOVED = ".removed"


@dataclass
class Tidying:
    """Keeps the checkpoints of one run in order, seen from one rank."""

    run: RunFolder
    group: dist.ProcessGroup
    retention: Retention
    compression: Compression
    check_owner: Callable[[], None]
    """Called on rank 0 before anything is changed: raises `PeerError` when another process has the run."""
    _told_budget: bool = False

    def tidy(self, compress: bool) -> None:
        """Remove what is not to be kept, and have the rest stored as wished; damaged steps stay to be looked at.

        A step that another one needs stays until that was stored anew. What cannot be done now is told in a warning,
        and tried after the next save. Raises `PeerError` when another process has taken the run over.
        """
        self._led(self._remove_old, None)
        plan: list[Job] = self._led(self._plan, []) if compress else []
        for job in plan:
            if not self._store(job):
                break
        self._led(self._remove_surplus, None)

    def clean(self) -> None:
        """Remove what saves and compressions that were killed have left behind. Rank 0 only, while it owns the run."""
        for entry in self.run.checkpoints.iterdir():
            if any(mark in entry.name for mark in (TEMPORARY, REPLACED, REMOVED)):
                shutil.rmtree(entry, ignore_errors=True)
        self.compression.clean()

    def make_room(self) -> None:
        """Give up, with a warning, steps that need some which were to go: a save has failed. Rank 0 only.

        The newest one and what it needs stay.
        """
        try:
            steps = self._storage()
            given_up = stranded(steps, self._surplus(self._whole()))
            if not given_up:
                return
            self._remove(given_up)
        except (OSError, ValueError, DamagedError) as error:
            self._warn(f"no room could be made ({error})")
            return
        names = ", ".join(f"step_{step}" for step in given_up)
        self._warn(
            f"{names} removed to make room: they need steps that were to go, and could not be stored anew"
        )

    def _led(self, action: Callable[[], T], otherwise: T) -> T:
        """Rank 0's result of `action` on every rank; `otherwise` where it cannot be done, with a warning."""
        result, lost = otherwise, None
        if dist.get_rank(self.group) == 0:
            try:
                self.check_owner()
                result = action()
            except PeerError as error:
                lost = str(error)
            except (OSError, ValueError, DamagedError) as error:
                self._warn(f"checkpoints stay as they are for now ({error})")
        result, lost = broadcast((result, lost), self.group)
        if lost is not None:
            raise PeerError(lost)
        return result

    def _warn(self, reason: str, **more: int) -> None:
        self.run.try_event(Event.WARNING, reason=reason, **more)

    def _store(self, job: Job) -> bool:
        """Have one step compressed; return whether there is time for another."""
        done = self.compression.run(job)
        if done is None:
            return False
        if dist.get_rank(self.group) == 0:
            if done.reason is not None:
                said = f"step {job.step} could not be compressed, and stays as it is ({done.reason})"
                self._warn(said, step=job.step)
            else:
                share, seconds = round(done.share, 3), round(done.seconds, 3)
                needs = {} if job.parent is None else {"parent": job.parent}
                self.run.try_event(Event.COMPRESSED, step=job.step, share=share, seconds=seconds, **needs)
        return True

    def _remove_old(self) -> None:
        self.clean()
        # The budget is for what steps take when they are stored as wished.
        self._remove(self._surplus(self._whole(), by_budget=False))

    def _plan(self) -> list[Job]:
        found = self._whole()
        return self.compression.plan(found, self._surplus(found, by_budget=False))

    def _remove_surplus(self) -> None:
        self._remove(self._surplus(self._whole()))
        found = self._whole()
        over_gb = self.retention.exceeded(_sizes(found), [], self._others_bytes(found))
        if over_gb is not None and not self._told_budget:
            self._told_budget = True
            self._warn(
                f"checkpoints take {over_gb:.3g} GB more than checkpoint.disk_budget_gb="
                f"{self.retention.disk_budget_gb:g} with nothing left to remove: raise it"
            )

    def _remove(self, surplus: Sequence[int]) -> None:
        """Remove steps, but for those that another one needs."""
        if not surplus:
            return
        with locked_folder(self.run.checkpoints, LOCK_WAIT_S):
            for step in removable(self._storage(), surplus):
                path = self.run.checkpoints / f"step_{step}"
                # At once: half a step would look like a damaged one.
                gone = path.with_name(f"{path.name}{REMOVED}")
                path.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)

    def _surplus(self, found: Mapping[int, Manifest], by_budget: bool = True) -> list[int]:
        losses = eval_losses(self.run) if self.retention.keep_best > 0 else {}
        rules = self.retention if by_budget else replace(self.retention, disk_budget_gb=None)
        return rules.surplus(_sizes(found), losses, self._others_bytes(found))

    def _whole(self) -> dict[int, Manifest]:
        """The manifests of all steps that nothing is wrong with."""
        return dict(self._found())

    def _found(self) -> Iterator[tuple[int, Manifest]]:
        for step in self.run.published_steps():
            try:
                yield step, whole(self.run.checkpoints / f"step_{step}")
            except ValueError:
                continue

    def _storage(self) -> dict[int, Step]:
        return {step: storage(manifest) for step, manifest in self._found()}

    def _others_bytes(self, found: Mapping[int, Manifest]) -> int:
        names = {f"step_{step}" for step in found}
        others = [entry for entry in self.run.checkpoints.iterdir() if entry.name not in names]
        return sum(path.stat().st_size for entry in others for path in _files(entry))


def _files(entry: Path) -> Iterator[Path]:
    return (path for path in entry.rglob("*") if path.is_file())


def _sizes(found: Mapping[int, Manifest]) -> list[Whole]:
    return [Whole(step, manifest.bytes, manifest.verified) for step, manifest in found.items()]
