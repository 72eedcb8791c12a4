"""A dry run's numbers are those of a real run."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from harness.one_step import SHAPE, OneStep
from harness.pool import Ranks

from contract.errors import ConfigError
from train.config import load_config
from train.dry_run import DryRun, dry_run
from train.layout.memory import OFFLOADED, Role, total

pytestmark = pytest.mark.slow

LAYOUTS = [
    (1, "precision=bf16"),
    (2, "precision=fp32 parallel.zero=0"),
    (3, "precision=fp32 parallel.zero=3"),
    (4, "precision=bf16 parallel.zero=2 parallel.dp_replicate=2 parallel.recompute=full"),
    (4, "precision=fp32 parallel.tp=2 parallel.zero=1"),
    (4, "precision=fp32 parallel.cp=2 parallel.tp=2 parallel.zero=0"),
    (4, "precision=fp32 parallel.pp=2 parallel.zero=2"),
    (4, "precision=fp32 parallel.pp=2 parallel.zero=2 parallel.schedule=zbv"),
    (4, "parallel.tp=2 parallel.zero=1 model.vocab_size=321 model.ffn_dim=193"),
    (3, "precision=four_level parallel.zero=1 model.vocab_size=321"),
    (2, "precision=four_level parallel.zero=3 precision.optimizer_state=int8"),
    (2, "precision.parameters=bfloat16 parallel.zero=0"),
    (4, "offload.optimizer=cpu parallel.zero=2 parallel.tp=2"),
]


def alone(overrides: list[str], size: int, rank: int = 0) -> DryRun:
    """A dry run in a process of its own: torch remembers meshes of earlier ones."""
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        return pool.submit(dry_run, load_config([*SHAPE, *overrides]), size, rank).result(timeout=120)


@pytest.mark.req("A10", "B1")
@pytest.mark.parametrize(("size", "layout"), LAYOUTS, ids=lambda value: str(value).replace(" ", ","))
def test_a_dry_run_holds_what_a_real_rank_holds(ranks: Ranks, size: int, layout: str) -> None:
    def measure() -> tuple[tuple[int, int, int], int | None]:
        step = OneStep(layout.split())
        kept_bytes = None if step.dims.pp > 1 else step.micro_batch()[0]
        return (step.parameter_bytes, step.gradient_bytes, step.optimizer_bytes()), kept_bytes

    state, kept_bytes = ranks(size, measure, timeout_s=120)[-1]
    found = alone(layout.split(), size, size - 1)
    assert (found.built.parameters, found.built.gradients, found.built.optimizer) == state
    if kept_bytes is not None:
        assert found.built.activations == pytest.approx(kept_bytes, rel=0.01)
    for name in ("parameters", "gradients", "optimizer", "accumulated", "gathered", "activations", "total"):
        assert getattr(found.reckoned, name) == pytest.approx(getattr(found.built, name), rel=0.1), name


@pytest.mark.req("A9")
@pytest.mark.parametrize(
    ("layout", "whole"),
    [
        # Plain replicas reduce gradients where they add up.
        ("parallel.zero=0", False),
        ("parallel.zero=0 parallel.tp=2", True),
        ("parallel.zero=1", True),
        ("parallel.zero=2", False),
        ("parallel.pp=2 parallel.zero=2", False),
        # Both halves of a backward must be through before a gradient can be reduced.
        ("parallel.pp=2 parallel.zero=2 parallel.schedule=zbv", True),
    ],
)
def test_a_dry_run_counts_whole_gradients_where_they_add_up(layout: str, whole: bool) -> None:
    found = alone(["precision=fp32", *layout.split()], 4)
    assert found.built.accumulated == found.reckoned.accumulated
    assert (found.built.accumulated > 0) == whole


@pytest.mark.req("A10")
def test_a_dry_run_shows_what_a_budget_buys() -> None:
    found = alone(["parallel.recompute=auto", "parallel.recompute_budget_gb=0.004"], 2)
    assert found.built.activations <= 4_000_000
    assert "of 0.004 GB a rank" in found.recompute
    assert alone([], 2).built.activations > 4_000_000


@pytest.mark.req("C6")
def test_a_dry_run_knows_tiers_that_it_does_not_build(tmp_path: Path) -> None:
    """Weights and activations elsewhere are those that would be here; no file and no memory is taken."""
    disks = f"offload.optimizer=nvme offload.parameters=nvme offload.nvme_path=[{tmp_path}] offload.activations=cpu"
    there, here = (
        alone([*layout.split(), "parallel.zero=3"], 2) for layout in (disks, "precision.parameters=bfloat16")
    )
    assert there.built == here.built
    assert not list(tmp_path.iterdir())
    on_gpu = there.on_gpu
    assert on_gpu[Role.optimizer].nvme == there.built.optimizer > on_gpu[Role.optimizer].device == 0
    assert on_gpu[Role.parameters].nvme >= there.built.parameters > on_gpu[Role.parameters].device == 0
    activations = on_gpu[Role.activations]
    assert activations.host > activations.device
    assert activations.total == here.on_gpu[Role.activations].device
    assert there.as_tree()["on_gpu"]["optimizer"]["nvme_bytes"] == there.built.optimizer


@pytest.mark.req("C6")
def test_a_dry_run_refuses_what_the_host_has_no_room_for() -> None:
    """On a GPU, which it is about: there copies need buffers that a CPU does without."""
    layout = ["offload.optimizer=cpu", "parallel.zero=2"]
    on_gpu = total(alone(layout, 2).on_gpu, OFFLOADED).host
    with pytest.raises(ConfigError, match=r"offload\.host_budget_gb"):
        alone([*layout, f"offload.host_budget_gb={0.99 * on_gpu / 1e9}"], 2)


@pytest.mark.req("B1")
def test_a_dry_run_looks_at_compiled_layers_as_at_plain_ones() -> None:
    layout = ["precision=bf16", "parallel.tp=2", "parallel.recompute=full"]
    assert alone([*layout, "parallel.compile=true"], 4) == alone(layout, 4)
