"""Whether a layout trains as one process does: a bare loop, and what a run of ours leaves behind."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from contract.run_folder import RunFolder, read_json_lines
from train.config import TrainConfig, load_config
from train.data.loader import TokenWindows
from train.data.order import shuffled
from train.model.llama import build


@dataclass(frozen=True)
class Course:
    """What a training went through."""

    losses: list[float]
    """Of each step."""
    norms: list[float]
    """Of the gradients of each step, before clipping."""
    weights: dict[str, torch.Tensor]
    """After the last step, whole, by name."""
    eval_loss: float | None
    """After the last step, on the held-out samples of `loop.eval_batches`; None without any."""
    tokens: int
    """That the steps have taken."""


def bare_course(overrides: list[str]) -> Course:
    """Train in one process, each step's whole batch at once: plain AdamW, plain clipping, fp32, nothing of ours but
    the model, the order of samples and the configuration."""
    config = load_config([*overrides, "parallel.gradient_accumulation_steps=null"])
    windows = TokenWindows.open(config.data, "train")
    config.model.vocab_size = config.model.vocab_size or -(-windows.metadata.vocab_size // 64) * 64
    model = build(config.model, config.seed, torch.device("cpu"))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        betas=(config.optim.beta1, config.optim.beta2),
        eps=config.optim.eps,
        weight_decay=config.optim.weight_decay,
        foreach=False,
    )
    losses, norms = [], []
    size = config.loop.samples_per_step
    for step in range(config.loop.steps):
        batch = windows.read(shuffled(config.seed, np.arange(step * size, (step + 1) * size), windows.count))
        loss = F.cross_entropy(model(batch.tokens, batch.documents).flatten(0, 1), batch.targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        # In fp32 such a sum over all values is wrong in the sixth digit.
        norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]).double())
        for parameter in model.parameters():
            parameter.grad *= min(1.0, config.loop.clip_norm / (norm.item() + 1e-6))
        for group in optimizer.param_groups:
            group["lr"] = config.optim.lr * min(1.0, (step + 1) / max(1, config.optim.warmup_steps))
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    weights = {name: p.detach() for name, p in model.named_parameters()}
    tokens = config.loop.steps * size * config.data.sequence_length
    return Course(losses, norms, weights, _bare_evaluation(model, config), tokens)


@torch.no_grad()
def _bare_evaluation(model: torch.nn.Module, config: TrainConfig) -> float | None:
    if config.loop.eval_batches == 0:
        return None
    windows = TokenWindows.open(config.data, "validation")
    batch = windows.read(range(min(windows.count, config.loop.eval_batches * config.loop.samples_per_step)))
    logits = model(batch.tokens, batch.documents)
    return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).item()


def course_of(run: RunFolder, folder: Path) -> Course:
    """Read what a finished run has left: metrics, and the newest checkpoint by torch's own converter."""
    lines = [line for line in read_json_lines(run.metrics) if "loss" in line]
    target = folder / f"{run.name}.pt"
    dcp_to_torch_save(run.checkpoints / f"step_{run.published_steps()[-1]}", target)
    weights = torch.load(target, weights_only=True)["model"]
    evaluations = [line["eval_loss"] for line in read_json_lines(run.metrics) if "eval_loss" in line]
    return Course(
        losses=[line["loss"] for line in lines],
        norms=[line["grad_norm"] for line in lines],
        weights=weights,
        eval_loss=evaluations[-1] if evaluations else None,
        tokens=lines[-1]["tokens"],
    )


def assert_same_course(ours: Course, theirs: Course) -> None:
    """Losses, norms and the evaluation within 1e-5 relative, final weights within 1e-4 of each tensor's norm."""
    assert len(ours.losses) == len(theirs.losses) and ours.tokens == theirs.tokens
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-5, err_msg="loss")
    np.testing.assert_allclose(ours.norms, theirs.norms, rtol=1e-5, err_msg="gradient norm")
    assert (ours.eval_loss is None) == (theirs.eval_loss is None)
    if theirs.eval_loss is not None:
        np.testing.assert_allclose(ours.eval_loss, theirs.eval_loss, rtol=1e-5, err_msg="evaluation")
    assert ours.weights.keys() == theirs.weights.keys()
    for name, weight in theirs.weights.items():
        assert ours.weights[name].shape == weight.shape, name
        error = (ours.weights[name] - weight).norm() / weight.norm()
        assert error < 1e-4, f"{name}: {error:.2e}"
