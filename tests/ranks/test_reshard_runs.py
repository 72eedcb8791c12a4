"""What people do with checkpoints of a layout: continue in another, export, generate, start from given weights."""

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from harness.parity import bare_course, course_of
from harness.pool import Ranks
from harness.toy import toy_overrides, train_toy

from contract.exit_codes import ExitCode
from contract.run_folder import Event, RunFolder
from train.checkpoint.store import CheckpointStore
from train.config import load_config
from train.generate import export, generate
from train.launch import Launch
from train.model.config import parameter_count
from train.model.hf import read_hf

pytestmark = pytest.mark.slow

STEPS = 8
COMMON = [
    f"loop.steps={STEPS}",
    "loop.eval_batches=1",
    "precision=fp32",
    "optim.decay=constant",
    "optim.lr=3e-3",
    "optim.eps=1e-5",
]


@pytest.mark.req("C13")
def test_a_run_goes_on_in_another_layout_as_if_nothing_had_happened(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    settings = toy_overrides(toy_tokens, tmp_path, "run", *COMMON)
    for size, layout in [(2, ["parallel.zero=3"]), (4, ["parallel.zero=1", "parallel.dp_replicate=2"])]:
        stopped = ranks(size, train_toy, [*settings, *layout], stop_after=2)
        assert stopped == [ExitCode.STOPPED] * size
    assert ranks(1, train_toy, settings) == [ExitCode.FINISHED]
    bare = bare_course(settings)
    course = course_of(run, tmp_path)
    assert course.losses == pytest.approx(bare.losses, rel=1e-5)
    assert course.norms == pytest.approx(bare.norms, rel=1e-5)
    changes = [event["changed"] for event in run.read_events() if event["event"] == Event.STARTED]
    assert changes[0] == []
    assert "parallel.zero=1 (was 3)" in changes[1]
    assert "parallel.zero=0 (was 1)" in changes[2]


@pytest.mark.parametrize(("size", "layout"), [(2, "zero=3"), (4, "pp=2 tp=2")])
def test_what_a_layout_has_trained_generates_is_exported_and_imported(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path, size: int, layout: str
) -> None:
    """Generated from and exported by one process without a process group, imported by the layout again."""
    own = [f"parallel.{one}" for one in layout.split()]
    settings = toy_overrides(toy_tokens, tmp_path, "run", *COMMON, *own)
    assert ranks(size, train_toy, settings) == [ExitCode.FINISHED] * size
    run = RunFolder(tmp_path / "run")
    text = generate(run.path, "word", count=8, temperature=0, top_k=1, seed=1)
    assert text.startswith("word")
    assert len(text) > len("word")

    assert export(run.path, tmp_path / "exported") == STEPS
    weights = course_of(run, tmp_path).weights
    _, exported = read_hf(tmp_path / "exported")
    assert_same(exported, weights)

    again = [f"run.init_from={tmp_path / 'exported'}", "run.name=again", "loop.steps=1", "optim.lr=0"]
    assert ranks(size, train_toy, [*settings, *again]) == [ExitCode.FINISHED] * size
    assert_same(course_of(RunFolder(tmp_path / "again"), tmp_path).weights, weights)


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_the_sample_of_a_sharded_model_is_drawn_from_its_checkpoint(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path
) -> None:
    settings = toy_overrides(toy_tokens, tmp_path, "run", *COMMON, "loop.steps=1", "parallel.zero=3")

    def told() -> list[str]:
        with mock.patch("train.monitor.progress.ProgressLine.say", autospec=True) as say:
            train_toy(settings)
        return [call.args[1] for call in say.call_args_list]

    lines = ranks(2, told)[0]
    place = next(number for number, line in enumerate(lines) if "a sample that continues" in line)
    assert "[...]" in lines[place + 1]


LARGE = ["model.dim=256", "model.layers=4", "model.ffn_dim=704", "parallel.zero=3", "precision=fp32"]
"""Large enough to be seen in the memory of a process."""


def growth_bytes(action: Callable[[], object]) -> int:
    """How far the memory of this process rises above where it is now, at most."""

    def kilobytes(field: str) -> int:
        found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1])

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that is free but kept would hide what is taken anew
    Path("/proc/self/clear_refs").write_text("5")  # forgets the highest mark
    before = kilobytes("VmRSS")
    action()
    return 1024 * (kilobytes("VmHWM") - before)


def watch(method: str, settings: list[str]) -> int:
    """Train, and return by how much the memory of this rank grew in a method of `CheckpointStore` or `Launch`."""
    grown = []
    owner = CheckpointStore if hasattr(CheckpointStore, method) else Launch
    original = getattr(owner, method)

    def watched(*args: object, **settings: object) -> object:
        result = []
        grown.append(growth_bytes(lambda: result.append(original(*args, **settings))))
        return result[0]

    with mock.patch.object(owner, method, watched):
        train_toy(settings)
    return grown[0]


def test_a_rank_loads_its_share_of_a_checkpoint(ranks: Ranks, toy_tokens: Path, tmp_path: Path) -> None:
    """Written by one rank, so that each file holds the whole of everything."""
    settings = toy_overrides(toy_tokens, tmp_path, "run", *LARGE, "loop.steps=1")
    ranks(1, train_toy, settings)
    whole_bytes = 12 * parameter_count(load_config([*settings, "model.vocab_size=320"]).model)
    for grown in ranks(4, watch, "load", [*settings, "loop.steps=2"]):
        # A quarter, and one tensor at a time as it lies in the file.
        assert grown < whole_bytes / 2
    for grown in ranks(4, watch, "save", [*settings, "loop.steps=3"]):
        assert grown < whole_bytes / 4


def test_a_rank_reads_its_share_of_given_weights(ranks: Ranks, toy_tokens: Path, tmp_path: Path) -> None:
    settings = toy_overrides(toy_tokens, tmp_path, "run", *LARGE, "loop.steps=1")
    ranks(1, train_toy, settings)
    export(tmp_path / "run", tmp_path / "exported")
    whole_bytes = 4 * parameter_count(load_config([*settings, "model.vocab_size=320"]).model)
    start = f"run.init_from={tmp_path / 'exported'}"
    for grown in ranks(4, watch, "_import_weights", [*settings, start, "run.name=other"]):
        # Twice a quarter, its own and what it maps of the file, in pages; the whole would be mapped or copied.
        assert grown < whole_bytes
