"""The set-up of one launch of a run: check everything, build the parts, restore, announce."""

import errno
import math
import os
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

import configs.compose
from contract.errors import ReportedError, SaveError, UserError
from contract.run_folder import HAND_STARTED, Event, job_identity, start_number
from train import bootstrap
from train.checkpoint.compress.plan import Wish
from train.checkpoint.compress.rounding import Rounding
from train.checkpoint.config import CheckpointConfig, Compress, Lossy
from train.checkpoint.digests import digest
from train.checkpoint.fast import FastTier
from train.checkpoint.fast_folder import check_room, fast_folder, no_gain
from train.checkpoint.manifest import Manifest
from train.checkpoint.reader import Phases
from train.checkpoint.retain import Retention
from train.checkpoint.staging import Staging
from train.checkpoint.store import CheckpointStore
from train.checkpoint.tidy import TEMPORARY
from train.checkpoint.write import broadcast
from train.comm.check import check_plan
from train.config import WATCH_MARGIN_S, TrainConfig
from train.continuing import (
    changed_batch,
    changed_values,
    check_continues,
    check_exact,
    check_model,
    check_never,
    check_required,
    sample_order,
)
from train.data.loader import TokenWindows, TrainLoader
from train.evaluate import Evaluator
from train.layout.check import lay_out
from train.layout.config import Recompute
from train.layout.dims import ParallelDims
from train.layout.memory import heaviest, lines, memory
from train.layout.notes import notes
from train.loop import Parts
from train.mesh import Mesh
from train.model.config import padded_vocabulary, parameter_count
from train.model.hf import read_hf
from train.monitor.flops import peak_tflops
from train.monitor.progress import ProgressLine, tell
from train.monitor.recorder import Recorder
from train.offload.config import Tier
from train.offload.room import check_fits, room
from train.optim.adamw import AnyAdamW, build_optimizer
from train.parallel.apply import Sharded, build_engine, build_parts
from train.parallel.fill import draw
from train.parallel.recompute import plan_of
from train.precision.state import PrecisionState
from train.resilience.owner import RunOwner, RunTakenError
from train.resilience.pulse import Phase, beat
from train.resilience.stop import Agreement, StopRequest
from train.resilience.together import together
from train.state import TrainState, seed_everything

SHARED_STORAGE_WAIT_S = 10.0
PASSING = (errno.EIO, errno.ESTALE, errno.ESHUTDOWN, errno.ETIMEDOUT, errno.EREMOTEIO)
"""What a shared file system fails with while it fails over, or has thrown this node out."""
SAVED_BYTES = 12
"""Of a parameter in a checkpoint: fp32, and two moments."""
SPARED = 0.9
"""Share of the free memory of a host that copies of the state may take, with which checkpoints are saved."""
LAUNCHERS = {"mpi": "mpirun", "slurm": "srun"}
"""What people call a launcher, where that is another name."""


class Launch:
    """The set-up of one launch of a run, seen from one rank.

    Nothing in the run folder changes until everything that can be wrong was checked: a launch that is
    refused must leave the run as it was.
    """

    def __init__(
        self, config: TrainConfig, request: StopRequest, world: bootstrap.World, device: torch.device
    ) -> None:
        self.owner = RunOwner(config.run_folder)
        self._config = config
        self._config_text = configs.compose.to_yaml(config)
        self._request = request
        self._world = world
        self._device = device
        self._leader = world.rank == 0
        self._claimed = False
        self._announced = False
        self._load_s = 0.0
        self._notes: list[str] = []
        """What is unfortunate on this node."""
        self._table: list[str] = []
        """What the rank that keeps most has where."""
        self._opened = ExitStack()
        """What has to be closed where `set_up` fails."""

    def set_up(self) -> Parts:
        """Build what the loop works with, restored from the newest checkpoint. Collective."""
        try:
            return self._set_up()
        except BaseException:
            self._opened.close()
            raise

    def _set_up(self) -> Parts:
        config, device, world, limits = self._config, self._device, self._world, self._config.resilience
        beat(Phase.START)
        control = _cpu_group(limits.collective_timeout_s)
        together(control, self._claim)
        self._claimed = True
        token = broadcast(self.owner.token, control)
        try:
            together(control, lambda: self._check_shared(token))
        finally:
            if self._leader:
                with suppress(OSError):
                    self._sign(token).rmdir()
        windows, held_out = together(control, self._open_data)

        beat(Phase.START)
        dims = together(control, lambda: self._lay_out())
        mesh = Mesh.build(dims, device.type, world.local_size)
        checkpoints = CheckpointStore(
            run=config.run_folder,
            # The watch on the pulse knows which rank it is that others wait for: it fires first.
            group=_cpu_group(limits.checkpoint_timeout_s + WATCH_MARGIN_S),
            manifest=Manifest(
                step=0,
                world_size=world.size,
                model=configs.compose.to_tree(config.model),
                data=windows.fingerprint | sample_order(config),
                layout=asdict(dims) | {"zero": config.parallel.zero},
                samples_per_step=config.loop.samples_per_step,
                versions=_versions(),
                config=digest(self._config_text.encode()),
            ),
            retention=Retention(
                config.checkpoint.keep_last,
                config.checkpoint.keep_every_steps,
                config.checkpoint.keep_best,
                config.checkpoint.disk_budget_gb,
            ),
            wish=_wish(config.checkpoint),
            rounding=_rounding(config.checkpoint),
            verify_load=config.checkpoint.verify_load,
            staging=self._staging() if config.checkpoint.background else None,
            fast=together(control, self._fast_tier),
            check_owner=self.owner.check,
        )
        if checkpoints.fast is not None:
            self._recover(checkpoints, control)
        newest = checkpoints.newest()
        if newest is not None:
            found = newest
            together(control, lambda: check_continues(config, found, checkpoints.manifest))
            # Before anything large is read; and again below, where damage may have led to an older step.
            together(control, lambda: check_exact(config, found))
        # Random weights take minutes for a large model: only where nothing replaces them.
        fresh = newest is None and config.run.init_from is None
        values = draw(config.model, config.seed) if fresh else None
        # When no rank of the node has taken its memory yet.
        together(control, lambda: self._check_memory(dims))
        together(control, lambda: self._check_room(checkpoints.fast, newest))
        sharded = together(control, lambda: self._build_parts(mesh))
        optimizer = together(control, lambda: self._build_optimizer(sharded))
        state = TrainState(
            sharded.parts,
            optimizer,
            config.model,
            rank=world.rank,
            precision=PrecisionState.of(config.precision),
        )
        seed_everything(config.seed, world.rank)
        if values is not None:
            state.fill(values)
        if newest is not None:
            beat(Phase.LOAD, newest.step)
            began_s = time.monotonic()
            newest = checkpoints.restore(state, newest)
            self._load_s = time.monotonic() - began_s
            restored = newest
            rounded = together(control, lambda: check_exact(config, restored))
            self._notes += [rounded] if rounded is not None and self._leader else []
            beat(Phase.START)
        elif not fresh:
            together(control, lambda: self._import_weights(state))
        loader = together(control, lambda: self._loader(windows, state, mesh))
        together(control, lambda: self._announce(state, checkpoints, dims, newest))
        offloads = config.offload.activations is not Tier.none
        if self._leader and (offloads or config.parallel.recompute is not Recompute.none):
            tell(str(plan_of(config, mesh)))

        agreement = Agreement(control, self._request, config.checkpoint.every_minutes * 60)
        peak = peak_tflops(device, config.monitor.peak_tflops)
        return Parts(
            config=config,
            run=config.run_folder,
            device=device,
            state=state,
            mesh=mesh,
            engine=build_engine(sharded, config, device),
            loader=loader,
            evaluator=Evaluator(config, held_out, device, control, agreement, mesh),
            checkpoints=checkpoints,
            agreement=agreement,
            progress=ProgressLine(config.monitor.progress, config.loop.steps, self._leader),
            recorder=self._recorder(state) if self._leader else None,
            peak_flops=None if peak is None else peak * 1e12 * world.size,
        )

    def _staging(self) -> Staging:
        def room_bytes() -> int:
            return int(SPARED * room(self._device, self._world.local_size, []).host)

        return Staging(room_bytes, pinned=self._device.type == "cuda")

    def _fast_tier(self) -> FastTier | None:
        path, run = self._config.checkpoint.fast_path, self._config.run_folder
        if path is None:
            return None
        tier = FastTier(fast_folder(path, run), run)
        if self._leader and (reason := no_gain(tier.root, run)):
            self._notes.append(reason)
        return tier

    def _recover(self, checkpoints: CheckpointStore, control: dist.ProcessGroup) -> None:
        """Publish what earlier starts have left on the nodes, if that is newer than what is published."""
        together(control, self._settle)
        beat(Phase.SAVE)
        checkpoints.recover()
        beat(Phase.START)
        together(control, self._check_resume)

    def _settle(self) -> None:
        if self._leader:
            self.owner.settle()

    def _check_room(self, tier: FastTier | None, newest: Manifest | None) -> None:
        """Make sure that the disk of this node has room for what its ranks save."""
        if tier is None or self._world.local_rank != 0:
            return
        known = None if newest is None or not newest.verified else _values_bytes(newest)
        whole = parameter_count(self._config.model) * SAVED_BYTES if known is None else known
        share = whole * self._world.local_size // self._world.size
        if reason := check_room(tier.root, share, known is not None):
            self._notes.append(reason)

    def _lay_out(self) -> ParallelDims:
        config, world = self._config, self._world
        dims = lay_out(config, world.size, world.local_size, on_gpus=self._device.type == "cuda")
        if self._leader:
            check_plan(config, dims, world.local_size)
        return dims

    def _check_memory(self, dims: ParallelDims) -> None:
        """Make sure that what this rank keeps fits where it runs, and tell (rank 0)."""
        config, world = self._config, self._world
        there = room(self._device, world.local_size, config.offload.nvme_path)
        kept = memory(config, dims, world.rank, self._device.type)
        check_fits(config, kept, there, world.rank, world.local_size)
        if self._leader:
            fullest, most = heaviest(config, dims, self._device.type)
            self._table = lines(fullest, most, config.offload, there.limits())

    def _build_parts(self, mesh: Mesh) -> Sharded:
        sharded = build_parts(self._config, mesh, self._device, None)
        if sharded.shelved is not None:
            self._opened.callback(sharded.shelved.close)
        return sharded

    def _build_optimizer(self, sharded: Sharded) -> AnyAdamW:
        optimizer = build_optimizer(sharded.parts, self._config, self._device, sharded.shelved)
        self._opened.callback(optimizer.close)
        return optimizer

    def record_failure(self, error: BaseException) -> None:
        """Leave word of a failure in the run folder.

        A launch by hand that was refused leaves the run as it was; a job's supervisor wants the reason.
        """
        in_job = job_identity()[0] != HAND_STARTED
        refused = isinstance(error, RunTakenError)
        told = isinstance(error, ReportedError)
        if told or not (self._announced or (in_job and (self._claimed or refused))):
            return
        code = error.exit_code if isinstance(error, UserError) else None
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        folder = self._config.run_folder
        # `refused`: the run is another process's and well, only this launch has failed.
        marks = {"refused": True} if refused else {}
        folder.try_event(Event.FAILED, rank=self._world.rank, reason=reason, code=code, **marks)

    def _claim(self) -> None:
        """Take the run folder for this launch (rank 0)."""
        if not self._leader:
            return
        folder = self._config.run_folder
        # What the nodes' disks have is not known yet.
        if self._config.checkpoint.fast_path is None:
            check_required(self._config)
        try:
            folder.create()
            self.owner.acquire()
            self._sign(self.owner.token).mkdir()
        except OSError as error:
            raise _unwritable(folder.path, error) from error
        check_never(self._config)

    def _check_resume(self) -> None:
        if self._leader:
            check_required(self._config)
            check_never(self._config)

    def _check_shared(self, token: str) -> None:
        """Make sure that this rank sees what rank 0 has written: shards on separate disks are no checkpoint."""
        deadline = time.monotonic() + SHARED_STORAGE_WAIT_S
        folder = self._config.run_folder
        while not (sees := self.owner.sees(token)) or not self._sign(token).is_dir():
            if time.monotonic() > deadline:
                path = folder.checkpoints if sees else folder.path
                raise UserError(
                    f"{path} is not the folder that rank 0 writes to: put run.root on storage that all nodes share"
                )
            time.sleep(0.1)

    def _sign(self, token: str) -> Path:
        """What rank 0 puts where checkpoints go, which may be another file system, until all ranks have seen it."""
        return self._config.run_folder.checkpoints / f"sign{TEMPORARY}{token}"

    def _open_data(self) -> tuple[TokenWindows, TokenWindows | None]:
        """Open the token files and fit the vocabulary to them."""
        config = self._config
        windows = TokenWindows.open(config.data, "train")
        held_out = TokenWindows.open(config.data, "validation") if config.loop.eval_batches > 0 else None
        if config.model.vocab_size is None:
            config.model.vocab_size = padded_vocabulary(windows.metadata.vocab_size)
        windows.metadata.check_vocabulary(config.model.vocab_size)
        config.model.check_sequence_length(config.data.sequence_length)
        return windows, held_out

    def _import_weights(self, state: TrainState) -> None:
        assert self._config.run.init_from is not None
        folder = Path(self._config.run.init_from)
        shape, weights = read_hf(folder)
        check_model(configs.compose.to_tree(shape), configs.compose.to_tree(self._config.model), str(folder))
        state.fill(lambda name, _, where: weights[name][where])

    def _recorder(self, state: TrainState) -> Recorder:
        done = state.step == self._config.loop.steps
        return Recorder(
            self._config.run_folder,
            state.step,
            self._config.monitor.tensorboard,
            redo_evaluation=done,
            check_owner=self.owner.check,
        )

    def _loader(self, windows: TokenWindows, state: TrainState, mesh: Mesh) -> TrainLoader:
        return TrainLoader(
            windows,
            seed=self._config.seed,
            consumed_samples=state.samples,
            global_batch_size=self._config.loop.samples_per_step,
            micro_batch_size=self._config.parallel.micro_batch_size,
            dp_rank=mesh.dp.get_local_rank(),
            dp_size=mesh.dp.size(),
            prefetch_batches=self._config.data.prefetch_batches,
        )

    def _announce(
        self, state: TrainState, checkpoints: CheckpointStore, dims: ParallelDims, newest: Manifest | None
    ) -> None:
        """Write down what this launch is about to do, and tidy up what earlier ones have left (rank 0)."""
        if self._leader:
            self.owner.settle()
            checkpoints.set_aside_damaged()
            checkpoints.clean()
        self._announced = True
        if not self._leader:
            return
        folder = self._config.run_folder
        unfortunate = notes(self._config, dims, self._world.local_size) + self._notes
        changes = (
            changed_values(folder.config.read_text(), self._config_text) if folder.config.exists() else []
        )
        if newest is not None:
            changes += changed_batch(newest.samples_per_step, self._config.loop.samples_per_step, changes)
        try:
            if not folder.config.exists() or changes:
                temporary = folder.config.with_suffix(".tmp")
                temporary.write_text(self._config_text)
                temporary.replace(folder.config)
            folder.finished.unlink(missing_ok=True)
            folder.failed.unlink(missing_ok=True)
            folder.append_event(
                Event.STARTED,
                pid=os.getpid(),
                world_size=self._world.size,
                launcher=self._world.launcher,
                device=_device_name(self._device),
                changed=changes,
                start=start_number(),
            )
            if state.step > 0:
                folder.append_event(
                    Event.RESUMED,
                    step=state.step,
                    tokens=state.tokens,
                    load_s=round(self._load_s, 3),
                    phases=_told(checkpoints.load_phases),
                    start=start_number(),
                )
            for name in self._request.replaced:
                reason = f"another handler of {name} was replaced: stop requests belong to the trainer"
                folder.append_event(Event.WARNING, reason=reason)
            for note in unfortunate:
                folder.append_event(Event.WARNING, reason=note)
        except OSError as error:
            raise _unwritable(folder.path, error) from error
        tell(f"run {folder.name}: {_who_trains(self._world)}, on {_device_name(self._device)}")
        for note in unfortunate:
            tell(f"note: {note}")
        for line in self._table:
            tell(line)
        if self._config.checkpoint.background and state.stored():
            tell(
                "checkpoints are written while training waits: the optimizer's state is read from where it is kept"
            )
        if self._config.offload.delayed_update:
            tell("each step computes with weights that are one update old (offload.delayed_update)")
        if state.step > 0:
            tell(
                f"continuing run {folder.name} from step {state.step}, loaded in {self._load_s:.1f} s: "
                f"{checkpoints.load_phases}"
            )
            for change in changes:
                tell(f"changed since then: {change}")


def _unwritable(folder: Path, error: OSError) -> UserError:
    """Say that the run folder cannot be written; where that may pass by itself another try is worth it."""
    if error.errno in PASSING:
        return SaveError(
            f"run folder {folder} cannot be written ({error.strerror}): look at its file system if that does not pass"
        )
    return UserError(
        f"run folder {folder} cannot be written ({error.strerror}): choose another run.root, or free some space"
    )


def _who_trains(world: bootstrap.World) -> str:
    """Say how many ranks there are and what has started them."""
    ranks = f"{world.size} rank{'s' * (world.size > 1)}"
    if world.launcher == "alone":
        return ranks
    if world.launcher == "agent":
        return f"{ranks} started by an agent" + f" on each of {world.nodes} nodes" * (world.nodes > 1)
    return f"{ranks} started by {LAUNCHERS.get(world.launcher, world.launcher)}"


def _told(phases: Phases | None) -> dict[str, float]:
    return {} if phases is None else {name: round(value, 3) for name, value in asdict(phases).items()}


def _wish(kept: CheckpointConfig) -> Wish:
    return Wish(
        compress=kept.compress is not Compress.none,
        deltas=kept.compress is Compress.delta,
        longest_chain=kept.delta_chain,
        alone_every_steps=kept.keep_every_steps,
    )


def _rounding(kept: CheckpointConfig) -> Rounding | None:
    if kept.lossy is Lossy.none:
        return None
    return Rounding(weights=kept.lossy is Lossy.all, largest_error=kept.lossy_error)


def _values_bytes(manifest: Manifest) -> int:
    """Of all tensors, however they are stored."""
    forms = manifest.tensors.values()
    return sum(math.prod(form["shape"]) * getattr(torch, form["dtype"]).itemsize for form in forms)


def _versions() -> dict[str, str]:
    """Of what writes a checkpoint."""
    found = {"torch": str(torch.__version__)}
    with suppress(metadata.PackageNotFoundError):  # run from a copy of the sources
        found["trierarch"] = metadata.version("trierarch")
    return found


def _device_name(device: torch.device) -> str:
    return "the CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)


def _cpu_group(timeout_s: float) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup)
    return group
