"""A checkpoint of any layout restores in any other, to the bit, and training goes on as in one process."""

import hashlib
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.composed import composed
from harness.parity import bare_course
from harness.pool import Ranks
from harness.toy import StopAfter, toy_overrides
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from contract.errors import UserError
from contract.run_folder import RunFolder
from tools.ckpt.convert import Form, Wish, convert
from train.bootstrap import World
from train.checkpoint.compress.plan import Job
from train.checkpoint.compress.plan import Wish as Storing
from train.checkpoint.compressing import Compression
from train.checkpoint.manifest import read_manifest
from train.checkpoint.reader import SafeReader
from train.config import TrainConfig, load_config
from train.data.loader import TokenWindows, TrainLoader
from train.launch import Launch
from train.layout.dims import AXES
from train.loop import Parts, train
from train.model.config import ModelConfig, parameter_count
from train.parallel.clip import clip_grad_norm
from train.parallel.engine import mean_loss
from train.parallel.fill import local_part
from train.parallel.tied import copied_heads
from train.state import TrainState

pytestmark = pytest.mark.slow

SAVED, STEPS = 3, 5
"""Steps after which each layout saves, and up to which each goes on from what the others have saved."""
COMMON = [
    f"loop.steps={STEPS}",
    "loop.global_batch_size=12",
    "loop.eval_batches=0",
    "parallel.micro_batch_size=3",
    "model.layers=4",
    "precision=fp32",
    # The same rate in every step, so that a step needs no schedule.
    "optim.decay=constant",
    "optim.warmup_steps=0",
    "optim.lr=3e-3",
    "optim.eps=1e-5",
]
LAYOUTS = {
    "untied": [
        (1, ""),
        (2, "zero=0"),
        (4, "zero=2 dp_replicate=2"),
        (3, "zero=3 micro_batch_size=4"),
        (2, "tp=2"),
        (4, "pp=2 tp=2"),
        (4, "pp=2 cp=2"),
        (2, "cp=2 zero=1 context=ring"),
        (2, "pp=2 schedule=interleaved_1f1b"),
        (4, "tp=2 zero=3"),
    ],
    "tied": [
        (1, ""),
        (2, "tp=2"),
        (2, "pp=2 schedule=zbv"),
    ],
    "many": [
        (4, "pp=2 tp=2"),
        (8, "tp=2 zero=3 dp_replicate=2"),
    ],
}
"""Of a model with a head of its own, of one without, and of the first on many ranks, where DTensor looks for seconds at
all that can be done on a mesh of three dimensions; a line is a layout, restored from each of its list's."""


@dataclass(frozen=True)
class Saved:
    """What one layout has left."""

    run: RunFolder
    digests: dict[str, str]
    """Of each whole tensor in the memory of the ranks when they saved, by name."""


@dataclass(frozen=True)
class Restored:
    """What one layout has made of another's checkpoint."""

    digests: dict[str, str]
    losses: list[float]
    """Of the steps after it; none where it was only looked at."""


def overrides(tokens: Path, root: Path, model: str, size: int, layout: str) -> list[str]:
    """Settings of a run of a layout."""
    name = f"{model}_{size}_{layout}".replace(" ", "_").replace("=", "")
    degrees = [f"parallel.{one}" for one in layout.split()]
    tied = f"model.tie_embeddings={str(model == 'tied').lower()}"
    return toy_overrides(tokens, root, name, *COMMON, *degrees, tied)


def digests(state: TrainState) -> dict[str, str]:
    """SHA-256 of the bytes of each whole tensor, by name, from what the ranks hold of it; rank 0 alone knows."""
    tree = state.state_dict()
    tensors = dict(tree["model"])
    for name, moments in tree["optimizer"].items():
        tensors |= {f"{name}:{kind}": moment for kind, moment in moments.items()}
    own = [(name, tuple(tensor.shape), *local_part(tensor)) for name, tensor in tensors.items()]
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(own, everybody if dist.get_rank() == 0 else None)
    if dist.get_rank() > 0:
        return {}
    whole: dict[str, Tensor] = {}
    known: dict[str, Tensor] = {}
    for name, shape, part, where in chain(*everybody):
        tensor = whole.setdefault(name, torch.zeros(shape))
        seen = known.setdefault(name, torch.zeros(shape, dtype=torch.bool))
        assert torch.equal(tensor[where][seen[where]], part[seen[where]]), f"copies of {name} differ"
        tensor[where], seen[where] = part, True
    assert all(seen.all() for seen in known.values()), "some rank's part is missing"
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in whole.items()}


def open_run(config: TrainConfig, stop_after: int | None) -> tuple[Launch, Parts]:
    """What a rank of the trainer works with."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank=rank, size=size, local_rank=rank, local_size=size, launcher="test")
    launch = Launch(config, StopAfter(stop_after), world, torch.device("cpu"))
    return launch, launch.set_up()


def save(settings: list[str]) -> dict[str, str]:
    """Train until the save; the step before it is saved, too."""
    both = [f"checkpoint.every_steps={SAVED - 1}", "checkpoint.keep_last=0"]
    launch, parts = open_run(composed([*settings, *both]), SAVED - 1)
    try:
        assert train(parts).stopped
    finally:
        parts.close()
        launch.owner.release()
    return digests(parts.state)


def spoil(state: TrainState) -> None:
    """Make sure that what is restored next can't have been there before."""
    with torch.no_grad():
        for parameter in state.parts.parameters():
            local_part(parameter)[0].fill_(torch.nan)
            for moment in state.optimizer.state.get(parameter, {}).values():
                local_part(moment)[0].fill_(torch.nan)
    state.step = state.samples = state.tokens = -1


def train_on(parts: Parts, windows: TokenWindows) -> list[float]:
    """Losses of the steps that are left."""
    state, mesh, config = parts.state, parts.mesh, parts.config
    loader = TrainLoader(
        windows,
        seed=config.seed,
        consumed_samples=state.samples,
        global_batch_size=config.loop.samples_per_step,
        micro_batch_size=config.parallel.micro_batch_size,
        dp_rank=mesh.dp.get_local_rank(),
        dp_size=mesh.dp.size(),
        prefetch_batches=0,
    )
    losses = []
    for batch in islice(loader, STEPS - state.step):
        losses.append(mean_loss(parts.engine.train(batch.micro_batches), mesh))
        clip_grad_norm(state.optimizer, config.loop.clip_norm, mesh, copied_heads(state.parts))
        state.optimizer.step()
        state.optimizer.zero_grad()
    return losses


def restore(settings: list[str], sources: list[Path], followed: int) -> list[Restored]:
    """Restore each source's checkpoint; go on from that of number `followed`, equal digests speak for the others."""
    config = composed(settings)
    config.run.name += "_restores"
    launch, parts = open_run(config, None)
    windows = TokenWindows.open(config.data, "train")
    restored = []
    try:
        for number, source in enumerate(sources):
            spoil(parts.state)
            store = replace(parts.checkpoints, run=RunFolder(source))
            manifest = store.newest()
            assert manifest is not None
            store.load(parts.state, manifest)
            assert parts.state.step == SAVED
            found = digests(parts.state)
            restored.append(Restored(found, train_on(parts, windows) if number == followed else []))
    finally:
        parts.close()
        launch.owner.release()
    return restored


@pytest.fixture(scope="session")
def saved(
    ranks: Ranks, toy_tokens: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Saved]]:
    """What every layout of a model has saved, by layout."""
    root = tmp_path_factory.mktemp("saved")
    known: dict[str, dict[str, Saved]] = {}

    def of(model: str) -> dict[str, Saved]:
        if model not in known:
            known[model] = {}
            for size, layout in LAYOUTS[model]:
                settings = overrides(toy_tokens, root, model, size, layout)
                found = ranks(size, save, settings)
                known[model][f"{size} ranks {layout}"] = Saved(load_config(settings).run_folder, found[0])
        return known[model]

    return of


@pytest.fixture(scope="session")
def undisturbed(toy_tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[float]]:
    """Losses of one process after the save."""
    root = tmp_path_factory.mktemp("bare")
    return lambda model: bare_course(overrides(toy_tokens, root, model, 1, "")).losses[SAVED:]


@pytest.mark.req("C13")
@pytest.mark.parametrize(
    ("model", "size", "layout"),
    [
        pytest.param(model, *layout, marks=[pytest.mark.chaos] * (model == "many"))
        for model, layouts in LAYOUTS.items()
        for layout in layouts
    ],
    ids=lambda value: str(value).replace(" ", ","),
)
def test_a_layout_restores_every_layout(
    ranks: Ranks,
    toy_tokens: Path,
    tmp_path: Path,
    saved: Callable[[str], dict[str, Saved]],
    undisturbed: Callable[[str], list[float]],
    model: str,
    size: int,
    layout: str,
) -> None:
    sources = saved(model)
    settings = overrides(toy_tokens, tmp_path, model, size, layout)
    # Each layout goes on from another one.
    followed = (LAYOUTS[model].index((size, layout)) + 1) % len(sources)
    restored = ranks(size, restore, settings, [source.run.path for source in sources.values()], followed)[0]
    for (name, source), found in zip(sources.items(), restored, strict=True):
        assert found.digests == source.digests, name
    assert restored[followed].losses == pytest.approx(undisturbed(model), rel=1e-5)


@pytest.mark.parametrize("model", ["untied", "tied", pytest.param("many", marks=pytest.mark.chaos)])
def test_a_checkpoint_holds_every_tensor_once(saved: Callable[[str], dict[str, Saved]], model: str) -> None:
    """Copies on several ranks are written by one of them; the manifest says which layout wrote."""
    for (size, _), source in zip(LAYOUTS[model], saved(model).values(), strict=True):
        folder = source.run.checkpoints / f"step_{SAVED}"
        manifest = read_manifest(folder)
        assert math.prod(manifest.layout[axis] for axis in AXES) == size
        metadata = SafeReader(folder).read_metadata()
        values = stored = 0
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            if name.startswith(("model.", "optimizer.")) and tensor.size:
                values += tensor.size.numel()
                stored += sum(chunk.sizes.numel() for chunk in tensor.chunks)
        assert values == stored == 3 * parameter_count(ModelConfig(**manifest.model))
        # Each piece has a header, of well under 2 kB, and each rank has its random generators.
        in_files_bytes = sum(bytes for name, bytes in manifest.files.items() if name.endswith(".distcp"))
        assert in_files_bytes < 4 * stored + 2048 * len(metadata.storage_data) + 20_000 * size


STORED = [
    ("delta", "untied", (3, "zero=3 micro_batch_size=4"), (4, "pp=2 tp=2")),
    ("converted", "untied", (4, "tp=2 zero=3"), (1, "")),
    ("converted", "tied", (2, "pp=2 schedule=zbv"), (2, "tp=2")),
]
"""How a step is stored before it is restored; of which model; the layouts that wrote it and that restores it."""


def no_model(model: dict[str, Any]) -> Any:
    """Of no form of Hugging Face's is there anything here."""
    raise UserError("not asked for")


def convert_there_and_back(step: Path, target: Path) -> None:
    """Make `target` of a step's tensors alone, by way of another form."""
    other = target.parents[1] / "dcp"
    convert(step, other, Wish(Form.DCP), no_model)
    convert(other, target, Wish(Form.TRIERARCH, like=step), no_model)
    assert len(list(target.glob("*.distcp"))) == 1


def store_as_delta(ranks: Ranks, step: Path, target: Path) -> None:
    """Make `target` of a step, stored as the difference to the one before it."""
    parent = step.with_name(f"step_{SAVED - 1}")

    def compress(checkpoints: Path) -> str | None:
        group = dist.group.WORLD
        assert group is not None
        compression = Compression(group, checkpoints, Storing(compress=True), lambda: None)
        done = compression.run(Job(SAVED, SAVED - 1))
        return "it was in a hurry" if done is None else done.reason

    shutil.copytree(parent, target.with_name(parent.name))
    shutil.copytree(step, target)
    assert ranks(2, compress, target.parent) == [None, None]
    manifest = read_manifest(target)
    assert manifest.parent == parent.name and manifest.compressed
    assert not list(target.glob("*.distcp"))


@pytest.mark.req("C13", "A15")
@pytest.mark.parametrize(
    ("way", "model", "source", "layout"), STORED, ids=lambda value: str(value).replace(" ", ",")
)
def test_a_layout_restores_what_another_way_of_storing_has_made_of_a_step(
    ranks: Ranks,
    toy_tokens: Path,
    tmp_path: Path,
    saved: Callable[[str], dict[str, Saved]],
    undisturbed: Callable[[str], list[float]],
    way: str,
    model: str,
    source: tuple[int, str],
    layout: tuple[int, str],
) -> None:
    origin = saved(model)[f"{source[0]} ranks {source[1]}"]
    step = origin.run.checkpoints / f"step_{SAVED}"
    run = RunFolder(tmp_path / "stored")
    run.create()
    if way == "delta":
        store_as_delta(ranks, step, run.checkpoints / step.name)
    else:
        convert_there_and_back(step, run.checkpoints / step.name)
    settings = overrides(toy_tokens, tmp_path, model, *layout)
    (restored,) = ranks(layout[0], restore, settings, [run.path], 0)[0]
    assert restored.digests == origin.digests
    assert restored.losses == pytest.approx(undisturbed(model), rel=1e-5)
