"""The checkpoints of a run: when they are written and which of them count. `train.checkpoint.write` writes one."""

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from contract.errors import ReportedError, UserError
from contract.run_folder import Event, RunFolder, job_identity, start_number
from train.checkpoint.compress.plan import Wish
from train.checkpoint.compress.rounding import Rounding
from train.checkpoint.compressing import Compression
from train.checkpoint.errors import DamagedError, UnfitError
from train.checkpoint.fast import FastTier
from train.checkpoint.flight import Flight
from train.checkpoint.manifest import METADATA, Manifest, read_manifest
from train.checkpoint.reader import Phases, SafeReader, load_tree, whole
from train.checkpoint.recover import recover
from train.checkpoint.retain import Retention
from train.checkpoint.staging import Share, Staging
from train.checkpoint.tidy import TEMPORARY, Tidying
from train.checkpoint.write import Snapshot, Writer, broadcast, causes
from train.monitor.progress import tell
from train.resilience.pulse import Phase, beat
from train.resilience.together import together
from train.state import TrainState

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
    """Of any step; what depends on the step is filled in when it is saved."""
    retention: Retention
    check_owner: Callable[[], None]
    """Called on rank 0 before a step is published: raises `PeerError` when another process has the run."""
    wish: Wish = field(default_factory=lambda: Wish(compress=False))
    """How steps are stored once they are published."""
    rounding: Rounding | None = None
    """Of what is saved; None saves what there is."""
    verify_load: bool = True
    """Whether to hash what is loaded."""
    staging: Staging | None = None
    """Where saves in the background are copied to; None saves while training waits."""
    fast: FastTier | None = None
    """Where steps are written first; None writes them to the run folder at once."""
    load_phases: Phases | None = None
    """Where the time of the last load went."""
    newest_step: int | None = None
    """The step that was restored or saved last."""
    _flight: Flight | None = None
    """The save in the background that nobody has waited for yet."""
    _share: Share | None = None
    _stall_s: float | None = None
    _damaged: dict[int, str] = field(default_factory=dict)
    """On rank 0: steps newer than the restored one, which are not whole, and what is wrong with each."""

    def __post_init__(self) -> None:
        self._compression = Compression(self.group, self.run.checkpoints, self.wish, self.check_owner)
        self._tidying = Tidying(self.run, self.group, self.retention, self._compression, self.check_owner)

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
        self._tidying.clean()

    def save(self, state: TrainState, background: bool = False, urgent: bool = False) -> bool:
        """Write and publish the state of `state.step`; return whether that worked, the same on every rank.

        In the `background` a copy is made, of weights and moments until `before_update` returns, and True is no more
        than a promise: `poll` and `wait` tell what has become of it. Compression is left to the background in any case,
        and to the next save where this one is `urgent`. A failed save is tried once more and then given up with a
        warning event: the caller decides whether training can go on without it. Raises `PeerError` when another process
        has taken the run over, as `poll` and `wait` do.
        """
        began_s = time.monotonic()
        self.wait()
        if self.newest_step == state.step:
            return True
        beat(Phase.SAVE)
        snapshot = Snapshot(state.step, state.state_dict(), state.stored())
        staged = self._staged(snapshot) if background else None
        flight = Flight(state.step)
        if staged is None and not (background and self._kept(snapshot)):
            saved = self._attempts(flight, snapshot, began_s, waits=True)
            self.newest_step = state.step if saved else self.newest_step
            if saved and (urgent or not self.wish.compress):
                self._tidy(compress=not urgent)
            elif saved:
                # Files are all that it needs: nobody has to wait.
                flight.copied.set()
                self._begin(flight, lambda: self._tidy(compress=True))
        else:
            saved = True
            if staged is None:
                flight.copied.set()  # the nodes' disks have it
            flight.stall_s = time.monotonic() - began_s
            self._begin(flight, partial(self._save_and_tidy, flight, staged or snapshot, began_s))
        self._stall_s = (self._stall_s or 0.0) + time.monotonic() - began_s
        return saved

    def before_update(self) -> None:
        """Wait until weights and moments may change: until then they are copied, beside what else is computed."""
        if self._flight is None or self._flight.copied.is_set():
            return
        began_s = time.monotonic()
        self._flight.copied.wait()
        waited_s = time.monotonic() - began_s
        self._flight.stall_s += waited_s
        self._stall_s = (self._stall_s or 0.0) + waited_s

    def poll(self) -> bool | None:
        """Return whether a save in the background has worked that has ended since the last call; None without one."""
        return self._land() if self._flight is not None and self._flight.over else None

    def wait(self) -> bool | None:
        """Wait for a save in the background; return whether it has worked, None without one."""
        return None if self._flight is None else self._land()

    def settle(self, stopping: Callable[[], bool]) -> None:
        """Wait for what goes on in the background, compression included, unless the process is to stop."""
        seen = -1
        while self._flight is not None and not self._flight.over and not stopping():
            if self._compression.blocks != seen:
                seen = self._compression.blocks
                beat(Phase.SAVE)
            self._flight.pause()
        self.wait()

    def take_stall_s(self) -> float | None:
        """How long training has stood still for saves since the last call, s; None without any."""
        stall_s, self._stall_s = self._stall_s, None
        return stall_s

    def close(self) -> None:
        """Give memory up; a save in the background that nobody has waited for is given up too."""
        if self._flight is None and self.staging is not None:
            self.staging.close()

    def _begin(self, flight: Flight, work: Callable[[], bool]) -> None:
        self._flight = flight
        self._compression.begin()
        flight.begin(work)

    def _save_and_tidy(self, flight: Flight, snapshot: Snapshot, began_s: float) -> bool:
        if not flight.copied.is_set():
            assert self.staging is not None
            self.staging.fill()
            flight.copied.set()
        return self._attempts(flight, snapshot, began_s, waits=False) and self._tidy(compress=True)

    def _land(self) -> bool:
        assert self._flight is not None
        flight, self._flight = self._flight, None
        # Training waits for what was published, never for its compression.
        self._compression.hurry()
        saved = flight.result()
        self.newest_step = flight.step if saved else self.newest_step
        return saved

    def _staged(self, snapshot: Snapshot) -> Snapshot | None:
        """A copy that training leaves alone; None where the state has to be written from where it lies."""
        if self.staging is None or snapshot.stored:
            return None
        self._share = self._share or Share(self.group)
        tree = self.staging.copy(snapshot.tree, self._share.of(snapshot.tree), _changes_in_updates)
        if tree is None:
            reason = (
                f"rank {dist.get_rank(self.group)} has no memory of the host for a copy of its state: step "
                f"{snapshot.step} is saved while training waits"
            )
            self.run.try_event(Event.WARNING, step=snapshot.step, reason=reason)
            return None
        return replace(snapshot, tree=tree)

    def _kept(self, snapshot: Snapshot) -> bool:
        """Whether the nodes' own disks have the step, so that training can go on while it is copied from there."""
        return self.fast is not None and self.fast.keep(self._writer(), snapshot)

    def _writer(self) -> Writer:
        return Writer(self.group, self.manifest, self.check_owner, self.rounding)

    def _attempts(self, flight: Flight, snapshot: Snapshot, began_s: float, waits: bool) -> bool:
        """Save, in whichever thread; `waits`: whether training does meanwhile."""
        step = snapshot.step
        write = self._writer().write if self.fast is None else partial(self.fast.save, self._writer())
        for attempt in range(ATTEMPTS):
            if attempt > 0:
                time.sleep(PAUSE_S)
            flight.attempts += 1
            if waits:
                beat(Phase.SAVE)
            reason = write(snapshot, self._temporary(step), self._folder(step))
            if reason is None:
                if self._leader:
                    seconds = time.monotonic() - began_s
                    stalled_s = seconds if waits else flight.stall_s
                    self.run.try_event(
                        Event.SAVED, step=step, seconds=round(seconds, 3), stall_s=round(stalled_s, 3)
                    )
                return True
            if self._leader:
                said = (
                    f"saving step {step} failed ({reason}), attempt {attempt + 1} of {ATTEMPTS}{self._room()}"
                )
                self.run.try_event(Event.WARNING, step=step, reason=said)
                self._tidying.make_room()
        return False

    def _room(self) -> str:
        """Say how much is free: where the disk is full, torch does not say so."""
        try:
            free = shutil.disk_usage(self.run.checkpoints).free
        except OSError:
            return ""
        return f"; {free / 1e6:,.0f} MB are free in {self.run.checkpoints}"

    def _tidy(self, compress: bool) -> bool:
        """Keep the steps in order; returns True: the save was one."""
        self._tidying.tidy(compress)
        return True

    def recover(self) -> None:
        """Publish what an earlier start has kept on the nodes' own disks, if that is newer. Collective.

        Before `newest`, while this process owns the run. Raises `PeerError` when another one does.
        """
        if self.fast is None:
            return
        began_s = time.monotonic()
        step = recover(
            self.fast,
            self._writer(),
            lambda step: (self._temporary(step), self._folder(step)),
            self._newest_written,
            self._warn,
        )
        if step is not None and self._leader:
            seconds = round(time.monotonic() - began_s, 3)
            self.run.try_event(Event.SAVED, step=step, seconds=seconds, stall_s=seconds)
            tell(
                f"step {step} was kept on the nodes' disks by an earlier start, and is now in the run folder"
            )

    def _newest_written(self) -> tuple[int, float]:
        """The newest whole step, and when rank 0 began with it, s since the epoch; (-1, 0) without one.

        Raises OSError.
        """
        for step in reversed(self.run.published_steps()):
            with suppress(ValueError):
                began = whole(self._folder(step)).began
                # The storage's clock, by the one file that is never replaced later.
                written = (self._folder(step) / METADATA).stat().st_mtime
                return step, written if began is None else began
        return -1, 0.0

    def newest(self) -> Manifest | None:
        """Return the manifest of the newest whole step, the same on every rank, or None if there is no step.

        Damaged steps are passed over with a warning. When there are steps but none is whole, that is an
        error: starting from nothing would throw the run away.
        """
        found, news = together(self.group, self._look)
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

    def _look(self) -> tuple[Manifest | None, dict[int, str]]:
        """Rank 0: the newest whole step, and what is wrong with newer ones that nobody has told of."""
        news: dict[int, str] = {}
        if not self._leader:
            return None, news
        try:
            for step in reversed(self.run.published_steps()):
                if step in self._damaged:
                    continue
                try:
                    return whole(self._folder(step)), news
                except ValueError as error:
                    news[step] = f"checkpoint step_{step} of run {self.run.name} is damaged: {error}"
        except OSError as error:
            reason = f"{self.run.checkpoints} cannot be read ({error.strerror}): look at its file system"
            raise UserError(reason) from error
        return None, news

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
            return self._try_as_stored_now(state, manifest, str(error))
        return None

    def _try_as_stored_now(self, state: TrainState, manifest: Manifest, problem: str) -> str | None:
        """Load a step again where a command has stored it in another way meanwhile; return what is wrong."""
        try:
            current = read_manifest(self._folder(manifest.step))
            if current != manifest:
                self.load(state, current)
                return None
        except (OSError, ValueError, DamagedError) as error:
            return str(error)
        return problem

    def load(self, state: TrainState, manifest: Manifest) -> None:
        """Restore `state` from a step that `newest` returned.

        Not collective: raises `UserError` on the ranks that cannot, `DamagedError` where values are not those that
        were saved.
        """
        folder = self._folder(manifest.step)
        reader = SafeReader(folder, manifest, self.verify_load)
        try:
            state.load(lambda tree: load_tree(tree, reader), reader.read_metadata().state_dict_metadata)
        except (CheckpointException, UnfitError) as error:
            why = causes(error) if isinstance(error, CheckpointException) else error
            raise UserError(
                f"checkpoint {folder} cannot be loaded ({why}): put its files back, or move the folder "
                "away to continue from an older step"
            ) from error
        finally:
            reader.close()
        self.load_phases = reader.phases
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


def _changes_in_updates(key: tuple[str, ...]) -> bool:
    """Whether a tensor, by its place in the tree, only changes when the optimizer steps."""
    return key[0] in ("model", "optimizer")
