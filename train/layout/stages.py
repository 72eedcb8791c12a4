"""Pipeline schedules and stages by arithmetic: who holds which layers, what a schedule demands, idles and keeps.

Schedules are those of torch.distributed.pipelining: GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019), looped
BFS (Lamy-Poirier 2022), interleaved 1F1B (Narayanan et al. 2021), zero bubble, interleaved as ZB1P and folded as ZB-V
(Qi et al. 2023), and DualPipeV (DeepSeek-AI 2024, folded). A chunk below is one micro-batch in one stage.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from contract.errors import ConfigError
from train.layout.config import ParallelConfig
from train.layout.split import balance
from train.model.config import ModelConfig

CHUNK = 3
"""Time of a chunk where theory needs one: forward 1, backward 1 for the input and 1 for the weights."""


class Placement(StrEnum):
    """Which stages a rank holds."""

    single = "single"
    """One: rank r has stage r."""
    loop = "loop"
    """Several, each a whole turn after the last: r, r + pp, r + 2 pp, ..."""
    v = "v"
    """Two, down and up again: r and 2 pp - 1 - r. The first and the last stage are on one rank."""


@dataclass(frozen=True)
class Schedule:
    """What is to know of a schedule without running it.

    p ranks, v stages on each, m micro-batches, rank r.
    """

    placement: Placement
    splits_backward: bool
    """Whether the gradients of the weights are computed apart from those of the input."""
    fewest: Callable[[int], int]
    """p -> fewest micro-batches."""
    idle: Callable[[int, int, int], int]
    """p, v, m -> time in which a rank computes nothing, where a chunk takes `CHUNK`."""
    held: Callable[[int, int, int, int], int]
    """p, v, m, r -> most chunks whose activations rank r keeps at once."""
    in_rounds: bool = False
    """Whether the micro-batches must divide into rounds, see `round_of`."""


def round_of(p: int, m: int) -> int:
    """Micro-batches that an interleaved schedule takes through one stage before it turns to the next."""
    return m // max(1, m // p)


def _loop_idle(p: int, v: int, m: int) -> int:
    # With fewer micro-batches than ranks each turn waits for the first one to come round.
    return CHUNK * (p - 1 + (v - 1) * max(0, p - m))


SCHEDULES = {
    "gpipe": Schedule(
        Placement.single, False, lambda p: 1, lambda p, v, m: CHUNK * (p - 1), lambda p, v, m, r: m
    ),
    "1f1b": Schedule(
        Placement.single,
        False,
        lambda p: p,
        lambda p, v, m: CHUNK * (p - 1),
        lambda p, v, m, r: min(m, p - r),
    ),
    "looped_bfs": Schedule(Placement.loop, False, lambda p: 1, _loop_idle, lambda p, v, m, r: m * v),
    "interleaved_1f1b": Schedule(
        Placement.loop,
        False,
        lambda p: 1,
        _loop_idle,
        lambda p, v, m, r: min(m * v, (v - 1) * round_of(p, m) + 2 * (p - 1 - r) + 1),
        in_rounds=True,
    ),
    "interleaved_zero_bubble": Schedule(
        Placement.loop,
        True,
        lambda p: p,
        lambda p, v, m: p - 1,
        lambda p, v, m, r: min(m * v, (v - 1) * round_of(p, m) + p),
        in_rounds=True,
    ),
    "zbv": Schedule(
        Placement.v,
        True,
        lambda p: 1,
        # It fills its bubble from 2 p - 1 micro-batches on; what stays is the way to the last rank.
        lambda p, v, m: max(p - 1, 2 * (2 * p - 1 - m)),
        lambda p, v, m, r: min(2 * p, 2 * m, m + 1 + r),
    ),
    "dualpipev": Schedule(
        Placement.v,
        True,
        lambda p: 2 * p,
        # A forward is handed on when the backward beside it is done too: twice the way of zero bubble.
        lambda p, v, m: 2 * (p - 1),
        lambda p, v, m, r: 2 * p + 1,
    ),
}


def schedule_of(config: ParallelConfig) -> Schedule:
    """Look up the schedule of a configuration; raises `ConfigError` for a name that there is not."""
    if config.schedule not in SCHEDULES:
        raise ConfigError(f"parallel.schedule={config.schedule}: choose {', '.join(SCHEDULES)}")
    return SCHEDULES[config.schedule]


def stages_per_rank(config: ParallelConfig) -> int:
    """Stages that each rank holds."""
    if config.pp == 1 or schedule_of(config).placement is Placement.single:
        return 1
    return config.stages_per_rank or 2


def stage_count(config: ParallelConfig) -> int:
    """Stages of all ranks together."""
    return config.pp * stages_per_rank(config)


def stages_of(config: ParallelConfig, pp_rank: int) -> list[int]:
    """Numbers of the stages that a rank of the pipeline holds, ascending."""
    if config.pp > 1 and schedule_of(config).placement is Placement.v:
        return [pp_rank, 2 * config.pp - 1 - pp_rank]
    return list(range(pp_rank, stage_count(config), config.pp))


def stage_layers(config: ParallelConfig, model: ModelConfig, sequence_length: int) -> list[range]:
    """Layers of each stage, first to last. Needs `model.vocab_size`; call `check_pipeline` first."""
    counts = config.split or balance(model, sequence_length, stage_count(config))
    starts = [sum(counts[:index]) for index in range(len(counts))]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def bubble(config: ParallelConfig, micro_batches: int) -> float:
    """Share of a step, 0 to 1, in which a rank computes nothing, for stages that take the same time.

    Of the whole step: bubble over ideal time, as (p - 1) / m of 1F1B, is b / (1 - b). Handing over takes no time;
    zero-bubble schedules are for a forward that takes as long as either half of the backward. With `recompute`, where
    they do not split it, their bubble is larger than this.
    """
    v = stages_per_rank(config)
    idle = schedule_of(config).idle(config.pp, v, micro_batches)
    return idle / (idle + CHUNK * v * micro_batches)


def chunks_held(config: ParallelConfig, pp_rank: int, micro_batches: int) -> int:
    """Most chunks, a micro-batch in one stage each, whose activations a rank keeps at once."""
    return schedule_of(config).held(config.pp, stages_per_rank(config), micro_batches, pp_rank)


def check_pipeline(config: ParallelConfig, layers: int, micro_batches: int) -> None:
    """Raise `ConfigError` for a pipeline that cannot work, with the nearest one that can.

    `layers`: of the model; `micro_batches`: that a rank takes in one step.
    """
    schedule = schedule_of(config)
    if config.pp == 1:
        for name in ("stages_per_rank", "split"):
            if getattr(config, name) is not None:
                raise ConfigError(f"parallel.{name} does nothing with parallel.pp=1: set it to null")
        return
    _check_stages_per_rank(config, schedule)
    _check_layers(config, layers)
    _check_micro_batches(config, schedule, micro_batches)
    if schedule.splits_backward and config.zero == 3:
        # torch would leave some gradients of parameters that are freed in between wrong, without an error.
        raise ConfigError(
            f"parallel.schedule={config.schedule} computes the gradients of the weights later, which zero=3 gets "
            "wrong: set parallel.zero=2, or choose 1f1b or interleaved_1f1b"
        )
    if schedule.splits_backward and config.compile:
        raise ConfigError(
            f"parallel.schedule={config.schedule} splits the backward pass, which compiled layers cannot: set "
            "parallel.compile=false, or choose 1f1b or interleaved_1f1b"
        )


def _check_stages_per_rank(config: ParallelConfig, schedule: Schedule) -> None:
    asked = config.stages_per_rank
    least, words = {Placement.single: (1, "1"), Placement.loop: (2, "2 or more"), Placement.v: (2, "2")}[
        schedule.placement
    ]
    if asked is None or asked == least or (schedule.placement is Placement.loop and asked > least):
        return
    raise ConfigError(
        f"parallel.stages_per_rank={asked}: schedule={config.schedule} has {words}, set it to null or choose another "
        "schedule"
    )


def _check_layers(config: ParallelConfig, layers: int) -> None:
    stages, asked = stage_count(config), config.split
    if asked is None:
        # The first stage has the embedding and the last one the head: they can do without layers.
        if layers < max(1, stages - 2):
            raise ConfigError(
                f"parallel.pp={config.pp} with schedule={config.schedule} makes {stages} stages, too many for "
                f"model.layers={layers}: take at most {layers + 2} stages, by a smaller parallel.pp or fewer "
                "stages_per_rank"
            )
        return
    if len(asked) != stages:
        raise ConfigError(
            f"parallel.split={asked} has {len(asked)} numbers, but pp={config.pp} with schedule={config.schedule} "
            f"makes {stages} stages: give one number for each"
        )
    if sum(asked) != layers:
        raise ConfigError(
            f"parallel.split={asked} has {sum(asked)} layers in all, but model.layers={layers}: change one"
        )
    if min(asked) < 0 or 0 in asked[1:-1]:
        raise ConfigError(
            f"parallel.split={asked}: each stage needs a layer, but the first and the last, which may have none"
        )


def _check_micro_batches(config: ParallelConfig, schedule: Schedule, micro_batches: int) -> None:
    p = config.pp
    problem = f"parallel.schedule={config.schedule} with pp={p}"
    remedy = "set parallel.gradient_accumulation_steps={} (or the global batch for it)"
    if micro_batches < schedule.fewest(p):
        raise ConfigError(
            f"{problem} needs at least {schedule.fewest(p)} micro-batches a step and gets {micro_batches}: "
            f"{remedy.format(schedule.fewest(p))}, lower parallel.micro_batch_size, or choose gpipe"
        )
    if schedule.in_rounds and not _in_rounds(p, micro_batches):
        below = next(m for m in range(micro_batches, 0, -1) if _in_rounds(p, m))
        above = next(m for m in range(micro_batches, micro_batches + p + 1) if _in_rounds(p, m))
        raise ConfigError(
            f"{problem} takes micro-batches in equal rounds of {p} or a few more, into which {micro_batches} do not "
            f"divide: {remedy.format(f'{below} or {above}')}"
        )


def _in_rounds(p: int, m: int) -> bool:
    return m % max(1, m // p) == 0
