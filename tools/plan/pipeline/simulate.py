"""A pipeline played chunk by chunk: from the times of its stages to the time of a step, its bubbles and what is kept.

Schedules are those of `train.layout.stages.SCHEDULES` in the order of torch.distributed.pipelining, and those of the
zero-bubble paper (Qi et al. 2023) with one stage a rank: `zb_h1` and `zb_h2` in fixed orders, `zb_1p` and `zb_2p` in
orders searched for the given times with memory for p and 2 p micro-batches, to be short in `longest_s`. `zb_v` is
another name of `zbv`.

Times are played as whole numbers, in units of a 2^30th of the longest, so that what is equal stays equal, and a step of
many micro-batches can be had from one of few (`repeat`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from contract.errors import ConfigError
from tools.plan.pipeline.greedy import greedy_orders
from tools.plan.pipeline.orders import BACKWARD, FORWARD, INPUT, PLACEMENTS, WEIGHTS, Order, orders, rank_of
from tools.plan.pipeline.play import Played, Rules, play
from tools.plan.pipeline.repeat import play_few
from tools.plan.stage import Stage
from train.layout.stages import SCHEDULES, Placement, round_of

SEARCHED = {"zb_1p": 1, "zb_2p": 2}
"""Schedules whose order depends on the times, and how many micro-batches they hold, times the ranks."""
NAMES = (*SCHEDULES, "zb_h1", "zb_h2", *SEARCHED, "zb_v")

TOLERANCE = 2e-3
"""Share of its time by which a step that is not played whole may be off."""

_UNITS = 1 << 30
_LETTERS = {FORWARD: "F", INPUT: "B", WEIGHTS: "W", BACKWARD: "BW"}


@dataclass(frozen=True)
class Span:
    """One chunk, computed."""

    rank: int
    stage: int
    micro_batch: int
    kind: str
    """F forward, B backward for the input, W for the weights, BW for both at once."""
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """A step of a pipeline."""

    total_s: float
    """From the first chunk of all to the last."""
    busy_s: tuple[float, ...]
    """What each rank computes."""
    starts_s: tuple[float, ...]
    """When each rank begins its first chunk, 0 for the first rank."""
    ends_s: tuple[float, ...]
    """When each rank is done."""
    held: tuple[float, ...]
    """Most chunks whose activations each rank keeps at once."""
    spans: tuple[Span, ...] = ()
    """In the order of their start; only if they are asked for."""

    @property
    def bubble(self) -> float:
        """Share of the ranks' time, 0 to 1, in which they compute nothing."""
        return 1 - sum(self.busy_s) / (self.total_s * len(self.busy_s)) if self.total_s else 0.0

    @property
    def longest_s(self) -> float:
        """Longest time from a rank's first chunk to its last.

        What steps in a row take where each rank goes into the next one by itself, as in the zero-bubble paper. Where
        all wait for each other, as for the norm of gradients, it is `total_s`.
        """
        return max(end - start for start, end in zip(self.starts_s, self.ends_s, strict=True))


def placement_of(schedule: str) -> Placement:
    """Which stages a rank has; raises `ConfigError` for a name that there is not."""
    if schedule in SEARCHED:
        return Placement.single
    if schedule not in NAMES:
        raise ConfigError(f"schedule={schedule}: choose {', '.join(NAMES)}")
    return PLACEMENTS["zbv" if schedule == "zb_v" else schedule]


def simulate(
    schedule: str,
    ranks: int,
    stages: Sequence[Stage],
    micro_batches: int,
    handover_s: float = 0.0,
    *,
    spans: bool = False,
    overlaps: bool = True,
    most_held: float | None = None,
    kept_for_weights: float = 1.0,
    tolerance: float = TOLERANCE,
) -> Timeline:
    """Play a step.

    `stages`: times of one micro-batch in each, first to last; as many for each rank as the schedule wants. Where the
    backward is not split, as with recompute, give `weights_s` 0 and all of it as `backward_s`.
    `handover_s`: from the end of a chunk until another rank may use its result (a rank's own stages use it at once).
    `overlaps`: that passes beside computation. If not, as with blocking sends, a rank computes nothing while it sends,
    nor while it receives: both at the same time between two chunks, `handover_s` long from when both are there.
    `most_held`: for `zb_1p` and `zb_2p`, micro-batches that a rank may keep in place of p and 2 p.
    `kept_for_weights`: share of a chunk's activations that stays from the backward for the input until that for the
    weights: all, or 32 / (34 + 5 a s / h) of a layer with a square of scores (Qi et al. 2023).
    With `spans` all micro-batches are played. Without, as few as tell the rest: mostly exactly, else so that the times
    are off by no more than `tolerance`, a share of them. With 0 they are always exact.
    Raises `ConfigError` if the schedule cannot be run.
    """
    schedule = "zbv" if schedule == "zb_v" else schedule
    per_rank = _check(schedule, ranks, stages, micro_batches, handover_s, most_held, kept_for_weights)
    rules, unit = _rules(schedule, ranks, stages, handover_s, overlaps)
    placement, whole = rules.placement, rules.stages
    found, played = _play(
        schedule, per_rank, micro_batches, rules, most_held, kept_for_weights, tolerance, whole=spans
    )
    busy = [0] * ranks
    for stage, times in enumerate(whole):
        busy[rank_of(stage, ranks, placement)] += micro_batches * sum(times)
    unsplit = not any(weights for _, _, weights in whole)
    return Timeline(
        max(played.ends) * unit,
        tuple(time * unit for time in busy),
        tuple(time * unit for time in played.starts),
        tuple(time * unit for time in played.ends),
        tuple(most_chunks(order, 0.0 if unsplit else kept_for_weights) for order in found),
        tuple(_spans(found, played, rules, unit)) if spans else (),
    )


def _rules(
    schedule: str, ranks: int, stages: Sequence[Stage], handover_s: float, overlaps: bool
) -> tuple[Rules, float]:
    """Times as whole numbers, and seconds of their unit."""
    unit = max(handover_s, *(max(one.forward_s, one.backward_s, one.weights_s) for one in stages)) / _UNITS
    whole = tuple(_whole(one, unit) for one in stages)
    handover = round(handover_s / unit) if unit else 0
    return Rules(ranks, placement_of(schedule), whole, handover, overlaps), unit


def _play(
    schedule: str,
    per_rank: int,
    micro_batches: int,
    rules: Rules,
    most_held: float | None,
    kept_for_weights: float,
    tolerance: float,
    *,
    whole: bool,
) -> tuple[Sequence[Order], Played]:
    found: Sequence[Order]
    if schedule in SEARCHED:
        limit = SEARCHED[schedule] * rules.ranks if most_held is None else most_held
        return _search(rules, micro_batches, limit, kept_for_weights)
    size = round_of(rules.ranks, micro_batches)
    few = None if whole else play_few(schedule, per_rank, micro_batches, size, rules, tolerance)
    if few is not None:
        return few
    found = orders(schedule, rules.ranks, per_rank, micro_batches, size)
    return found, play(found, rules, micro_batches)


def _search(rules: Rules, micro_batches: int, limit: float, kept: float) -> tuple[Sequence[Order], Played]:
    """Return the best of the searched order and of the fixed ones that keep to the limit."""
    found: list[Sequence[Order]] = [greedy_orders(rules.stages, rules.handover, micro_batches, limit, kept)]
    for fixed in ("zb_h1", "zb_h2"):
        one = orders(fixed, rules.ranks, 1, micro_batches, 1)
        if max(most_chunks(order, kept) for order in one) <= limit:
            found.append(one)
    every = [(one, play(one, rules, micro_batches)) for one in found]
    return min(every, key=lambda pair: pair[1].longest)


def total_s(
    schedule: str,
    ranks: int,
    stages: Sequence[Stage],
    micro_batches: int,
    handover_s: float = 0.0,
    *,
    overlaps: bool = True,
) -> float:
    """Time of a step, exact, without what else `simulate` finds; meant for few micro-batches."""
    schedule = "zbv" if schedule == "zb_v" else schedule
    per_rank = _check(schedule, ranks, stages, micro_batches, handover_s, None, 1.0)
    rules, unit = _rules(schedule, ranks, stages, handover_s, overlaps)
    _, played = _play(schedule, per_rank, micro_batches, rules, None, 1.0, 0.0, whole=True)
    return max(played.ends) * unit


def most_chunks(order: Order, kept_for_weights: float) -> float:
    """Most chunks that a rank keeps at once."""
    change = {FORWARD: 1.0, INPUT: kept_for_weights - 1, WEIGHTS: -kept_for_weights, BACKWARD: -1.0}
    held = most = 0.0
    for chunk in order:
        held += change[(~chunk if chunk < 0 else chunk) % 4]
        most = max(most, held)
    return round(most, 6)


def _whole(stage: Stage, unit: float) -> tuple[int, int, int]:
    if not unit:
        return 0, 0, 0
    return round(stage.forward_s / unit), round(stage.backward_s / unit), round(stage.weights_s / unit)


def _check(
    schedule: str,
    ranks: int,
    stages: Sequence[Stage],
    micro_batches: int,
    handover_s: float,
    most_held: float | None,
    kept_for_weights: float,
) -> int:
    """Raise `ConfigError` for what cannot be played; returns the stages of a rank."""
    if ranks < 1 or micro_batches < 1:
        raise ConfigError(
            f"schedule={schedule} with {ranks} ranks and {micro_batches} micro-batches: give 1 or more of each"
        )
    wanted = {Placement.single: (1, "one"), Placement.v: (2, "two"), Placement.loop: (0, "one or more")}
    each, words = wanted[placement_of(schedule)]
    if not stages or len(stages) % ranks or (each and len(stages) != each * ranks):
        raise ConfigError(
            f"schedule={schedule} with {ranks} ranks wants {words} stages a rank: {len(stages)} given"
        )
    numbers = [number for one in stages for number in (one.forward_s, one.backward_s, one.weights_s)]
    if not all(0 <= number < float("inf") for number in (*numbers, handover_s)):
        raise ConfigError(f"schedule={schedule}: times of stages and of handing over must be 0 or more")
    if not 0 <= kept_for_weights <= 1:
        raise ConfigError(f"kept_for_weights={kept_for_weights}: give a share, 0 to 1")
    if most_held is not None and (schedule not in SEARCHED or most_held < 1):
        raise ConfigError(
            f"most_held={most_held} with schedule={schedule}: give 1 or more, to {' or '.join(SEARCHED)} only"
        )
    known = SCHEDULES.get(schedule)
    fewest = known.fewest(ranks) if known else 1
    if micro_batches < fewest:
        raise ConfigError(
            f"schedule={schedule} with {ranks} ranks needs {fewest} micro-batches: {micro_batches} given"
        )
    if known and known.in_rounds and micro_batches % round_of(ranks, micro_batches):
        raise ConfigError(
            f"schedule={schedule} with {ranks} ranks takes micro-batches in equal rounds of {ranks} or a few more: "
            f"{micro_batches} given"
        )
    return len(stages) // ranks


def _spans(found: Sequence[Order], played: Played, rules: Rules, unit: float) -> list[Span]:
    count = len(rules.stages)
    spans = []
    for rank, order in enumerate(found):
        for chunk, end in zip(order, played.each[rank], strict=True):
            plain = ~chunk if chunk < 0 else chunk
            kind, stage = plain % 4, plain // 4 % count
            start = end - rules.time(kind, stage)
            spans.append(Span(rank, stage, plain // (4 * count), _LETTERS[kind], start * unit, end * unit))
    return sorted(spans, key=lambda span: (span.start_s, span.rank, span.end_s))
