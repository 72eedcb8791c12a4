"""Numbers in one byte each, in blocks with a scale each: dynamic block-wise quantisation (Dettmers et al. 2022).

A code stands for a sign, a power of ten and a fraction, so that numbers of a block may be seven orders of magnitude
apart. Numbers that are taken out and put in again are the same to the bit.
"""

import functools
import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from train.precision.config import BLOCK

DECADES = 7


def code_values(signed: bool) -> list[float]:
    """What the 256 codes stand for, ascending, the largest 1; without a sign none is below 0.

    Each decade below 1 has twice as many numbers as the one below it, at equal distances from a tenth of it on.
    """
    found = [0.0, 1.0]
    fractions = 6 if signed else 7
    for decade in range(DECADES):
        count = 2 ** max(0, decade + fractions - DECADES + 1)
        edges = [0.1 + 0.9 * place / count for place in range(count + 1)]
        values = [
            (low + high) / 2 * 10.0 ** (decade - DECADES + 1) for low, high in itertools.pairwise(edges)
        ]
        found += values + [-value for value in values] * signed
    return sorted(found)


@functools.cache
def _table(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """What codes stand for, and the bounds between them."""
    values = torch.tensor(code_values(signed), device=device)
    return values, (values[1:] + values[:-1]) / 2


class Blocks:
    """A row of numbers, held in codes."""

    def __init__(self, size: int, signed: bool, device: torch.device) -> None:
        """`size` zeros."""
        self._signed, self._size = signed, size
        self.codes = torch.full((size,), code_values(signed).index(0), dtype=torch.uint8, device=device)
        self.scale = torch.zeros(-(-size // BLOCK), device=device)

    def read(self, start: int, end: int) -> Tensor:
        """Numbers `start`, a multiple of BLOCK, to `end`, fp32."""
        values, _ = _table(self._signed, self.codes.device)
        found = values[self.codes[start:end].int()]
        return (_blocks(found) * self.scale[start // BLOCK : -(-end // BLOCK), None]).view(-1)[: end - start]

    def write(self, start: int, numbers: Tensor) -> None:
        """Replace the numbers from `start`, a multiple of BLOCK, on; the last block must be whole or the last."""
        _, bounds = _table(self._signed, self.codes.device)
        blocks = _blocks(numbers)
        # With its sign: the largest number is 1 of it, and there is no code for -1.
        scale = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
        shares = blocks / torch.where(scale == 0, 1.0, scale)
        codes = torch.bucketize(shares, bounds)
        if not self._signed:
            # A second moment that became 0 would make its update infinite.
            codes = torch.where((codes == 0) & (shares > 0), 1, codes)
        end = start + len(numbers)
        self.codes[start:end].copy_(codes.view(-1)[: len(numbers)])
        self.scale[start // BLOCK : -(-end // BLOCK)].copy_(scale[:, 0])


def _blocks(numbers: Tensor) -> Tensor:
    """Shape (blocks, BLOCK), filled up with zeros."""
    return F.pad(numbers, (0, -len(numbers) % BLOCK)).view(-1, BLOCK)
