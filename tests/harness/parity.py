"""Whether a layout trains as one process does: a bare loop, and what a run of ours leaves behind."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from contract.run_folder import RunFolder, read_json_lines
from train.config import load_config
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
        norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]))
        for parameter in model.parameters():
            parameter.grad *= min(1.0, config.loop.clip_norm / (norm.item() + 1e-6))
        for group in optimizer.param_groups:
            group["lr"] = config.optim.lr * min(1.0, (step + 1) / max(1, config.optim.warmup_steps))
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return Course(losses, norms, {name: p.detach() for name, p in model.named_parameters()})


def course_of(run: RunFolder, folder: Path) -> Course:
    """Read what a finished run has left: metrics, and the newest checkpoint by torch's own converter."""
    lines = [line for line in read_json_lines(run.metrics) if "loss" in line]
    target = folder / f"{run.name}.pt"
    dcp_to_torch_save(run.checkpoints / f"step_{run.published_steps()[-1]}", target)
    weights = torch.load(target, weights_only=True)["model"]
    return Course([line["loss"] for line in lines], [line["grad_norm"] for line in lines], weights)


def assert_same_course(ours: Course, theirs: Course) -> None:
    """Losses and norms within 1e-5 relative, final weights within 1e-4 of each tensor's norm."""
    assert len(ours.losses) == len(theirs.losses)
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-5, err_msg="loss")
    np.testing.assert_allclose(ours.norms, theirs.norms, rtol=1e-5, err_msg="gradient norm")
    assert ours.weights.keys() == theirs.weights.keys()
    for name, weight in theirs.weights.items():
        assert ours.weights[name].shape == weight.shape, name
        error = (ours.weights[name] - weight).norm() / weight.norm()
        assert error < 1e-4, f"{name}: {error:.2e}"
