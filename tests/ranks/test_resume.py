"""A run that is stopped and continued is, to the bit, the run that was never stopped."""

import contextlib
import io
import json
import os
import pickle
import random
import re
import resource
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.checkpoints import seal
from harness.pool import Ranks, RanksError
from harness.toy import toy_overrides, train_toy
from harness.toy_text import write_toy_text
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from contract.errors import UserError
from contract.exit_codes import ExitCode
from contract.run_folder import STEP_FOLDER, Event, RunFolder, read_json_lines
from contract.variables import START
from train.checkpoint.digests import digest
from train.checkpoint.manifest import Manifest, read_manifest
from train.checkpoint.retain import Retention
from train.checkpoint.store import CheckpointStore
from train.config import load_config
from train.data.prepare import prepare
from train.generate import export, load_model

STEPS = 40


def saved_tensors(run: RunFolder, tmp_path: Path) -> dict[str, torch.Tensor]:
    """Read the newest checkpoint by torch's own converter, flattened."""
    target = tmp_path / f"{run.name}.pt"
    dcp_to_torch_save(run.checkpoints / f"step_{run.published_steps()[-1]}", target)
    flat: dict[str, torch.Tensor] = {}

    def walk(tree: object, path: str) -> None:
        if isinstance(tree, dict):
            for key, value in tree.items():
                walk(value, f"{path}/{key}")
        elif isinstance(tree, torch.Tensor):
            flat[path] = tree

    walk(torch.load(target, weights_only=True), "")
    return flat


def losses(run: RunFolder) -> dict[int, tuple[float, float]]:
    return {
        line["step"]: (line["loss"], line["grad_norm"])
        for line in read_json_lines(run.metrics)
        if "loss" in line
    }


def assert_same_run(one: RunFolder, other: RunFolder, tmp_path: Path) -> None:
    assert losses(one) == losses(other)
    assert list(losses(one)) == list(range(1, STEPS + 1))
    left, right = saved_tensors(one, tmp_path), saved_tensors(other, tmp_path)
    assert left.keys() == right.keys()
    assert any("exp_avg_sq" in name for name in left)
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


@pytest.mark.req("C13")
def test_each_start_writes_where_no_other_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A rank of an earlier start that wakes up must not write into a later one's files."""
    store = CheckpointStore(
        RunFolder(tmp_path), dist.group.WORLD, Manifest(0, 1, {}, {}), Retention(1), lambda: None
    )
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    folders = []
    for restart, start in [("", "0"), ("", "1"), ("1", "0")]:
        monkeypatch.setenv("SLURM_RESTART_COUNT", restart)
        monkeypatch.setenv(START, start)
        folders.append(store._temporary(5))
    assert len(set(folders)) == 3
    assert not any(STEP_FOLDER.match(path.name) for path in folders)


@pytest.mark.req("C13", "A22")
@pytest.mark.parametrize(("size", "precision"), [(1, "bf16"), (2, "bf16"), (4, "fp32")])
def test_resume_is_bitwise(ranks: Ranks, toy_tokens: Path, tmp_path: Path, size: int, precision: str) -> None:
    stops = sorted(random.sample(range(1, STEPS - 1), 2))
    common = [f"loop.steps={STEPS}", f"precision={precision}"]
    undisturbed = toy_overrides(toy_tokens, tmp_path, "undisturbed", *common)
    assert ranks(size, train_toy, undisturbed) == [ExitCode.FINISHED] * size

    stopped = toy_overrides(toy_tokens, tmp_path, "stopped", *common, "data.prefetch_batches=0")
    for done, stop in zip([0, *stops], stops, strict=False):
        assert ranks(size, train_toy, stopped, stop_after=stop - done - 1) == [ExitCode.STOPPED] * size
        assert RunFolder(tmp_path / "stopped").published_steps()[-1] == stop, f"stops {stops}"
    assert ranks(size, train_toy, stopped) == [ExitCode.FINISHED] * size

    run = RunFolder(tmp_path / "stopped")
    assert_same_run(RunFolder(tmp_path / "undisturbed"), run, tmp_path)
    resumed = [event["step"] for event in run.read_events() if event["event"] == Event.RESUMED]
    assert resumed == stops
    assert run.finished.exists()
    assert len(run.published_steps()) == 2, "each stop saves, and the oldest of the three is gone"


@pytest.mark.req("C13", "A13")
def test_resume_on_another_number_of_ranks_goes_on_with_the_same_samples(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path
) -> None:
    """Sums are added in another order, so the losses agree to rounding only; a skipped sample would show."""
    common = [f"loop.steps={STEPS}", "precision=fp32"]
    ranks(1, train_toy, toy_overrides(toy_tokens, tmp_path, "one", *common))
    changing = toy_overrides(toy_tokens, tmp_path, "changing", *common)
    ranks(2, train_toy, changing, stop_after=9)
    ranks(4, train_toy, changing, stop_after=9)
    ranks(1, train_toy, changing)
    one, other = losses(RunFolder(tmp_path / "one")), losses(RunFolder(tmp_path / "changing"))
    assert one.keys() == other.keys()
    for step, values in one.items():
        assert other[step] == pytest.approx(values, rel=2e-4), step


def test_a_batch_that_changes_with_the_number_of_ranks_is_told(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path
) -> None:
    """The text of the configuration is the same."""
    run = RunFolder(tmp_path / "run")
    settings = toy_overrides(toy_tokens, tmp_path, "run", "loop.eval_batches=0")
    follows = ["parallel.gradient_accumulation_steps=2", "loop.global_batch_size=null"]

    def told(steps: int, more: list[str]) -> list[str]:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            train_toy([*settings, f"loop.steps={steps}", *more])
        changes = [line for line in out.getvalue().splitlines() if line.startswith("changed")]
        return [change for change in changes if "samples" in change or "batch_size" in change]

    assert ranks(2, told, 1, follows)[0] == []
    assert read_manifest(run.checkpoints / "step_1").samples_per_step == 8
    assert ranks(1, told, 2, follows)[0] == ["changed since then: a step has 4 samples (was 8)"]
    started = [event["changed"] for event in run.read_events() if event["event"] == Event.STARTED]
    assert "a step has 4 samples (was 8)" in started[-1]

    # A checkpoint of before this was written down: what the configuration says is all there is to tell.
    manifest = run.checkpoints / "step_2" / "manifest.json"
    fields = json.loads(manifest.read_text())
    assert fields.pop("samples_per_step") == 4
    seal(manifest.parent, fields)
    lines = ranks(2, told, 3, ["loop.global_batch_size=16"])[0]
    assert lines == ["changed since then: loop.global_batch_size=16 (was null)"]
    # It is told once.
    lines = ranks(1, told, 4, ["loop.global_batch_size=8"])[0]
    assert lines == ["changed since then: loop.global_batch_size=8 (was 16)"]


@pytest.mark.req("C13")
def test_lost_work_is_done_again_to_the_same_metrics(ranks: Ranks, toy_tokens: Path, tmp_path: Path) -> None:
    """Metrics of steps after the checkpoint belong to work that a crash lost: they must not appear twice."""
    overrides = toy_overrides(toy_tokens, tmp_path, "run", "loop.steps=12", "checkpoint.every_steps=4")
    ranks(1, train_toy, overrides)
    run = RunFolder(tmp_path / "run")
    before = losses(run)
    newest = run.checkpoints / "step_12"
    next(newest.glob("*.distcp")).unlink()
    ranks(1, train_toy, overrides)
    assert losses(run) == before
    warnings = [event["reason"] for event in run.read_events() if event["event"] == Event.WARNING]
    assert any("step_12" in reason and "missing" in reason for reason in warnings)
    assert run.published_steps() == [8, 12]
    assert (run.checkpoints / "step_12.damaged").is_dir()
    dcp.FileSystemReader(newest).read_metadata()


def train_on_a_full_disk(
    overrides: list[str], freed_after: int | None, stop_after: int | None = None
) -> ExitCode:
    """Train while no file may grow beyond 20 kB, as on a full disk, until so many warnings were written."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    run = load_config(overrides).run_folder

    def free_some_space() -> None:
        warnings: list[object] = []
        while freed_after is not None and len(warnings) < freed_after:
            time.sleep(0.02)
            warnings = [event for event in run.read_events() if event["event"] == Event.WARNING]
        if freed_after is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)

    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    thread = threading.Thread(target=free_some_space, daemon=True)
    thread.start()
    try:
        return train_toy(overrides, stop_after)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        thread.join(timeout=10)


def test_a_failed_save_does_not_end_the_training(ranks: Ranks, toy_tokens: Path, tmp_path: Path) -> None:
    overrides = toy_overrides(toy_tokens, tmp_path, "run", "loop.steps=6", "checkpoint.every_steps=2")
    assert ranks(2, train_on_a_full_disk, overrides, 2) == [ExitCode.FINISHED] * 2
    run = RunFolder(tmp_path / "run")
    warnings = [event["reason"] for event in run.read_events() if event["event"] == Event.WARNING]
    assert "saving step 2 failed" in warnings[0]
    assert "attempt 2 of 2" in warnings[1]
    assert re.search(rf"; [\d,]+ MB are free in {re.escape(str(run.checkpoints))}$", warnings[0]), (
        "a full disk shows in that"
    )
    assert run.published_steps() == [4, 6]


@pytest.mark.parametrize("stop_after", [None, 2])
def test_a_last_save_that_fails_is_no_success(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path, stop_after: int | None
) -> None:
    """Neither FINISHED nor "stopped with a checkpoint" may be said of a run whose weights are nowhere."""
    overrides = toy_overrides(toy_tokens, tmp_path, "run", "loop.steps=6")
    with pytest.raises(
        RanksError, match=r"step \d could not be saved .* the newest whole checkpoint is none"
    ) as caught:
        ranks(2, train_on_a_full_disk, overrides, None, stop_after=stop_after)
    assert "SaveError" in str(caught.value)
    run = RunFolder(tmp_path / "run")
    assert not run.finished.exists()
    assert run.published_steps() == []
    assert run.read_events()[-1]["event"] == Event.FAILED
    assert ranks(2, train_toy, overrides) == [ExitCode.FINISHED] * 2


def test_retention_counts_whole_steps_only(ranks: Ranks, toy_tokens: Path, tmp_path: Path) -> None:
    """Damaged steps are set aside: they must neither push whole ones out nor count as progress."""
    overrides = toy_overrides(
        toy_tokens, tmp_path, "run", "checkpoint.every_steps=4", "checkpoint.keep_last=2"
    )
    ranks(1, train_toy, [*overrides, "loop.steps=12", "checkpoint.keep_last=3"])
    run = RunFolder(tmp_path / "run")
    assert run.published_steps() == [4, 8, 12]
    next((run.checkpoints / "step_12").glob("*.distcp")).unlink()
    damaged = bytearray((run.checkpoints / "step_8/.metadata").read_bytes())
    damaged[50:250] = bytes(200)
    (run.checkpoints / "step_8/.metadata").write_bytes(damaged)
    ranks(1, train_toy, [*overrides, "loop.steps=6"])
    assert run.published_steps() == [4, 6]
    assert (run.checkpoints / "step_12.damaged").is_dir()
    assert (run.checkpoints / "step_8.damaged").is_dir()
    resumed = [event["step"] for event in run.read_events() if event["event"] == Event.RESUMED]
    assert resumed == [4]


def test_metadata_that_would_run_code_is_refused(ranks: Ranks, toy_tokens: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "pwned"),)

    overrides = toy_overrides(toy_tokens, tmp_path, "run", "loop.steps=2")
    ranks(1, train_toy, overrides)
    step = tmp_path / "run/checkpoints/step_2"
    (step / ".metadata").write_bytes(pickle.dumps(Evil()))
    manifest = json.loads((step / "manifest.json").read_text())
    manifest["files"][".metadata"] = (step / ".metadata").stat().st_size
    manifest["metadata"] = digest((step / ".metadata").read_bytes())
    seal(step, manifest)
    with pytest.raises(RanksError, match=r"asks for posix.mkdir, which no checkpoint needs"):
        ranks(1, train_toy, overrides)
    with pytest.raises(
        UserError, match=r"no whole checkpoint to read \(step_2: .metadata asks for posix.mkdir"
    ):
        load_model(RunFolder(tmp_path / "run"))
    assert not (tmp_path / "pwned").exists()


def test_a_checkpoint_is_saved_when_the_clock_says_so(ranks: Ranks, toy_tokens: Path, tmp_path: Path) -> None:
    overrides = toy_overrides(toy_tokens, tmp_path, "run", "loop.steps=6", "checkpoint.every_minutes=1e-6")
    ranks(2, train_toy, overrides)
    saved = [
        event["step"] for event in RunFolder(tmp_path / "run").read_events() if event["event"] == Event.SAVED
    ]
    assert saved[0] == 1
    assert saved[-1] == 6
    assert len(saved) >= 3, "the clock runs anew from each save"
    overrides = toy_overrides(toy_tokens, tmp_path, "other", "loop.steps=6", "checkpoint.every_minutes=60")
    ranks(2, train_toy, overrides)
    assert RunFolder(tmp_path / "other").published_steps() == [6]


def test_a_step_with_nothing_whole_is_refused(ranks: Ranks, toy_tokens: Path, tmp_path: Path) -> None:
    overrides = toy_overrides(toy_tokens, tmp_path, "run", "loop.steps=4")
    ranks(1, train_toy, overrides)
    run = RunFolder(tmp_path / "run")
    (run.checkpoints / "step_4" / "manifest.json").unlink()
    with pytest.raises(RanksError, match=r"step_4 of run run is damaged: manifest.json is missing"):
        ranks(2, train_toy, overrides)
    assert run.finished.exists(), "a refused launch must leave the run as it was"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("model.vocab_size=512", r"model.vocab_size is 512, but the checkpoint of step 4 has 320"),
        ("model.layers=3", r"model.layers is 3, but the checkpoint of step 4 has 2"),
        ("seed=7", r"seed=7 differs from 1234, with which run run was trained so far"),
        ("data.validation_fraction=0.3", r"data.validation_fraction=0.3 differs from 0.05"),
        ("run.resume=never", r"run run already has checkpoints up to step 4"),
        ("model.vocab_size=100", r"model.vocab_size=100 is smaller than the vocabulary of the data"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path, change: str, sentence: str
) -> None:
    overrides = toy_overrides(toy_tokens, tmp_path, "run", "loop.steps=4")
    ranks(1, train_toy, overrides)
    run = RunFolder(tmp_path / "run")
    before = (run.config.read_text(), run.events.read_text(), run.metrics.read_text())
    with pytest.raises(RanksError, match=sentence):
        ranks(2, train_toy, [*overrides, change])
    assert (run.config.read_text(), run.events.read_text(), run.metrics.read_text()) == before


def test_a_run_starts_from_the_weights_of_hugging_face(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path
) -> None:
    """Exported after 4 steps and imported into a new run, the model evaluates to the same loss."""
    ranks(1, train_toy, toy_overrides(toy_tokens, tmp_path, "first", "loop.steps=4", "precision=fp32"))
    export(tmp_path / "first", tmp_path / "exported")
    start = [f"run.init_from={tmp_path / 'exported'}", "loop.steps=1", "optim.lr=0", "precision=fp32"]
    ranks(2, train_toy, toy_overrides(toy_tokens, tmp_path, "second", *start))
    one, two = (
        [
            line["eval_loss"]
            for line in read_json_lines(RunFolder(tmp_path / name).metrics)
            if "eval_loss" in line
        ]
        for name in ("first", "second")
    )
    assert one == pytest.approx(two, rel=1e-6)
    with pytest.raises(RanksError, match=r"model.layers is 3, but \S*exported has 2"):
        ranks(2, train_toy, toy_overrides(toy_tokens, tmp_path, "third", *start, "model.layers=3"))
    # From the second launch on the run's own checkpoint counts.
    ranks(
        1, train_toy, toy_overrides(toy_tokens, tmp_path, "second", "run.init_from=/nowhere", "loop.steps=2")
    )


@pytest.mark.req("D6")
def test_a_run_that_diverges_stops_before_it_spoils_a_checkpoint(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path
) -> None:
    overrides = toy_overrides(toy_tokens, tmp_path, "run", "checkpoint.every_steps=1", "optim.warmup_steps=0")
    ranks(2, train_toy, [*overrides, "loop.steps=4"])
    run = RunFolder(tmp_path / "run")
    wild = [*overrides, "loop.steps=60", "optim.lr=1e12", "loop.log_every_steps=1000"]
    with pytest.raises(RanksError, match=r"training has diverged, the gradient norm is (nan|inf) at step"):
        ranks(2, train_toy, wild)
    for name, tensor in saved_tensors(run, tmp_path).items():
        assert torch.isfinite(tensor.double()).all(), name
    assert run.read_events()[-1]["reason"].startswith("training has diverged")


def test_other_data_is_refused(ranks: Ranks, toy_tokens: Path, tmp_path: Path) -> None:
    ranks(1, train_toy, toy_overrides(toy_tokens, tmp_path, "run", "loop.steps=4"))
    prepare([write_toy_text(tmp_path / "more", documents=61)], tmp_path / "other", workers=1)
    with pytest.raises(RanksError, match=r"not what it was trained on so far \(the number of documents"):
        ranks(1, train_toy, toy_overrides(tmp_path / "other", tmp_path, "run", "loop.steps=4"))


def test_a_changed_setting_is_said_and_takes_effect(ranks: Ranks, toy_tokens: Path, tmp_path: Path) -> None:
    """The checkpoint holds the optimizer's settings too: they must not come back from it."""
    overrides = toy_overrides(toy_tokens, tmp_path, "run", "loop.steps=4")
    ranks(1, train_toy, overrides)
    ranks(1, train_toy, [*overrides, "loop.steps=6", "optim.weight_decay=0.5"])
    started = [
        event for event in RunFolder(tmp_path / "run").read_events() if event["event"] == Event.STARTED
    ]
    assert started[-1]["changed"] == ["loop.steps=6 (was 4)", "optim.weight_decay=0.5 (was 0.1)"]
    ranks(1, train_toy, toy_overrides(toy_tokens, tmp_path, "same", "loop.steps=4"))
    ranks(1, train_toy, toy_overrides(toy_tokens, tmp_path, "same", "loop.steps=6"))
    decayed, same = (saved_tensors(RunFolder(tmp_path / name), tmp_path) for name in ("run", "same"))
    weight = "/model/embed_tokens.weight"
    assert decayed[weight].norm() < same[weight].norm(), "the checkpoint must not bring the old decay back"
