"""Cost models against closed forms, against published figures, and switch points under noise."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.allreduce_plan import AllReducePlan
from tools.nccl.busbw import busbw
from tools.nccl.measurement import Collective, Exchange, Exchanges, Measurement
from tools.nccl.route.costs import FLAT, HIERARCHICAL, RING, TREE, Costs, fit, switch_points
from tools.nccl.route.line import Curve, Line, fit_line

pytestmark = [pytest.mark.req("B6", "C10")]
SIZES = [1 << power for power in range(10, 33)]

# One node of 8 A100, all-reduce: bytes and microseconds (stas00/ml-engineering, network/README.md).
PUBLISHED_US = {
    32768: 43.83,
    131072: 51.76,
    524288: 80.4,
    1048576: 101.9,
    2097152: 101.4,
    4194304: 101.5,
    8388608: 133.5,
    16777216: 276.6,
    67108864: 684.6,
    268435456: 2420.6,
    1073741824: 8203.9,
    4294967296: 32136.0,
    17179869184: 127997.0,
}


def collective(
    size: int, time_s: float, nodes: int, gpus: int, algorithm: str = "flat", operation: str = "all_reduce"
) -> Collective:
    ranks = nodes * gpus
    bus = busbw(operation, ranks, size, time_s)
    scope = "world" if nodes > 1 else "n0"
    return Collective(
        operation, ranks, nodes, size, time_s, time_s, time_s, size / time_s, bus, 0, algorithm, True, scope
    )


def measurement(
    nodes: int, gpus: int, inside: Line | None, between: Line | None, backend: str
) -> Measurement:
    rows = []
    size = 1 << 26
    for step, pairs in (
        (inside, [(node * gpus, node * gpus + 1) for node in range(nodes)]),
        (
            between,
            [(node * gpus + g, (node + 1) * gpus + g) for node in range(nodes - 1) for g in range(gpus)],
        ),
    ):
        if step is not None:
            rate = size / step.seconds(size)
            rows += [Exchange(first, second, step.alpha_s, rate, rate) for first, second in pairs]
    names = [f"n{node}" for node in range(nodes)]
    return Measurement(names, gpus, backend, Exchanges.of(rows), about={"exchange_bytes": size})


@settings(deadline=None)
@given(st.floats(1e-6, 1e-3), st.floats(1e8, 3e11))
def test_a_line_is_found_again(alpha_s: float, bandwidth: float) -> None:
    sizes = np.array([1 << power for power in range(6, 36)], dtype=np.float64)
    found = fit_line(sizes, alpha_s + sizes / bandwidth)
    assert found.alpha_s == pytest.approx(alpha_s, rel=1e-3)
    assert found.bandwidth == pytest.approx(bandwidth, rel=1e-3)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.floats(1e-6, 1e-3), st.floats(1e10, 3e11))
def test_a_line_is_found_under_noise_jumps_and_an_outlier(
    seed: int, alpha_s: float, bandwidth: float
) -> None:
    random = np.random.default_rng(seed)
    sizes = np.array([1 << power for power in range(6, 36)], dtype=np.float64)
    times = (alpha_s + sizes / bandwidth) * np.exp(random.normal(0, 0.03, len(sizes)))
    middle = (sizes > alpha_s * bandwidth / 4) & (sizes < 4 * alpha_s * bandwidth)
    times[middle] *= random.uniform(1.0, 2.0, int(middle.sum()))
    times[random.choice([1, len(sizes) - 2])] *= 5
    found = fit_line(sizes, times)
    assert found.alpha_s == pytest.approx(alpha_s, rel=0.1)
    assert found.bandwidth == pytest.approx(bandwidth, rel=0.1)


def test_a_line_through_few_points() -> None:
    assert fit_line(np.array([1024.0]), np.array([1e-5])) == Line(1e-5, math.inf)
    flat = fit_line(np.array([1024.0, 2048.0]), np.array([1e-5, 1e-5]))
    assert flat.seconds(2048) == pytest.approx(1e-5)
    two = fit_line(np.array([1024.0, 1e9]), np.array([1e-5, 1.0]))
    assert two.bandwidth == pytest.approx(1e9, rel=0.01) and two.alpha_s == pytest.approx(9e-6, rel=0.01)


def test_the_published_sweep_gives_its_latency_and_its_bandwidth() -> None:
    sizes = np.array(list(PUBLISHED_US), dtype=np.float64)
    found = fit_line(sizes, np.array(list(PUBLISHED_US.values())) * 1e-6)
    # 229 to 235 GB/s of bus bandwidth at a gigabyte and more; 44 to 102 us up to 4 MiB.
    assert 2 * 7 / 8 * found.bandwidth == pytest.approx(232e9, rel=0.03)
    assert 40e-6 < found.alpha_s < 105e-6


def test_what_was_measured_is_used_and_interpolated() -> None:
    seen = measurement(1, 8, Line(5e-6, 2.2e11), None, "nccl")
    seen.collectives = [collective(size, time * 1e-6, 1, 8) for size, time in PUBLISHED_US.items()]
    costs = fit(seen)
    assert costs is not None
    for size, time in PUBLISHED_US.items():
        assert costs.predict(FLAT, size, 1, 8) == pytest.approx(time * 1e-6)
        assert costs.predict(RING, size, 1, 8) == pytest.approx(time * 1e-6)
    between = costs.predict(FLAT, 33554432, 1, 8)
    # 424 us were published there.
    assert between == pytest.approx(424e-6, rel=0.05)
    assert costs.predict(FLAT, 1, 1, 8) == pytest.approx(43.83e-6)
    assert costs.predict(FLAT, 1 << 36, 1, 8) == pytest.approx(4 * 127997e-6)
    assert switch_points(costs, 1, 8) == [(0, RING)]
    # On four nodes with nothing measured between them it is the model that answers.
    assert costs.predict(RING, 1 << 34, 4, 8) > 0


def test_several_runs_of_a_size_count_by_their_median() -> None:
    curve = Curve.of([(2048.0, 1.0), (1024.0, 1.0), (2048.0, 9.0), (2048.0, 2.0)])
    assert curve.seconds(2048) == 2.0 and curve.seconds(512) == 1.0 and curve.seconds(4096) == 4.0


@settings(deadline=None)
@given(
    st.integers(2, 64),
    st.integers(1, 8),
    st.floats(1e-6, 1e-4),
    st.floats(1e-6, 1e-4),
    st.floats(1e9, 1e12),
    st.floats(1e9, 1e12),
    st.integers(10, 32),
)
def test_the_models_are_the_closed_forms(
    n: int, g: int, a_in: float, a_out: float, b_in: float, b_out: float, power: int
) -> None:
    costs, size, p = Costs(Line(a_in, b_in), Line(a_out, b_out)), 2.0**power, n * g
    slowest = min(b_in, g * b_out) if g > 1 else b_out
    ring = 2 * (p - 1) / p * (n * a_out + (p - n) * a_in) + 2 * (p - 1) / p * size / slowest
    assert costs.predict(RING, size, n, g) == pytest.approx(ring)
    hierarchical = 2 * (g - 1) * a_in + 2 * (n - 1) * a_out
    hierarchical += 2 * (g - 1) / g * size / b_in + 2 * (n - 1) / n * (size / g) / b_out
    assert costs.predict(HIERARCHICAL, size, n, g) == pytest.approx(hierarchical)
    levels = math.ceil(math.log2(n))
    moved = max(2 * size / b_in if g > 1 else 0, 2 * (n - 1) / n * size / (g * b_out))
    tree = 2 * levels * a_out + 2 * (g - 1) * a_in + moved / 0.92
    assert costs.predict(TREE, size, n, g) == pytest.approx(tree)
    assert costs.predict(FLAT, size, n, g) == pytest.approx(min(ring, tree))
    with pytest.raises(ValueError, match="no model of bruck"):
        costs.model("bruck", size, n, g)


def test_steps_are_fitted_from_exchanges() -> None:
    inside, between = Line(5e-6, 2e11), Line(1.2e-5, 2.4e10)
    costs = fit(measurement(4, 8, inside, between, "nccl"))
    assert costs is not None and costs.trees
    for found, planted in ((costs.inside, inside), (costs.between, between)):
        assert found.alpha_s == pytest.approx(planted.alpha_s)
        assert found.bandwidth == pytest.approx(planted.bandwidth, rel=0.01)
    gloo = fit(measurement(4, 2, inside, between, "gloo"))
    assert gloo is not None and gloo.algorithms(4, 2) == (RING, HIERARCHICAL)
    assert gloo.algorithms(4, 1) == (RING,) == gloo.algorithms(1, 2)
    assert fit(Measurement(["n0"], 1, "nccl")) is None


def test_all_reduces_alone_tell_the_steps_too() -> None:
    truth = Costs(Line(5e-6, 2.3e11), Line(1.2e-5, 2.4e10))
    seen = measurement(4, 8, None, None, "nccl")
    seen.collectives = [collective(size, truth.model(RING, size, 1, 8), 1, 8) for size in SIZES]
    seen.collectives += [collective(size, truth.model(RING, size, 4, 8), 4, 8) for size in SIZES]
    costs = fit(seen)
    assert costs is not None
    assert costs.inside.bandwidth == pytest.approx(2.3e11, rel=0.05)
    assert costs.between.bandwidth == pytest.approx(2.4e10, rel=0.05)
    assert costs.between.alpha_s == pytest.approx(1.2e-5, rel=0.2)


def test_a_calibrated_model_foretells_other_numbers_of_nodes() -> None:
    truth = Costs(Line(5e-6, 2e11), Line(1.2e-5, 2.4e10), launch_s=2e-5, share={RING: 0.9}, trees=False)
    seen = measurement(8, 4, truth.inside, truth.between, "gloo")
    seen.collectives = [collective(size, truth.model(RING, size, 8, 4), 8, 4) for size in SIZES]
    costs = fit(seen)
    assert costs is not None
    for nodes, size in itertools.product((2, 4, 8, 16), (1 << 12, 1 << 30)):
        expected = truth.model(RING, size, nodes, 4)
        assert costs.predict(FLAT, size, nodes, 4) == pytest.approx(expected, rel=0.05)


def test_steps_inside_a_collective_may_be_quicker_than_exchanges() -> None:
    truth = Costs(Line(1e-6, 2e11), Line(2e-6, 2.4e10), trees=False)
    seen = measurement(4, 4, Line(1e-5, 2e11), Line(2e-5, 2.4e10), "gloo")
    seen.collectives = [collective(size, truth.model(RING, size, 4, 4), 4, 4) for size in SIZES]
    costs = fit(seen)
    assert costs is not None
    assert costs.predict(HIERARCHICAL, 1024, 4, 4) == pytest.approx(
        truth.model(HIERARCHICAL, 1024, 4, 4), rel=0.05
    )


def test_hierarchical_wins_among_small_messages_and_flat_among_large_ones() -> None:
    costs = Costs(Line(1e-5, 1e11), Line(2e-5, 2.5e10), trees=False)
    points = switch_points(costs, 16, 4)
    assert [name for _, name in points] == [HIERARCHICAL, RING]
    edge = points[1][0]
    for size in (edge // 8, edge * 8):
        flat, levels = (costs.predict(one, size, 16, 4) for one in (RING, HIERARCHICAL))
        assert (flat < levels) == (size > edge)


def test_measured_curves_decide_and_fit_the_plan_of_the_trainer() -> None:
    seen = measurement(2, 2, Line(1e-5, 1e10), Line(1e-4, 1e8), "gloo")
    for size in SIZES[:18]:
        flat = 1e-3 + size / 5e7
        seen.collectives += [collective(size, flat, 2, 2)]
        seen.collectives += [collective(size, 2e-3 + size / 1e8, 2, 2, "hierarchical")]
        seen.collectives += [
            collective(size, flat / 9, 2, 2, "ordered"),
            collective(size, 1.0, 2, 2, "flat", "broadcast"),
        ]
    costs = fit(seen)
    assert costs is not None
    points = switch_points(costs, 2, 2)
    assert [name for _, name in points] == [RING, HIERARCHICAL]
    # The curves cross where size / 1e8 is a millisecond.
    assert points[1][0] == pytest.approx(1e5, rel=0.4)
    plan = AllReducePlan(2, {2: points})
    assert plan.choose(2, 1000) == RING and plan.choose(2, 10**8) == HIERARCHICAL


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.floats(0.0, 0.04), st.integers(2, 32), st.integers(2, 8))
def test_noise_makes_no_zoo_of_intervals(seed: int, noise: float, nodes: int, gpus: int) -> None:
    random = np.random.default_rng(seed)
    truth = Costs(Line(8e-6, 1e11), Line(1.4e-5, 2.4e10), trees=False)
    seen = measurement(nodes, gpus, truth.inside, truth.between, "gloo")
    for size, name in itertools.product(SIZES, (RING, HIERARCHICAL)):
        time = truth.model(name, size, nodes, gpus) * float(np.exp(random.normal(0, noise)))
        seen.collectives.append(collective(size, time, nodes, gpus, FLAT if name == RING else name))
    costs = fit(seen)
    assert costs is not None
    points = switch_points(costs, nodes, gpus)
    AllReducePlan(gpus, {nodes: points})
    assert len(points) <= 3
    for start, name in points:
        other = {RING: HIERARCHICAL, HIERARCHICAL: RING}[name]
        size = max(start, 1024)
        assert truth.model(name, size, nodes, gpus) <= 1.35 * truth.model(other, size, nodes, gpus)


def test_alike_curves_never_switch() -> None:
    seen = measurement(4, 2, Line(1e-5, 1e10), Line(1e-4, 1e9), "gloo")
    random = np.random.default_rng(1)
    for size, name in itertools.product(SIZES, (FLAT, HIERARCHICAL)):
        time = (1e-4 + size / 1e9) * float(np.exp(random.normal(0, 0.01)))
        seen.collectives.append(collective(size, time, 4, 2, name))
    costs = fit(seen)
    assert costs is not None and len(switch_points(costs, 4, 2)) == 1


def test_two_nodes_exchange_less_by_tree_than_by_ring() -> None:
    # On two nodes a tree moves the buffer once each way, which shows as a bus bandwidth above that of the adapter.
    costs = Costs(Line(3e-6, 2.3e11), Line(1e-5, 2.4e10))
    time = costs.predict(TREE, 1 << 32, 2, 1)
    assert busbw("all_reduce", 2, 1 << 32, time) == pytest.approx(0.92 * 2.4e10, rel=0.01)
    eight = costs.predict(TREE, 1 << 32, 2, 8)
    assert busbw("all_reduce", 16, 1 << 32, eight) > 0.92 * 8 * 2.4e10 or eight == pytest.approx(
        2 * 2**32 / 2.3e11 / 0.92, rel=0.01
    )
