"""The loop against a bare one, written out in the plainest torch."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness.pool import Ranks
from harness.toy import toy_overrides, train_toy

from contract.run_folder import RunFolder, read_json_lines
from train.config import TrainConfig, load_config
from train.data.loader import TokenWindows
from train.data.order import shuffled
from train.model.config import ModelConfig, flops_per_token
from train.model.llama import build

STEPS = 6


def bare_losses(config: TrainConfig) -> list[tuple[float, float, float]]:
    """(loss, gradient norm, learning rate) of each step: one process, the whole batch at once, plain AdamW."""
    windows = TokenWindows.open(config.data, "train")
    config.model.vocab_size = 320
    model = build(config.model, config.seed, torch.device("cpu"))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        weight_decay=0.1,
        foreach=False,
    )
    lines = []
    for step in range(STEPS):
        lr = config.optim.lr * min(1.0, (step + 1) / 5)
        size = config.loop.global_batch_size
        batch = windows.read(shuffled(config.seed, np.arange(step * size, (step + 1) * size), windows.count))
        loss = F.cross_entropy(model(batch.tokens).flatten(0, 1), batch.targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]))
        for parameter in model.parameters():
            parameter.grad *= min(1.0, 1.0 / (norm.item() + 1e-6))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        lines.append((loss.item(), norm.item(), lr))
    return lines


@pytest.mark.req("A1", "A14", "A16", "D2")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_losses_are_those_of_a_bare_loop(ranks: Ranks, toy_tokens: Path, tmp_path: Path, size: int) -> None:
    """Accumulation over 4 / size micro-batches, all-reduce, clipping, warm-up: together one big batch."""
    overrides = toy_overrides(
        toy_tokens, tmp_path, "run", f"loop.steps={STEPS}", "precision=fp32", "optim.decay=constant"
    )
    ranks(size, train_toy, overrides)
    lines = [line for line in read_json_lines(RunFolder(tmp_path / "run").metrics) if "loss" in line]
    ours = [(line["loss"], line["grad_norm"], line["lr"]) for line in lines]
    theirs = bare_losses(load_config(overrides))
    assert len(ours) == STEPS
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    assert [line["tokens"] for line in lines] == [(step + 1) * 8 * 32 for step in range(STEPS)]


@pytest.mark.req("A14")
def test_an_evaluation_does_not_depend_on_the_ranks(ranks: Ranks, toy_tokens: Path, tmp_path: Path) -> None:
    """Bits per byte of the byte-level tokenizer are its loss in bits, end-of-document tokens aside."""
    results = []
    for size in (1, 2, 4):
        # 5 batches of 8 samples: more than the held-out windows, so that the ranks get unequal shares.
        overrides = toy_overrides(
            toy_tokens, tmp_path, f"on{size}", "loop.steps=1", "loop.eval_batches=5", "precision=fp32"
        )
        ranks(size, train_toy, overrides)
        (line,) = [
            line for line in read_json_lines(RunFolder(tmp_path / f"on{size}").metrics) if "eval_loss" in line
        ]
        results.append(line)
    windows = TokenWindows.open(load_config(overrides).data, "validation")
    assert windows.count % 4 != 0
    targets = windows.targets(windows.count)
    for line in results:
        assert line["eval_tokens"] == windows.count * 32
        assert line["eval_loss"] == pytest.approx(results[0]["eval_loss"], rel=1e-6)
        text_bytes = int((targets != 256).sum())
        bits = line["eval_loss"] * line["eval_tokens"] / math.log(2)
        assert line["eval_bits_per_byte"] == pytest.approx(bits / text_bytes, rel=1e-6)


@pytest.mark.req("A14")
def test_mfu_is_logged_where_the_peak_is_known(ranks: Ranks, toy_tokens: Path, tmp_path: Path) -> None:
    overrides = toy_overrides(toy_tokens, tmp_path, "run", "loop.steps=2", "monitor.peak_tflops=0.5")
    ranks(2, train_toy, overrides)
    model = ModelConfig(vocab_size=320, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=64)
    for line in read_json_lines(RunFolder(tmp_path / "run").metrics):
        if "loss" in line:
            flops_per_s = line["tokens_per_s"] * flops_per_token(model, 32)
            assert line["mfu"] == pytest.approx(flops_per_s / (2 * 0.5e12))


@pytest.mark.req("A14", "C7")
def test_bf16_computes_in_bf16_and_keeps_weights_in_fp32(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path
) -> None:
    def types(overrides: list[str]) -> tuple[set[torch.dtype], set[torch.dtype]]:
        seen: set[torch.dtype] = set()
        weights: set[torch.dtype] = set()

        def note(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
            if isinstance(module, torch.nn.Linear):
                seen.add(output.dtype)
                weights.add(module.weight.dtype)

        handle = torch.nn.modules.module.register_module_forward_hook(note)
        train_toy(overrides)
        handle.remove()
        return seen, weights

    for precision, computed in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        overrides = toy_overrides(
            toy_tokens, tmp_path, precision, "loop.steps=1", "loop.eval_batches=0", f"precision={precision}"
        )
        ((seen, weights),) = ranks(1, types, overrides)
        assert (seen, weights) == ({computed}, {torch.float32})
