"""The search for the best layout: nothing that is better is left out, and all that is proposed works and fits."""

import dataclasses
import functools
import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import ConfigError
from tools.plan.case import Machine
from tools.plan.constants import constants
from tools.plan.gpu import Gpu, gpu
from tools.plan.own import case_of, varied
from tools.plan.room import LOOSE, Rooms, fullest, least_state_bytes
from tools.plan.search import ROUNDING, Found, Plan, _Common, _Search, evaluate, search
from tools.plan.space import Space, divisors
from tools.plan.step import predict_step
from train.config import TrainConfig, load_config
from train.layout.batch import micro_batches
from train.layout.check import lay_out
from train.layout.config import ContextMethod, ParallelConfig, Recompute
from train.layout.dims import ParallelDims
from train.layout.memory import heaviest, total
from train.layout.stages import SCHEDULES, Placement
from train.model.config import ModelConfig, parameter_count

pytestmark = pytest.mark.slow

TOY = ModelConfig(
    name="toy",
    vocab_size=8192,
    dim=1024,
    layers=6,
    heads=8,
    kv_heads=4,
    ffn_dim=2816,
    max_sequence_length=4096,
)


@functools.cache
def small_gpu(memory_gb: float) -> Gpu:
    return dataclasses.replace(gpu("a100_40"), memory_gb=memory_gb)


def config_of(samples: int = 8, model: ModelConfig = TOY, **parallel: object) -> TrainConfig:
    config = TrainConfig()
    config.model = model
    config.data.sequence_length = 2048
    config.loop.global_batch_size = samples
    config.parallel = ParallelConfig(**{"micro_batch_size": 1, **parallel})  # type: ignore[arg-type]
    return config


def every(config: TrainConfig, machine: Machine, fixed: frozenset[str] = frozenset()) -> Iterator[Plan]:
    """Every layout of the space that works and fits, by the trainer's own checks and arithmetic."""
    known = constants()
    space = Space(config, machine.gpus, machine.gpus_per_node, fixed)
    for shape in space.shapes():
        for zero, shard in space.variants(shape):
            for recompute in space.recomputes(shape):
                for offload in space.offloads:
                    parallel = space.variant(shape, zero, shard, recompute)
                    one = varied(config, parallel=parallel, offload=offload)
                    try:
                        dims = lay_out(one, machine.gpus, machine.gpus_per_node, on_gpus=True)
                    except ConfigError:
                        continue
                    case = case_of(one, dims, machine)
                    room = Rooms(machine.gpu.usable_bytes, known).of(one, dims)
                    if room.fits:
                        yield Plan(one, dims, case, predict_step(case, known), room)


def best_of(plans: Iterator[Plan], top: int) -> list[Plan]:
    best: dict[object, Plan] = {}
    for plan in plans:
        if plan.degrees not in best or plan.order < best[plan.degrees].order:
            best[plan.degrees] = plan
    return sorted(best.values(), key=lambda plan: plan.order)[:top]


@pytest.mark.req("A24")
@pytest.mark.parametrize(
    ("memory_gb", "samples", "nodes", "per_node", "fixed"),
    [
        (40.0, 8, 1, 4, {}),
        (2.7, 8, 1, 4, {}),
        (2.4, 4, 2, 2, {}),
        (2.9, 12, 2, 3, {}),
        (2.5, 8, 2, 2, {"pp": 2}),
        (2.6, 8, 1, 4, {"zero": 3}),
        (2.6, 8, 2, 2, {"schedule": "interleaved_1f1b", "pp": 2}),
    ],
)
def test_nothing_better_is_left_out(
    memory_gb: float, samples: int, nodes: int, per_node: int, fixed: dict[str, object]
) -> None:
    machine = Machine(small_gpu(memory_gb), nodes * per_node, per_node, 5e10)
    config, names = config_of(samples, **fixed), frozenset(fixed)
    found = search(config, machine, names, top=4)
    expected = best_of(every(config, machine, names), 4)
    assert expected, "the case shows nothing"
    assert [plan.order for plan in found.plans] == [plan.order for plan in expected]
    assert [plan.parallel for plan in found.plans] == [plan.parallel for plan in expected]
    assert found.tightest is None


@pytest.mark.req("A24")
def test_memory_decides_where_it_is_short() -> None:
    """The cases above differ: with plenty of memory another layout is best than with little."""
    config = config_of()
    plenty = search(config, Machine(small_gpu(40.0), 4, 4, 5e10), top=1).plans[0]
    little = search(config, Machine(small_gpu(2.8), 4, 4, 5e10), top=1).plans[0]
    assert plenty.parallel != little.parallel
    assert plenty.step.total_s < little.step.total_s
    assert little.room.device_bytes <= 2.8 * 2**30 < plenty.room.device_bytes


LARGE = {"deepseek_7b": ("a100_40", 16, 4, 128), "gpt3_175b": ("a100_80", 64, 8, 48)}


@functools.cache
def large(name: str, top: int = 3) -> Found:
    kind, gpus, per_node, samples = LARGE[name]
    config = load_config(
        [
            f"model={name}",
            "data.sequence_length=2048",
            f"loop.global_batch_size={samples}",
            "parallel.micro_batch_size=1",
        ]
    )
    return search(config, Machine(gpu(kind), gpus, per_node, 1e11), top=top)


@pytest.mark.slow
@pytest.mark.req("A24", "A9", "A10", "B1")
@pytest.mark.parametrize("name", LARGE)
def test_what_is_proposed_works_and_fits(name: str) -> None:
    known = constants()
    found = large(name)
    assert len(found.plans) == 3
    assert len({plan.degrees for plan in found.plans}) == 3
    times = [plan.seconds_per_token for plan in found.plans]
    assert times == sorted(times)
    for plan in found.plans:
        fresh = varied(plan.config)
        dims = lay_out(fresh, plan.dims.ranks, LARGE[name][2], on_gpus=True)
        assert dims == plan.dims
        rank, kept = heaviest(fresh, dims, "cuda")
        needed = total(kept).device + known.fragmentation * sum(kept[role].device for role in LOOSE)
        assert needed + known.context_gb * 2**30 <= plan.case.machine.gpu.usable_bytes
        needed += plan.room.passing_bytes * (1 + known.fragmentation) + plan.room.context_bytes
        assert math.isclose(needed, plan.room.device_bytes, rel_tol=1e-12), rank
        again = evaluate(fresh, plan.case.machine)
        assert again.step == plan.step and again.case == plan.case


@pytest.mark.slow
def test_a_search_is_deterministic() -> None:
    large.cache_clear()
    first = [plan.parallel for plan in large("deepseek_7b").plans]
    large.cache_clear()
    assert [plan.parallel for plan in large("deepseek_7b").plans] == first


DEGREE = st.sampled_from([1, 2, 4, 8])


@pytest.mark.req("A24", "A9")
@given(
    tp=DEGREE,
    pp=DEGREE,
    dp=DEGREE,
    cp=st.sampled_from([1, 2]),
    micro=st.sampled_from([1, 2, 4]),
    count=st.sampled_from([1, 4, 8, 16]),
    schedule=st.sampled_from(list(SCHEDULES)),
    stages=st.sampled_from([None, 2, 3, 4]),
    zero=st.integers(0, 3),
    recompute=st.sampled_from([Recompute.none, Recompute.selective, Recompute.full]),
)
@settings(max_examples=250, deadline=None)
def test_the_fullest_rank_and_bounds_of_memory_are_right(
    tp: int,
    pp: int,
    dp: int,
    cp: int,
    micro: int,
    count: int,
    schedule: str,
    stages: int | None,
    zero: int,
    recompute: Recompute,
) -> None:
    """A rank that is looked at holds most of all; bounds are no larger than what is bounded."""
    config = config_of(
        micro * count * dp,
        dataclasses.replace(TOY, layers=22, vocab_size=32000, kv_heads=8),
        tp=tp,
        pp=pp,
        cp=cp,
        micro_batch_size=micro,
        zero=zero,
        schedule=schedule if pp > 1 else "1f1b",
        stages_per_rank=stages if pp > 1 and SCHEDULES[schedule].placement is Placement.loop else None,
        context=ContextMethod.ring if cp > 1 else ContextMethod.heads,
        recompute=recompute,
    )
    try:
        dims = lay_out(config, tp * pp * dp * cp, 8, on_gpus=True)
    except ConfigError:
        return
    known = constants()
    rooms = Rooms(80.0 * 2**30, known)
    rank, kept = heaviest(config, dims, "cuda")
    most = total(kept).device + known.fragmentation * sum(kept[role].device for role in LOOSE)
    room = rooms.of(config, dims)
    # `heaviest` does not count what the allocator holds besides, so that another rank may come first with it.
    assert room.device_bytes - room.context_bytes >= most * (1 - 1e-12), (rank, fullest(config, dims))
    state = least_state_bytes(config, dims, micro_batches(config, dims))
    sharers = dims.dp_shard * dims.cp if zero else 1
    average = state.of(parameter_count(config.model) / (tp * pp), sharers)
    assert average <= room.device_bytes
    for part in rooms.parts(config, dims):
        assert state.of(part.parameters, sharers) + part.loose_bytes <= room.device_bytes


@pytest.mark.req("A24")
@given(
    gpus=st.sampled_from([(4, 4), (8, 4), (16, 8), (64, 8)]),
    samples=st.sampled_from([8, 16, 48, 64]),
    pick=st.integers(0, 10**6),
    layers=st.sampled_from([6, 12, 23]),
)
@settings(max_examples=150, deadline=None)
def test_bounds_of_time_are_bounds(gpus: tuple[int, int], samples: int, pick: int, layers: int) -> None:
    """No variant of a shape is faster than its bound, nor faster with more recompute or offload."""
    machine = Machine(gpu("a100_80"), *gpus, 1e11)
    config = config_of(samples, dataclasses.replace(TOY, layers=layers))
    known = constants()
    space = Space(config, *gpus, frozenset())
    shapes = list(space.shapes())
    shape = shapes[pick % len(shapes)]
    bounds = _Search(config, machine, frozenset(), 1, known)
    variants = list(space.variants(shape))
    zero, shard = variants[pick % len(variants)]
    common = _Common(bounds, shape, space.offloads)
    before_s = 0.0
    for recompute in space.recomputes(shape):
        parallel = space.variant(shape, zero, shard, recompute)
        times = []
        for offload in space.offloads:
            one = varied(config, parallel=parallel, offload=offload)
            case = case_of(one, ParallelDims.of(parallel, machine.gpus), machine)
            times.append(predict_step(case, known).total_s)
            assert bounds.bound(shape, recompute) <= times[-1] / case.tokens
            least_s = common.least_s(recompute)
            assert common.least_s(recompute, "1f1b") * (1 - ROUNDING) <= least_s <= times[-1] / case.tokens
        assert times == sorted(times)
        assert before_s <= times[0]
        before_s = times[0]


@pytest.mark.req("B1")
def test_what_is_fixed_stays() -> None:
    machine = Machine(gpu("a100_40"), 8, 4, 1e11)
    config = config_of(16, tp=2, zero=3, micro_batch_size=2, recompute=Recompute.full)
    names = frozenset({"tp", "zero", "micro_batch_size", "recompute"})
    found = search(config, machine, names, top=10)
    assert found.plans
    for plan in found.plans:
        parallel = plan.parallel
        assert (parallel.tp, parallel.zero, parallel.micro_batch_size) == (2, 3, 2)
        assert parallel.recompute is Recompute.full
    steps = config_of(16, gradient_accumulation_steps=2)
    for plan in search(steps, machine, frozenset({"gradient_accumulation_steps"}), top=10).plans:
        assert plan.case.layout.micro_batches == 2 and plan.case.samples == 16


def test_nothing_fits_or_works() -> None:
    config = config_of(8)
    tiny = search(config, Machine(small_gpu(1.7), 4, 4, 1e11))
    assert not tiny.plans and tiny.tightest is not None
    assert not tiny.tightest.room.fits
    odd = search(config_of(8, tp=3), Machine(small_gpu(40.0), 4, 4, 1e11), frozenset({"tp"}))
    assert not odd.plans and odd.tightest is None


@given(st.integers(1, 5000))
def test_divisors(number: int) -> None:
    assert divisors(number) == [one for one in range(1, number + 1) if number % one == 0]


@pytest.mark.req("A24", "A10")
def test_what_a_backward_pass_needs_for_a_while_is_counted() -> None:
    """The loss of a large vocabulary, and the layer that is computed again, as the model of other trainers has them."""
    from tools.plan.activations import LOSS_BYTES, layer_bytes

    config = load_config(
        [
            "model=deepseek_7b",
            "data.sequence_length=4096",
            "parallel.zero=3",
            "parallel.recompute=full",
            "loop.global_batch_size=64",
        ],
        reads_data=False,
    )
    dims = lay_out(config, 8, 8, on_gpus=True)
    where = Machine(gpu("a100_80"), 8, 8, 200e9)
    room = Rooms(80.0 * 2**30, constants()).of(config, dims)
    tokens = config.parallel.micro_batch_size * 4096
    # 4 bytes of a logit are kept from the forward pass on.
    assert room.passing_bytes == tokens * 102400 * (LOSS_BYTES - 4)
    config.model.vocab_size = 512
    layer = layer_bytes(case_of(config, dims, where))
    again = Rooms(80.0 * 2**30, constants()).of(config, dims).passing_bytes
    assert again == pytest.approx(layer.everything - layer.input + layer.backward, rel=0.1)
