"""Days, energy, checkpoints and goodput of a plan."""

import functools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import ConfigError
from tools.plan.case import Machine
from tools.plan.goals import best_interval_s, checkpoint_bytes, checkpoints, goodput, gpu_watts, totals
from tools.plan.gpu import gpu
from tools.plan.search import Plan, evaluate
from tools.plan.settings import LLAMA3_FAILURES, GoalsConfig, load_plan
from train.config import load_config
from train.model.config import parameter_count


@functools.cache
def plan_of(*overrides: str, gpus: int = 16) -> Plan:
    sizes = ["data.sequence_length=2048", "loop.global_batch_size=64", "parallel.micro_batch_size=1"]
    config = load_config(["model=llama_1b", *sizes, *overrides])
    return evaluate(config, Machine(gpu("a100_80"), gpus, 8, 2e11))


def wasted(interval_s: float, stall_s: float, every_s: float) -> float:
    """Mean time that a second of work takes, by Daly's model: failures come at random, in work and in saves."""
    # Expected time until `interval + stall` seconds pass without a failure.
    return every_s * math.expm1((interval_s + stall_s) / every_s) / interval_s


@pytest.mark.req("A24")
@given(st.floats(0.1, 600), st.floats(3600, 1e7))
@settings(max_examples=60)
def test_the_interval_wastes_least(stall_s: float, every_s: float) -> None:
    best = best_interval_s(stall_s, every_s)
    least = wasted(best, stall_s, every_s)
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert least <= wasted(best * factor, stall_s, every_s) * (1 + 1e-6)


def test_the_interval_is_youngs_for_rare_failures() -> None:
    assert math.isclose(best_interval_s(10.0, 1e8), math.sqrt(2 * 10.0 * 1e8), rel_tol=1e-3)
    assert math.isinf(best_interval_s(10.0, math.inf))
    # Saving that takes longer than the time between failures: work for that time.
    assert best_interval_s(100.0, 40.0) == 40.0


@pytest.mark.req("A24")
def test_the_published_rate_gives_the_published_failures() -> None:
    assert math.isclose(LLAMA3_FAILURES * 16384 * 54, 419)
    goals = GoalsConfig()
    saving = checkpoints(plan_of(), goals)
    assert math.isclose(saving.failure_every_s, 86400 / (16 * goals.failures_per_gpu_day))


@given(st.floats(0, 100), st.floats(1, 1e5), st.floats(1e3, 1e8), st.floats(0, 1e4))
@settings(max_examples=60)
def test_goodput_is_a_share(stall_s: float, interval_s: float, every_s: float, lost_s: float) -> None:
    found = goodput(stall_s, interval_s, every_s, lost_s)
    assert 0 <= found <= 1
    assert found >= goodput(stall_s, interval_s, every_s, lost_s + 1)
    assert goodput(0, math.inf, math.inf, 0) == 1


@pytest.mark.req("A24", "B1")
@pytest.mark.parametrize(
    "layout",
    [
        (),
        ("parallel.zero=3",),
        ("parallel.zero=1", "parallel.dp_replicate=2"),
        ("parallel.tp=2", "parallel.pp=2"),
        ("parallel.tp=4", "parallel.zero=2"),
    ],
    ids=lambda layout: " ".join(layout) or "plain",
)
def test_a_checkpoint_has_the_state_once(layout: tuple[str, ...]) -> None:
    plan = plan_of(*layout)
    # fp32 weights and two moments; what several ranks of tp hold whole (norms, shared heads) counts for each.
    whole = 12 * parameter_count(plan.config.model)
    assert whole <= checkpoint_bytes(plan) <= 1.03 * whole


def test_what_training_waits_for_when_it_saves() -> None:
    goals = GoalsConfig()
    behind = checkpoints(plan_of(), goals)
    waits = checkpoints(plan_of("checkpoint.background=false"), goals)
    assert waits.stall_s == waits.write_s == behind.write_s
    assert behind.stall_s < 0.1 * behind.write_s
    assert math.isclose(behind.write_s, behind.size_bytes / 2e9)
    assert waits.goodput < behind.goodput < 1
    never = checkpoints(plan_of(), GoalsConfig(failures_per_gpu_day=0))
    assert never.goodput == 1 and math.isinf(never.interval_s)


@pytest.mark.req("A24", "A25")
def test_days_and_energy() -> None:
    plan, goals = plan_of(), GoalsConfig(failures_per_gpu_day=0, host_watts_per_gpu=100, pue=1.5)
    found = totals(plan, 1e9, goals)
    assert found.steps == math.ceil(1e9 / plan.case.tokens)
    assert math.isclose(found.days, found.steps * plan.step.total_s / 86400)
    assert math.isclose(found.gpu_hours, found.days * 24 * 16)
    assert math.isclose(found.energy_kwh, found.gpu_hours * (found.gpu_watts + 100) * 1.5 / 1000)
    kind = plan.case.machine.gpu
    assert kind.idle_watts < gpu_watts(plan) <= kind.watts
    # The less a step computes of its time, the less a GPU draws.
    assert gpu_watts(plan_of("parallel.pp=8", "parallel.micro_batch_size=4")) < gpu_watts(plan)
    assert totals(plan, None, goals).steps == plan.config.loop.steps


def test_settings_of_goals() -> None:
    found = load_plan(["train.tokens=1e12", "goals.pue=1.1"])
    assert found.train.tokens == 1e12 and found.goals.pue == 1.1
    for wrong in (
        "train.tokens=0",
        "goals.pue=0.9",
        "goals.write_gb_s=0",
        "goals.restart_s=-1",
        "goals.nothing=1",
    ):
        with pytest.raises(ConfigError):
            load_plan([wrong])
