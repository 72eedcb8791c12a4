"""Compiled layers compute what plain ones do."""

import shutil

import pytest
import torch
from harness.one_step import OneStep
from harness.pool import Ranks

# One layer, and no more operators than needed: a C++ compiler takes seconds for each kernel.
TINY = ["model.layers=1", "model.dim=32", "model.heads=2", "model.kv_heads=2", "model.ffn_dim=64"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize(
    ("size", "layout"), [(1, "parallel.recompute=full"), (2, "parallel.zero=2")], ids=["recompute", "zero=2"]
)
def test_compiled_layers_give_the_same_gradients(ranks: Ranks, size: int, layout: str) -> None:
    def compare() -> None:
        settings = [*TINY, "precision=fp32", *layout.split()]
        plain, compiled = (OneStep([*settings, f"parallel.compile={on}"]) for on in ("false", "true"))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
        assert compiled.loss == pytest.approx(plain.loss, rel=1e-6)
        expected = plain.gradients()
        for name, gradient in compiled.gradients().items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)

    ranks(size, compare, timeout_s=280)
