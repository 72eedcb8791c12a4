"""The checkpoints of a run: when they are written and which of them count. `train.checkpoint.write` writes one."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from contract.errors import ReportedError, UserError
from contract.run_folder import Event, RunFolder, job_identity, start_number
from train.checkpoint.flight import Flight
from train.checkpoint.manifest import Manifest, read_manifest
from train.checkpoint.reader import SafeReader, damage, load_tree
from train.checkpoint.retain import Retention, Whole, eval_losses
from train.checkpoint.slices import DamagedError
from train.checkpoint.staging import Share, Staging
from train.checkpoint.write import REPLACED, Snapshot, Writer, broadcast, causes
from train.monitor.progress import tell
from train.resilience.pulse import Phase, beat
from train.resilience.together import together
from train.state import TrainState

TEMPORARY = ".tmp-"
DAMAGED = ".damaged"
REMOVED = ".removed"
ATTEMPTS = 2
PAUSE_S = 1.0


@dataclass
class CheckpointStore:
    """The checkpoints of one run, seen from one rank."""

    run: RunFolder
    group: dist.ProcessGroup
    """A gloo group of all ranks, for nothing but checkpoints."""
    manifest: Manifest
    """Of any step; what depends on the step is filled in when it is saved."""
    retention: Retention
    check_owner: Callable[[], None]
    """Called on rank 0 before a step is published: raises `PeerError` when another process has the run."""
    verify_load: bool = True
    """Whether to hash what is loaded."""
    staging: Staging | None = None
    """Where saves in the background are copied to; None saves while training waits."""
    newest_step: int | None = None
    """The step that was restored or saved last."""
    _flight: Flight | None = None
    """The save in the background that nobody has waited for yet."""
    _share: Share | None = None
    _stall_s: float | None = None
    _told_budget: bool = False
    _damaged: dict[int, str] = field(default_factory=dict)
    """On rank 0: steps newer than the restored one, which are not whole, and what is wrong with each."""

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
        """Remove what saves that were killed have left behind. Rank 0 only, while it owns the run."""
        for entry in self.run.checkpoints.iterdir():
            if any(mark in entry.name for mark in (TEMPORARY, REPLACED, REMOVED)):
                shutil.rmtree(entry, ignore_errors=True)

    def save(self, state: TrainState, background: bool = False) -> bool:
        """Write and publish the state of `state.step`; return whether that worked, the same on every rank.

        In the `background` only a copy is made now, and True is no more than a promise: `poll` and `wait` tell what
        has become of it. A failed save is tried once more and then given up with a warning event: the caller decides
        whether training can go on without it. Raises `PeerError` when another process has taken the run over, as
        `poll` and `wait` do.
        """
        began_s = time.monotonic()
        self.wait()
        if self.newest_step == state.step:
            return True
        beat(Phase.SAVE)
        snapshot = Snapshot(state.step, state.state_dict(), state.stored())
        staged = self._staged(snapshot) if background else None
        flight = Flight(state.step)
        if staged is None:
            saved = self._attempts(flight, snapshot, began_s, None)
            self.newest_step = state.step if saved else self.newest_step
        else:
            saved, self._flight = True, flight
            stall_s = time.monotonic() - began_s
            flight.begin(partial(self._attempts, flight, staged, began_s, stall_s))
        self._stall_s = (self._stall_s or 0.0) + time.monotonic() - began_s
        return saved

    def poll(self) -> bool | None:
        """Return whether a save in the background has worked that has ended since the last call; None without one."""
        return self._land() if self._flight is not None and self._flight.over else None

    def wait(self) -> bool | None:
        """Wait for a save in the background; return whether it has worked, None without one."""
        return None if self._flight is None else self._land()

    def take_stall_s(self) -> float | None:
        """How long training has stood still for saves since the last call, s; None without any."""
        stall_s, self._stall_s = self._stall_s, None
        return stall_s

    def close(self) -> None:
        """Give memory up; a save in the background that nobody has waited for is given up too."""
        if self._flight is None and self.staging is not None:
            self.staging.close()

    def _land(self) -> bool:
        assert self._flight is not None
        flight, self._flight = self._flight, None
        saved = flight.result()
        self.newest_step = flight.step if saved else self.newest_step
        return saved

    def _staged(self, snapshot: Snapshot) -> Snapshot | None:
        """A copy that training leaves alone; None where the state has to be written from where it lies."""
        if self.staging is None or snapshot.stored:
            return None
        self._share = self._share or Share(self.group)
        tree = self.staging.copy(snapshot.tree, self._share.of(snapshot.tree))
        if tree is None:
            reason = (
                f"rank {dist.get_rank(self.group)} has no memory of the host for a copy of its state: step "
                f"{snapshot.step} is saved while training waits"
            )
            self.run.try_event(Event.WARNING, step=snapshot.step, reason=reason)
            return None
        return replace(snapshot, tree=tree)

    def _attempts(self, flight: Flight, snapshot: Snapshot, began_s: float, stall_s: float | None) -> bool:
        """Save, in whichever thread; `stall_s`: how long training was held up, None where it still is."""
        step = snapshot.step
        writer = Writer(self.group, self.manifest, self.check_owner)
        for attempt in range(ATTEMPTS):
            if attempt > 0:
                time.sleep(PAUSE_S)
            flight.attempts += 1
            if stall_s is None:
                beat(Phase.SAVE)
            reason = writer.write(snapshot, self._temporary(step), self._folder(step))
            if reason is None:
                if self._leader:
                    seconds = time.monotonic() - began_s
                    stalled_s = seconds if stall_s is None else stall_s
                    self.run.try_event(
                        Event.SAVED, step=step, seconds=round(seconds, 3), stall_s=round(stalled_s, 3)
                    )
                    self._retain()
                return True
            if self._leader:
                said = f"saving step {step} failed ({reason}), attempt {attempt + 1} of {ATTEMPTS}"
                self.run.try_event(Event.WARNING, step=step, reason=said)
        return False

    def _retain(self) -> None:
        """Remove what is not to be kept; damaged steps do not count and stay to be looked at."""
        self.clean()
        whole = {}
        for step in self.run.published_steps():
            if damage(self._folder(step)) is None:
                manifest = read_manifest(self._folder(step))
                whole[f"step_{step}"] = Whole(step, manifest.bytes, manifest.verified)
        steps = list(whole.values())
        others = [entry for entry in self.run.checkpoints.iterdir() if entry.name not in whole]
        others_bytes = sum(path.stat().st_size for entry in others for path in entry.rglob("*"))
        losses = eval_losses(self.run) if self.retention.keep_best > 0 else {}
        removed = self.retention.surplus(steps, losses, others_bytes)
        for step in removed:
            # At once: half a step would look like a damaged one.
            gone = self._folder(step).with_name(f"step_{step}{REMOVED}")
            self._folder(step).rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
        over_gb = self.retention.exceeded(steps, removed, others_bytes)
        if over_gb is not None and not self._told_budget:
            self._told_budget = True
            reason = (
                f"checkpoints take {over_gb:.3g} GB more than checkpoint.disk_budget_gb="
                f"{self.retention.disk_budget_gb:g} with nothing left to remove: raise it"
            )
            self.run.try_event(Event.WARNING, reason=reason)

    def newest(self) -> Manifest | None:
        """Return the manifest of the newest whole step, the same on every rank, or None if there is no step.

        Damaged steps are passed over with a warning. When there are steps but none is whole, that is an
        error: starting from nothing would throw the run away.
        """
        found: Manifest | None = None
        news: dict[int, str] = {}
        if self._leader:
            for step in reversed(self.run.published_steps()):
                if step in self._damaged:
                    continue
                problem = damage(self._folder(step))
                if problem is None:
                    found = read_manifest(self._folder(step))
                    break
                news[step] = f"checkpoint step_{step} of run {self.run.name} is damaged: {problem}"
            self._damaged |= news
        found, problems = broadcast((found, list(self._damaged.values())), self.group)
        if found is None and problems:
            kind = UserError if self._leader else ReportedError
            raise kind(
                f"{problems[0]}, and no older one is whole: put the file back, or move "
                f"{self.run.checkpoints} away to start again"
            )
        for step, problem in news.items():
            self._warn(step, problem)
        return found

    def restore(self, state: TrainState, manifest: Manifest) -> Manifest:
        """Restore `state` from the step that `newest` returned; return what it was restored from. Collective.

        Where the values of a step turn out to be damaged, on whichever rank, all ranks take the next older one.
        Raises `UserError` on all ranks when none is left.
        """
        while True:
            problem = together(self.group, partial(self._try, state, manifest))
            problems: list[str | None] = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(problems, problem, group=self.group)
            told = [one for one in problems if one is not None]
            if not told:
                return manifest
            if self._leader:
                step = manifest.step
                self._damaged[step] = f"checkpoint step_{step} of run {self.run.name} is damaged: {told[0]}"
                self._warn(step, self._damaged[step])
            older = self.newest()
            assert older is not None, "newest raises where nothing is left"
            manifest = older

    def _try(self, state: TrainState, manifest: Manifest) -> str | None:
        try:
            self.load(state, manifest)
        except DamagedError as error:
            return str(error)
        return None

    def load(self, state: TrainState, manifest: Manifest) -> None:
        """Restore `state` from a step that `newest` returned.

        Not collective: raises `UserError` on the ranks that cannot, `DamagedError` where values are not those that
        were saved.
        """
        folder = self._folder(manifest.step)
        reader = SafeReader(folder, manifest, self.verify_load)
        try:
            state.load(lambda tree: load_tree(tree, reader), reader.read_metadata().state_dict_metadata)
        except CheckpointException as error:
            raise UserError(
                f"checkpoint {folder} cannot be loaded ({causes(error)}): put its files back, or move the folder "
                "away to continue from an older step"
            ) from error
        self.newest_step = manifest.step

    def _warn(self, step: int, problem: str) -> None:
        tell(problem)
        self.run.try_event(Event.WARNING, step=step, reason=problem)

    def set_aside_damaged(self) -> None:
        """Rename steps newer than the restored one, which are not whole. Rank 0 only, while it owns the run.

        They must neither count as progress nor push whole steps out.
        """
        for step in self._damaged:
            path = self._folder(step)
            shutil.rmtree(path.with_name(path.name + DAMAGED), ignore_errors=True)
            path.rename(path.with_name(path.name + DAMAGED))
