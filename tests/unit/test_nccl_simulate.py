"""The simulated fabrics behave like networks, and their faults like faults."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.nccl.findings import Part, Symptom
from tools.nccl.measurement import Measurement
from tools.nccl.simulate.cases import KINDS, make_case
from tools.nccl.simulate.fabric import dragonfly, fair_shares, fat_tree, islands, rails
from tools.nccl.simulate.faults import Planted
from tools.nccl.simulate.prober import Noise, Simulator

QUIET = Noise(test=0, part=0, latency=0, outliers=0, background=0)


def between(measured: Measurement, pair: tuple[int, int]) -> float:
    """Bandwidth of a pair of ranks, the first test."""
    which = np.flatnonzero((measured.exchanges.first == pair[0]) & (measured.exchanges.second == pair[1]))
    return float(measured.exchanges.bandwidth[which[0]])


def test_shares_are_max_min_fair() -> None:
    # The textbook's line of links: a long flow and one on each link, capacities 1, 2, 1.
    uses = np.array([[0, 1, 2], [0, -1, -1], [1, -1, -1], [2, -1, -1]])
    rates = fair_shares(uses, np.array([1.0, 2.0, 1.0]), np.full(4, np.inf))
    assert rates == pytest.approx([0.5, 0.5, 1.5, 0.5])


@given(st.integers(1, 30), st.integers(1, 8), st.integers(0, 10**6))
@settings(deadline=None, max_examples=60)
def test_no_resource_is_overfull_and_every_flow_has_a_bottleneck(
    flows: int, resources: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    uses = np.array([rng.permutation(np.r_[np.arange(resources), -1, -1])[:3] for _ in range(flows)])
    capacity, limit = rng.uniform(0.1, 10, resources), rng.uniform(0.1, 5, flows)
    rates = fair_shares(uses, capacity, limit)
    load = np.array([rates[(uses == one).any(axis=1)].sum() for one in range(resources)])
    assert (load <= capacity * (1 + 1e-9)).all()
    for flow in range(flows):
        full = [one for one in uses[flow] if one >= 0 and load[one] >= capacity[one] * (1 - 1e-6)]
        largest = any(rates[flow] >= rates[(uses == one).any(axis=1)].max() * (1 - 1e-6) for one in full)
        assert largest or rates[flow] == pytest.approx(limit[flow])


def test_two_gpus_share_a_nic() -> None:
    simulator = Simulator(fat_tree(2, 4, 2, "switch", 2), noise=QUIET)
    both = simulator.exchange([(0, 4), (1, 5)])
    alone = simulator.exchange([(0, 4)])
    assert both[0].bandwidth == pytest.approx(alone[0].bandwidth / 2)


def test_an_oversubscribed_spine_shows_under_load_only() -> None:
    simulator = Simulator(fat_tree(8, 1, 1, "switch", 4, 2.0), noise=QUIET)
    crossing = simulator.exchange([(0, 4), (1, 5), (2, 6), (3, 7)])
    alone = simulator.exchange([(0, 4)])
    near = simulator.exchange([(0, 1), (2, 3)])
    assert crossing[0].bandwidth == pytest.approx(alone[0].bandwidth / 2)
    assert near[0].bandwidth == pytest.approx(alone[0].bandwidth)
    assert near[0].latency_s < alone[0].latency_s


def test_groups_of_a_dragonfly_are_farther_than_leaves() -> None:
    simulator = Simulator(dragonfly(16, 1, 1, "switch", 4, 2), noise=QUIET)
    leaf, cell, far = (simulator.exchange([pair])[0].latency_s for pair in ((0, 1), (0, 4), (0, 8)))
    assert leaf < cell < far


def test_islands_in_a_node() -> None:
    assert len(np.unique(islands(8, "switch"))) == 1
    halves = islands(8, "islands")
    assert halves[0, 3] > halves[0, 4]
    cube = islands(8, "cube")
    assert (cube == cube.T).all() and len(np.unique(cube)) == 3


FAULTS = [
    (Planted("", Part.node, Symptom.slow, (1,), left=0.5), (4, 8), (0, 8)),
    (Planted("", Part.nic, Symptom.slow, (1,), 0, left=0.5), (4, 8), (5, 9)),
    (Planted("", Part.rail, Symptom.slow, (), 2, left=0.5), (2, 6), (1, 5)),
    (Planted("", Part.link, Symptom.slow, (1, 2), left=0.5), (4, 8), (0, 4)),
    (Planted("", Part.nvlink, Symptom.slow, (1,), gpus=(0, 2), left=0.5), (4, 6), (4, 5)),
    (Planted("", Part.gpu, Symptom.slow, (1,), gpus=(3,), left=0.5), (4, 7), (4, 5)),
    (Planted("", Part.gpu, Symptom.slow, (1,), gpus=(3,), left=0.5), (7, 11), (6, 10)),
]


@pytest.mark.parametrize(("planted", "slow", "quick"), FAULTS)
def test_a_planted_fault_slows_its_pairs_only(
    planted: Planted, slow: tuple[int, int], quick: tuple[int, int]
) -> None:
    fabric = rails(4, 4, 4, "switch", 4)
    healthy = Simulator(fabric, noise=QUIET).measure()
    measured = Simulator(fabric, [planted], noise=QUIET).measure()
    # What is left is capped at a little less than half where the other limits allow a little more than all.
    assert between(measured, slow) / between(healthy, slow) == pytest.approx(0.5, rel=0.06)
    assert between(measured, quick) == pytest.approx(between(healthy, quick))


def test_a_bad_uplink_a_dead_node_and_wrong_values() -> None:
    fabric = fat_tree(12, 1, 1, "switch", 4)
    bad = Simulator(fabric, [Planted("", Part.switch, Symptom.slow, (0, 1, 2, 3), left=0.25)], noise=QUIET)
    found = bad.exchange([(0, 4), (1, 5), (2, 6), (3, 7), (8, 9)])
    assert found[0].bandwidth == pytest.approx(found[4].bandwidth / 4, rel=0.06)
    dead = Simulator(fabric, [Planted("", Part.node, Symptom.silent, (3,))], noise=QUIET)
    silent, alive = dead.exchange([(3, 4), (1, 2)])
    assert silent.bandwidth == 0 and np.isnan(silent.latency_s) and alive.bandwidth > 0
    liar = Simulator(fabric, [Planted("", Part.gpu, Symptom.wrong, (3,), gpus=(0,))], noise=QUIET)
    wrong, right = liar.exchange([(3, 4), (1, 2)])
    assert wrong.wrong > 0 and right.wrong == 0


def test_a_flaky_link_and_a_late_node() -> None:
    fabric = fat_tree(4, 1, 1, "switch", 4)
    flaky = Planted("", Part.link, Symptom.flaky, (0, 1), left=0.1, often=0.3)
    late = Planted("", Part.node, Symptom.late, (3,), left=0.5)
    simulator = Simulator(fabric, [flaky, late], noise=QUIET)
    tests = [simulator.exchange([(0, 1), (2, 3)]) for _ in range(20)]
    assert sum(one.slowest < 0.2 * one.bandwidth for one, _ in tests) >= 15
    assert tests[0][1].latency_s == pytest.approx(2 * tests[0][0].latency_s)


@pytest.mark.parametrize("kind", [*KINDS, "healthy"])
def test_cases_are_drawn_by_seed(kind: str) -> None:
    one, again, other = (make_case(seed, kind, (8, 16)) for seed in (4, 4, 5))
    assert one.kind == kind and one.planted == again.planted and one.fabric.kind == again.fabric.kind
    assert other.fabric is not one.fabric
    assert np.array_equal(one.fabric.leaf, again.fabric.leaf)
