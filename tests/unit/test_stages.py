"""Stages and schedules by arithmetic, against torch's own schedules and against brute force."""

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules

from contract.errors import ConfigError
from train.layout.config import ParallelConfig
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


def order(config: ParallelConfig, micro_batches: int) -> dict[int, list[Action]]:
    """What each rank does, in torch's order."""
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
    schedule = CLASSES[config.schedule](stages[0] if single else stages, micro_batches)
    if config.schedule == "1f1b":
        return {rank: order_1f1b(config.pp, rank, micro_batches) for rank in range(config.pp)}
    return {
        rank: [
            (part.computation_type.value, part.stage_index, part.microbatch_index)
            for action in actions
            if action is not None
            for part in action.sub_actions or (action,)
            if part.computation_type.value in "FIWB"
        ]
        for rank, actions in schedule.pipeline_order.items()
    }


def order_1f1b(pp: int, rank: int, micro_batches: int) -> list[Action]:
    """The order that torch runs, which is not the one that it would print."""
    ahead = min(micro_batches, pp - rank)
    actions = [("F", rank, index) for index in range(ahead)]
    for index in range(micro_batches):
        actions.append(("B", rank, index))
        if ahead + index < micro_batches:
            actions.append(("F", rank, ahead + index))
    return actions


def play(orders: dict[int, list[Action]], stages: int) -> tuple[int, dict[int, int]]:
    """Run the orders with a time of 1 for F, I and W: the time in all, and the most chunks that a rank held."""
    ends: dict[Action, int] = {}
    clock, held, most = (dict.fromkeys(orders, 0) for _ in range(3))
    left = {rank: list(actions) for rank, actions in orders.items()}
    while any(left.values()):
        before = len(ends)
        for rank, actions in left.items():
            while actions:
                kind, stage, index = actions[0]
                needs = [("F", stage, index)] if kind != "F" else [("F", stage - 1, index)] if stage else []
                if kind in "IB" and stage < stages - 1:
                    needs.append(("I", stage + 1, index))
                if not all(need in ends for need in needs):
                    break
                actions.pop(0)
                start = max([clock[rank], *(ends[need] for need in needs)])
                clock[rank] = start + (2 if kind == "B" else 1)
                ends["I" if kind == "B" else kind, stage, index] = clock[rank]
                held[rank] += {"F": 1, "I": 0}.get(kind, -1)
                most[rank] = max(most[rank], held[rank])
        assert len(ends) > before, "deadlock"
    return max(clock.values()), most


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
    time, held = play(order(config, micro_batches), stage_count(config))
    work = CHUNK * stages_per_rank(config) * micro_batches
    assert bubble(config, micro_batches) == pytest.approx(1 - work / time)
    assert held == {rank: chunks_held(config, rank, micro_batches) for rank in range(pp)}


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
