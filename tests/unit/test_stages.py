"""Stages and schedules by arithmetic, against torch's own schedules and against brute force."""

import dataclasses
import itertools
import operator
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules

from contract.errors import ConfigError
from train.layout.config import ParallelConfig, Recompute
from train.layout.in_flight import in_flight, received_early
from train.layout.recompute import most_bytes
from train.layout.split import balance, partition
from train.layout.stages import (
    CHUNK,
    SCHEDULES,
    Placement,
    bubble,
    check_pipeline,
    chunks_held,
    stage_count,
    stage_layers,
    stages_of,
    stages_per_rank,
)
from train.model.config import ModelConfig

MODEL = ModelConfig(vocab_size=320, dim=32, layers=8, heads=4, ffn_dim=64)
CLASSES = {
    "gpipe": torch_schedules.ScheduleGPipe,
    "1f1b": torch_schedules.Schedule1F1B,
    "looped_bfs": torch_schedules.ScheduleLoopedBFS,
    "interleaved_1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipev": torch_schedules.ScheduleDualPipeV,
}

Action = tuple[str, int, int]
"""Kind (F forward, I backward for the input, W for the weights, B both), stage, micro-batch."""


def schedule_of_torch(config: ParallelConfig, micro_batches: int) -> Any:
    """torch's schedule, with all that it decides before it runs."""
    stages = [
        SimpleNamespace(
            stage_index=index,
            num_stages=stage_count(config),
            group_size=config.pp,
            group_rank=0,
            submod=nn.Identity(),
        )
        for index in range(stages_per_rank(config))
    ]
    single = SCHEDULES[config.schedule].placement is Placement.single
    return CLASSES[config.schedule](stages[0] if single else stages, micro_batches)


def groups(config: ParallelConfig, micro_batches: int) -> dict[int, list[list[Action]]]:
    """What each rank does, in torch's order; what it does together is handed on together."""
    schedule = schedule_of_torch(config, micro_batches)
    if config.schedule == "1f1b":
        return {rank: order_1f1b(config.pp, rank, micro_batches) for rank in range(config.pp)}
    return {
        rank: [
            [
                (part.computation_type.value, part.stage_index, part.microbatch_index)
                for part in action.sub_actions or (action,)
            ]
            for action in actions
            if action is not None and action.computation_type.name != "REDUCE_GRAD"
        ]
        for rank, actions in schedule.pipeline_order.items()
    }


def order(config: ParallelConfig, micro_batches: int) -> dict[int, list[Action]]:
    """What each rank does, one after the other."""
    return {rank: list(itertools.chain(*each)) for rank, each in groups(config, micro_batches).items()}


def order_1f1b(pp: int, rank: int, micro_batches: int) -> list[list[Action]]:
    """The order that torch runs, which is not the one that it would print."""
    ahead = min(micro_batches, pp - rank)
    actions = [[("F", rank, index)] for index in range(ahead)]
    for index in range(micro_batches):
        actions.append([("B", rank, index)])
        if ahead + index < micro_batches:
            actions.append([("F", rank, ahead + index)])
    return actions


def play(orders: dict[int, list[list[Action]]], stages: int) -> tuple[int, dict[int, int]]:
    """Run the orders with a time of 1 for F, I and W: the time in all, and the most chunks that a rank held."""
    ends: dict[Action, int] = {}
    clock, held, most = (dict.fromkeys(orders, 0) for _ in range(3))
    left = {rank: list(actions) for rank, actions in orders.items()}
    while any(left.values()):
        before = len(ends)
        for rank, of_rank in left.items():
            while of_rank and all(need in ends for action in of_rank[0] for need in needs(action, stages)):
                group = of_rank.pop(0)
                for action in group:
                    start = max([clock[rank], *(ends[need] for need in needs(action, stages))])
                    clock[rank] = start + (2 if action[0] == "B" else 1)
                    held[rank] += {"F": 1, "I": 0}.get(action[0], -1)
                    most[rank] = max(most[rank], held[rank])
                for kind, stage, index in group:
                    ends["I" if kind == "B" else kind, stage, index] = clock[rank]
        assert len(ends) > before, "deadlock"
    return max(clock.values()), most


def needs(action: Action, stages: int) -> list[Action]:
    """What must be done elsewhere before; what a rank itself must have done comes before in its order."""
    kind, stage, index = action
    if kind == "F":
        return [("F", stage - 1, index)] if stage else []
    return [("I", stage + 1, index)] if kind in "IB" and stage < stages - 1 else []


def config_of(schedule: str, pp: int, v: int | None = None, **more: object) -> ParallelConfig:
    loop = SCHEDULES[schedule].placement is Placement.loop
    return ParallelConfig(pp=pp, schedule=schedule, stages_per_rank=v if loop else None, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(pp=st.integers(2, 5), v=st.integers(2, 3), micro_batches=st.integers(1, 13))
def test_theory_is_what_torchs_schedule_does(schedule: str, pp: int, v: int, micro_batches: int) -> None:
    """Accepted numbers of micro-batches are those that torch accepts; bubble and memory follow from its order."""
    config = config_of(schedule, pp, v)
    try:
        check_pipeline(config, 64, micro_batches)
    except ConfigError:
        # torch takes fewer for this one, at which its bubble is larger than that of plain 1F1B.
        if schedule == "interleaved_zero_bubble" and micro_batches < pp:
            return
        with pytest.raises(ValueError, match="icrobatch"):
            order(config, micro_batches)
        return
    time, held = play(groups(config, micro_batches), stage_count(config))
    work = CHUNK * stages_per_rank(config) * micro_batches
    assert bubble(config, micro_batches) == pytest.approx(1 - work / time)
    assert held == {rank: chunks_held(config, rank, micro_batches) for rank in range(pp)}


def occupied(actions: list[Action], stages: list[int], splits: bool) -> Iterator[tuple[int, ...]]:
    """After each action: micro-batches kept of each of a rank's stages, and those halfway through their backward."""
    kept, halfway = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    for kind, stage, _ in actions:
        if kind == "F":
            kept[stage] += 1
        elif kind == "I" and splits:
            halfway[stage] += 1
        elif kind == "W" and splits:
            halfway[stage] -= 1
            kept[stage] -= 1
        elif kind != "W":
            kept[stage] -= 1
        yield (*kept.values(), *halfway.values())


@pytest.mark.req("A10")
@pytest.mark.parametrize("schedule", SCHEDULES)
@given(
    pp=st.integers(2, 5),
    v=st.integers(2, 3),
    micro_batches=st.integers(1, 13),
    sizes=st.lists(st.integers(1, 9), min_size=3, max_size=3),
    more=st.integers(0, 9),
)
def test_what_is_in_flight_is_what_torchs_schedule_keeps(
    schedule: str, pp: int, v: int, micro_batches: int, sizes: list[int], more: int
) -> None:
    """However large a micro-batch is in each stage, and however much larger when it is halfway."""
    config = config_of(schedule, pp, v)
    try:
        check_pipeline(config, 64, micro_batches)
    except ConfigError:
        return
    for rank, actions in order(config, micro_batches).items():
        stages = stages_of(config, rank)
        kept, halfway = sizes[: len(stages)], [more] * len(stages)
        times = list(occupied(actions, stages, splits=True))
        most = max(sum(map(operator.mul, time, kept + halfway)) for time in times)
        assert most_bytes(in_flight(config, rank, micro_batches), kept, halfway) == most
        whole = dataclasses.replace(config, recompute=Recompute.full)
        times = list(occupied(actions, stages, splits=False))
        most = max(sum(map(operator.mul, time, kept)) for time in times)
        reckoned = most_bytes(in_flight(whole, rank, micro_batches), kept, [0] * len(stages))
        assert most <= reckoned <= most * 1.5


def early(schedule: Any, rank: int, stages: list[int], last: int) -> tuple[int, int]:
    """Chunks that a rank keeps at most, and what it has received besides when it keeps those."""
    kept = received = 0
    found = []
    for action in schedule.pipeline_order_with_comms[rank]:
        for part in action.sub_actions or (action,):
            kind, stage = part.computation_type.name, part.stage_index
            received += kind in ("RECV_F", "RECV_B")
            if kind == "FORWARD":
                received -= stage > 0 and stage - 1 not in stages
                kept += 1
            found.append((kept, received))
            if kind in ("FULL_BACKWARD", "BACKWARD_INPUT"):
                received -= stage < last and stage + 1 not in stages
            kept -= kind in ("FULL_BACKWARD", "BACKWARD_WEIGHT")
    return max(found)


@pytest.mark.parametrize(
    "schedule", ["looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]
)
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_little_is_received_before_its_turn(schedule: str, pp: int) -> None:
    config = config_of(schedule, pp, 2)
    for micro_batches in (2 * pp, 4 * pp):
        of_torch = schedule_of_torch(config, micro_batches)
        for rank in range(pp):
            _, found = early(of_torch, rank, stages_of(config, rank), stage_count(config) - 1)
            ahead = schedule == "interleaved_zero_bubble" and rank in (0, pp - 1)
            assert found <= (pp if ahead else received_early(config)), (rank, micro_batches)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_stage_is_on_one_rank_and_torch_agrees(schedule: str) -> None:
    config = config_of(schedule, 4, 3)
    placed = [stages_of(config, rank) for rank in range(4)]
    assert sorted(itertools.chain(*placed)) == list(range(stage_count(config)))
    acted = {rank: sorted({stage for _, stage, _ in actions}) for rank, actions in order(config, 8).items()}
    assert acted == dict(enumerate(placed))


def test_bubbles_of_the_papers() -> None:
    """(p - 1) / m of the ideal time, over v when interleaved (Narayanan et al. 2021)."""
    for schedule, v, ideal in (("gpipe", 1, 3 / 8), ("1f1b", 1, 3 / 8), ("interleaved_1f1b", 2, 3 / 16)):
        share = bubble(config_of(schedule, 4, v), 8)
        assert share / (1 - share) == pytest.approx(ideal), schedule
    assert bubble(config_of("zbv", 4), 8) < bubble(config_of("interleaved_1f1b", 4), 8)


@pytest.mark.parametrize("v", [2, 3])
def test_zero_bubble_leaves_a_third(v: int) -> None:
    """(p - 1) (TF + TB - TW) of ZB-H1 and ZB-1p (Qi et al. 2023), where the three take the same time."""
    for p, m in ((2, 4), (4, 8), (4, 32), (8, 24)):
        plain, zero = (
            bubble(config_of(schedule, p, v), m)
            for schedule in ("interleaved_1f1b", "interleaved_zero_bubble")
        )
        assert zero / (1 - zero) == pytest.approx(plain / (1 - plain) / 3)
        assert zero / (1 - zero) == pytest.approx((p - 1) * (1 + 1 - 1) / (CHUNK * v * m))


def total(schedule: str, p: int, v: int, m: int) -> float:
    """Time of a step, where a forward through one stage, and either half of a backward, takes 1."""
    return CHUNK * v * m / (1 - bubble(config_of(schedule, p, v), m))


@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 2), (4, 1), (4, 3), (4, 4), (8, 5), (8, 8)])
def test_totals_of_the_papers_for_few_micro_batches(p: int, m: int) -> None:
    """(m + stages - 1) (TF + TB + TW) where the first stage is never busy twice (Qi et al. 2023)."""
    assert total("gpipe", p, 1, m) == pytest.approx((m + p - 1) * CHUNK)
    if m == p:
        assert total("1f1b", p, 1, m) == pytest.approx((m + p - 1) * CHUNK)
        # (m + p - 1) (TF + TB) + TW; torch has it for two stages a rank and more, each p chunks of work later.
        assert total("interleaved_zero_bubble", p, 2, m) == pytest.approx((m + p - 1) * 2 + 1 + CHUNK * p)
    for v in (2, 3):
        for schedule in ("looped_bfs", "interleaved_1f1b"):
            assert total(schedule, p, v, m) == pytest.approx((m + p * v - 1) * CHUNK)


COST = st.tuples(st.integers(1, 9), st.integers(0, 30), st.integers(0, 30))


@given(st.integers(0, 7), st.integers(2, 5), st.lists(COST, min_size=1, max_size=2))
def test_partition_is_the_best_there_is(layers: int, stages: int, costs: list[tuple[int, int, int]]) -> None:
    layers = max(layers, stages - 2)

    def worst(counts: tuple[int, ...]) -> tuple[int, ...]:
        ends = [(head, *[0] * (stages - 2), tail) for _, head, tail in costs]
        return tuple(
            max(layer * count + end for count, end in zip(counts, extra, strict=True))
            for (layer, _, _), extra in zip(costs, ends, strict=True)
        )

    every = [
        counts
        for counts in itertools.product(range(layers + 1), repeat=stages)
        if sum(counts) == layers and all(counts[1:-1])
    ]
    found = tuple(partition(layers, stages, costs))
    assert found in every
    assert worst(found) == min(map(worst, every))


def test_embedding_and_head_are_counted() -> None:
    layer_alone = ModelConfig(vocab_size=2, dim=64, layers=8, heads=4, ffn_dim=128)
    assert balance(layer_alone, 64, 4) == [2, 2, 2, 2]
    # With a vocabulary this large the head takes as long as several layers, and the embedding is as large.
    wide = ModelConfig(vocab_size=4096, dim=64, layers=8, heads=4, ffn_dim=128)
    counts = balance(wide, 64, 4)
    assert counts[-1] < 2 and counts[0] <= counts[1] and sum(counts) == 8


def test_layers_follow_each_other() -> None:
    config = ParallelConfig(pp=2, schedule="zbv", split=[1, 3, 2, 2])
    assert stage_layers(config, MODEL, 32) == [range(1), range(1, 4), range(4, 6), range(6, 8)]
    assert stages_of(config, 0) == [0, 3]
    balanced = stage_layers(ParallelConfig(pp=2), MODEL, 32)
    assert [layer for one in balanced for layer in one] == list(range(8))


@pytest.mark.req("C5", "D6")
@pytest.mark.parametrize(
    ("changes", "micro_batches", "sentence"),
    [
        ({"schedule": "2f2b"}, 8, "schedule=2f2b: choose gpipe, 1f1b"),
        ({}, 3, "needs at least 4 micro-batches a step and gets 3: set .*steps=4 "),
        ({"schedule": "dualpipev"}, 7, "needs at least 8 micro-batches"),
        ({"schedule": "interleaved_zero_bubble"}, 2, "needs at least 4 micro-batches"),
        ({"schedule": "interleaved_1f1b"}, 9, "set parallel.gradient_accumulation_steps=8 or 10"),
        ({"stages_per_rank": 2}, 8, "schedule=1f1b has 1"),
        ({"schedule": "zbv", "stages_per_rank": 3}, 8, "schedule=zbv has 2"),
        ({"schedule": "looped_bfs", "stages_per_rank": 1}, 8, "looped_bfs has 2 or more"),
        ({"schedule": "looped_bfs", "stages_per_rank": 5}, 8, "20 stages, too many for .*at most 10 stages"),
        ({"split": [4, 4]}, 8, "has 2 numbers, but pp=4 with schedule=1f1b makes 4 stages"),
        ({"split": [2, 2, 2, 3]}, 8, "has 9 layers in all, but model.layers=8"),
        ({"split": [4, 0, 2, 2]}, 8, "each stage needs a layer, but the first and the last"),
        ({"schedule": "zbv", "zero": 3}, 8, "zbv computes .* zero=3 gets wrong: set parallel.zero=2"),
        ({"schedule": "dualpipev", "zero": 3}, 8, "zero=3 gets wrong"),
        ({"schedule": "interleaved_zero_bubble", "zero": 3}, 8, "zero=3 gets wrong"),
        ({"schedule": "zbv", "compile": True}, 8, "parallel.compile=false"),
        ({"pp": 1, "split": [8]}, 8, "parallel.split does nothing with parallel.pp=1"),
        ({"pp": 1, "stages_per_rank": 1}, 8, "parallel.stages_per_rank does nothing"),
    ],
)
def test_impossible_pipelines_are_refused(
    changes: dict[str, object], micro_batches: int, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_pipeline(ParallelConfig(**{"pp": 4, **changes}), 8, micro_batches)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"split": [0, 4, 4, 0]},
        {"schedule": "gpipe", "zero": 3},
        {"schedule": "interleaved_1f1b", "zero": 3, "compile": True},
        {"schedule": "looped_bfs", "stages_per_rank": 2},
        {"schedule": "zbv", "zero": 2, "stages_per_rank": 2},
    ],
)
def test_possible_pipelines_pass(changes: dict[str, object]) -> None:
    check_pipeline(ParallelConfig(pp=4, **changes), 8, 8)  # type: ignore[arg-type]
