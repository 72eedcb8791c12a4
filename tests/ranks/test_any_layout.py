"""Layouts and sizes drawn at random: gradients are those of one process, or the layout is refused with a sentence."""

import random
from typing import Any

import pytest
import torch
from harness.one_step import OneStep
from harness.pool import Ranks

from contract.errors import ConfigError
from train.config import load_config
from train.layout.check import lay_out
from train.layout.stages import SCHEDULES
from train.parallel.fill import global_name

pytestmark = pytest.mark.slow

CASES = 5


def gradients(cases: list[list[str]]) -> list[dict[str, torch.Tensor]]:
    """Whole gradients of this rank's parts, by name in the whole model, for each case."""
    found = []
    for case in cases:
        step = OneStep(case)
        shape = step.config.model
        found.append({global_name(n.partition(".")[2], shape): g for n, g in step.gradients().items()})
    return found


def drawn(draw: random.Random, ranks: int, axis: str) -> tuple[list[str], list[str]]:
    """Settings of a model and of a layout of `ranks` ranks with `axis` in it, which may be refused."""
    heads = draw.choice([1, 2, 3, 4, 6])
    model: dict[str, Any] = {
        "model.heads": heads,
        "model.kv_heads": draw.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "model.dim": heads * draw.choice([4, 8]),
        "model.layers": draw.randint(1, 6),
        "model.ffn_dim": draw.randint(3, 40),
        "model.vocab_size": draw.randint(8, 70),
        "model.tie_embeddings": str(draw.random() < 0.5).lower(),
        "data.sequence_length": draw.randint(4, 24),
        "data.mask_documents": str(draw.random() < 0.3).lower(),
        "parallel.micro_batch_size": draw.randint(1, 3),
    }
    inner = draw.choice([degree for degree in (2, ranks) if ranks % degree == 0])
    layout: dict[str, Any] = {axis: inner}
    if inner < ranks:
        layout[draw.choice([other for other in ("tp", "pp", "cp") if other != axis])] = ranks // inner
    if "pp" in layout:
        layout["schedule"] = draw.choice(sorted(SCHEDULES))
    if "cp" in layout:
        layout["context"] = draw.choice(["heads", "ring"])
    return (
        [f"{key}={value}" for key, value in model.items()] + ["precision=fp32"],
        [f"parallel.{key}={value}" for key, value in layout.items()],
    )


@pytest.mark.req("C5", "A3", "A4")
@pytest.mark.parametrize("axis", ["pp", "cp"])
@pytest.mark.parametrize("size", [2, 4])
def test_any_layout_is_right_or_refused(ranks: Ranks, session_seed: int, size: int, axis: str) -> None:
    draw = random.Random(f"{session_seed} {size} {axis}")
    cases: list[tuple[list[str], list[str]]] = []
    while len(cases) < CASES:
        model, layout = drawn(draw, size, axis)
        config = load_config(
            [*model, *layout, "loop.global_batch_size=null", "parallel.gradient_accumulation_steps=2"]
        )
        try:
            lay_out(config, size)
        except ConfigError as error:
            assert "\n" not in str(error)
            continue
        cases.append((model, layout))
    (expected,) = ranks(1, gradients, [model for model, _ in cases])
    parts = ranks(size, gradients, [model + layout for model, layout in cases], timeout_s=120)
    for number, case in enumerate(cases):
        found: dict[str, torch.Tensor] = {}
        for rank in parts:
            found |= rank[number]
        assert found.keys() == expected[number].keys(), case
        for name, gradient in expected[number].items():
            error = (found[name] - gradient).norm() / (gradient.norm() + 1e-12)
            assert error < 1e-4, f"{name}: {error:.1e} in {case}"
