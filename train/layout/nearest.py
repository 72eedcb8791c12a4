"""Layouts near one that does not work: what a refusal offers instead. Imports no torch."""

import dataclasses
import functools
import heapq
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from train.layout.config import ParallelConfig

AXES = ("dp", "dp_replicate", "dp_shard", "tp", "pp", "cp")
"""The degrees that a user sets, in the order in which they are named."""
OFFERED = 3
MOST_TRIED = 500
"""Layouts that are checked, the nearest first: a refusal must not take long."""
TRIED_AROUND = 64
"""Numbers of nodes that are tried on either side."""


def nearest_layouts(
    parallel: ParallelConfig,
    ranks: int,
    largest: Mapping[str, int],
    fits: Callable[[ParallelConfig], bool],
    ranks_per_node: int,
) -> list[ParallelConfig]:
    """Return up to `OFFERED` layouts of `ranks` ranks that `fits`, with those in front whose tp stays inside a node.

    Near is a small sum of |log2| of the changes of degrees that `parallel` sets. `largest` bounds tp, pp and cp.
    """
    tried = heapq.nsmallest(
        MOST_TRIED,
        _degrees(parallel, ranks, largest),
        key=lambda one: (
            ranks_per_node % one["tp"] != 0,
            round(_distance(one, parallel), 9),
            _new(one, parallel),
            one["cp"],
        ),
    )
    found: list[ParallelConfig] = []
    for degrees in tried:
        candidate = dataclasses.replace(parallel, **cast(dict[str, Any], degrees))
        if candidate != parallel and fits(candidate):
            found.append(candidate)
            if len(found) == OFFERED:
                break
    return found


def nearest_rank_counts(
    parallel: ParallelConfig, ranks: int, fits: Callable[[int], bool], ranks_per_node: int
) -> list[int]:
    """Return the next smaller and the next larger number of ranks that `fits`, whole nodes beyond the first one."""
    fixed = [getattr(parallel, axis) for axis in ("tp", "pp", "cp")]
    dp = [parallel.dp] if parallel.dp else [parallel.dp_replicate, parallel.dp_shard]
    step = math.prod([*fixed, *(degree for degree in dp if degree)])
    if all(dp):
        return [step] if step != ranks and fits(step) else []
    nodes = math.lcm(step, ranks_per_node)
    within = range(step, ranks_per_node + 1, step)
    around = ranks // nodes
    beyond = range(max(1, around - TRIED_AROUND) * nodes, (around + TRIED_AROUND) * nodes + 1, nodes)
    counts = sorted({*within, *beyond} - {ranks})
    below = next((n for n in reversed(counts) if n < ranks and fits(n)), None)
    above = next((n for n in counts if n > ranks and fits(n)), None)
    return [n for n in (below, above) if n is not None]


def write(parallel: ParallelConfig, instead_of: ParallelConfig) -> str:
    """Write the degrees of a layout as settings; those that are 1 only where `instead_of` has another."""
    return " ".join(
        f"parallel.{axis}={getattr(parallel, axis)}"
        for axis in AXES
        if getattr(parallel, axis) not in (None, 1) or getattr(parallel, axis) != getattr(instead_of, axis)
    )


def _degrees(parallel: ParallelConfig, ranks: int, largest: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield every way to multiply to `ranks` by the degrees that are set."""
    for tp in _divisors(ranks, largest["tp"]):
        for pp in _divisors(ranks // tp, largest["pp"]):
            for cp in _divisors(ranks // tp // pp, largest["cp"]):
                dp = ranks // tp // pp // cp
                inner = {"tp": tp, "pp": pp, "cp": cp} | ({} if parallel.dp is None else {"dp": dp})
                yield from (inner | shares for shares in _shares(parallel, dp))


def _shares(parallel: ParallelConfig, dp: int) -> Iterator[dict[str, int]]:
    """Yield the ways to make up `dp` by dp_replicate and dp_shard, so far as they are set."""
    if parallel.dp_replicate is None and parallel.dp_shard is None:
        yield {}
        return
    for replicate in _divisors(dp, dp):
        both = {"dp_replicate": replicate, "dp_shard": dp // replicate}
        yield {axis: degree for axis, degree in both.items() if getattr(parallel, axis) is not None}


@functools.cache
def _divisors(number: int, largest: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return [n for n in sorted({*small, *(number // n for n in small)}) if n <= largest]


def _distance(degrees: Mapping[str, int], parallel: ParallelConfig) -> float:
    return sum(abs(math.log2(degree / getattr(parallel, axis))) for axis, degree in degrees.items())


def _new(degrees: Mapping[str, int], parallel: ParallelConfig) -> int:
    """Axes that there were not before."""
    return sum(degree > 1 and getattr(parallel, axis) == 1 for axis, degree in degrees.items())
