"""What is kept elsewhere than on the device changes no number."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness.disks import mounted
from harness.offload import COMMON, STEPS, assert_same, left_by, opened
from harness.pool import Ranks, RanksError
from harness.toy import toy_overrides, train_toy
from torch import Tensor

from contract.errors import NodeError, UserError
from contract.exit_codes import ExitCode
from contract.run_folder import RunFolder
from train.offload.nvme_states import NvmeStates

pytestmark = pytest.mark.slow

HOST = ["offload.optimizer=cpu"]
ALL_HOST = [*HOST, "offload.gradients=cpu"]


def disk(path: Path) -> list[str]:
    """Settings of a tier on NVMe whose pool has fewer buffers than there are blocks."""
    return [
        "offload.optimizer=nvme",
        f"offload.nvme_path=[{path}]",
        "offload.prefetch_layers=1",
        "offload.nvme_checksums=true",
    ]


def train(
    ranks: Ranks, size: int, tokens: Path, folder: Path, name: str, *more: str, steps: int | None = None
) -> None:
    """Train, or train on, to the end or for some steps."""
    overrides = toy_overrides(tokens, folder, name, *COMMON, *more)
    codes = ranks(size, train_toy, overrides, None if steps is None else steps - 1, timeout_s=120)
    assert codes == [ExitCode.FINISHED if steps is None else ExitCode.STOPPED] * size


def left(folder: Path, name: str, step: int = STEPS) -> dict[str, Tensor]:
    """What a run has left after a step."""
    return left_by(RunFolder(folder / name), folder, step)


@pytest.mark.req("C6", "A11", "B9")
@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, "zero=1 gradient_accumulation_steps=2 precision=bf16"),
        (2, "zero=3 gradient_accumulation_steps=2 precision=fp32"),
        pytest.param(1, "gradient_accumulation_steps=2 precision=bf16", marks=pytest.mark.chaos),
        pytest.param(2, "zero=0 precision=bf16", marks=pytest.mark.slow),
        pytest.param(2, "zero=2 cp=2 precision=bf16", marks=pytest.mark.slow),
        pytest.param(2, "zero=3 compile=true precision=bf16", marks=pytest.mark.chaos),
        pytest.param(2, "zero=2 precision=bf16 model.tie_embeddings=true", marks=pytest.mark.chaos),
        pytest.param(4, "zero=2 dp_replicate=2 micro_batch_size=1 precision=bf16", marks=pytest.mark.chaos),
        pytest.param(4, "zero=3 tp=2 precision=bf16", marks=pytest.mark.chaos),
        pytest.param(4, "zero=2 pp=2 schedule=zbv precision=fp32", marks=pytest.mark.slow),
        pytest.param(4, "zero=2 pp=2 precision=bf16 model.tie_embeddings=true", marks=pytest.mark.slow),
    ],
    ids=lambda value: str(value).replace(" ", ","),
)
def test_an_offloaded_optimizer_gives_the_same_bits(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path, size: int, layout: str
) -> None:
    """On the host and on NVMe, with gradients here and there: losses, norms, final weights and moments."""
    words = layout.split()
    more = [word if "." in word or "precision" in word else f"parallel.{word}" for word in words]
    if "gradient_accumulation_steps" in layout:
        more.append("loop.global_batch_size=null")
    # One mechanism replicates and shards: without it plain replicas compute under autocast.
    plain = ["precision.parameters=bfloat16"] if size == 1 or "zero=0" in words else []
    train(ranks, size, toy_tokens, tmp_path, "none", *more, *plain)
    expected = left(tmp_path, "none")
    tiers = {"host": HOST, "all_host": ALL_HOST, "nvme": [*disk(tmp_path), "offload.gradients=cpu"]}
    if "zero=3" in words and "compile=true" not in words:
        tiers["everything"] = [*tiers["nvme"], "offload.parameters=nvme", "offload.activations=cpu"]
    if "gradient_accumulation_steps" not in layout:
        # The others are steps on the way to the last: the first layouts have them all.
        tiers = {name: tiers[name] for name in ("host", list(tiers)[-1])}
    for name, tier in tiers.items():
        train(ranks, size, toy_tokens, tmp_path, name, *more, *tier)
        assert_same(left(tmp_path, name), expected, name)
    assert not list(tmp_path.glob("trierarch-*")), "files are left"


@pytest.mark.req("C6")
def test_a_run_goes_from_tier_to_tier_and_layout_to_layout(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path
) -> None:
    """Saved by one and restored by the next, as if it had never moved."""
    train(ranks, 2, toy_tokens, tmp_path, "whole", "parallel.zero=1")
    stages = [
        (["parallel.zero=3", *disk(tmp_path)], 1),
        (["parallel.zero=2", *ALL_HOST], 1),
        (["parallel.zero=1"], 1),
        (["parallel.zero=3", "offload.gradients=cpu", *disk(tmp_path)], None),
    ]
    for settings, steps in stages:
        train(ranks, 2, toy_tokens, tmp_path, "moves", *settings, steps=steps)
    assert_same(left(tmp_path, "moves"), left(tmp_path, "whole"), "moves")


@pytest.mark.req("C6")
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_a_restore_keeps_every_bit_in_any_layout(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path, tier: str
) -> None:
    """Of two ranks by three, and back: a step is saved anew in the layout that it was restored in."""
    uneven = ["model.ffn_dim=68", "loop.global_batch_size=12", "loop.steps=2", "precision=bf16"]
    train(ranks, 2, toy_tokens, tmp_path, "run", *uneven, "parallel.zero=3", *ALL_HOST, steps=1)
    expected = left(tmp_path, "run", 1)
    settings = disk(tmp_path) if tier == "nvme" else HOST
    for size in (3, 2):
        overrides = toy_overrides(
            toy_tokens,
            tmp_path,
            "run",
            *COMMON,
            *uneven,
            "parallel.zero=2",
            "parallel.micro_batch_size=2",
            *settings,
        )
        ranks(size, save_again, overrides, timeout_s=120)
        assert_same(left(tmp_path, "run", 1), expected, f"{size} ranks")


def save_again(overrides: list[str]) -> None:
    """Restore the newest step and write it once more."""
    with opened(overrides) as parts:
        parts.checkpoints.newest_step = None
        assert parts.checkpoints.save(parts.state)


@pytest.mark.req("C6", "D7")
def test_killed_in_the_middle_of_a_swap_it_goes_on_from_the_checkpoint(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path
) -> None:
    """SIGKILL while blocks are being written; the files of the dead are gone after the next start."""

    def killed(overrides: list[str]) -> None:
        put, left = NvmeStates.put, [12]

        def put_or_die(self: NvmeStates, index: int, changed: bool = True) -> None:
            put(self, index, changed)
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

        NvmeStates.put = put_or_die  # type: ignore[method-assign]
        train_toy(overrides)

    train(ranks, 1, toy_tokens, tmp_path, "whole", *HOST)
    settings = [*disk(tmp_path), "offload.gradients=cpu"]
    train(ranks, 1, toy_tokens, tmp_path, "run", *settings, steps=2)
    with pytest.raises(RanksError, match="SIGKILL"):
        ranks(1, killed, toy_overrides(toy_tokens, tmp_path, "run", *COMMON, *settings))
    assert len(list(tmp_path.glob("trierarch-*"))) == 1, "it was not killed within a swap"
    train(ranks, 1, toy_tokens, tmp_path, "run", *settings)
    assert_same(left(tmp_path, "run"), left(tmp_path, "whole"), "run")
    assert not list(tmp_path.glob("trierarch-*"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=4m", "tmpfs") as folder:
        yield folder


@pytest.mark.req("C6")
def test_a_disk_that_is_full_in_mid_run_costs_one_sentence_and_no_checkpoint(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path, small_disk: Path
) -> None:
    """Space is set aside at the start: somebody has to take it away."""

    def robbed(overrides: list[str]) -> None:
        put, left = NvmeStates.put, [8]

        def put_or_rob(self: NvmeStates, index: int, changed: bool = True) -> None:
            left[0] -= 1
            if not left[0]:
                (file,) = small_disk.glob("trierarch-*/blocks.bin")
                os.truncate(file, 0)
                with (
                    (small_disk / "other").open("wb", buffering=0) as other,
                    pytest.raises(OSError, match="space"),
                ):
                    while True:
                        other.write(bytes(1 << 12))
            put(self, index, changed)

        NvmeStates.put = put_or_rob  # type: ignore[method-assign]
        try:
            with pytest.raises(NodeError, match=r"disk.*: no space is left|full|No space") as caught:
                train_toy(overrides)
            assert str(small_disk) in str(caught.value) and "\n" not in str(caught.value)
        finally:
            NvmeStates.put = put  # type: ignore[method-assign]

    train(ranks, 1, toy_tokens, tmp_path, "whole", *HOST)
    settings = disk(small_disk)
    train(ranks, 1, toy_tokens, tmp_path, "run", *settings, steps=2)
    ranks(1, robbed, toy_overrides(toy_tokens, tmp_path, "run", *COMMON, *settings))
    assert RunFolder(tmp_path / "run").published_steps() == [2]
    train(ranks, 1, toy_tokens, tmp_path, "run", *HOST)
    assert_same(left(tmp_path, "run"), left(tmp_path, "whole"), "run")


@pytest.mark.req("A11")
def test_a_delayed_update_computes_with_weights_that_are_one_update_old(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path
) -> None:
    """Steps 1 and 2 have the first weights; a save finishes the update, so that going on and resuming are the same."""
    late = [*ALL_HOST, "offload.delayed_update=true", "precision=fp32"]
    train(ranks, 2, toy_tokens, tmp_path, "prompt", *ALL_HOST, "precision=fp32")
    train(ranks, 2, toy_tokens, tmp_path, "late", *late)
    train(ranks, 2, toy_tokens, tmp_path, "saves", *late, "checkpoint.every_steps=2")
    train(ranks, 2, toy_tokens, tmp_path, "resumes", *late, steps=2)
    train(ranks, 2, toy_tokens, tmp_path, "resumes", *late)
    prompt, late_losses = (left(tmp_path, name)["loss"] for name in ("prompt", "late"))
    assert prompt[0] == late_losses[0] and prompt[1] != late_losses[1]
    assert_same(left(tmp_path, "resumes"), left(tmp_path, "saves"), "resumes")
    resumed, saves = (left(tmp_path, name)["loss"] for name in ("resumes", "saves"))
    assert torch.equal(resumed, saves) and saves[2] != late_losses[2]


@pytest.mark.req("C6")
def test_a_slow_disk_is_in_the_events_of_the_run(ranks: Ranks, toy_tokens: Path, tmp_path: Path) -> None:
    """With settings from a file for all nodes, by which every request takes too long."""
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"block_bytes": 8192, "threads": 1, "slow_s": 1e-9, "limit_s": 60.0}))
    train(ranks, 1, toy_tokens, tmp_path, "slow", *disk(tmp_path), f"offload.nvme_settings={settings}")
    warned = [event for event in RunFolder(tmp_path / "slow").read_events() if event["event"] == "warning"]
    assert len(warned) == 1 and warned[0]["rank"] == 0
    assert "the disk is slow" in warned[0]["reason"]


@pytest.mark.req("C6")
def test_a_disk_must_not_have_longer_than_a_step(ranks: Ranks, toy_tokens: Path, tmp_path: Path) -> None:
    """Else the watch on steps fires first, and nobody learns that it was the disk."""
    overrides = toy_overrides(toy_tokens, tmp_path, "late", *disk(tmp_path), "resilience.step_timeout_s=100")
    with pytest.raises(
        RanksError, match=r"limit_s=120 s .* resilience.step_timeout_s=100 s, which would fire first"
    ):
        ranks(1, train_toy, overrides, timeout_s=120)


@pytest.mark.req("C6")
def test_all_ranks_end_alike_where_one_has_no_disk(ranks: Ranks, toy_tokens: Path, tmp_path: Path) -> None:
    """With the code of a crash, as another node may have it, and no traceback on any rank."""
    (tmp_path / "disk").mkdir()

    def how_it_ends(paths: list[str]) -> tuple[str, int, str]:
        overrides = toy_overrides(
            toy_tokens,
            tmp_path,
            "run",
            "offload.optimizer=nvme",
            f"offload.nvme_path=[{paths[dist.get_rank()]}]",
        )
        with pytest.raises(UserError) as ended, opened(overrides):
            pass
        return type(ended.value).__name__, int(ended.value.exit_code), str(ended.value)

    there, missing = str(tmp_path / "disk"), str(tmp_path / "none")
    (_, code, said), (kind, same, told) = ranks(2, how_it_ends, [there, missing])
    assert (code, same, kind) == (1, 1, "NodeError")
    assert "none" in said and "none" in told
