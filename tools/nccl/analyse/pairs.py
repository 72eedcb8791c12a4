"""One line for each pair of ranks, from all the tests of it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tools.nccl.analyse.robust import Indices, by_group, median
from tools.nccl.measurement import Exchanges, Floats

Flags = NDArray[np.bool_]

UNSTEADY = 0.5
"""A slowest repetition below this share of the median one, compared with what is usual, counts as a failure."""
FLAKY_TESTS, FLAKY_SHARE = 3, 0.4
"""A pair is flaky when at least so many tests, and so large a share of them, failed."""


@dataclass(frozen=True)
class Pairs:
    """Parallel arrays, a line for each pair of ranks that was tested."""

    first: Indices
    second: Indices
    speed: Floats
    """Logarithm of the bandwidth, the better median of the tests; NaN: no answer or not measured."""
    loaded: Floats
    """Logarithm of the bandwidth of the first test that answered, when as many as could exchanged at the same time."""
    latency: Floats
    """Logarithm of the latency in s, the lower median of the tests."""
    tests: Indices
    unsteady: Indices
    """Tests with a repetition that was far slower than the others, or answered by some tests only."""
    silent: Flags
    """Most tests had no answer."""
    wrong: Flags
    """Values arrived that had not been sent, in at least one test."""
    range: Floats
    """Logarithm of the best over the worst bandwidth of the tests."""

    def __len__(self) -> int:
        return len(self.first)

    @property
    def flaky(self) -> Flags:
        """Pairs that work only sometimes."""
        found: Flags = (self.unsteady >= FLAKY_TESTS) & (self.unsteady >= FLAKY_SHARE * self.tests)
        return found & ~self.silent

    def take(self, chosen: Flags) -> "Pairs":
        """Return some of the lines."""
        return Pairs(**{name: getattr(self, name)[chosen] for name in self.__dataclass_fields__})


def gather(exchanges: Exchanges, ranks: int) -> Pairs:
    """Bring the tests of each pair together; a test that measured nothing (NaN) counts as none."""
    measured = np.isfinite(exchanges.bandwidth)
    first = np.minimum(exchanges.first, exchanges.second)[measured].astype(np.int64)
    second = np.maximum(exchanges.first, exchanges.second)[measured].astype(np.int64)
    keys, line = np.unique(first * ranks + second, return_inverse=True)
    count = len(keys)
    bandwidth = exchanges.bandwidth[measured]
    answered = bandwidth > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        speed = np.where(answered, np.log(bandwidth), np.nan)
        steady = np.log(exchanges.slowest[measured]) - speed
        latency = np.log(exchanges.latency_s[measured])
    usual = median(steady)
    failed = answered & (steady < usual + np.log(UNSTEADY))
    tests = np.bincount(line, minlength=count)
    silent = np.bincount(line[~answered], minlength=count)
    highest = by_group(speed, line, count, 1.0)
    loaded = np.full(count, np.nan)
    loaded[line[answered][::-1]] = speed[answered][
        ::-1
    ]  # numpy keeps the last of equal indices: the first test
    return Pairs(
        first=keys // ranks,
        second=keys % ranks,
        speed=by_group(speed, line, count),
        loaded=loaded,
        latency=-by_group(-latency, line, count),
        tests=tests,
        unsteady=np.bincount(line[failed], minlength=count) + np.where(silent < tests, silent, 0),
        silent=silent > tests / 2,
        wrong=np.bincount(line[exchanges.wrong[measured] > 0], minlength=count) > 0,
        range=highest - by_group(speed, line, count, 0.0),
    )
