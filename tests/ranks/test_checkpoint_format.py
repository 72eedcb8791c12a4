"""What a step on disk says of its tensors, and that a step with other bytes is neither published nor loaded."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness.disks import lose, small_disk
from harness.offload import opened
from harness.pool import Ranks, RanksError
from harness.toy import toy_overrides, train_toy
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from contract.errors import UserError
from contract.exit_codes import ExitCode
from contract.run_folder import Event, RunFolder
from train.checkpoint.compress.files import StepFiles
from train.checkpoint.digests import digest, read_digests
from train.checkpoint.manifest import read_manifest
from train.checkpoint.reader import SafeReader
from train.checkpoint.slices import slices
from train.checkpoint.stored import as_bytes
from train.checkpoint.write import Writer
from train.generate import load_model

pytestmark = pytest.mark.slow

COMMON = ["loop.steps=3", "loop.eval_batches=0", "precision=fp32"]


def flip(folder: Path, tensor: str, number: int = 0) -> str:
    """Change one bit of a slice of a tensor; return the name of the file."""
    piece = slices(StepFiles(folder), SafeReader(folder).read_metadata(), tensor)[number]
    place = piece.position() + piece.nbytes // 2
    with piece.path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 4]))
    return piece.path.name


def losses(run: RunFolder) -> list[float]:
    return [json.loads(line)["loss"] for line in run.metrics.read_text().splitlines()]


def warnings_of(run: RunFolder) -> list[str]:
    return [event["reason"] for event in run.read_events() if event["event"] == Event.WARNING]


def resaved(overrides: list[str], source: Path) -> None:
    """Restore another run's newest step, and save it as this one's."""
    with opened(overrides) as parts:
        store = replace(parts.checkpoints, run=RunFolder(source))
        manifest = store.newest()
        assert manifest is not None
        store.load(parts.state, manifest)
        assert parts.checkpoints.save(parts.state)


LAYOUTS = [
    (1, ""),
    (2, "zero=0"),
    (2, "zero=1"),
    (4, "zero=3"),
    (2, "tp=2"),
    (4, "tp=2 zero=3"),
    (2, "pp=2"),
]
OFFLOADS = [(2, "zero=3", "optimizer=cpu"), (1, "zero=0", "optimizer=nvme nvme_path=[{}]")]


@pytest.fixture(scope="module")
def trained(ranks: Ranks, toy_tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a single process, three steps long."""
    root = tmp_path_factory.mktemp("trained")
    assert ranks(1, train_toy, toy_overrides(toy_tokens, root, "run", *COMMON)) == [ExitCode.FINISHED]
    return root / "run"


def shared(tensors: dict[str, Any]) -> dict[str, Any]:
    """Of the model and its optimizer: each rank has generators of its own."""
    return {name: value for name, value in tensors.items() if not name.startswith("rng.")}


@pytest.mark.req("C8")
@pytest.mark.parametrize(
    ("size", "layout", "offload"), [*((size, layout, "") for size, layout in LAYOUTS), *OFFLOADS]
)
def test_hashes_of_whole_tensors_are_the_same_in_any_layout(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path, trained: Path, size: int, layout: str, offload: str
) -> None:
    settings = [f"parallel.{one}" for one in layout.split()]
    settings += [f"offload.{one.format(tmp_path)}" for one in offload.split()]
    overrides = toy_overrides(toy_tokens, tmp_path, "other", *COMMON, *settings)
    ranks(size, resaved, overrides, trained)
    before = read_manifest(trained / "checkpoints/step_3")
    after = read_manifest(tmp_path / "other/checkpoints/step_3")
    assert shared(after.tensors) == shared(before.tensors)
    assert after.world_size == size and len(after.digests) == size
    assert any(name.startswith("optimizer.") for name in after.tensors)


@pytest.mark.req("C8")
def test_a_manifest_tells_what_torch_reads(trained: Path, tmp_path: Path) -> None:
    folder = trained / "checkpoints/step_3"
    manifest = read_manifest(folder)
    dcp_to_torch_save(folder, tmp_path / "all.pt")
    flat: dict[str, torch.Tensor] = {}

    def walk(tree: Any, path: str) -> None:
        if isinstance(tree, dict):
            for key, value in tree.items():
                walk(value, f"{path}.{key}" if path else key)
        else:
            flat[path] = tree

    walk(torch.load(tmp_path / "all.pt", weights_only=True), "")
    assert flat.keys() == manifest.tensors.keys()
    for name, tensor in flat.items():
        told = manifest.tensors[name]
        assert told == {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "xxh3": digest(as_bytes(tensor)),
        }
    assert manifest.versions["torch"] == torch.__version__
    assert manifest.config == digest((trained / "config.yaml").read_bytes())
    assert manifest.parent is None
    slices_of = read_digests(folder / "digests/rank_0.json", manifest.digests["rank_0.json"])
    assert {one.tensor for one in slices_of} == flat.keys()


def train_on_a_bad_disk(overrides: list[str], bad_writes: int, tensor: str) -> ExitCode:
    """Train while the disk changes what the first saves have written."""
    left = [bad_writes]
    read_back = Writer._read_back

    def after_the_disk(writer: Writer, folder: Path, *arguments: Any) -> None:
        if left[0] > 0 and dist.get_rank() == 0:
            flip(folder, tensor)
        left[0] -= 1
        # Not the ranks' own group: training goes on meanwhile.
        dist.barrier(writer.group)
        read_back(writer, folder, *arguments)

    with mock.patch.object(Writer, "_read_back", after_the_disk):
        return train_toy(overrides)


@pytest.mark.req("C8", "A22")
def test_what_does_not_read_back_is_written_again(ranks: Ranks, toy_tokens: Path, tmp_path: Path) -> None:
    settings = ["checkpoint.every_steps=1", "checkpoint.keep_last=0"]
    overrides = toy_overrides(toy_tokens, tmp_path, "run", *COMMON, *settings, "parallel.zero=3")
    tensor = "optimizer.norm.weight.exp_avg"
    assert ranks(2, train_on_a_bad_disk, overrides, 3, tensor) == [ExitCode.FINISHED] * 2
    run = RunFolder(tmp_path / "run")
    said = warnings_of(run)
    assert len(said) == 3, "two attempts at step 1, one at step 2"
    assert all(f"the slice of {tensor} at [0], which rank 0 wrote, does not read back" in one for one in said)
    assert run.published_steps() == [2, 3]
    assert not [path for path in run.checkpoints.iterdir() if ".tmp" in path.name]


def go_stale(folder: Path, tensor: str, number: int) -> str:
    """Put the file of the step before in the place of that of a slice: its size is the same."""
    piece = slices(StepFiles(folder), SafeReader(folder).read_metadata(), tensor)[number]
    shutil.copy(folder.with_name("step_2") / piece.path.name, piece.path)
    return piece.path.name


@pytest.mark.req("C8", "A22")
@pytest.mark.parametrize(
    ("harm", "offload"),
    [(flip, "none"), (flip, "cpu"), (go_stale, "none")],
    ids=["bit", "offloaded", "stale"],
)
def test_values_that_have_changed_lead_to_the_older_step(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path, harm: Callable[[Path, str, int], str], offload: str
) -> None:
    """Whatever was loaded of the newer one before that was found is gone."""
    settings = ["checkpoint.every_steps=1", "checkpoint.keep_last=0", "parallel.zero=3"]
    overrides = toy_overrides(toy_tokens, tmp_path, "run", *COMMON, *settings, f"offload.optimizer={offload}")
    ranks(2, train_toy, overrides)
    run = RunFolder(tmp_path / "run")
    metrics = losses(run)
    tensor = "model.layers.1.self_attn.q_proj.weight"
    name = harm(run.checkpoints / "step_3", tensor, 1)
    ranks(2, train_toy, overrides)
    (reason,) = warnings_of(run)
    assert reason.startswith("checkpoint step_3 of run run is damaged: the slice of ")
    assert reason.endswith(f", which rank 1 wrote to {name}, is not what was written")
    assert harm is go_stale or f"{tensor} at [16, 0]" in reason
    assert [event["step"] for event in run.read_events() if event["event"] == Event.RESUMED] == [2]
    assert losses(run) == metrics
    assert {path.name for path in run.checkpoints.iterdir()} >= {"step_3", "step_3.damaged"}


@pytest.mark.req("C8", "A22")
def test_a_disk_that_fails_leads_to_the_older_step(ranks: Ranks, toy_tokens: Path, tmp_path: Path) -> None:
    settings = ["checkpoint.every_steps=1", "checkpoint.keep_last=0", "parallel.zero=3", "model.ffn_dim=256"]
    overrides = toy_overrides(toy_tokens, tmp_path, "run", *COMMON, *settings)
    ranks(2, train_toy, overrides)
    run = RunFolder(tmp_path / "run")
    tensor = "model.layers.1.mlp.up_proj.weight"
    folder = run.checkpoints / "step_3"
    piece = slices(StepFiles(folder), SafeReader(folder).read_metadata(), tensor)[1]
    assert piece.nbytes >= 2 * os.sysconf("SC_PAGE_SIZE")
    begin, file = piece.position(), piece.path
    with small_disk(tmp_path / "disk", 16 << 20) as disk:
        shutil.copy(file, disk / "part")
        with (disk / "part").open("rb") as copied:
            os.fsync(copied.fileno())
        file.unlink()
        file.symlink_to(disk / "part")
        lose(disk, disk / "part", begin, begin + piece.nbytes)
        with pytest.raises(OSError, match="Input/output error"):
            (disk / "part").read_bytes()
        ranks(2, train_toy, overrides)
    (reason,) = warnings_of(run)
    assert (
        f"{tensor} at {list(piece.start)}, which rank 1 wrote to {file.name}, cannot be read (Input" in reason
    )
    assert [event["step"] for event in run.read_events() if event["event"] == Event.RESUMED] == [2]


def how_it_ends(overrides: list[str]) -> str:
    """The kind of error that ends this rank."""
    with pytest.raises(UserError) as ended:
        train_toy(overrides)
    return type(ended.value).__name__


def test_without_an_older_step_the_damage_is_an_error(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path, trained: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    shutil.copytree(trained, run.path)
    flip(run.checkpoints / "step_3", "model.embed_tokens.weight")
    overrides = toy_overrides(toy_tokens, tmp_path, "run", *COMMON)
    sentence = (
        r"step_3 of run run is damaged: the slice of model.embed_tokens.weight .* no older one is whole"
    )
    with pytest.raises(RanksError, match=sentence):
        ranks(2, train_toy, overrides)
    # One rank tells; the others only end with the code.
    assert ranks(2, how_it_ends, overrides) == ["UserError", "ReportedError"]
    with pytest.raises(UserError, match=r"step_3 is damaged: the slice of model.embed_tokens.weight"):
        load_model(run)
    assert ranks(1, train_toy, [*overrides, "checkpoint.verify_load=false"]) == [ExitCode.FINISHED]


@pytest.mark.req("C8")
def test_a_checkpoint_without_hashes_goes_on(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path, trained: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    shutil.copytree(trained, run.path)
    folder = run.checkpoints / "step_3"
    shutil.rmtree(folder / "digests")
    fields = json.loads((folder / "manifest.json").read_text())
    old = ("step", "world_size", "model", "data", "layout", "samples_per_step")
    files = {name: size for name, size in fields["files"].items() if "/" not in name}
    (folder / "manifest.json").write_text(
        json.dumps({name: fields[name] for name in old} | {"files": files, "format": 1})
    )
    assert not read_manifest(folder).verified
    overrides = toy_overrides(toy_tokens, tmp_path, "run", *COMMON, "loop.steps=4")
    assert ranks(2, train_toy, overrides) == [ExitCode.FINISHED] * 2
    assert read_manifest(run.checkpoints / "step_4").verified
