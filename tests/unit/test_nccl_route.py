"""Ring orders against the optimum, paths against NetworkX, and what is advised on simulated machines."""

import dataclasses
import itertools
import json
from collections.abc import Sequence

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.nccl import analyse
from tools.nccl.findings import Fault, Findings, Part, Symptom, Verdict
from tools.nccl.measurement import Collective, Exchange, Exchanges, Floats, Measurement
from tools.nccl.route.advice import GAIN, Advice, advise
from tools.nccl.route.edges import group_labels, node_edges, steady
from tools.nccl.route.graph import relays, shortest_paths, wide_relays, widest_paths
from tools.nccl.route.hierarchy import Hierarchy, plan
from tools.nccl.route.mesh import advise_mesh
from tools.nccl.route.ring import Ring, order_ring, search_ring
from tools.nccl.simulate.cases import make_case
from tools.nccl.simulate.fabric import dragonfly, fat_tree
from tools.nccl.simulate.prober import Simulator

pytestmark = [pytest.mark.req("B6", "C10")]
KINDS = ["uniform", "groups", "plane", "flat", "one slow node", "asymmetric"]


def matrix_of(kind: str, nodes: int, seed: int) -> Floats:
    """A matrix of costs; all but `asymmetric` are symmetric."""
    random = np.random.default_rng([seed, nodes])
    if kind in ("uniform", "asymmetric"):
        cost = random.uniform(1, 10, (nodes, nodes))
    elif kind == "groups":
        group = random.integers(0, max(2, nodes // 4), nodes)
        cost = np.where(group[:, None] == group, 1.0, 3.0) * np.exp(random.normal(0, 0.05, (nodes, nodes)))
    elif kind == "plane":
        place = random.uniform(size=(nodes, 2))
        cost = np.hypot(*(place[:, None] - place).transpose(2, 0, 1)) + 0.01
    else:
        cost = np.exp(random.normal(0, 0.03, (nodes, nodes)))
        if kind == "one slow node":
            cost[nodes // 2] *= 4
    return cost if kind == "asymmetric" else np.maximum(cost, cost.T)


def judge(order: Sequence[int], cost: Floats) -> tuple[float, float]:
    edges = [float(cost[one, other]) for one, other in zip(order, [*order[1:], order[0]], strict=True)]
    return max(edges), sum(edges)


def check(ring: Ring, cost: Floats) -> None:
    assert sorted(ring.order) == list(range(len(cost))) and ring.order[0] == 0
    assert (ring.worst, ring.total) == pytest.approx(judge(ring.order, cost))
    assert ring.bound <= ring.worst * (1 + 1e-9) and ring.total_bound <= ring.total * (1 + 1e-9)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(KINDS), st.integers(1, 7), st.integers(0, 10**6))
def test_a_small_ring_is_the_best_of_all(kind: str, nodes: int, seed: int) -> None:
    cost = matrix_of(kind, nodes, seed)
    ring = order_ring(cost, margin=0, slack=0)
    rings = [judge((0, *rest), cost) for rest in itertools.permutations(range(1, nodes))]
    if nodes == 1:
        assert ring == Ring((0,), 0.0, 0.0, 0.0, exact=True, total_bound=0.0, kept=True)
        return
    check(ring, cost)
    assert ring.exact and (ring.worst, ring.total) == pytest.approx(min(rings), rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_search_is_within_2_percent_of_the_optimum(kind: str) -> None:
    worst, total = [], []
    for seed in range(10):
        cost = matrix_of(kind, 6 + seed % 7, seed)
        best, found = order_ring(cost, margin=0, slack=0), search_ring(cost)
        check(found, cost)
        assert best.exact and found.bound <= best.worst * (1 + 1e-6)
        worst.append(found.worst / best.worst - 1)
        if found.worst <= best.worst * (1 + 1e-6):
            total.append(found.total / best.total - 1)
            assert found.total_bound <= best.total * (1 + 1e-6)
        assert not found.exact or (found.worst, found.total) == pytest.approx(
            (best.worst, best.total), rel=1e-6
        )
    assert np.mean(worst) <= 0.02 and np.mean(total) <= 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_a_larger_ring_is_near_its_bounds(kind: str) -> None:
    cost = matrix_of(kind, 40, 1)
    ring = order_ring(cost, slack=0)
    check(ring, cost)
    assert ring.worst <= 1.1 * ring.bound and ring.total <= 1.1 * ring.total_bound
    assert kind != "groups" or order_ring(cost, slack=0) == ring, "it depends on chance"


@settings(deadline=None, max_examples=8)
@given(st.integers(2, 4), st.integers(4, 9), st.integers(0, 1000))
def test_groups_of_near_nodes_stay_together(groups: int, each: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    group = random.permutation(np.repeat(np.arange(groups), each))
    noise = np.exp(random.normal(0, 0.02, (len(group), len(group))))
    cost = np.where(group[:, None] == group, 1.0, 4.0) * (noise + noise.T)
    found = group[list(order_ring(cost, slack=0.1).order)]
    assert (found != np.roll(found, 1)).sum() == groups


@pytest.mark.parametrize("seed", range(5))
def test_the_only_good_ways_between_groups_are_found(seed: int) -> None:
    random = np.random.default_rng(seed)
    group = np.repeat([0, 1], 20)
    noise = random.uniform(1, 1.2, (40, 40))
    cost = np.where(group[:, None] == group, 1.0, 5.0) * np.maximum(noise, noise.T)
    for _ in range(2):
        first, second = random.integers(20), 20 + random.integers(20)
        cost[first, second] = cost[second, first] = 2.0
        # Of the next pair no node is one of this pair.
        cost[first, 20:] = cost[20:, first] = np.where(np.arange(20, 40) == second, 2.0, 5.5)
        cost[second, :20] = cost[:20, second] = np.where(np.arange(20) == first, 2.0, 5.5)
    chosen = np.argwhere(np.triu(cost == 2.0))
    ring = order_ring(cost, slack=0)
    assert ring.worst == ring.bound == (2.0 if len(np.unique(chosen)) == 4 else ring.worst)


def test_the_given_order_is_kept_unless_another_is_better_beyond_noise() -> None:
    cost = np.exp(np.random.default_rng(5).normal(0, 0.005, (40, 40)))
    cost = (cost + cost.T) / 2
    ring = order_ring(cost)
    assert ring.kept and ring.order == tuple(range(40))
    cost[3, 4] = cost[4, 3] = 2.0
    ring = order_ring(cost)
    assert not ring.kept and ring.worst < 1.1
    assert abs(ring.order.index(3) - ring.order.index(4)) not in (1, 39)
    # What was found is a fixed point: in its own numbers it is the given order.
    again = order_ring(cost[np.ix_(ring.order, ring.order)])
    assert again.kept and again.order == tuple(range(40))


@pytest.mark.parametrize("nodes", [6, 30])
def test_a_missing_edge_is_used_only_where_there_is_no_ring_without(nodes: int) -> None:
    cost = np.full((nodes, nodes), np.nan)
    ring = np.random.default_rng(nodes).permutation(nodes)
    cost[ring, np.roll(ring, 1)] = cost[np.roll(ring, 1), ring] = 1.0
    found = order_ring(cost)
    check(found, cost)
    assert found.total == nodes
    cost[ring[0], ring[1]] = cost[ring[1], ring[0]] = np.inf
    broken = order_ring(cost)
    assert broken.worst == broken.total == np.inf and sorted(broken.order) == list(range(nodes))


def test_slack_trades_the_slowest_edge_for_the_sum() -> None:
    far = np.array([[4.0, 4.0, 4.1], [4.0, 4.0, 4.3], [4.1, 4.3, 4.0]])
    group = np.repeat(np.arange(3), 3)
    cost = np.where(group[:, None] == group, 1.0, far[group][:, group])
    strict, loose = (order_ring(cost, margin=0, slack=slack) for slack in (0, 0.1))
    assert strict.worst < loose.worst == 4.3 and loose.total < strict.total


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 12), st.integers(0, 10**6), st.floats(0, 0.7))
def test_paths_are_those_of_networkx(nodes: int, seed: int, gone: float) -> None:
    random = np.random.default_rng(seed)
    times = random.uniform(1, 10, (nodes, nodes)) ** 2
    times[random.uniform(size=times.shape) < gone] = np.inf
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(nodes))
    edges = [(i, j) for i in range(nodes) for j in range(nodes) if i != j and np.isfinite(times[i, j])]
    graph.add_weighted_edges_from([(i, j, times[i, j]) for i, j in edges])
    found = shortest_paths(times)
    for first, lengths in networkx.all_pairs_dijkstra_path_length(graph):
        for second in range(nodes):
            assert found.seconds[first, second] == pytest.approx(lengths.get(second, np.inf))
            if second in lengths and second != first:
                path = (first, *found.via(first, second), second)
                assert sum(times[i, j] for i, j in itertools.pairwise(path)) == pytest.approx(lengths[second])
    worth = {
        (i, j)
        for i, j in itertools.permutations(range(nodes), 2)
        if found.seconds[i, j] <= 0.8 * times[i, j] and np.isfinite(found.seconds[i, j])
    }
    chosen = relays(times)
    assert {(one.first, one.second) for one in chosen} == worth
    for one in chosen:
        assert one.via and one.relayed_s == pytest.approx(found.seconds[one.first, one.second])
        assert one.direct_s == times[one.first, one.second]


@settings(deadline=None, max_examples=40)
@given(st.integers(3, 12), st.integers(0, 10**6), st.floats(0, 0.7))
def test_the_widest_ways_are_those_of_networkx(nodes: int, seed: int, gone: float) -> None:
    random = np.random.default_rng(seed)
    width = random.uniform(1, 10, (nodes, nodes))
    width[random.uniform(size=width.shape) < gone] = 0
    width = np.minimum(width, width.T)
    graph = networkx.Graph()
    graph.add_nodes_from(range(nodes))
    edges = [(i, j) for i, j in itertools.combinations(range(nodes), 2) if width[i, j] > 0]
    graph.add_weighted_edges_from([(i, j, width[i, j]) for i, j in edges])
    tree = networkx.maximum_spanning_tree(graph)
    found = widest_paths(width)
    for first, second in itertools.combinations(range(nodes), 2):
        best = 0.0
        if networkx.has_path(tree, first, second):
            path = networkx.shortest_path(tree, first, second)
            best = min(width[i, j] for i, j in itertools.pairwise(path))
        assert found[first, second] == found[second, first] == best
    for one in wide_relays(width, 1e6):
        over = min(width[one.first, one.via[0]], width[one.via[0], one.second])
        assert (
            over > 0
            and one.relayed_s == pytest.approx(1e6 / over)
            and width[one.first, one.second] <= 0.8 * over
        )


def test_a_pair_that_was_not_measured_gets_no_relay() -> None:
    times = np.array([[0, 1, np.nan], [1, 0, 1], [np.nan, 1, 0]])
    assert relays(times) == []
    times[0, 2] = times[2, 0] = np.inf
    assert [(one.first, one.via, one.second) for one in relays(times)] == [(0, (1,), 2), (2, (1,), 0)]
    assert wide_relays(np.array([[0, 9, np.nan], [9, 0, 9], [np.nan, 9, 0]]), 1.0) == []


def reduced(levels: Hierarchy, ranks: int) -> list[set[int]]:
    """Do the steps: a piece of the buffer is the set of ranks whose part it holds; return what rank holds at last."""
    first = levels.steps[0].groups[0]
    pieces = 1
    for step in levels.steps:
        pieces *= len(step.groups[0]) if step.operation == "reduce_scatter" else 1
    held = {rank: {piece: {rank} for piece in range(pieces)} for rank in range(ranks)}
    for step in levels.steps:
        fresh = {}
        for group in step.groups:
            shares = len(group) if step.operation == "reduce_scatter" else 1
            mine = sorted(held[group[0]])
            assert all(sorted(held[rank]) == mine for rank in group), "counterparts hold different pieces"
            for number, rank in enumerate(group):
                kept = mine[number % shares :: shares]
                fresh[rank] = {piece: set().union(*(held[one][piece] for one in group)) for piece in kept}
        held = fresh
    assert first and sorted(held) == list(range(ranks))
    return [part for pieces_held in held.values() for part in pieces_held.values()]


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.randoms())
def test_a_hierarchical_plan_adds_up_everything(clusters: int, each: int, gpus: int, random) -> None:  # type: ignore[no-untyped-def]
    nodes = list(range(clusters * each))
    random.shuffle(nodes)
    groups = [nodes[start : start + each] for start in range(0, len(nodes), each)]
    order = list(nodes)
    random.shuffle(order)
    levels = plan(order, gpus, groups)
    everyone = set(range(len(nodes) * gpus))
    assert all(part == everyone for part in reduced(levels, len(everyone)))
    assert levels.leaders == tuple(node * gpus for node in order)
    assert ("cluster" in [step.name for step in levels.steps]) == (clusters > 1 and each > 1)


def test_unequal_clusters_make_no_level() -> None:
    levels = plan([0, 1, 2, 3, 4], 2, [[0, 1], [2, 3, 4]])
    assert [step.name for step in levels.steps] == ["node", "world"] and "2 to 3 nodes" in levels.note
    assert plan([0, 1, 2], 2, [[0, 1]]).note == ""
    assert "every node" in plan([0, 1, 2, 3], 2, [[0, 1], [2]]).note


def measured(
    bandwidth: Floats,
    *,
    latency_s: float = 1e-5,
    gpus: int = 1,
    inside: Floats | None = None,
    uplink: tuple[Sequence[int], float] | None = None,
    backend: str = "gloo",
) -> Measurement:
    """Measure in rounds in which all nodes are busy; `uplink`: each node's group, and what a group has to others."""
    nodes = len(bandwidth)
    rows: list[Exchange] = []
    seats = list(range(nodes + nodes % 2))
    for number in range(len(seats) - 1):
        pairs = [
            (seats[i], seats[-1 - i])
            for i in range(len(seats) // 2)
            if nodes not in (seats[i], seats[-1 - i])
        ]
        for one, other in pairs:
            rate = float(bandwidth[one, other])
            if uplink is not None and uplink[0][one] != uplink[0][other]:
                crossing = sum(uplink[0][a] != uplink[0][b] for a, b in pairs)
                rate = min(rate, uplink[1] / crossing)
            rows += [
                Exchange(one * gpus + rail, other * gpus + rail, latency_s, rate / gpus, rate / gpus, number)
                for rail in range(gpus)
            ]
        seats = [seats[0], seats[-1], *seats[1:-1]]
    if inside is not None:
        rows += [
            Exchange(node * gpus + a, node * gpus + b, 5e-6, inside[a, b], inside[a, b], 1000 + b)
            for node in range(nodes)
            for a, b in itertools.combinations(range(gpus), 2)
        ]
    names = [f"n{node}" for node in range(nodes)]
    return Measurement(names, gpus, backend, Exchanges.of(rows), about={"exchange_bytes": 1 << 24})


def findings_of(groups: Sequence[Sequence[str]], *faults: Fault) -> Findings:
    return Findings(Verdict.ok, tuple(faults), (), tuple(tuple(group) for group in groups))


def grouped(groups: Sequence[int]) -> list[list[str]]:
    return [[f"n{node}" for node, one in enumerate(groups) if one == label] for label in sorted(set(groups))]


def test_a_thin_uplink_is_crossed_as_seldom_as_can_be_and_the_gain_is_that_of_the_crossings() -> None:
    groups = [0, 1, 0, 0, 1, 0, 1, 1]
    seen = measured(np.full((8, 8), 1e8), uplink=(groups, 1e8))
    advice = advise(seen, findings_of(grouped(groups)))
    label = [groups[int(name[1:])] for name in advice.order]
    assert sum(one != other for one, other in zip(label, label[1:] + label[:1], strict=True)) == 2
    # The given order crosses three times each way, at a third of the pace.
    assert advice.gain_predicted == pytest.approx(2.0, rel=0.1)
    assert "2 of 8 edges" in advice.order_text and "instead of 6" in advice.order_text
    assert json.loads(json.dumps(dataclasses.asdict(advice)))["order"] == list(advice.order)


def test_a_ring_goes_round_a_slow_link_and_an_excluded_node_is_left_out() -> None:
    bandwidth = np.full((6, 6), 1e8)
    bandwidth[2, 3] = bandwidth[3, 2] = 2e7
    link = Fault(Part.link, Symptom.slow, ("n2", "n3"), "20 of 100 MB/s", share=0.2)
    names = [[f"n{node}" for node in range(6)]]
    advice = advise(measured(bandwidth), findings_of(names, link))
    places = [advice.order.index(name) for name in ("n2", "n3")]
    assert abs(places[0] - places[1]) not in (1, 5) and advice.order[0] == "n0"
    assert advice.gain_predicted == pytest.approx(4.0, rel=0.05)
    assert any("n2 - n3 over" in text and "0.1 GB/s instead of 0.02 GB/s" in text for text in advice.relays)
    without = advise(measured(bandwidth), findings_of(names, dataclasses.replace(link, excludes=("n3",))))
    assert without.order == () and without.order_text.startswith("no gain") and without.relays == ()


def test_a_node_without_answers_is_in_no_ring() -> None:
    bandwidth = np.full((6, 6), 1e8)
    bandwidth[0, 1] = bandwidth[1, 0] = 0
    advice = advise(measured(bandwidth), findings_of([[f"n{node}" for node in range(6)]]))
    assert abs(advice.order.index("n0") - advice.order.index("n1")) not in (1, 5)
    assert advice.gain_predicted is None and "do not answer" in advice.order_text
    bandwidth[0, 2:] = bandwidth[2:, 0] = 0
    seen = measured(bandwidth)
    advice = advise(seen, findings_of([seen.nodes]))
    assert advice.order == () and "do not answer" in advice.order_text
    seen.silent["n0"] = "no answer for 30 s"
    advice = advise(seen, findings_of([seen.nodes]))
    assert advice.order == () and advice.order_text.startswith("no gain") and 5 in advice.plan


@settings(deadline=None, max_examples=10)
@given(st.integers(4, 24), st.integers(1, 4), st.integers(0, 1000))
def test_noise_and_single_disturbed_pairs_predict_no_gain(nodes: int, gpus: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    bandwidth = 1e11 * np.exp(random.normal(0, 0.02, (nodes, nodes)))
    bandwidth[0, 1] *= 0.4
    bandwidth = np.minimum(bandwidth, bandwidth.T)
    seen = measured(bandwidth, gpus=gpus, backend="simulated")
    advice = advise(seen, findings_of([seen.nodes]))
    assert advice.order == () and advice.order_text.startswith("no gain") and not advice.relays
    assert advice.gain_predicted is None or advice.gain_predicted < GAIN


@pytest.mark.parametrize(("oversubscription", "nodes"), [(4.0, 24), (1.0, 16)])
def test_the_gain_on_a_simulated_fat_tree_is_that_of_its_capacities(
    oversubscription: float, nodes: int
) -> None:
    fabric = fat_tree(nodes, 2, 2, "switch", 8, oversubscription)
    leaf = np.random.default_rng(nodes).permutation(fabric.leaf)
    seen = Simulator(dataclasses.replace(fabric, leaf=leaf), seed=nodes).measure(budget_s=300)
    advice = advise(seen, analyse.run(seen))
    if oversubscription == 1:
        assert advice.order == () and "no gain" in advice.order_text
        return

    def rate(order: Sequence[int]) -> float:
        here = leaf[list(order)]
        leaving = np.bincount(here[here != np.roll(here, -1)])
        return float(min(1.0, (8 / oversubscription / leaving).min()))

    true = rate([seen.nodes.index(name) for name in advice.order]) / rate(range(nodes)) - 1
    assert true > 0.5 and advice.gain_predicted == pytest.approx(true, abs=0.15 * (1 + true))


def test_leaves_of_one_cell_share_no_uplink_though_they_are_groups() -> None:
    fabric = dragonfly(32, 2, 2, "switch", 4, 2, 4.0)
    order = np.random.default_rng(3).permutation(32)
    leaf, cell = fabric.leaf[order], fabric.cell[order]
    seen = Simulator(dataclasses.replace(fabric, leaf=leaf, cell=cell), seed=3).measure(budget_s=300)
    leaves = [[seen.nodes[node] for node in np.flatnonzero(leaf == one)] for one in range(8)]
    advice = advise(seen, findings_of(leaves))

    def rate(order: Sequence[int]) -> float:
        here = cell[list(order)]
        return float(min(1.0, (8 / 4 / np.bincount(here[here != np.roll(here, -1)])).min()))

    true = rate([seen.nodes.index(name) for name in advice.order]) / rate(range(32)) - 1
    assert true > 0.5 and advice.gain_predicted == pytest.approx(true, abs=0.15 * (1 + true))


def test_a_fault_says_nothing_of_what_is_usual_in_a_small_group() -> None:
    # Two of the three pairs of a group meet the slow node: the third one is as good as others.
    groups = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2])
    bandwidth = np.where(np.equal.outer(groups, groups), 1e10, 8e9)
    bandwidth[4], bandwidth[:, 4] = 5e9, 5e9
    slow = Fault(Part.node, Symptom.slow, ("n4",), "", excludes=("n4",))
    advice = advise(measured(bandwidth), findings_of(grouped(groups.tolist()), slow))
    assert advice.order == () and not advice.relays


def test_no_node_of_a_group_is_a_relay_around_the_switch_that_the_group_shares() -> None:
    case = make_case(10, "oversubscribed leaf", (32,))
    seen = Simulator(case.fabric, case.planted, seed=10).measure(seed=10)
    findings = analyse.run(seen)
    assert [fault.part for fault in findings.faults] == [Part.switch]
    assert not advise(seen, findings).relays


def all_reduce(algorithm: str, time_s: float, ranks: int, size: int = 1 << 24) -> Collective:
    rate = size / time_s
    return Collective(
        "all_reduce", ranks, ranks, size, time_s, time_s, time_s, rate, rate, algorithm=algorithm
    )


@pytest.mark.parametrize(("time_s", "better"), [(0.2, True), (0.6, False)])
def test_what_was_measured_in_an_order_counts_more_than_what_was_predicted(
    time_s: float, better: bool
) -> None:
    groups = [0, 1, 0, 1, 0, 1]
    seen = measured(np.full((6, 6), 1e8), uplink=(groups, 1e8))
    seen.about["order"] = ["n0", "n4", "n2", "n5", "n1", "n3"]
    seen.collectives = [all_reduce("flat", 0.6, 6), all_reduce("ordered", time_s, 6)]
    advice = advise(seen, findings_of(grouped(groups)))
    assert advice.gain_measured == pytest.approx(0.6 / time_s - 1)
    assert advice.order == (("n0", "n4", "n2", "n5", "n1", "n3") if better else ())
    assert ("stays" in advice.order_text) == (not better)


def test_what_is_slower_inside_a_node_sets_the_pace() -> None:
    groups = [0, 1, 0, 1]
    seen = measured(np.full((4, 4), 1e9), gpus=2, uplink=(groups, 1e9))
    seen.collectives = [Collective("all_reduce", 2, 1, 1 << 24, 1.0, 1.0, 1.0, 1e8, 1e8, scope="n0")]
    advice = advise(seen, findings_of(grouped(groups)))
    assert advice.order == () and "inside" in advice.order_text


def test_groups_that_slurm_knows_are_used_where_the_measurement_shows_none() -> None:
    groups = [0, 1, 0, 1, 0, 1, 0, 1]
    seen = measured(np.full((8, 8), 1e8), uplink=(groups, 3e8))
    everyone = findings_of([seen.nodes])
    known = {name: f"s{group}" for name, group in zip(seen.nodes, groups, strict=True)}
    assert advise(seen, everyone, known=known).gain_predicted == pytest.approx(1 / 3, rel=0.1)


def test_nothing_measured_is_no_advice_and_few_nodes_have_one_order() -> None:
    nothing = Measurement(["n0", "n1"], 4, "nccl")
    assert advise(nothing, findings_of([nothing.nodes])) == Advice()
    few = measured(np.full((3, 3), 1e9))
    assert "one order only" in advise(few, findings_of([few.nodes])).order_text


def test_unmeasured_pairs_are_guessed_from_their_groups_and_nodes() -> None:
    labels = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    times = np.where(labels[:, None] == labels, 1.0, 4.0)
    times[0], times[:, 0] = 2 * times[0], 2 * times[:, 0]
    times[1, 2] = times[2, 1] = times[0, 5] = times[5, 0] = times[2, 6] = times[6, 2] = np.nan
    found = steady(times, labels)
    assert found[1, 2] == pytest.approx(1.0, rel=0.01) and found[2, 6] == pytest.approx(4.0, rel=0.01)
    assert found[0, 5] == pytest.approx(8.0, rel=0.01)


def test_the_worst_rail_counts_as_it_was_measured_last() -> None:
    seen = measured(np.full((4, 4), 2e9), gpus=2)
    seen.exchanges += Exchanges.of(
        [Exchange(1, 3, 5e-5, 1e8, 1e8), Exchange(0, 4, 1e-5, 7e8, 7e8), Exchange(4, 0, 1e-5, 8e8, 8e8)]
    )
    edges = node_edges(seen)
    assert edges.bandwidth[0, 1] == edges.bandwidth[1, 0] == 1e8 and edges.bandwidth[3, 2] == 1e9
    assert edges.bandwidth[0, 2] == 8e8 and np.isnan(edges.bandwidth.diagonal()).all()
    # One rail that is late for a moment does not set the latency of the pair.
    assert edges.latency_s[0, 1] == 1e-5
    assert group_labels(["a", "b", "c"], [["b"], ["a"]]).tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    ("inside", "between", "within", "most", "words"),
    [
        (np.full((4, 4), 2.4e11), 1e11, "node", 4, "tp up to 4, in a node: 240 GB/s there, 25 GB/s between"),
        (np.kron(np.eye(2), np.full((2, 2), 8e10)) + 1e10, 4e10, "island", 2, "one island"),
        (np.full((4, 4), 1e9), 4e9, "any", 16, "tp may span nodes"),
    ],
)
def test_axes_go_where_their_bandwidth_is(
    inside: Floats, between: float, within: str, most: int, words: str
) -> None:
    seen = measured(np.full((4, 4), between), gpus=4, inside=inside)
    found = advise_mesh(seen, (tuple(seen.nodes),))
    assert (found.tp_within, found.tp_most) == (within, most) and words in found.sentence
    assert found.near == found.far == between / 4 and found.dp_shard_nodes == 4


def test_shards_stay_in_groups_that_are_far_from_each_other() -> None:
    groups = [0, 0, 1, 1]
    far = np.where(np.equal.outer(groups, groups), 1e11, 2e10)
    seen = measured(far, gpus=4, inside=np.full((4, 4), 2e11))
    found = advise_mesh(seen, (("n0", "n1"), ("n2", "n3")))
    assert found.dp_shard_nodes == 2 and "dp_shard in groups of 2 nodes or fewer" in found.sentence
    assert "5 GB/s between groups" in found.sentence
