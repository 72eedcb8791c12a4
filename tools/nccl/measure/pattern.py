"""Contents of buffers that show every element that is lost, moved or not added, and cost no memory to check.

A pattern repeats after a short period, which divides no power of two: a buffer is one table after another, beginning
somewhere in it. So filling and checking are copies and comparisons with a table. All values are small integers, which
every type of numbers adds up without rounding.
"""

import torch
from torch import Tensor

EXACT = {torch.float32: 1 << 24, torch.float16: 1 << 11, torch.bfloat16: 1 << 8}
"""Integers up to this are exact."""
POISON = -1.0
"""No pattern has it: what nobody has written shows."""
_PERIOD = 251
_ROWS = 1 << 16
"""Of a buffer that are compared at once."""


class Moved:
    """What a rank sends to others, each of its elements told from its neighbours and from other ranks'."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        # The period is prime: only ranks a multiple of it apart look alike.
        self._table = (torch.arange(_PERIOD) * 7 % _PERIOD).to(dtype=dtype, device=device)

    def table(self, rank: int, block: int = 0) -> Tensor:
        """The table of `rank`, of the block for or from another rank."""
        return self._table.roll(-(rank * 31 + block * 17))


class Added:
    """What ranks add up: the sum of all is known, and lacks something at every place where one is missing."""

    def __init__(self, ranks: int, dtype: torch.dtype, device: torch.device) -> None:
        # Values 0, 1, 2 and then zeros, so many that no sum passes what is exact.
        least = -(-4 * ranks // (EXACT[dtype] - 4))
        self._period = next(period for period in (3, 5, 7, *range(9, 1 << 20, 2)) if period >= least)
        table = torch.arange(self._period)
        self._table = torch.where(table < 3, table, 0).to(dtype=dtype, device=device)
        turns, rest = divmod(ranks, self._period)
        total = torch.full((self._period,), 3.0 * turns)
        for rank in range(rest):
            total += self._table.to("cpu", torch.float32).roll(-rank)
        self.sum = total.to(dtype=dtype, device=device)
        """The table of the sum over all ranks."""

    def table(self, rank: int) -> Tensor:
        """The table of a rank."""
        return self._table.roll(-rank)


def fill(buffer: Tensor, table: Tensor, first: int = 0) -> None:
    """Write a table again and again into a buffer, whose first element is number `first` of the pattern."""
    table = table.roll(-first)
    head, rest = _cut(buffer, table)
    head.copy_(table.expand_as(head))
    rest.copy_(table[: rest.numel()])


def count_wrong(buffer: Tensor, table: Tensor, first: int = 0) -> Tensor:
    """Return how many elements are not as `fill` writes them: a tensor of one number on the buffer's device."""
    table = table.roll(-first)
    head, rest = _cut(buffer, table)
    wrong = (rest != table[: rest.numel()]).sum()
    for rows in head.split(_ROWS):
        wrong += (rows != table).sum()
    return wrong


def _cut(buffer: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Cut into rows of one table each, and what is left."""
    whole = buffer.numel() - buffer.numel() % table.numel()
    return buffer[:whole].view(-1, table.numel()), buffer[whole:]
