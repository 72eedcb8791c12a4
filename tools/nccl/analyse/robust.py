"""Statistics that a few wild values do not move."""

import numpy as np
from numpy.typing import NDArray

from tools.nccl.measurement import Floats

Indices = NDArray[np.int64]

NORMAL = 1.4826
"""Sigma of a normal distribution over its MAD (Rousseeuw and Croux, JASA 88, 1993)."""
TABLE = 10
"""Entries of a table of groups, per value, up to which a table is made."""


def median(values: Floats) -> float:
    """Median of what is finite; NaN of nothing."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else float("nan")


def mad(values: Floats) -> float:
    """Median absolute deviation of what is finite, not scaled; NaN of nothing."""
    return median(np.abs(values - median(values)))


def sigma(values: Floats) -> float:
    """Spread as the sigma of a normal distribution, by the MAD; 0 of nothing."""
    found = NORMAL * mad(values)
    return found if np.isfinite(found) else 0.0


def upper_sigma(values: Floats) -> float:
    """Spread of the better half alone: faults only ever lower a figure."""
    center = median(values)
    above = values[np.isfinite(values) & (values >= center)] - center
    return NORMAL * float(np.median(above)) if len(above) > 1 else 0.0


def row_medians(table: Floats) -> Floats:
    """Median of each row of a table with NaN for what is missing; NaN of an empty row."""
    if table.shape[1] == 0:
        return np.full(len(table), np.nan)
    ordered = np.sort(table, axis=1)  # NaN come last
    counts = np.isfinite(ordered).sum(axis=1)
    rows = np.arange(len(table))
    low = ordered[rows, np.maximum(counts - 1, 0) // 2]
    high = ordered[rows, np.minimum(counts // 2, table.shape[1] - 1)]
    return np.where(counts > 0, (low + high) / 2, np.nan)


def by_group(values: Floats, group: Indices, groups: int, quantile: float = 0.5) -> Floats:
    """Return a quantile of each group of values: an element of the group, of two in question the higher one.

    group: number of each value's group, 0 to groups - 1. NaN are left out; a group of nothing gives NaN.
    """
    finite = np.isfinite(values)
    values, group = values[finite], group[finite]
    counts = np.bincount(group, minlength=groups)
    place = np.ceil(quantile * np.maximum(counts - 1, 0)).astype(np.int64)
    found = np.full(groups, np.nan)
    some = np.flatnonzero(counts)
    starts = np.cumsum(counts) - counts
    widest = int(counts.max()) if len(counts) else 0
    if widest * groups > TABLE * max(1, len(values)):
        ordered = values[np.lexsort((values, group))]
        found[some] = ordered[(starts + place)[some]]
        return found
    # Groups that are alike in size are sorted as rows of a table, which is many times faster.
    order = np.argsort(group, kind="stable")
    table = np.full((groups, widest), np.nan)
    table[group[order], np.arange(len(order)) - starts[group[order]]] = values[order]
    table.sort(axis=1)
    found[some] = table[some, place[some]]
    return found


def confidence(deviations: float) -> float:
    """Map a distance in sigmas to 0..1: half of the doubt goes with every two sigmas."""
    return float(1 - 0.5 ** max(0.0, deviations / 2))


def runs(numbers: Indices) -> list[tuple[int, ...]]:
    """Split sorted numbers where one is missing: rails side by side may share a NIC."""
    parts = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    return [tuple(int(one) for one in part) for part in parts if len(part)]
