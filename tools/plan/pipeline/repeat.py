"""A step of many micro-batches from one of few.

An order of more micro-batches is one of fewer with a period put in at the same point of each rank. What is played is
nothing but sums and the later of two times: if before that point each chunk comes between a and b later than the same
chunk of the period before, so it does in every period put in after it, and what follows comes between n a and n b
later for n periods. Mostly a and b are the same once the ranks have fallen into step, and the result is exactly that of
the whole step; else it is in the middle, and off by half of n (b - a) at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tools.plan.pipeline.orders import BACKWARD, INPUT, PLACEMENTS, Order, orders, rank_of
from tools.plan.pipeline.play import Played, Rules, needs_of, play
from train.layout.stages import SCHEDULES

_WORTH = 0.7
"""Share of the micro-batches up to which playing fewer is less work."""


@dataclass(frozen=True)
class _Period:
    """Where a period can be put in."""

    cuts: tuple[int, ...]
    """For each rank, chunks before."""
    chunks: int
    """Of a rank in a period."""
    window: int
    """Periods before the cut that anything after it waits for."""


def play_few(
    schedule: str, per_rank: int, micro_batches: int, size: int, rules: Rules, tolerance: float
) -> tuple[Sequence[Order], Played] | None:
    """Play few micro-batches and return the end of a step of all, or None if they do not tell it.

    `tolerance`: share of the time by which the result may be off. What is returned has the ends of the whole step, and
    the orders (and `each`) of the few.
    """
    known = SCHEDULES.get(schedule)
    in_rounds = known is not None and known.in_rounds
    step = size if in_rounds else 1
    filled_by = 2 * rules.ranks if per_rank == 2 or schedule == "zb_h2" else rules.ranks
    periods = -(-filled_by // step) + (3 if in_rounds else 8)
    for few in (periods * step, 2 * periods * step):
        if few > _WORTH * micro_batches:
            break
        period = _period(schedule, rules.ranks, per_rank, few, size, step)
        if period is not None:
            found = orders(schedule, rules.ranks, per_rank, few, size)
            played = play(found, rules, few)
            least, most = _later(period, played)
            count = (micro_batches - few) // step
            more = count * (least + most) // 2
            if count * (most - least) <= 2 * tolerance * (max(played.ends) + more):
                return found, Played(played.starts, [end + more for end in played.ends], played.each)
    return None


def _later(period: _Period, played: Played) -> tuple[int, int]:
    """How much later a chunk ends than the same of the period before: least and most."""
    span = period.window * period.chunks
    found: set[int] = set()
    for cut, ends in zip(period.cuts, played.each, strict=True):
        now, before = ends[cut - span : cut], ends[cut - span - period.chunks : cut - period.chunks]
        found.update(map(int.__sub__, now, before))
    return min(found), max(found)


@lru_cache(maxsize=64)
def _period(schedule: str, ranks: int, per_rank: int, few: int, size: int, step: int) -> _Period | None:
    """Find where a period goes in, for `step` more micro-batches; None if there is no such place."""
    shorter = orders(schedule, ranks, per_rank, few, size)
    longer = orders(schedule, ranks, per_rank, few + step, size)
    chunks = len(longer[0]) - len(shorter[0])
    shift = 4 * ranks * per_rank * step
    cuts = []
    for short, long in zip(shorter, longer, strict=True):
        cut = _common(short, long)
        while cut and short[cut - 1] < 0:
            cut -= 1  # not between a chunk and the one that it is handed on with
        if len(long) - len(short) != chunks or long[cut + chunks :] != _shifted(short[cut:], shift):
            return None
        cuts.append(cut)
    window = _reach(schedule, ranks, per_rank, few, shorter, cuts, chunks)
    if window is None:
        return None
    for cut, short, long in zip(cuts, shorter, longer, strict=True):
        first = cut - (window + 1) * chunks
        if first < 0 or long[first + chunks : cut + chunks] != _shifted(short[first:cut], shift):
            return None
    return _Period(tuple(cuts), chunks, window)


def _common(one: Order, other: Order) -> int:
    """Length of the beginning that two orders share."""
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


def _shifted(order: Order, shift: int) -> Order:
    return [chunk + shift if chunk >= 0 else chunk - shift for chunk in order]


def _reach(
    schedule: str,
    ranks: int,
    per_rank: int,
    few: int,
    found: Sequence[Order],
    cuts: Sequence[int],
    chunks: int,
) -> int | None:
    """Periods before the cut that chunks after it, or in the last period before it, wait for; None if not the reverse.

    What is before the cut must not wait for anything after it.
    """
    stages = ranks * per_rank
    count = 4 * stages
    owner = [rank_of(stage, ranks, PLACEMENTS[schedule]) for stage in range(stages)]
    needs = [needs_of(number % 4, number // 4, stages) for number in range(count)]
    place = [0] * (count * few)
    for order in found:
        for index, chunk in enumerate(order):
            if chunk < 0:
                place[~chunk] = index + 1
            else:
                place[chunk - (BACKWARD - INPUT) if chunk % 4 == BACKWARD else chunk] = index
    most = 1
    for order, cut in zip(found, cuts, strict=True):
        for index, chunk in enumerate(order):
            plain = chunk if chunk >= 0 else ~chunk
            offset = needs[plain % count]
            if not offset:
                continue
            result = plain + offset
            rank = owner[result // 4 % stages]
            before = cuts[rank] - place[result]
            if before <= 0 and index < cut:
                return None
            if index >= cut - chunks:
                most = max(most, before)
    return -(-most // chunks)
