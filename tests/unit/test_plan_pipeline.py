"""The planner's pipeline, against torch's orders, the zero-bubble paper, closed forms and longest paths."""

import dataclasses
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import networkx as nx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules

from contract.errors import ConfigError
from tools.plan.pipeline.orders import named, orders, rank_of
from tools.plan.pipeline.simulate import NAMES, SEARCHED, Stage, Timeline, placement_of, simulate, total_s
from train.layout.config import ParallelConfig
from train.layout.stages import SCHEDULES, Placement, bubble, check_pipeline, chunks_held, round_of

pytestmark = pytest.mark.slow

CLASSES = {
    "gpipe": torch_schedules.ScheduleGPipe,
    "looped_bfs": torch_schedules.ScheduleLoopedBFS,
    "interleaved_1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipev": torch_schedules.ScheduleDualPipeV,
}
FIXED = [name for name in NAMES if name not in SEARCHED and name != "zb_v"]

Chunk = tuple[str, int, int]
"""Kind as torch writes it (F, I, W, or B for both), stage, micro-batch."""


def stages_a_rank(schedule: str, v: int) -> int:
    return {Placement.single: 1, Placement.v: 2, Placement.loop: v}[placement_of(schedule)]


def possible(schedule: str, p: int, v: int, m: int) -> bool:
    if schedule not in SCHEDULES:
        return True
    loop = placement_of(schedule) is Placement.loop
    try:
        check_pipeline(
            ParallelConfig(pp=p, schedule=schedule, stages_per_rank=v if loop else None), 2 * p * v, m
        )
    except ConfigError:
        return False
    return True


def order_of_torch(schedule: str, p: int, v: int, m: int) -> list[list[list[Chunk]]]:
    """For each rank what it does one after the other; what is handed on together stands together."""
    if schedule == "1f1b":
        # torch prints another order than it runs: see `Schedule1F1B._step_microbatches`.
        return [[[chunk] for chunk in run_1f1b(p, m, rank)] for rank in range(p)]
    each = stages_a_rank(schedule, v)
    stages = [
        SimpleNamespace(
            stage_index=index, num_stages=p * each, group_size=p, group_rank=0, submod=nn.Identity()
        )
        for index in range(each)
    ]
    made: Any = CLASSES[schedule](stages[0] if schedule == "gpipe" else stages, m)
    return [
        [
            [
                (part.computation_type.value, part.stage_index, part.microbatch_index)
                for part in action.sub_actions or (action,)
            ]
            for action in made.pipeline_order[rank]
            if action is not None and action.computation_type.name != "REDUCE_GRAD"
        ]
        for rank in range(p)
    ]


def run_1f1b(p: int, m: int, rank: int) -> list[Chunk]:
    warm = min(m, p - rank)
    done = [("F", rank, index) for index in range(warm)]
    for index in range(m):
        done.append(("B", rank, index))
        if warm + index < m:
            done.append(("F", rank, warm + index))
    return done


def our_order(schedule: str, p: int, v: int, m: int) -> list[list[list[Chunk]]]:
    each = stages_a_rank(schedule, v)
    found = []
    for order in orders(schedule, p, each, m, round_of(p, m)):
        groups: list[list[Chunk]] = []
        together: list[Chunk] = []
        for kind, stage, index, goes_on in named(order, p * each):
            together.append(("FIWB"[kind], stage, index))
            if not goes_on:
                groups.append(together)
                together = []
        found.append(groups)
    return found


@pytest.mark.req("A3")
@pytest.mark.parametrize("schedule", SCHEDULES)
@given(p=st.integers(2, 6), v=st.integers(2, 3), m=st.integers(1, 26))
@settings(max_examples=25, deadline=None)
def test_orders_are_those_of_torch(schedule: str, p: int, v: int, m: int) -> None:
    assume(possible(schedule, p, v, m))
    assert our_order(schedule, p, v, m) == order_of_torch(schedule, p, v, m)


def longest_path(
    groups: list[list[list[Chunk]]],
    stages: Sequence[Stage],
    p: int,
    placement: Placement,
    handover: float,
    *,
    overlaps: bool,
) -> float:
    """Total time as the longest path through starts and ends of chunks."""
    graph = nx.DiGraph()
    last = len(stages) - 1
    handed_on: dict[tuple[str, int, int], Chunk] = {}
    for of_rank in groups:
        for group in of_rank:
            for kind, stage, index in group:
                if kind != "W":
                    handed_on["F" if kind == "F" else "I", stage, index] = group[-1]

    def need(chunk: Chunk) -> tuple[str, int, int] | None:
        kind, stage, index = chunk
        if kind == "F":
            return ("F", stage - 1, index) if stage else None
        return ("I", stage + 1, index) if kind in "IB" and stage < last else None

    def elsewhere(one: int, other: int) -> bool:
        return rank_of(one, p, placement) != rank_of(other, p, placement)

    def sends(chunk: Chunk) -> bool:
        kind, stage, _ = chunk
        to = stage + 1 if kind == "F" else stage - 1
        return kind != "W" and 0 <= to <= last and elsewhere(stage, to)

    for of_rank in groups:
        before: Chunk | None = None
        for chunk in (chunk for group in of_rank for chunk in group):
            kind, stage, _ = chunk
            one = stages[stage]
            time = {
                "F": one.forward_s,
                "I": one.backward_s,
                "W": one.weights_s,
                "B": one.backward_s + one.weights_s,
            }
            graph.add_edge((chunk, "start"), (chunk, "end"), weight=time[kind])
            wanted = need(chunk)
            far = wanted is not None and elsewhere(wanted[1], stage)
            if before is not None:
                blocked = not overlaps and (far or sends(before))
                graph.add_edge((before, "end"), (chunk, "start"), weight=handover if blocked else 0.0)
            if wanted is not None:
                graph.add_edge((handed_on[wanted], "end"), (chunk, "start"), weight=handover if far else 0.0)
            before = chunk
    return float(nx.dag_longest_path_length(graph))


NUMBER = st.floats(0.1, 3.0)
STAGE = st.builds(Stage, NUMBER, NUMBER, NUMBER)


@pytest.mark.req("A3", "A24")
@pytest.mark.parametrize("schedule", SCHEDULES)
@given(data=st.data(), p=st.integers(2, 4), v=st.integers(2, 3), m=st.integers(1, 12))
@settings(max_examples=20, deadline=None)
def test_total_is_the_longest_path_through_torchs_order(
    schedule: str, data: st.DataObject, p: int, v: int, m: int
) -> None:
    """Stages that all differ, handing over beside computation and blocking."""
    assume(possible(schedule, p, v, m))
    count = p * stages_a_rank(schedule, v)
    stages = data.draw(st.lists(STAGE, min_size=count, max_size=count))
    handover = data.draw(st.sampled_from([0.0, 0.05, 1.0]))
    groups = order_of_torch(schedule, p, v, m)
    for overlaps in (True, False):
        expected = longest_path(groups, stages, p, placement_of(schedule), handover, overlaps=overlaps)
        found = simulate(schedule, p, stages, m, handover, overlaps=overlaps, tolerance=0)
        assert found.total_s == pytest.approx(expected, rel=1e-6)


@pytest.mark.req("A3", "A24")
@pytest.mark.parametrize("schedule", SCHEDULES)
@given(p=st.integers(2, 8), v=st.integers(2, 4), m=st.integers(1, 80))
@settings(max_examples=25, deadline=None)
def test_equal_stages_have_the_bubbles_and_chunks_of_theory(schedule: str, p: int, v: int, m: int) -> None:
    assume(possible(schedule, p, v, m))
    loop = placement_of(schedule) is Placement.loop
    config = ParallelConfig(pp=p, schedule=schedule, stages_per_rank=v if loop else None)
    found = simulate(schedule, p, [Stage(0.5, 0.5, 0.5)] * (p * stages_a_rank(schedule, v)), m)
    assert found.bubble == pytest.approx(bubble(config, m), abs=1e-9)
    assert list(found.held) == [chunks_held(config, rank, m) for rank in range(p)]


@given(p=st.integers(2, 8), rounds=st.integers(2, 5), weights=st.floats(0.1, 1.0), time=st.floats(0.01, 10))
@settings(deadline=None)
def test_zero_bubble_idles_as_the_paper_says(p: int, rounds: int, weights: float, time: float) -> None:
    """(p - 1) (TF + TB - TW) of H1, (p - 1) (TF + TB - 2 TW) of H2; 1F1B (p - 1) (TF + TB + TW)."""
    m = 2 * p * rounds
    stages = [Stage(time, time, weights * time)] * p
    work = m * time * (2 + weights)
    idle = {
        name: simulate(name, p, stages, m, tolerance=0).longest_s - work
        for name in ("1f1b", "zb_h1", "zb_h2")
    }
    assert idle["1f1b"] == pytest.approx((p - 1) * time * (2 + weights))
    assert idle["zb_h1"] == pytest.approx((p - 1) * time * (2 - weights))
    assert idle["zb_h2"] == pytest.approx((p - 1) * time * (2 - 2 * weights), abs=1e-6 * work)
    held = {name: simulate(name, p, stages, m).held for name in ("zb_h1", "zb_h2")}
    assert held == {"zb_h1": (p,) * p, "zb_h2": (2 * p - 1,) * p}


# Zero-bubble paper (Qi et al. 2023), Table 9: milliseconds of F, B, W and of handing over. Beside it the stages of a
# rank in the interleaved schedule, one layer each (the first and the last stage have one less, beside the embedding and
# the head), and a / h of what waits for the weights, 32 / (34 + 5 a s / h) of a layer (Table 3: heads, width; s 1024).
PROFILED = {
    "1.5B": (18.522, 18.086, 9.337, 0.601, 3, 24 / 2304),
    "6.2B": (29.718, 29.444, 19.927, 0.527, 4, 32 / 4096),
    "14.6B": (11.347, 11.248, 8.132, 0.377, 3, 40 / 5120),
    "28.3B": (10.419, 10.207, 7.715, 0.408, 2, 48 / 6144),
}
COLUMNS = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_1p", "zb_2p")
# Table 5: bubble rates by model, ranks and micro-batches.
RATES = {
    ("1.5B", 8, 24): (0.2431, 0.1055, 0.1585, 0.1083, 0.1585, 0.0433),
    ("1.5B", 8, 32): (0.1985, 0.0818, 0.1242, 0.0837, 0.1242, 0.0039),
    ("1.5B", 8, 64): (0.1240, 0.0443, 0.0674, 0.0444, 0.0674, 0.0026),
    ("6.2B", 8, 24): (0.2347, 0.0808, 0.1323, 0.0698, 0.1323, 0.0029),
    ("6.2B", 8, 32): (0.1898, 0.0628, 0.1045, 0.0559, 0.1045, 0.0022),
    ("6.2B", 8, 64): (0.1091, 0.0320, 0.0554, 0.0294, 0.0554, 0.0010),
    ("14.6B", 16, 48): (0.2552, 0.1104, 0.1397, 0.0672, 0.1397, 0.0066),
    ("14.6B", 16, 64): (0.2082, 0.0852, 0.1088, 0.0516, 0.1088, 0.0054),
    ("14.6B", 16, 128): (0.1251, 0.0445, 0.0576, 0.0266, 0.0576, 0.0028),
    ("28.3B", 32, 96): (0.2646, 0.1493, 0.1421, 0.0641, 0.1421, 0.0038),
    ("28.3B", 32, 128): (0.2168, 0.1164, 0.1106, 0.0490, 0.1106, 0.0029),
    ("28.3B", 32, 256): (0.1352, 0.0624, 0.0594, 0.0257, 0.0594, 0.0018),
}


@pytest.mark.req("A3", "A24")
@pytest.mark.parametrize(("model", "p", "m"), RATES)
def test_bubble_rates_of_the_zero_bubble_paper(model: str, p: int, m: int) -> None:
    """Rate: 1 - m (TF + TB + TW) / cost, where cost is the longest time from a rank's first chunk to its last.

    Each hand-over takes what was profiled, beside computation; of v stages a rank each takes a v-th of the times.
    """
    *times, handover, v, heads = PROFILED[model]
    kept = 32 / (34 + 5 * 1024 * heads)
    for schedule, rate in zip(COLUMNS, RATES[model, p, m], strict=True):
        each = v if schedule == "interleaved_1f1b" else 1
        stages = [Stage(*(time / 1000 / each for time in times))] * (p * each)
        found = simulate(schedule, p, stages, m, handover / 1000, kept_for_weights=kept, tolerance=0)
        assert 1 - m * sum(times) / 1000 / found.longest_s == pytest.approx(rate, abs=0.01), schedule
        limit = {"zb_1p": p, "zb_2p": 2 * p}.get(schedule, m * each)
        assert max(found.held) <= limit + 1e-6


@pytest.mark.req("A24")
@pytest.mark.parametrize("schedule", FIXED)
@given(
    data=st.data(),
    p=st.integers(1, 5),
    v=st.integers(1, 3),
    m=st.integers(20, 130),
    spread=st.sampled_from([0.0, 0.02, 1.0]),
)
@settings(max_examples=25, deadline=None)
def test_few_micro_batches_tell_the_rest(
    schedule: str, data: st.DataObject, p: int, v: int, m: int, spread: float
) -> None:
    count = p * stages_a_rank(schedule, v)
    number = st.floats(1.0, 1.0 + spread)
    stages = data.draw(st.lists(st.builds(Stage, number, number, number), min_size=count, max_size=count))
    handover, overlaps = data.draw(st.sampled_from([0.0, 0.01, 0.4])), data.draw(st.booleans())
    try:
        whole = simulate(schedule, p, stages, m, handover, overlaps=overlaps, spans=True)
    except ConfigError:
        return  # so many micro-batches do not divide into rounds, or are too few
    whole = dataclasses.replace(whole, spans=())
    assert simulate(schedule, p, stages, m, handover, overlaps=overlaps, tolerance=0) == whole
    for tolerance in (0.002, 0.05):
        near = simulate(schedule, p, stages, m, handover, overlaps=overlaps, tolerance=tolerance)
        for ours, right in ((near.total_s, whole.total_s), *zip(near.ends_s, whole.ends_s, strict=True)):
            assert abs(ours - right) <= tolerance * 1.001 * near.total_s
        assert (near.busy_s, near.held, near.starts_s) == (whole.busy_s, whole.held, whole.starts_s)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "zb_h2"])
def test_few_micro_batches_are_played_of_many(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step too long to be played whole in a test has its closed form."""
    p, v = 4, stages_a_rank(schedule, 2)
    m = 4 * 10**5
    found = simulate(schedule, p, [Stage(1, 1, 1)] * (p * v), m)
    idle = {"1f1b": 9, "interleaved_1f1b": 9, "interleaved_zero_bubble": 3, "zbv": 3, "zb_h2": 3}[schedule]
    assert found.total_s == 3 * v * m + idle


def check(found: Timeline, ranks: int, stages: Sequence[Stage], m: int, handover: float) -> None:
    """Each chunk is computed once, after what it needs, and a rank does one at a time."""
    kinds = Counter((span.kind, span.stage, span.micro_batch) for span in found.spans)
    assert set(kinds.values()) == {1} and len(kinds) == 3 * m * len(stages)
    ends = {(span.kind, span.stage, span.micro_batch): span.end_s for span in found.spans}
    free = [0.0] * ranks
    for span in found.spans:
        assert span.start_s >= free[span.rank] - 1e-6
        free[span.rank] = span.end_s
        wanted = []
        if span.kind == "F" and span.stage:
            wanted = [(ends["F", span.stage - 1, span.micro_batch], handover)]
        elif span.kind == "B":
            wanted = [(ends["F", span.stage, span.micro_batch], 0.0)]
            if span.stage < len(stages) - 1:
                wanted.append((ends["B", span.stage + 1, span.micro_batch], handover))
        elif span.kind == "W":
            wanted = [(ends["B", span.stage, span.micro_batch], 0.0)]
        assert all(span.start_s >= end + later - 1e-6 for end, later in wanted), span
    assert found.total_s == pytest.approx(max(free))


@given(
    data=st.data(),
    p=st.integers(1, 6),
    m=st.integers(1, 30),
    most=st.floats(1, 20),
    kept=st.floats(0, 1),
    handover=st.sampled_from([0.0, 0.1, 2.0]),
)
@settings(max_examples=60, deadline=None)
def test_searched_orders_are_valid_and_keep_to_their_memory(
    data: st.DataObject, p: int, m: int, most: float, kept: float, handover: float
) -> None:
    stages = data.draw(st.lists(STAGE, min_size=p, max_size=p))
    found = simulate("zb_2p", p, stages, m, handover, spans=True, most_held=most, kept_for_weights=kept)
    check(found, p, stages, m, handover)
    assert max(found.held) <= most + 1e-6
    work = [m * (one.forward_s + one.backward_s + one.weights_s) for one in stages]
    assert found.busy_s == pytest.approx(work)
    assert found.longest_s >= max(work) - 1e-6


@given(
    p=st.integers(2, 8), rounds=st.integers(1, 4), weights=st.floats(0.2, 1.0), handover=st.floats(0, 0.05)
)
@settings(max_examples=40, deadline=None)
def test_search_is_as_good_as_the_fixed_orders(p: int, rounds: int, weights: float, handover: float) -> None:
    m = 2 * p * rounds
    stages = [Stage(1, 1, weights)] * p
    for searched, fixed, share in (
        ("zb_1p", "zb_h1", 1.0),
        ("zb_2p", "zb_h2", 1.0),
        ("zb_2p", "zb_h2", 0.45),
    ):
        found = simulate(searched, p, stages, m, handover, kept_for_weights=share).longest_s
        assert found <= simulate(fixed, p, stages, m, handover, tolerance=0).longest_s * 1.01, (
            searched,
            share,
        )


def test_a_slow_stage_sets_the_pace() -> None:
    """Closed form: all go at the pace of the slowest, here the last one with its head."""
    stages = [Stage(1, 1, 1)] * 3 + [Stage(2, 2, 2)]
    found = simulate("1f1b", 4, stages, 50)
    assert found.total_s == 3 * 1 + 50 * 6 + 3 * 2
    assert found.busy_s == (150, 150, 150, 300)
    assert found.starts_s == (0, 1, 2, 3)
    assert found.bubble == pytest.approx(1 - 750 / (4 * 309))


def test_blocking_costs_every_chunk_and_overlap_only_the_way() -> None:
    stages = [Stage(1, 1, 0)] * 2
    assert simulate("gpipe", 2, stages, 1, 0.25).total_s == 4.5
    assert simulate("gpipe", 2, stages, 8, 0.25).total_s == 2 * 8 + 2 + 2 * 0.25
    # The second rank receives before each forward and sends between two backwards; then comes the first one's last.
    assert (
        simulate("gpipe", 2, stages, 8, 0.25, overlaps=False).total_s == 1 + 8 * 1.25 + 8 * 1.25 + 1.25 - 0.25
    )


def test_weights_that_take_no_time_are_let_go_with_the_input() -> None:
    """As with recompute, where the backward is not split."""
    split = simulate("interleaved_zero_bubble", 4, [Stage(1, 1, 1)] * 8, 16)
    whole = simulate("interleaved_zero_bubble", 4, [Stage(1, 2, 0)] * 8, 16)
    assert split.held == (8, 8, 8, 8) and whole.held == (8, 7, 6, 5)


def test_zb_v_is_zbv_and_total_s_is_the_total() -> None:
    stages = [Stage(1, 2, 0.5)] * 8
    assert simulate("zb_v", 4, stages, 20, 0.1) == simulate("zbv", 4, stages, 20, 0.1)
    assert total_s("zbv", 4, stages, 20, 0.1) == simulate("zbv", 4, stages, 20, 0.1).total_s
    assert simulate("1f1b", 1, [Stage(0, 0, 0)], 3).bubble == 0


@pytest.mark.parametrize(
    ("schedule", "ranks", "stages", "m", "more", "sentence"),
    [
        ("2f2b", 2, 2, 4, {}, "schedule=2f2b: choose gpipe, .*zb_2p"),
        ("1f1b", 2, 4, 4, {}, "with 2 ranks wants one stages? a rank: 4 given"),
        ("zbv", 2, 6, 4, {}, "wants two stages a rank: 6 given"),
        ("looped_bfs", 2, 5, 4, {}, "wants one or more stages a rank: 5 given"),
        ("1f1b", 4, 4, 3, {}, "needs 4 micro-batches: 3 given"),
        ("dualpipev", 2, 4, 3, {}, "needs 4 micro-batches"),
        ("interleaved_1f1b", 4, 8, 9, {}, "equal rounds of 4 or a few more"),
        ("1f1b", 2, 2, 4, {"most_held": 3}, "most_held=3 with schedule=1f1b: .*to zb_1p or zb_2p only"),
        ("zb_1p", 2, 2, 4, {"most_held": 0.5}, "give 1 or more"),
        ("zb_1p", 2, 2, 4, {"kept_for_weights": 1.5}, "give a share, 0 to 1"),
        ("gpipe", 0, 2, 4, {}, "0 ranks"),
        ("gpipe", 2, 2, 0, {}, "0 micro-batches"),
        ("gpipe", 2, 2, 1, {"handover_s": -1.0}, "0 or more"),
        ("gpipe", 2, 2, 1, {"handover_s": float("nan")}, "0 or more"),
    ],
)
def test_what_cannot_be_played_is_refused(
    schedule: str, ranks: int, stages: int, m: int, more: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        simulate(schedule, ranks, [Stage(1, 1, 1)] * stages, m, **more)


def test_a_login_node_needs_no_more_than_the_standard_library() -> None:
    code = "import sys, tools.plan.pipeline.simulate as one; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
