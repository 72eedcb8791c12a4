"""Recomputed layers: the same gradients from fewer bytes, for the price that was reckoned."""

import contextlib
import io
from pathlib import Path

import pytest
import torch
from harness.one_step import OneStep
from harness.pool import Ranks, RanksError
from harness.toy import toy_overrides, train_toy

from train.layout.activations import layer_cost

pytestmark = pytest.mark.slow

BUDGET_BYTES = 3_500_000
MODES = {
    "none": ["parallel.recompute=none"],
    "selective": ["parallel.recompute=selective"],
    "full": ["parallel.recompute=full"],
    "auto": ["parallel.recompute=auto", f"parallel.recompute_budget_gb={BUDGET_BYTES / 1e9}"],
}
LAYOUTS = [
    (1, "precision=fp32"),
    (1, "precision=bf16"),
    (1, "precision=fp32 data.mask_documents=true model.kv_heads=4"),
    (2, "precision=fp32 parallel.zero=0"),
    (2, "precision=bf16 parallel.zero=3"),
    (2, "precision=fp32 parallel.tp=2"),
    (2, "precision=fp32 parallel.tp=2 parallel.sequence_parallel=false parallel.loss_parallel=false"),
    (2, "precision=fp32 parallel.cp=2 parallel.zero=2"),
    (2, "precision=fp32 parallel.cp=2 parallel.zero=2 parallel.context=ring"),
]


def steps_of(layout: str, modes: dict[str, list[str]]) -> dict[str, OneStep]:
    """A step in each mode; all have the same loss and the same gradients, to the last bit."""
    steps = {mode: OneStep([*layout.split(), *more]) for mode, more in modes.items()}
    gradients = steps["none"].gradients()
    for mode, step in steps.items():
        assert step.loss == steps["none"].loss, mode
        for name, gradient in step.gradients().items():
            assert torch.equal(gradient, gradients[name]), (mode, name)
    return steps


def reckoned_flops(step: OneStep) -> int:
    """Work that is repeated in a backward, of what torch's counter counts on a CPU."""
    flops = layer_cost(step.config, step.dims, "cpu").flops
    counted = flops.keys() - {"core", "between", "down_proj"}
    kept = [keep.results for keep in step.plan.layers.values()]
    return sum(flops[name] for results in kept if results is not None for name in counted - results)


@pytest.mark.req("A10", "B9", "D7")
@pytest.mark.parametrize(("size", "layout"), LAYOUTS, ids=lambda value: str(value).replace(" ", ","))
def test_gradients_stay_and_memory_falls_as_reckoned(ranks: Ranks, size: int, layout: str) -> None:
    def compare() -> dict[str, int]:
        kept, flops, steps = {}, {}, steps_of(layout, MODES)
        for mode, step in steps.items():
            kept[mode], flops[mode] = step.micro_batch()
            assert kept[mode] == pytest.approx(step.plan.kept_bytes, rel=0.02), mode
            assert flops[mode] - flops["none"] == reckoned_flops(step), mode
        return kept

    for kept in ranks(size, compare, timeout_s=120):
        assert kept["none"] > kept["selective"] > kept["full"]
        assert BUDGET_BYTES >= kept["auto"] > kept["full"]


@pytest.mark.req("A10")
@pytest.mark.parametrize(
    ("schedule", "modes"), [("1f1b", list(MODES)), ("zbv", ["none", "full"])], ids=["1f1b", "zbv"]
)
def test_a_pipeline_recomputes_to_the_same_gradients(ranks: Ranks, schedule: str, modes: list[str]) -> None:
    chosen = {mode: MODES[mode] for mode in modes}

    def compare() -> None:
        steps_of(f"precision=fp32 parallel.pp=2 parallel.schedule={schedule}", chosen)

    ranks(2, compare, timeout_s=120)


@pytest.mark.req("A10")
def test_a_budget_too_small_is_refused_with_one_that_works(ranks: Ranks) -> None:
    def kept_bytes(budget_gb: float) -> int:
        more = ["parallel.recompute=auto", f"parallel.recompute_budget_gb={budget_gb}"]
        return OneStep(["precision=fp32", *more]).micro_batch()[0]

    with pytest.raises(RanksError, match=r"keeps at least 0\.00159 GB"):
        ranks(1, kept_bytes, 0.001)
    assert ranks(1, kept_bytes, 0.00159)[0] <= 1_590_000


@pytest.mark.req("A10")
def test_a_run_tells_once_what_it_keeps(ranks: Ranks, toy_tokens: Path, tmp_path: Path) -> None:
    overrides = toy_overrides(toy_tokens, tmp_path, "run", "loop.steps=1", "parallel.recompute=full")

    def lines() -> list[str]:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            train_toy(overrides)
        return [line for line in out.getvalue().splitlines() if line.startswith("activations:")]

    first, second = ranks(2, lines, timeout_s=120)
    assert len(first) == 1 and first[0].endswith("layers 0-1 keep their input")
    assert second == []
