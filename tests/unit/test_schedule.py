"""Learning rates against the schedules of transformers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.optimization import get_scheduler

from train.config import Decay, OptimConfig, Warmup
from train.optim.adamw import AdamW
from train.optim.schedule import learning_rate


def reference(name: str, lr: float, warmup: int, total: int, **specific: float) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = get_scheduler(name, optimizer, warmup, total, scheduler_specific_kwargs=specific)
    rates = []
    for _ in range(total + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.req("A16")
@given(st.integers(0, 20), st.integers(30, 80), st.floats(0.0, 1.0))
def test_cosine_is_that_of_transformers(warmup: int, steps: int, floor: float) -> None:
    """Theirs starts at 0, so that its first step does nothing, and ends one step after the last."""
    config = OptimConfig(lr=0.1, warmup_steps=warmup, decay=Decay.cosine, min_lr_ratio=floor)
    ours = [learning_rate(config, step, steps) for step in range(steps)]
    theirs = reference("cosine_with_min_lr", 0.1, warmup, steps - 1, min_lr_rate=floor)
    assert ours[warmup:] == pytest.approx(theirs[warmup:], rel=1e-9)
    assert ours[:warmup] == pytest.approx([0.1 * (step + 1) / warmup for step in range(warmup)])
    assert ours[-1] == pytest.approx(0.1 * floor)


@pytest.mark.req("A16")
@given(st.integers(0, 20), st.integers(30, 80), st.floats(0.05, 0.5))
def test_wsd_is_that_of_transformers(warmup: int, steps: int, fraction: float) -> None:
    config = OptimConfig(
        lr=0.1, warmup_steps=warmup, decay=Decay.wsd, decay_fraction=fraction, min_lr_ratio=0.0
    )
    decay = max(1, round(steps * fraction))
    ours = [learning_rate(config, step, steps) for step in range(steps)]
    theirs = reference(
        "warmup_stable_decay",
        0.1,
        warmup,
        steps - 1,
        num_decay_steps=decay,
        num_stable_steps=steps - 1 - decay - warmup,
        decay_type="linear",
        min_lr_ratio=0.0,
    )
    assert ours[warmup:] == pytest.approx(theirs[warmup:], abs=1e-9)


@pytest.mark.req("A16")
@given(st.integers(0, 20), st.integers(30, 80))
def test_linear_is_that_of_transformers(warmup: int, steps: int) -> None:
    config = OptimConfig(lr=0.1, warmup_steps=warmup, decay=Decay.linear, min_lr_ratio=0.0)
    ours = [learning_rate(config, step, steps) for step in range(steps)]
    assert ours[warmup:] == pytest.approx(
        reference("linear", 0.1, warmup, steps - 1)[warmup:steps], abs=1e-12
    )


@given(st.integers(1, 200), st.floats(0.0, 1.0))
def test_warm_up_goes_from_its_lowest_rate_to_the_largest(warmup: int, lowest: float) -> None:
    for shape in Warmup:
        config = OptimConfig(lr=0.1, warmup_steps=warmup, warmup=shape, warmup_min_ratio=lowest)
        rates = [learning_rate(config, step, 1000) for step in range(warmup + 1)]
        assert rates == sorted(rates)
        assert rates[-1] == pytest.approx(0.1)
        assert rates[0] >= 0.1 * lowest * (1 - 1e-12)
    if warmup > 3:  # the logarithm is ahead in the middle
        log, linear = (
            learning_rate(OptimConfig(warmup_steps=warmup, warmup=shape), warmup // 2, 1000)
            for shape in (Warmup.log, Warmup.linear)
        )
        assert log > linear


@given(st.integers(1, 5000), st.integers(0, 5000), st.sampled_from(list(Decay)))
def test_rates_stay_in_bounds_whatever_the_lengths(steps: int, warmup: int, decay: Decay) -> None:
    config = OptimConfig(lr=1.0, warmup_steps=warmup, decay=decay)
    for step in {0, steps // 2, steps - 1}:
        assert 0 < learning_rate(config, step, steps) <= 1.0


def test_norms_are_not_decayed() -> None:
    model = torch.nn.ModuleDict({"norm": torch.nn.RMSNorm(4), "linear": torch.nn.Linear(4, 4, bias=False)})
    decayed, rest = AdamW(model, OptimConfig(weight_decay=0.3)).param_groups
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)
    assert [p.ndim for p in decayed["params"]] == [2]
    assert [p.ndim for p in rest["params"]] == [1]
