"""The one step that all attribution rests on: whose pairs are worse than others', as a whole."""

from dataclasses import dataclass

import numpy as np

from tools.nccl.analyse.pairs import Flags
from tools.nccl.analyse.robust import Indices, median, row_medians, sigma, upper_sigma
from tools.nccl.measurement import Floats

SIGMAS = 6.0
"""A part is suspected when it is that far from the others: one in a thousand million by chance."""
PASSES = 16
LEAST_NOISE = 0.02
"""Sigma of a single pair that is taken at least where few pairs are there to tell it (logarithm)."""
FEW = 8
"""Partners below which a row's own median is too near to its figures to measure their noise."""


@dataclass(frozen=True)
class Table:
    """For each row (a rank, a node, a group) its partners, padded with -1."""

    partner: Indices
    line: Indices
    """Line of the pairs from which an entry comes."""

    @classmethod
    def of(cls, first: Indices, second: Indices, rows: int) -> "Table":
        """Lay pairs out by their ends: each pair is in two rows."""
        row, other = np.concatenate([first, second]), np.concatenate([second, first])
        line = np.tile(np.arange(len(first)), 2)
        order = np.argsort(row, kind="stable")
        counts = np.bincount(row, minlength=rows)
        slot = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        shape = (rows, int(counts.max()) if len(row) else 0)
        partner, lines = np.full(shape, -1), np.full(shape, -1)
        partner[row[order], slot] = other[order]
        lines[row[order], slot] = line[order]
        return cls(partner, lines)

    def values(self, values: Floats) -> Floats:
        """Return the table of a figure of the pairs; NaN where there is no pair."""
        if not len(values):
            return np.full(self.line.shape, np.nan)
        return np.where(self.line >= 0, values[self.line], np.nan)


@dataclass(frozen=True)
class Rows:
    """How each row stands to the usual one."""

    effect: Floats
    """Logarithm of its share of what is usual: -0.1 is about 10 % slower. NaN: not measured."""
    low: Flags
    """Rows that are worse than the others beyond chance."""
    sigma: float
    """Of the effect of a healthy row."""


def low_rows(table: Table, values: Floats, least: float | Floats) -> Rows:
    """Return which rows are low with all healthy partners.

    A bad partner lowers a pair too: the worst rows are set aside first, and the others are judged anew without them.
    values: a figure for each pair, logarithmic, 0 as usual, more is better. least: an effect above -least is never low,
    however sure it is; one figure, or one for each row.
    """
    grid = table.values(values)
    low = np.zeros(len(grid), dtype=bool)
    everything = row_medians(grid)
    effect, spread = everything, 0.0
    reach = np.asarray(least)
    for _ in range(PASSES):
        good = np.where(low[table.partner], np.nan, grid) if low.any() else grid
        with_good = row_medians(good) if low.any() else everything
        effect = np.where(np.isfinite(with_good), with_good, everything)
        effect = effect - median(effect[~low])
        spread = _spread(good, effect, low)
        reach = np.maximum(least, SIGMAS * spread)
        fresh = ~low & (effect < -reach)
        if not fresh.any():
            break
        low |= fresh & (effect <= 0.7 * effect[fresh].min())
    return Rows(effect, low & (effect < -reach), spread)


def _spread(grid: Floats, effect: Floats, low: Flags) -> float:
    """Sigma of a healthy row's effect: as rows are seen to differ, and not less than its number of pairs gives."""
    healthy = grid[~low] - median(grid[~low])
    if not healthy.size:
        return 0.0
    usual = max(1.0, median(np.isfinite(healthy).sum(axis=1)))
    # The median of few is one of them: what is left around it says too little. Then the steadier half of all counts.
    few = max(LEAST_NOISE, min(upper_sigma(healthy), upper_sigma(-healthy)))
    noise = sigma(grid[~low] - effect[~low][:, None]) if usual >= FEW else few
    return float(max(upper_sigma(effect[~low]), 1.25 * noise / np.sqrt(usual)))
