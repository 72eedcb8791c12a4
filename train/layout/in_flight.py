"""How many micro-batches a rank of a pipeline has under way in each of its stages, by arithmetic. Imports no torch."""

import functools
from collections import Counter
from dataclasses import dataclass

from train.layout.config import ParallelConfig, Recompute
from train.layout.stages import Placement, chunks_held, round_of, schedule_of, stages_per_rank


@dataclass(frozen=True)
class InFlight:
    """What is under way at one time: a number of micro-batches for each stage of a rank, as `stages_of` orders them."""

    kept: tuple[int, ...]
    """Micro-batches whose forward is done and whose backward is not."""
    halfway: tuple[int, ...]
    """Those of them that have the gradient of the stage's input, and not yet those of its weights."""


def splits_backward(config: ParallelConfig) -> bool:
    """Whether gradients of weights are computed apart from those of the input.

    Not where layers are computed again: that would be done anew for each weight.
    """
    return schedule_of(config).splits_backward and config.recompute is Recompute.none


def in_flight(config: ParallelConfig, pp_rank: int, micro_batches: int) -> list[InFlight]:
    """Times of a step at which a rank keeps most.

    At any other time it keeps no more than at one of these, however large a micro-batch is in each of its stages, where
    being halfway adds the same in each.
    """
    if config.pp == 1:
        return [InFlight((1,), (0,))]
    schedule = schedule_of(config)
    if schedule.in_rounds:
        return _in_rounds(config, pp_rank, micro_batches)
    if schedule.placement is not Placement.v:
        stages = stages_per_rank(config)
        each = chunks_held(config, pp_rank, micro_batches) // stages
        return [InFlight((each,) * stages, (0,) * stages)]
    if config.schedule == "dualpipev":
        found = _dualpipev(config.pp, pp_rank)
    else:
        found = _zbv(config.pp, pp_rank, micro_batches)
    if splits_backward(config):
        return found
    return [InFlight(time.kept, (0, 0)) for time in found]


def received_early(config: ParallelConfig) -> int:
    """Hidden states, or gradients of them, that a rank has received before their turn, or still has after it, at most.

    At the times when it keeps most. Where several stages are on a rank the senders are ahead of it; on the first rank
    of `interleaved_zero_bubble` there may be some more.
    """
    if config.pp == 1:
        return 0
    return {"gpipe": 1, "looped_bfs": 1, "1f1b": 2}.get(config.schedule, 3)


def _in_rounds(config: ParallelConfig, pp_rank: int, micro_batches: int) -> list[InFlight]:
    """Micro-batches go through a rank's stages in rounds, forward upwards and backward downwards."""
    most, behind = chunks_held(config, pp_rank, micro_batches), 0
    if schedule_of(config).splits_backward:
        # The weights' turn comes this many micro-batches after the input's.
        behind = pp_rank + 1
        if not splits_backward(config):
            most, behind = most - pp_rank, 0
    size = round_of(config.pp, micro_batches)
    return list(_most_in_rounds(stages_per_rank(config), size, micro_batches // size, most, behind))


@functools.lru_cache(maxsize=65_536)  # a search of layouts asks for the same ones many times
def _most_in_rounds(stages: int, size: int, rounds: int, most: int, behind: int) -> tuple[InFlight, ...]:
    """`most`: chunks kept before the first backward; `behind`: backwards by which the weights' turn comes later."""
    # From some round on each is like the one before.
    rounds = min(rounds, most // (stages * size) + 3)
    forward = [stage for _ in range(rounds) for stage in range(stages) for _ in range(size)]
    backward = [stages - 1 - stage for stage in forward]
    kept = Counter(forward[:most])
    found = set()
    for done, stage in enumerate(backward):
        halfway = Counter(backward[done : done + behind])
        found.add(InFlight(*(tuple(count[one] for one in range(stages)) for count in (kept, halfway))))
        kept[stage] -= 1
        kept.update(forward[done + most : done + most + 1])
    return tuple(sorted(found, key=lambda time: time.kept))


def _zbv(p: int, r: int, m: int) -> list[InFlight]:
    most, down, up = min(2 * p, 2 * m, m + 1 + r), min(m, 2 * p - r), min(m, r + 1)
    found = [InFlight((most - up, up), (0, 1))]
    found.append(InFlight((down, min(most - down, max(0, r - max(0, p - m)))), (1, 0)))
    # After the last forward the weights wait, for the inputs of all that are left.
    lacking = max(0, 2 * p - 1 - m)
    if lacking < p:
        kept = (p - lacking, max(0, r - lacking))
        found.append(InFlight(kept, (min(r + 1, kept[0]), kept[1])))
    return found


def _dualpipev(p: int, r: int) -> list[InFlight]:
    found = [InFlight((2 * p - r, r + 1), (0, 0))]
    if r < p - 1:
        found.append(InFlight((2 * p - r - 1, r + 1), (0, 1)))
    half = (r + 1) // 2
    return [*found, InFlight((p - half, half), (r + 1 - half, half))]
