"""What each rank of a pipeline does, one chunk after the other, under schedules whose order is fixed beforehand.

The order is that of torch.distributed.pipelining for the names of `train.layout.stages`, and that of the zero-bubble
paper (Qi et al. 2023) for ZB-H1 and ZB-H2. A chunk is one micro-batch in one stage.

A chunk is written as one number, since millions of them are played: (micro-batch * stages + stage) * 4 + kind. Its
complement (`~chunk`) is a chunk whose result is handed on only when the next chunk of the rank is done too.
"""

from collections.abc import Iterator
from functools import lru_cache

from train.layout.stages import Placement

FORWARD, INPUT, WEIGHTS, BACKWARD = range(4)
"""Kinds: forward, backward for the input, for the weights, for both at once."""

PLACEMENTS = {
    "gpipe": Placement.single,
    "1f1b": Placement.single,
    "zb_h1": Placement.single,
    "zb_h2": Placement.single,
    "looped_bfs": Placement.loop,
    "interleaved_1f1b": Placement.loop,
    "interleaved_zero_bubble": Placement.loop,
    "zbv": Placement.v,
    "dualpipev": Placement.v,
}

Order = list[int]


@lru_cache(maxsize=128)
def orders(schedule: str, ranks: int, per_rank: int, micro_batches: int, size: int) -> tuple[Order, ...]:
    """Return the order of each rank: `per_rank` stages on each, `size` micro-batches in a round."""
    p, v, m = ranks, per_rank, micro_batches
    if schedule == "gpipe":
        return tuple(_breadth_first(p, 1, m, r, turned=False) for r in range(p))
    if schedule == "looped_bfs":
        return tuple(_breadth_first(p, v, m, r, turned=True) for r in range(p))
    if schedule == "1f1b":
        return tuple(_one_forward_one_backward(p, m, r) for r in range(p))
    if schedule == "interleaved_1f1b":
        return tuple(_interleaved(p, v, m, size, r) for r in range(p))
    if schedule in ("interleaved_zero_bubble", "zb_h1"):
        return tuple(_zero_bubble(p, v, m, size, r, ahead=p - 1 - r, behind=r) for r in range(p))
    if schedule == "zb_h2":
        return tuple(_zero_bubble(p, 1, m, 1, r, ahead=2 * (p - 1 - r), behind=2 * r) for r in range(p))
    return tuple((_zbv if schedule == "zbv" else _dualpipev)(p, m, r) for r in range(p))


def rank_of(stage: int, ranks: int, placement: Placement) -> int:
    """Rank that holds a stage."""
    if placement is Placement.v and stage >= ranks:
        return 2 * ranks - 1 - stage
    return stage % ranks


def _breadth_first(p: int, v: int, m: int, r: int, *, turned: bool) -> Order:
    """All forwards, stage by stage, then all backwards; `turned`: of the last micro-batch first."""
    stages = range(r, p * v, p)
    step = 4 * p * v
    upwards = [(i * step) + 4 * s for s in stages for i in range(m)]
    back = range(m)[::-1] if turned else range(m)
    return upwards + [(i * step) + 4 * s + BACKWARD for s in reversed(stages) for i in back]


def _one_forward_one_backward(p: int, m: int, r: int) -> Order:
    ahead = min(m, p - r)
    forward = [4 * (i * p + r) for i in range(m)]
    backward = [chunk + BACKWARD for chunk in forward]
    steady = [chunk for pair in zip(backward, forward[ahead:], strict=False) for chunk in pair]
    return forward[:ahead] + steady + backward[m - ahead :]


def _in_rounds(p: int, v: int, m: int, size: int, r: int, *, down: bool) -> Order:
    """Chunks in rounds of `size` micro-batches that go through all stages of the rank, upwards or downwards."""
    stages = range(r, p * v, p)
    return [
        4 * (i * p * v + s)
        for first in range(0, m, size)
        for s in (reversed(stages) if down else stages)
        for i in range(first, min(m, first + size))
    ]


def _interleaved(p: int, v: int, m: int, size: int, r: int) -> Order:
    forward = _in_rounds(p, v, m, size, r, down=False)
    backward = [chunk + BACKWARD for chunk in _in_rounds(p, v, m, size, r, down=True)]
    ahead = min(m * v, (v - 1) * size + 2 * (p - 1 - r))
    steady = [chunk for pair in zip(forward[ahead:], backward, strict=False) for chunk in pair]
    return forward[:ahead] + steady + backward[m * v - ahead :]


def _zero_bubble(p: int, v: int, m: int, size: int, r: int, *, ahead: int, behind: int) -> Order:
    """Forward and backward by turns after `ahead` forwards; the weights come `behind` chunks after their input."""
    forward = _in_rounds(p, v, m, size, r, down=False)
    backward = _in_rounds(p, v, m, size, r, down=True)
    ahead = min(m * v, (v - 1) * size + ahead)
    order = forward[:ahead]
    for done, chunk in enumerate(backward):
        order += forward[ahead + done : ahead + done + 1]
        order.append(chunk + INPUT)
        if done >= behind:
            order.append(backward[done - behind] + WEIGHTS)
    return order + [chunk + WEIGHTS for chunk in backward[max(0, m * v - behind) :]]


class _Turns:
    """The chunks of the two stages of a rank in a folded pipeline, each kind counted on its own."""

    def __init__(self, p: int, r: int) -> None:
        self.order: Order = []
        self._step = 8 * p
        self._stage = (4 * r, 4 * (2 * p - 1 - r))
        self._next = [[0, 0, 0], [0, 0, 0]]
        self._waiting: list[tuple[int, int]] = []

    def forward(self, side: int, *, held_back: bool = False) -> None:
        chunk = self._chunk(side, FORWARD)
        self.order.append(~chunk if held_back else chunk)

    def input(self, side: int) -> None:
        self._waiting.append((side, self._next[side][INPUT]))
        self.order.append(self._chunk(side, INPUT) + INPUT)

    def backward(self, side: int) -> None:
        self._next[side][WEIGHTS] += 1
        self.order.append(self._chunk(side, INPUT) + BACKWARD)

    def weights(self, side: int) -> None:
        self.order.append(self._chunk(side, WEIGHTS) + WEIGHTS)

    def oldest_weights(self) -> None:
        """Of the input that was first to be done without them, if there is one."""
        if self._waiting:
            side, index = self._waiting.pop(0)
            self._next[side][WEIGHTS] += 1
            self.order.append(index * self._step + self._stage[side] + WEIGHTS)

    def done(self, side: int, kind: int) -> int:
        return self._next[side][kind]

    def _chunk(self, side: int, kind: int) -> int:
        index = self._next[side][kind]
        self._next[side][kind] = index + 1
        return index * self._step + self._stage[side]


def _zbv(p: int, m: int, r: int) -> Order:
    """ZB-V. With fewer micro-batches than fill it, those that there are not are left out."""
    enough = max(m, 2 * p - 1)
    turns = _Turns(p, r)
    for _ in range(2 * (p - r) - 1):
        turns.forward(0)
    for _ in range(r):
        turns.forward(1)
        turns.forward(0)
    for _ in range(p - r):
        turns.forward(1)
        turns.input(1)
        turns.weights(1)
    while turns.done(1, FORWARD) < enough:
        if turns.done(0, FORWARD) < enough:
            turns.forward(0)
        turns.input(0)
        turns.weights(0)
        turns.forward(1)
        turns.input(1)
        turns.weights(1)
    for _ in range(r):
        turns.input(0)
        turns.input(1)
    for _ in range(p - r):
        turns.input(0)
        turns.weights(0)
    for side in (1, 0):
        while turns.done(side, WEIGHTS) < enough:
            turns.weights(side)
    return [chunk for chunk in turns.order if chunk < 8 * p * m]


def _dualpipev(p: int, m: int, r: int) -> Order:
    """DualPipe, folded: a forward is computed beside a backward, and handed on with it."""
    turns = _Turns(p, r)
    for _ in range(2 * (p - 1 - r)):
        turns.forward(0)
    for _ in range(r + 1):
        turns.forward(0)
        turns.forward(1)
    for _ in range(p - 1 - r):
        turns.input(1)
        turns.oldest_weights()
        turns.forward(1)
    for index in range(m - 2 * p + r + 1):
        # The last rank, which turns round, begins with the two one after the other.
        turns.forward(0, held_back=index > 0 or r < p - 1)
        turns.backward(1)
        turns.forward(1, held_back=True)
        turns.backward(0)
    for _ in range(p - 1 - r):
        turns.backward(1)
        turns.forward(1, held_back=True)
        turns.backward(0)
    # From the middle of these on the weights wait, for the inputs of all that are left.
    for index in range(2 * (r + 1)):
        (turns.input if index > r else turns.backward)(1 - index % 2)
    for _ in range(p - 1 - r):
        turns.oldest_weights()
        turns.input(0)
    for _ in range(r + 1):
        turns.oldest_weights()
    return turns.order


def named(order: Order, stages: int) -> Iterator[tuple[int, int, int, bool]]:
    """Kind, stage, micro-batch of each chunk, and whether it is handed on with the next one only."""
    for chunk in order:
        plain = ~chunk if chunk < 0 else chunk
        yield plain % 4, plain // 4 % stages, plain // (4 * stages), chunk < 0
