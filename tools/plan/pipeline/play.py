"""Orders of chunks played on ranks: when each chunk ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tools.plan.pipeline.orders import BACKWARD, FORWARD, INPUT, WEIGHTS, Order, rank_of
from train.layout.stages import Placement


@dataclass(frozen=True)
class Rules:
    """What does not change while a pipeline is played; times are whole numbers."""

    ranks: int
    placement: Placement
    stages: tuple[tuple[int, int, int], ...]
    """Times of each: forward, backward for the input, for the weights."""
    handover: int
    overlaps: bool
    """Handing over passes beside computation."""

    def time(self, kind: int, stage: int) -> int:
        """Of one chunk."""
        if kind == BACKWARD:
            return self.stages[stage][INPUT] + self.stages[stage][WEIGHTS]
        return self.stages[stage][kind]


@dataclass(frozen=True)
class Played:
    """Times of a step."""

    starts: list[int]
    """Of each rank's first chunk."""
    ends: list[int]
    """Of each rank's last chunk."""
    each: list[list[int]]
    """Ends of all chunks of each rank, in its order."""

    @property
    def longest(self) -> int:
        """Longest time from a rank's first chunk to its last."""
        return max(end - start for start, end in zip(self.starts, self.ends, strict=True))


class _Link(NamedTuple):
    """What a kind of chunk of a stage waits for, takes, and hands on."""

    time: int
    needs: int
    """From its number to that of the result that it waits for; 0: it waits for none."""
    gives: int
    """From its number to that of its result; -1: no other stage waits for it."""
    later: int
    """From its end until its result may be used."""
    receives: bool
    """Its rank computes nothing while it receives what the chunk needs."""
    sends: bool
    """The same for its result."""
    taker: int
    """Rank that uses the result."""


def play(found: Sequence[Order], rules: Rules, micro_batches: int) -> Played:
    """Play the orders; they must not wait for each other in a circle."""
    count, ranks, handover = 4 * len(rules.stages), rules.ranks, rules.handover
    links = [_link(number % 4, number // 4, rules) for number in range(count)]
    ready = [-1] * (count * micro_batches)
    waits_for = [-1] * ranks
    at, clock, owing = [0] * ranks, [0] * ranks, [False] * ranks
    kept_back: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    each: list[list[int]] = [[] for _ in range(ranks)]
    awake = list(range(ranks))
    while awake:
        rank = awake.pop()
        order, ends, now, owes = found[rank], each[rank], clock[rank], owing[rank]
        waiting = kept_back[rank]
        for index in range(at[rank], len(order)):
            chunk = order[index]
            plain = chunk if chunk >= 0 else ~chunk
            time, needs, gives, later, receives, sends, taker = links[plain % count]
            if needs:
                arrived = ready[plain + needs]
                if arrived < 0:
                    waits_for[rank] = plain + needs
                    break
                if arrived > now:
                    now = arrived
            if receives or owes:
                now += handover
            now += time
            ends.append(now)
            owes = sends
            if chunk < 0:
                if gives >= 0:
                    waiting.append((plain - gives, later, taker))
                continue
            if gives >= 0:
                result = plain - gives
                ready[result] = now + later
                if waits_for[taker] == result:
                    awake.append(taker)
            if waiting:
                for result, later, taker in waiting:
                    ready[result] = now + later
                    if waits_for[taker] == result:
                        awake.append(taker)
                waiting.clear()
        at[rank], clock[rank], owing[rank] = len(ends), now, owes
    assert all(len(ends) == len(order) for ends, order in zip(each, found, strict=True)), "deadlock"
    starts = [ends[0] - links[order[0] % count].time for ends, order in zip(each, found, strict=True)]
    return Played(starts, clock, each)


def needs_of(kind: int, stage: int, stages: int) -> int:
    """From the number of a chunk to that of the result that it waits for; 0: it waits for none on another stage."""
    if kind == FORWARD:
        return -4 if stage else 0
    if kind == WEIGHTS or stage == stages - 1:
        return 0
    return 4 if kind == INPUT else 4 - (BACKWARD - INPUT)


def _link(kind: int, stage: int, rules: Rules) -> _Link:
    stages, rank = len(rules.stages), rank_of(stage, rules.ranks, rules.placement)
    needs = needs_of(kind, stage, stages)
    before, after = (stage - 1, stage + 1) if kind == FORWARD else (stage + 1, stage - 1)
    receives = bool(needs) and rank_of(before, rules.ranks, rules.placement) != rank
    gives = -1
    taker, sends = rank, False
    if kind != WEIGHTS and 0 <= after < stages:
        gives = BACKWARD - INPUT if kind == BACKWARD else 0
        taker = rank_of(after, rules.ranks, rules.placement)
        sends = taker != rank
    blocks = not rules.overlaps
    later = rules.handover if sends and not blocks else 0
    return _Link(rules.time(kind, stage), needs, gives, later, receives and blocks, sends and blocks, taker)
