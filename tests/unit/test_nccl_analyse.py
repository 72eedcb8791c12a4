"""The analysis: what it blames, what it leaves in peace, what it compares, and what it does with little."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.nccl import analyse
from tools.nccl.analyse.groups import differ, find_groups
from tools.nccl.analyse.robust import by_group, row_medians, runs, sigma
from tools.nccl.analyse.rows import Table, low_rows
from tools.nccl.busbw import busbw
from tools.nccl.findings import Fault, Findings, Part, Symptom, Verdict
from tools.nccl.measurement import Collective, Exchange, Exchanges, Measurement
from tools.nccl.simulate.cases import KINDS, make_case
from tools.nccl.simulate.fabric import Fabric, fat_tree, rails
from tools.nccl.simulate.faults import Planted
from tools.nccl.simulate.prober import Noise, Simulator
from tools.nccl.simulate.score import is_right

pytestmark = pytest.mark.req("C10")

TREE = fat_tree(16, 4, 4, "switch", 4)
SMALL = (8, 12, 16, 27, 64)
CLUMSY = re.compile(
    r"\b(\w+) \1\b|\brail [^:]*\brail\b|\bgpu \S+ gpu\b|\b(?:its|all) 1 |GPUs: |node number|^rails|^machine",
    re.IGNORECASE,
)


def seen(fabric: Fabric, *planted: Planted, seed: int = 1, **options: object) -> Findings:
    """Measure a simulated machine and analyse it."""
    return analyse.run(Simulator(fabric, planted, seed=seed).measure(seed=seed), **options)  # type: ignore[arg-type]


def all_reduce(time_s: float, *, nodes: int = 4, size: int = 2**30, **changes: object) -> Collective:
    """An all-reduce of 8 GPUs a node."""
    ranks = nodes * 8
    bus = busbw("all_reduce", ranks, size, time_s)
    one = Collective("all_reduce", ranks, nodes, size, time_s, time_s, time_s, size / max(time_s, 1e-9), bus)
    return replace(one, **changes)  # type: ignore[arg-type]


class Class:
    """Figures of a class: so many bytes/s for any all-reduce."""

    name = "machines of this class"
    adapters_bandwidth: float | None = 200e9

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth = bandwidth

    def expected(self, operation: str, nodes: int, gpus_per_node: int, size_bytes: int) -> float | None:
        return self.bandwidth if operation == "all_reduce" else None


@pytest.mark.parametrize("kind", KINDS)
def test_planted_faults_are_attributed(kind: str) -> None:
    """A small version of tests/bench/nccl_faults.py, with other seeds."""
    right = 0
    for seed in range(500, 502):
        case = make_case(seed, kind, SMALL)
        measured = Simulator(case.fabric, case.planted, seed=seed).measure(seed=seed)
        right += is_right(case.planted[0], case.fabric, analyse.run(measured))
    assert right == 2


def test_healthy_fabrics_are_left_in_peace() -> None:
    for seed in range(500, 506):
        case = make_case(seed, "healthy", SMALL)
        findings = analyse.run(Simulator(case.fabric, seed=seed).measure(seed=seed))
        assert (findings.verdict, findings.faults) == (Verdict.ok, ()), seed


def test_several_faults_at_once_are_told_apart() -> None:
    findings = seen(
        TREE,
        Planted("", Part.node, Symptom.slow, (2,), left=0.6),
        Planted("", Part.nic, Symptom.slow, (7,), 1, left=0.5),
        Planted("", Part.link, Symptom.slow, (5, 11), left=0.5),
        Planted("", Part.node, Symptom.silent, (13,)),
        Planted("", Part.nvlink, Symptom.slow, (9,), gpus=(0, 3), left=0.3),
    )
    assert {one.name for one in findings.faults} == {
        "node n0002",
        "nic n0007 rail 1",
        "link n0005 - n0011",
        "node n0013",
        "nvlink n0009 GPU 0 - 3",
    }
    assert findings.verdict is Verdict.broken and findings.verdict.exit_code == 2
    assert findings.faults[0].symptom is Symptom.silent
    assert set(findings.exclude) == {"n0002", "n0007", "n0013", "n0009"}


def test_a_fault_carries_its_evidence() -> None:
    findings = seen(TREE, Planted("", Part.node, Symptom.slow, (2,), left=0.6))
    (fault,) = findings.faults
    assert findings.verdict is Verdict.degraded
    assert fault.share == pytest.approx(0.6, abs=0.03) and fault.confidence > 0.95
    assert "GB/s" in fault.evidence and "%" in fault.evidence


def test_a_dead_node_is_one_fault() -> None:
    findings = seen(fat_tree(16, 8, 4, "switch", 4), Planted("", Part.node, Symptom.silent, (5,)))
    assert [(one.name, one.symptom) for one in findings.faults] == [("node n0005", Symptom.silent)]


def test_a_silent_node_of_the_measurement_is_broken() -> None:
    measured = Simulator(TREE).measure()
    measured.silent = {"n9999": "no answer in 60 s"}
    findings = analyse.run(measured)
    assert findings.verdict is Verdict.broken and findings.exclude == ("n9999",)


def test_groups_are_found_and_compared_with_slurm() -> None:
    slurm = {name: f"leaf{leaf}" for name, leaf in zip(TREE.names, TREE.leaf, strict=True)}
    right = seen(TREE, slurm_groups=slurm)
    assert sorted(len(group) for group in right.groups) == [4, 4, 4, 4]
    assert not any("Slurm" in note for note in right.notes)
    slurm["n0003"] = "leaf2"
    wrong = seen(TREE, slurm_groups=slurm)
    assert any("n0003 is in leaf2 by Slurm" in note and "leaf0" in note for note in wrong.notes)
    assert {level.name for level in right.levels} == {"inside", "near", "far"}


def test_one_switch_is_one_group() -> None:
    for seed in range(5):
        assert seen(rails(16, 4, 4, "switch", 32), seed=seed).groups == (
            tuple(f"n{n:04d}" for n in range(16)),
        )


def test_differences_from_slurm_in_words() -> None:
    groups = [["a", "b"], ["c", "d"], ["e", "f"]]
    assert (
        differ(groups, dict.fromkeys("ab", "x") | dict.fromkeys("cd", "y") | dict.fromkeys("ef", "z")) == []
    )
    (joined,) = differ([["a", "b", "c"]], {"a": "x", "b": "x", "c": "y"})
    assert "apart: x, y" in joined
    (split,) = differ([["a", "b"], ["c", "d"]], dict.fromkeys("abcd", "x"))
    assert "several groups in Slurm's x" in split


def test_noise_alone_has_no_groups() -> None:
    rng = np.random.default_rng(0)
    for count in (4, 8, 16, 48):
        noise = rng.normal(0, 0.03, (count, count))
        matrix = (noise + noise.T) / 2
        np.fill_diagonal(matrix, np.nan)
        assert find_groups(matrix) is None


def test_no_bandwidth_is_broken_never_a_pass() -> None:
    measured = Measurement(["a", "b", "c", "d"], 8, "nccl", collectives=[all_reduce(0.0, busbw=0.0)])
    findings = analyse.run(measured)
    assert findings.verdict is Verdict.broken and "bus bandwidth of 0" in findings.faults[0].evidence
    assert analyse.run(replace(measured, collectives=[])).verdict is Verdict.broken
    assert analyse.run(replace(measured, collectives=[all_reduce(0.01)])).verdict is Verdict.ok


def test_two_nodes_above_their_adapters_are_no_pass() -> None:
    fast = all_reduce(2**30 * 15 / 8 / 250e9, nodes=2)
    measured = Measurement(["a", "b"], 8, "nccl", collectives=[fast])
    findings = analyse.run(measured, reference=Class(190e9))
    assert any("NCCL_ALGO=RING" in note for note in findings.notes)
    assert not any("of what machines of this class reach" in note for note in findings.notes)
    ring = all_reduce(2**30 * 15 / 8 / 185e9, nodes=2)
    judged = analyse.run(replace(measured, collectives=[ring]), reference=Class(190e9))
    assert any("97% of what machines of this class reach" in note for note in judged.notes)


def test_two_nodes_are_judged_by_their_pairs_where_nothing_else_is_known() -> None:
    measured = Simulator(fat_tree(2, 8, 8, "switch", 2), seed=1).measure()
    for bandwidth, above in ((24e9 * 8 * 0.95, False), (24e9 * 8 * 2, True)):
        measured.collectives = [all_reduce(2**30 * 15 / 8 / bandwidth, nodes=2)]
        assert any("NCCL_ALGO=RING" in note for note in analyse.run(measured).notes) is above


def test_a_machine_below_its_class() -> None:
    slow = Measurement(["a", "b", "c", "d"], 8, "nccl", collectives=[all_reduce(2**30 * 62 / 32 / 90e9)])
    findings = analyse.run(slow, reference=Class(190e9))
    (fault,) = findings.faults
    assert fault.part is Part.machine and fault.share == pytest.approx(90 / 190, rel=0.01)
    assert analyse.run(slow, reference=Class(95e9)).verdict is Verdict.ok


def test_wrong_values_in_a_collective_are_broken() -> None:
    measured = Measurement(["a", "b"], 8, "nccl", collectives=[all_reduce(0.01, wrong=3, scope="b", nodes=1)])
    findings = analyse.run(measured)
    assert findings.verdict is Verdict.broken and findings.exclude == ("b",)


def slower(measured: Measurement, factor: float) -> Measurement:
    """The same with all bandwidths changed alike."""
    columns = vars(measured.exchanges) | {
        "bandwidth": measured.exchanges.bandwidth * factor,
        "slowest": measured.exchanges.slowest * factor,
    }
    return replace(measured, exchanges=Exchanges(**columns))


def test_all_alike_slower_shows_against_a_baseline_only() -> None:
    before = Simulator(TREE, seed=1).measure()
    now = slower(Simulator(TREE, seed=2).measure(), 0.8)
    assert analyse.run(now).verdict is Verdict.ok
    findings = analyse.run(now, baseline=before)
    assert findings.verdict is Verdict.degraded
    assert {one.part for one in findings.faults} == {Part.machine}
    assert findings.faults[0].share == pytest.approx(0.8, abs=0.02)
    assert analyse.run(before, baseline=Simulator(TREE, seed=3).measure()).verdict is Verdict.ok


def test_a_baseline_of_other_nodes_matches_by_name() -> None:
    before = Simulator(TREE, seed=1).measure()
    now = slower(Simulator(fat_tree(8, 4, 4, "switch", 4), seed=2).measure(), 0.8)
    now.nodes = [f"n{number:04d}" for number in (9, 4, 30, 31, 2, 7, 40, 1)]
    findings = analyse.run(now, baseline=before)
    assert {one.part for one in findings.faults} == {Part.machine}
    assert any("40 pairs of the same GPUs" in note for note in findings.notes)  # 5 nodes: 10 pairs of 4 rails
    now.nodes = [f"x{number}" for number in range(8)]
    strangers = analyse.run(now, baseline=before)
    assert {one.part for one in strangers.faults} == {Part.machine}
    assert any("the medians of different nodes" in note for note in strangers.notes)


def test_a_bad_node_does_not_make_the_machine_slower() -> None:
    before = Simulator(TREE, seed=1).measure()
    now = Simulator(TREE, [Planted("", Part.node, Symptom.slow, (3,), left=0.5)], seed=2).measure()
    assert [one.name for one in analyse.run(now, baseline=before).faults] == ["node n0003"]


def test_a_rail_that_was_so_before_is_no_fault() -> None:
    rail = Planted("", Part.rail, Symptom.slow, (), 2, left=0.6)
    fabric = rails(8, 4, 4, "switch", 8)
    before, now = (Simulator(fabric, [rail], seed=seed).measure() for seed in (1, 2))
    assert [one.name for one in analyse.run(now).faults] == ["rail 2"]
    findings = analyse.run(now, baseline=before)
    assert findings.faults == () and any("as it was in the baseline" in note for note in findings.notes)
    healthy = Simulator(fabric, seed=3).measure()
    assert Part.rail in {one.part for one in analyse.run(now, baseline=healthy).faults}


def test_a_sampled_measurement_still_finds_nodes_nics_and_switches() -> None:
    fabric = fat_tree(256, 4, 4, "switch", 16)
    planted = [
        Planted("", Part.node, Symptom.slow, (77,), left=0.7),
        Planted("", Part.nic, Symptom.slow, (100,), 2, left=0.6),
        Planted("", Part.switch, Symptom.slow, tuple(range(32, 48)), left=0.4),
    ]
    measured = Simulator(fabric, planted, seed=1).measure(budget_s=30)
    assert len(measured.exchanges) < 0.3 * 256 * 255 / 2 * 4
    assert measured.unmeasured
    found = {(one.part, one.nodes) for one in analyse.run(measured).faults}
    assert found == {(one.part, tuple(fabric.names[n] for n in one.nodes)) for one in planted}


def test_missing_exchanges_are_no_fault() -> None:
    measured = Simulator(TREE, seed=4).measure()
    some = np.random.default_rng(0).random(len(measured.exchanges)) < 0.4
    measured.exchanges.bandwidth[some] = np.nan
    measured.exchanges.latency_s[::3] = np.nan
    assert analyse.run(measured).verdict is Verdict.ok


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 2), (1, 8), (2, 1), (2, 4), (3, 1), (3, 4), (5, 2)])
def test_small_machines(nodes: int, gpus: int) -> None:
    fabric = fat_tree(nodes, gpus, gpus, "switch", 8)
    for seed in range(6):
        assert seen(fabric, seed=seed).verdict is Verdict.ok
    if nodes >= 3:
        findings = seen(fabric, Planted("", Part.node, Symptom.slow, (1,), left=0.6))
        assert [one.name for one in findings.faults] == ["node n0001"]


def test_of_two_nodes_a_bad_rail_is_a_link() -> None:
    findings = seen(fat_tree(2, 4, 4, "switch", 8), Planted("", Part.nic, Symptom.slow, (1,), 2, left=0.5))
    assert [one.name for one in findings.faults] == ["link n0000 - n0001 rail 2"]
    assert "two nodes alone cannot tell" in findings.faults[0].evidence


def test_in_one_node_a_bad_nvlink_shows() -> None:
    findings = seen(
        fat_tree(1, 8, 8, "switch", 8), Planted("", Part.nvlink, Symptom.slow, (0,), gpus=(2, 5), left=0.4)
    )
    assert [one.name for one in findings.faults] == ["nvlink n0000 GPU 2 - 5"]
    uneven = seen(fat_tree(1, 8, 8, "cube", 8))
    assert uneven.faults == () and any("one node alone cannot tell" in note for note in uneven.notes)


def test_a_single_slow_test_is_no_fault() -> None:
    quiet = Simulator(fat_tree(8, 1, 1, "switch", 8), noise=Noise(outliers=0), seed=1).measure()
    quiet.exchanges.bandwidth[5] *= 0.4
    findings = analyse.run(quiet)
    assert findings.faults == () and any("in a single test" in note for note in findings.notes)


def test_a_dead_link_between_living_nodes() -> None:
    measured = Simulator(fat_tree(8, 1, 1, "switch", 8), seed=1).measure()
    hit = (measured.exchanges.first == 2) & (measured.exchanges.second == 6)
    measured.exchanges.bandwidth[hit] = measured.exchanges.slowest[hit] = 0
    findings = analyse.run(measured)
    assert [one.name for one in findings.faults] == [
        "link n0002 - n0006"
    ] and findings.verdict is Verdict.broken


def test_the_analysis_does_not_change_the_measurement() -> None:
    measured = Simulator(TREE, seed=1).measure()
    before = {name: column.copy() for name, column in vars(measured.exchanges).items()}
    analyse.run(measured, baseline=measured)
    for name, column in vars(measured.exchanges).items():
        assert np.array_equal(column, before[name], equal_nan=True)


@given(st.integers(1, 6), st.integers(1, 3), st.integers(0, 10**6), st.integers(0, 60))
@settings(deadline=None, max_examples=60)
def test_any_measurement_is_analysed(nodes: int, gpus: int, seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    ranks = nodes * gpus
    rows = []
    for number in range(count if ranks > 1 else 0):
        first, second = (int(one) for one in rng.choice(ranks, 2, replace=False))
        bandwidth = float(rng.choice([0.0, np.nan, 1e9, 2e9, rng.uniform(1, 1e11)]))
        latency = float(rng.choice([np.nan, 1e-6, rng.uniform(1e-7, 1)]))
        slowest = bandwidth * float(rng.choice([1, 0.1, 0]))
        rows.append(Exchange(first, second, latency, bandwidth, slowest, number, int(rng.integers(2))))
    names = [f"n{number}" for number in range(nodes)]
    measured = Measurement(names, gpus, "nccl", Exchanges.of(rows))
    findings = analyse.run(measured, baseline=measured, slurm_groups=dict.fromkeys(names[1:], "x"))
    for fault in findings.faults:
        assert set(fault.nodes) <= set(names) and 0 <= fault.confidence <= 1 and fault.name
    pairs = {frozenset((row.first, row.second)) for row in rows}
    if any(row.bandwidth == 0 for row in rows) and len(pairs) == len(rows):
        assert findings.verdict is not Verdict.ok


@given(
    st.lists(st.tuples(st.integers(0, 9), st.floats(-5, 5)), max_size=80),
    st.sampled_from([0.0, 0.5, 0.75, 1.0]),
)
def test_quantiles_of_groups(rows: list[tuple[int, float]], quantile: float) -> None:
    group, values = (
        np.array([g for g, _ in rows], dtype=np.int64),
        np.array([v for _, v in rows], dtype=np.float64),
    )
    found = by_group(values, group, 10, quantile)
    for number in range(10):
        mine = values[group == number]
        if len(mine):
            assert found[number] == np.quantile(mine, quantile, method="higher")
        else:
            assert np.isnan(found[number])


def test_of_many_healthy_rows_none_is_low() -> None:
    rng = np.random.default_rng(0)
    first, second = np.triu_indices(300, 1)
    some = rng.random(len(first)) < 0.05
    table = Table.of(first[some], second[some], 300)
    for _ in range(10):
        assert not low_rows(table, rng.normal(0, 0.1, int(some.sum())), 0.05).low.any()


def test_robust_statistics() -> None:
    assert sigma(np.random.default_rng(0).normal(0, 2, 20_000)) == pytest.approx(2, rel=0.03)
    table = np.array([[3.0, 1.0, np.nan], [np.nan, np.nan, np.nan], [5.0, 1.0, 2.0]])
    assert np.array_equal(row_medians(table), [2.0, np.nan, 2.0], equal_nan=True)
    assert runs(np.array([0, 1, 4, 6, 7])) == [(0, 1), (4,), (6, 7)]


@pytest.mark.parametrize(
    ("part", "more", "name"),
    [
        (Part.node, {"nodes": ("n3",)}, "node n3"),
        (Part.nic, {"nodes": ("n3",), "rail": 2}, "nic n3 rail 2"),
        (Part.nic, {"nodes": ("n3",), "rail": 2, "gpus": (2, 3)}, "nic n3 of GPUs 2, 3"),
        (Part.rail, {"rail": 0}, "rail 0"),
        (Part.rail, {"rail": 0, "gpus": (0, 1)}, "rail of GPUs 0, 1"),
        (Part.link, {"nodes": ("n1", "n4")}, "link n1 - n4"),
        (Part.link, {"nodes": ("n1", "n4"), "rail": 1}, "link n1 - n4 rail 1"),
        (Part.gpu, {"nodes": ("n3",), "gpus": (5,)}, "GPU 5 of n3"),
        (Part.nvlink, {"nodes": ("n3",), "gpus": (0, 1)}, "nvlink n3 GPU 0 - 1"),
        (Part.switch, {"nodes": ("a", "b", "c", "d")}, "switch of a, b, c and 1 more"),
        (Part.machine, {}, "the machine"),
    ],
)
def test_a_part_has_a_name_that_reads_well(part: Part, more: dict[str, Any], name: str) -> None:
    fault = Fault(part, Symptom.slow, **{"nodes": (), "evidence": "", **more})
    assert fault.name == name


@pytest.mark.parametrize("kind", KINDS)
def test_reports_of_faults_have_no_word_twice(kind: str) -> None:
    """Nor a part that is called twice, "its 1 pairs", or a node by its number where it has a name."""
    case = make_case(3, kind, (8, 12, 16, 24))
    measured = Simulator(case.fabric, case.planted, seed=case.seed).measure(seed=case.seed)
    findings = analyse.run(measured)
    assert findings.faults
    texts = [f"{one.name} {one.symptom}: {one.evidence}" for one in findings.faults]
    for text in [*texts, *findings.notes, *measured.unmeasured]:
        assert not CLUMSY.search(text), text


@pytest.mark.parametrize("ranks", [0, 2, 8])
def test_an_empty_measurement_is_no_pass(ranks: int) -> None:
    nodes = [f"n{number}" for number in range(ranks // 2)]
    findings = analyse.run(Measurement(nodes, 2, "nccl"))
    assert findings.verdict is Verdict.broken and "nothing was measured" in findings.faults[0].evidence


def test_exchanges_without_a_figure_are_no_pass() -> None:
    nothing = float("nan")
    unmeasured = Exchanges.of([Exchange(0, 1, nothing, nothing, nothing)])
    findings = analyse.run(Measurement(["a", "b"], 1, "gloo", unmeasured))
    assert findings.verdict is Verdict.broken and "nothing was measured" in findings.faults[0].evidence
