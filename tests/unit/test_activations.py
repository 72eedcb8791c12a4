"""The arithmetic of kept activations, and the choice within a budget."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import ConfigError
from train.config import TrainConfig, load_config
from train.layout.activations import RESULTS, Keep, layer_cost, outside_bytes, stages_of_rank
from train.layout.check import lay_out
from train.layout.config import Recompute
from train.layout.dims import ParallelDims
from train.layout.recompute import Plan, check_recompute, choose, plan

SEVEN_B = [
    "model.dim=4096",
    "model.layers=32",
    "model.heads=32",
    "model.kv_heads=null",
    "model.ffn_dim=11008",
    "model.vocab_size=32000",
    "model.max_sequence_length=4096",
    "data.sequence_length=4096",
    "parallel.micro_batch_size=1",
    "parallel.zero=3",
]
DP_8 = ParallelDims(dp_shard=8)


def config_of(*more: str) -> TrainConfig:
    return load_config([*SEVEN_B, *more])


def in_auto(budget_gb: float, *more: str) -> TrainConfig:
    return config_of("parallel.recompute=auto", f"parallel.recompute_budget_gb={budget_gb}", *more)


@st.composite
def frontiers(draw: st.DrawFn) -> list[Keep]:
    """Options that trade bytes for work."""
    count = draw(st.integers(1, 5))
    # Many sizes and few steps between them: a greedy choice is seldom the best.
    sizes, flops = (
        sorted(draw(st.lists(st.integers(0, most), min_size=count, max_size=count, unique=True)))
        for most in (10, 50)
    )
    return [Keep(None, size, work) for size, work in zip(sizes, reversed(flops), strict=True)]


@pytest.mark.req("A10")
@settings(deadline=None, max_examples=200)
@given(frontiers(), st.integers(1, 4), st.integers(0, 20))
def test_the_choice_is_the_best_there_is(keeps: list[Keep], layers: int, room: int) -> None:
    budget = min(keep.kept_bytes for keep in keeps) * layers + room
    best = min(
        sum(keep.recomputed_flops for keep in one)
        for one in itertools.product(keeps, repeat=layers)
        if sum(keep.kept_bytes for keep in one) <= budget
    )
    chosen = choose(keeps, layers, budget)
    assert len(chosen) == layers
    assert sum(keep.kept_bytes for keep in chosen) <= budget
    assert sum(keep.recomputed_flops for keep in chosen) == best


@pytest.mark.req("A10")
def test_a_frontier_runs_from_all_again_to_nothing_again() -> None:
    cost = layer_cost(config_of(), DP_8)
    frontier = cost.frontier()
    assert frontier[0] == cost.keep(frozenset())
    assert frontier[-1] == cost.keep(None)
    assert frontier[-1].recomputed_flops == 0
    for lean, rich in itertools.pairwise(frontier):
        assert lean.kept_bytes < rich.kept_bytes and lean.recomputed_flops > rich.recomputed_flops


@pytest.mark.req("B9", "D7")
def test_all_again_is_less_than_half_the_memory_for_a_third_more_compute() -> None:
    nothing, everything = (plan(config_of(f"parallel.recompute={mode}"), DP_8) for mode in ("none", "full"))
    assert everything.kept_bytes < nothing.kept_bytes / 2
    assert everything.recomputed_flops / (3 * everything.forward_flops) == pytest.approx(1 / 3, abs=0.1)
    assert nothing.recomputed_flops == 0


@pytest.mark.req("A10")
@pytest.mark.parametrize("share", [0.0, 0.1, 0.37, 0.8, 1.0])
def test_more_room_never_computes_more_and_is_never_exceeded(share: float) -> None:
    config = in_auto(1, "model.layers=8")

    def found(budget_gb: float | None, mode: Recompute = Recompute.auto) -> Plan:
        config.parallel.recompute, config.parallel.recompute_budget_gb = mode, budget_gb
        return plan(config, DP_8, device_type="cpu")

    least, most = (found(None, mode).kept_bytes for mode in (Recompute.full, Recompute.none))
    budget_gb = (least + share * (most - least) + 1) / 1e9
    assert found(budget_gb).kept_bytes <= budget_gb * 1e9
    assert found(budget_gb * 1.1).recomputed_flops <= found(budget_gb).recomputed_flops


@pytest.mark.req("A10")
def test_a_budget_too_small_names_the_smallest_that_works() -> None:
    with pytest.raises(ConfigError, match=r"keeps at least ([\d.]+) GB") as refusal:
        plan(in_auto(0.1), DP_8, device_type="cpu")
    named = float(str(refusal.value).split("at least ")[1].split()[0])
    found = plan(in_auto(named), DP_8, device_type="cpu")
    assert plan(in_auto(named), DP_8).kept_bytes <= named * 1e9
    assert found.kept_bytes <= named * 1e9
    assert all(keep.results == frozenset() for keep in found.layers.values())
    assert "layers 0-31 keep their input" in str(found)


def test_stages_keep_as_many_micro_batches_as_are_under_way() -> None:
    config = config_of("parallel.pp=4", "loop.global_batch_size=64")
    dims = ParallelDims(pp=4, dp_shard=2)
    (first,), (last,) = (stages_of_rank(config, dims, rank) for rank in (0, 3))
    assert first.first and not first.last and last.last
    # 1F1B: as much as a whole model's depth.
    held = plan(config, dims, 0, micro_batches=32)
    assert held.kept_bytes == pytest.approx(plan(config, DP_8).kept_bytes, rel=0.2)
    # The last stage keeps one, with its logits.
    layers_bytes = plan(config, dims, 3, 32).kept_bytes - outside_bytes(config, dims, last)
    assert layers_bytes == pytest.approx(
        len(last.layers) * layer_cost(config, dims).everything_bytes, rel=0.05
    )


@pytest.mark.req("A10")
@pytest.mark.parametrize(
    "schedule", ["looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]
)
def test_a_budget_holds_for_each_stage_of_a_rank(schedule: str) -> None:
    """With logits that only the last stage has, and of which few are kept at once."""
    settings = [
        "parallel.pp=4",
        f"parallel.schedule={schedule}",
        "parallel.zero=1",
        "model.vocab_size=128000",
    ]
    config = in_auto(1, *settings, "loop.global_batch_size=64")
    dims = ParallelDims(pp=4, dp_shard=2)

    def found(mode: Recompute, rank: int, budget_gb: float | None = None) -> Plan:
        config.parallel.recompute, config.parallel.recompute_budget_gb = mode, budget_gb
        return plan(config, dims, rank, 32, "cpu")

    for rank in range(4):
        least, most = (found(mode, rank).kept_bytes for mode in (Recompute.full, Recompute.none))
        for share in (0.2, 0.5, 0.9):
            budget_bytes = least + share * (most - least)
            chosen = found(Recompute.auto, rank, budget_bytes / 1e9)
            assert chosen.kept_bytes <= budget_bytes, (rank, share)
            # Without two halves of a backward less may suffice to keep everything.
            assert chosen.kept_bytes > 0.7 * budget_bytes or chosen.recomputed_flops == 0, (rank, share)


def test_between_the_halves_of_a_backward_more_is_kept() -> None:
    """Gradients of all that has been computed with weights; where layers are computed again there are no halves."""
    settings = ["parallel.pp=4", "parallel.schedule=zbv", "parallel.zero=1"]
    dims = ParallelDims(pp=4, dp_shard=2)
    config = config_of(*settings)
    cost = layer_cost(config, dims)
    # The last rank keeps 7 of its 8 micro-batches halfway, each in 4 layers: see `in_flight`.
    layers_bytes = 4 * (7 * (cost.everything_bytes + cost.halfway_bytes))
    assert plan(config, dims, 3, 32).kept_bytes == pytest.approx(layers_bytes, rel=0.03)
    assert cost.halfway_bytes > 0.4 * cost.everything_bytes
    full = config_of(*settings, "parallel.recompute=full")
    assert plan(full, dims, 3, 32).kept_bytes < 0.1 * layers_bytes


def test_what_is_shared_shrinks_what_is_kept() -> None:
    alone = layer_cost(config_of(), DP_8)
    tensor = layer_cost(config_of("parallel.tp=8"), ParallelDims(tp=8, dp_shard=2))
    context = layer_cost(config_of("parallel.cp=2"), ParallelDims(cp=2, dp_shard=4))
    for name in RESULTS:
        assert tensor.kept_bytes[name] * 8 == pytest.approx(alone.kept_bytes[name], rel=0.01)
    assert tensor.input_bytes * 8 == alone.input_bytes
    assert context.input_bytes * 2 == alone.input_bytes
    # What is computed twice with tp is the product before the ranks add up, which is not kept.
    assert tensor.keep(frozenset(RESULTS)).recomputed_flops > tensor.flops["o_proj_part"] > 0


def test_what_a_layout_cannot_follow_is_refused() -> None:
    config = config_of(
        "parallel.pp=2", "parallel.schedule=zbv", "parallel.zero=1", "parallel.recompute=selective"
    )
    check_recompute(config, ParallelDims(pp=2), micro_batches=4)
    config.parallel.compile = True
    with pytest.raises(ConfigError, match=r"which parallel\.compile melts together"):
        check_recompute(config, ParallelDims(pp=2), micro_batches=4)
    config.parallel.recompute = Recompute.full
    check_recompute(config, ParallelDims(pp=2), micro_batches=4)


@pytest.mark.req("A10")
def test_a_budget_too_small_is_refused_before_anything_starts() -> None:
    # The first stage keeps four micro-batches, the last one its head's logits.
    config = in_auto(0.5, "parallel.pp=4", "loop.global_batch_size=64")
    with pytest.raises(ConfigError, match="a rank keeps at least"):
        lay_out(config, 8)
    config.parallel.recompute_budget_gb = 50.0
    lay_out(config, 8)
