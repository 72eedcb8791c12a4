"""Plans of rounds, and campaigns over a simulated machine."""

import itertools
from collections.abc import Sequence

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.nccl import campaign, plan
from tools.nccl.findings import Part, Symptom
from tools.nccl.measurement import Exchange
from tools.nccl.simulate.fabric import fat_tree
from tools.nccl.simulate.faults import Planted
from tools.nccl.simulate.prober import Simulator

pytestmark = pytest.mark.req("C10")

FABRIC = fat_tree(16, 4, 4, "switch", 4)


@given(st.integers(0, 70))
@settings(deadline=None, max_examples=40)
def test_rounds_hold_every_pair_once_and_no_one_twice(count: int) -> None:
    met: list[tuple[int, int]] = []
    for number in range(plan.rounds_of(count)):
        pairs = [tuple(pair) for pair in plan.circle(count, number).tolist()]
        ends = list(itertools.chain(*pairs))
        assert len(ends) == len(set(ends)) == count // 2 * 2
        met += pairs
    assert sorted(met) == list(itertools.combinations(range(count), 2))


@given(st.integers(2, 300), st.integers(1, 12), st.integers(0, 1000))
@settings(deadline=None, max_examples=40)
def test_a_sample_gives_each_node_different_partners_and_is_connected(
    nodes: int, rounds: int, seed: int
) -> None:
    few = plan.sampled(nodes, 1, rounds, seed)
    assert len(few.between) == min(max(2, rounds), plan.rounds_of(nodes))
    graph: nx.Graph = nx.Graph()
    met = [tuple(pair) for number in few.between for pair in few.between_pairs(number).tolist()]
    graph.add_edges_from(met)
    assert len(met) == len(set(met)) and nx.is_connected(graph) and len(graph) == nodes
    degrees = [degree for _, degree in graph.degree]
    assert min(degrees) >= len(few.between) - nodes % 2


def test_partners_of_a_sample_are_spread_over_the_machine() -> None:
    few = plan.sampled(1024, 1, seed=5)
    distances = np.concatenate([np.abs(np.diff(few.between_pairs(n), axis=1)).ravel() for n in few.between])
    # The mean distance of two random ones of n is n / 3.
    assert 0.3 * 1024 < distances.mean() < 0.37 * 1024


def test_a_sample_says_what_it_misses() -> None:
    assert plan.complete(100, 4).left_out() is None
    few = plan.sampled(4096, 8)
    assert few.rounds == 7 + 48
    assert "98" not in (few.left_out() or "") and "99%" in (few.left_out() or "")
    assert few.time_s(0.5) == pytest.approx(27.5)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(21, 40)), unique=True, max_size=60), st.integers(1, 8)
)
@settings(deadline=None)
def test_any_pairs_are_spread_over_rounds(pairs: list[tuple[int, int]], most: int) -> None:
    rounds = list(plan.into_rounds(pairs, most))
    assert sorted(itertools.chain(*rounds)) == sorted(pairs)
    for one in rounds:
        ends = list(itertools.chain(*one))
        assert len(one) <= most and len(ends) == len(set(ends))


def test_a_campaign_measures_all_pairs_when_there_is_time() -> None:
    measured = Simulator(FABRIC, seed=1).measure()
    found = {
        tuple(sorted(pair)) for pair in zip(measured.exchanges.first, measured.exchanges.second, strict=True)
    }
    inside = 16 * 6
    between = 16 * 15 // 2 * 4
    assert len(found) == inside + between and measured.unmeasured == []


class Watched:
    """Passes rounds on and remembers them."""

    def __init__(self, inner: Simulator) -> None:
        self.inner = inner
        self.rounds: list[list[tuple[int, int]]] = []

    def exchange(self, pairs: Sequence[tuple[int, int]]) -> list[Exchange]:
        self.rounds.append(list(pairs))
        return self.inner.exchange(pairs)


def test_the_time_is_kept_and_what_was_left_out_is_said() -> None:
    simulator = Simulator(fat_tree(128, 4, 4, "switch", 16), seed=2)
    exchanges, sentences = campaign.run(128, 4, simulator, budget_s=25, seed=3, clock=simulator.clock)
    assert simulator.clock() < 30
    assert any("28 of 127 rounds" in one and "missed with a probability of" in one for one in sentences)
    degrees = np.bincount(np.concatenate([exchanges.first, exchanges.second]), minlength=512)
    assert degrees.min() >= 3 + 28


def test_no_time_at_all_is_said() -> None:
    simulator = Simulator(FABRIC, seed=2)
    _, sentences = campaign.run(16, 4, simulator, budget_s=0, clock=simulator.clock)
    assert any("rounds inside nodes" in one for one in sentences)


def test_what_is_odd_is_tested_again_until_it_is_believed() -> None:
    planted = Planted("slow link", Part.link, Symptom.slow, (2, 9), left=0.5)
    prober = Watched(Simulator(FABRIC, [planted], seed=3))
    told: list[str] = []
    exchanges, _ = campaign.run(16, 4, prober, budget_s=1e6, clock=prober.inner.clock, say=told.append)
    bad = (exchanges.first == 2 * 4) & (exchanges.second == 9 * 4)
    good = (exchanges.first == 3 * 4) & (exchanges.second == 9 * 4)
    assert bad.sum() >= 6 > good.sum()
    assert any("testing again" in one for one in told)
    for pairs in prober.rounds:
        ends = list(itertools.chain(*pairs))
        assert len(ends) == len(set(ends))


def test_the_ends_of_a_suspect_link_meet_good_partners() -> None:
    planted = Planted("slow link", Part.link, Symptom.slow, (2, 9), left=0.5)
    prober = Watched(Simulator(FABRIC, [planted], seed=3))
    campaign.run(16, 4, prober, budget_s=1e6, clock=prober.inner.clock)
    again = [pair for pairs in prober.rounds[3 + 15 + 2 :] for pair in pairs]
    partners = {b // 4 if a // 4 == 2 else a // 4 for a, b in again if 2 in (a // 4, b // 4)}
    assert 9 in partners and len(partners) > 1


def test_a_silent_node_is_left_alone_after_three_others() -> None:
    prober = Watched(Simulator(FABRIC, [Planted("dead node", Part.node, Symptom.silent, (5,))], seed=3))
    _, sentences = campaign.run(16, 4, prober, budget_s=1e6, clock=prober.inner.clock)
    with_it = sum(
        any(5 in (a // 4, b // 4) and a // 4 != b // 4 for a, b in pairs) for pairs in prober.rounds
    )
    assert with_it <= 4  # the warm-up and three rounds
    assert any("node number 5 did not answer" in one for one in sentences)


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 4), (2, 1), (2, 4), (3, 1), (5, 2)])
def test_small_machines(nodes: int, gpus: int) -> None:
    simulator = Simulator(fat_tree(nodes, gpus, gpus, "switch", 8), seed=1)
    exchanges, sentences = campaign.run(nodes, gpus, simulator, budget_s=1e6, clock=simulator.clock)
    expected = nodes * gpus * (gpus - 1) // 2 + nodes * (nodes - 1) // 2 * gpus
    assert len(set(zip(exchanges.first, exchanges.second, strict=True))) == expected
    assert sentences == []
