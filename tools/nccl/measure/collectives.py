"""Times of collective operations over sizes: a repetition takes as long as its slowest rank; contents are checked."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from tools.nccl.busbw import busbw
from tools.nccl.measure.kept import Kept, Key
from tools.nccl.measure.operations import KINDS, Build, Operation, Reduce, Ring, all_reduce
from tools.nccl.measure.progress import Progress
from tools.nccl.measure.stopwatch import Stopwatch
from tools.nccl.measure.team import Team, slowest
from tools.nccl.measurement import Collective

LEAST = 3
"""Repetitions at one size."""
_WARM_UPS = 2
_ALIGNMENTS = 3
"""Small operations before a timed one: ranks begin together, and the GPU is busy until the timed one is queued."""
_STOP, _KNOWN, _GO = range(3)


@dataclass(frozen=True)
class Series:
    """One operation, over sizes."""

    operation: str
    in_place: bool
    ring: Ring
    build: Callable[[int], Operation]
    """Makes it for a number of bytes."""
    algorithm: str = "flat"
    inside: bool = False
    """Whether each node does it by itself, all at the same time."""

    @property
    def name(self) -> str:
        """In words."""
        words = [] if self.algorithm == "flat" else [self.algorithm]
        words += [self.operation, "in place"] if self.in_place else [self.operation]
        return " ".join([*words, "in each node"] if self.inside else words)


class Collectives:
    """Measures series of operations within a time."""

    def __init__(
        self,
        team: Team,
        kept: Kept,
        progress: Progress,
        dtype: torch.dtype,
        *,
        repetitions: int = 100,
        hung: dict[str, str] | None = None,
    ) -> None:
        """`repetitions`: at most, at one size; `hung`: series in which an earlier start got no answer, and what to say
        of it: they are not tried."""
        self._most = repetitions
        self._team = team
        self._kept, self._progress = kept, progress
        self._dtype = dtype
        self._hung = hung or {}
        self._stopwatch = Stopwatch(team.device)
        self._token = torch.zeros(1, device=team.device)

    def ring(self, group: dist.ProcessGroup | None = None) -> Ring:
        """The ranks of a group, None for all."""
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        return Ring(group, rank, ranks, self._team.device, self._dtype)

    def series(self, operation: str) -> list[Series]:
        """What there is of an operation over all ranks; and of all-reduce inside each node."""
        build, ways = KINDS[operation]
        ring = self.ring()
        found = [_series(build, operation, in_place, ring) for in_place in ways]
        if operation == "all_reduce" and "inside" in self._team.groups:
            inside = self.ring(self._team.groups["inside"])
            found.append(_series(build, operation, True, inside, inside=True))
        return found

    def all_reduce(self, algorithm: str, ring: Ring, reduce: Reduce | None = None) -> Series:
        """All-reduce by another algorithm, or over a group in another order."""
        return Series(
            "all_reduce", True, ring, lambda size: all_reduce(ring, size, True, reduce), algorithm=algorithm
        )

    def measure(self, all_series: Sequence[Series], sizes: Sequence[int], budget_s: float) -> None:
        """Measure all series; each may use what the ones before have left. Collective."""
        ends_s = time.monotonic() + budget_s
        for number, series in enumerate(all_series):
            left_s = ends_s - time.monotonic()
            self._measure_series(series, sizes, left_s / (len(all_series) - number))

    def _measure_series(self, series: Series, sizes: Sequence[int], budget_s: float) -> None:
        if self._team.told([series.name in self._hung])[0]:
            self._leave_out(self._hung.get(series.name, ""))
            return
        ends_s = time.monotonic() + budget_s
        done: list[tuple[int, float]] = []
        for number, asked in enumerate(sizes):
            size = series.ring.share(asked) * series.ring.ranks * self._dtype.itemsize
            left_s = ends_s - time.monotonic()
            expected_s = _expected_s(done, size)
            known = self._kept.take_collectives(self._keys(series, size)) if self._team.leads else []
            too_long = bool(done) and expected_s * (_WARM_UPS + LEAST) > left_s
            command = _KNOWN if known else _STOP if too_long else _GO
            # Clocks differ, and rank 0 alone has what is kept: it decides.
            command, expected_ns = self._team.told([command, round(expected_s * 1e9)])
            if command == _STOP:
                last_bytes, last_s = done[-1]
                self._leave_out(
                    f"{series.name}: nothing above {last_bytes:,} bytes, for which one repetition took {last_s:.2g} s"
                )
                return
            if command == _GO:
                took_s = self._measure_size(series, size, expected_ns / 1e9, left_s / (len(sizes) - number))
            else:
                took_s = max((one.time_s for one in known), default=0.0)
            done.append((size, took_s))

    def _measure_size(self, series: Series, size: int, expected_s: float, budget_s: float) -> float:
        """Measure one size for about `budget_s`; return how long a repetition takes with all that belongs to it, s."""
        team, operation = self._team, series.build(size)
        what = f"{series.name}, {size:,} bytes"
        self._progress.say("collectives", what)
        limit_s = team.limit_s + 10 * expected_s
        # The first makes connections.
        self._repeat(series, operation, what, limit_s)
        began_s = time.monotonic()
        first_s, wrong = self._repeat(series, operation, what, limit_s)
        whole_s = time.monotonic() - began_s
        repetitions = team.told([min(self._most, max(LEAST, int(budget_s / whole_s) - _WARM_UPS))])[0]
        limit_s = team.limit_s + 10 * max(first_s, expected_s)
        times = []
        began_s = time.monotonic()
        for _ in range(repetitions):
            seconds, more = self._repeat(series, operation, what, limit_s)
            times.append(seconds)
            wrong += more
        whole_s = (time.monotonic() - began_s) / repetitions
        team.watch.step("collective", what, limit_s)
        all_times = slowest(times, series.ring.group).numpy()
        found = [float(np.percentile(all_times, share)) for share in (50, 90, 99)]
        rows = team.gathered([*found, wrong], what)
        if team.leads:
            self._kept.add_collectives(self._results(series, size, rows))
        if team.device.type == "cuda":
            del operation
            torch.cuda.empty_cache()  # the next buffers are larger
        return whole_s

    def _repeat(self, series: Series, operation: Operation, what: str, limit_s: float) -> tuple[float, int]:
        """Do it once; return how long this rank took, s, and how many of its elements are wrong."""
        self._team.watch.step("collective", what, limit_s)
        operation.prepare()
        for _ in range(_ALIGNMENTS if self._team.device.type == "cuda" else 1):
            dist.all_reduce(self._token, group=series.ring.group)
        self._stopwatch.start()
        operation.run()
        self._stopwatch.stop()
        return self._stopwatch.seconds(), int(operation.count_wrong())

    def _results(self, series: Series, size_bytes: int, rows: list[list[float]]) -> list[Collective]:
        """One result, or one of each node."""
        per_node = self._team.gpus_per_node
        ranks = per_node if series.inside else self._team.ranks
        results = []
        for scope, first in zip(self._scopes(series), range(0, self._team.ranks, ranks), strict=True):
            time_s, p90_s, p99_s, _ = rows[first]
            results.append(
                Collective(
                    operation=series.operation,
                    ranks=ranks,
                    nodes=1 if series.inside else len(self._team.nodes),
                    size_bytes=size_bytes,
                    time_s=time_s,
                    p90_s=p90_s,
                    p99_s=p99_s,
                    algbw=size_bytes / time_s,
                    busbw=busbw(series.operation, ranks, size_bytes, time_s),
                    wrong=int(sum(row[3] for row in rows[first : first + ranks])),
                    algorithm=series.algorithm,
                    in_place=series.in_place,
                    scope=scope,
                )
            )
        return results

    def _scopes(self, series: Series) -> list[str]:
        return self._team.nodes if series.inside else ["world"]

    def _keys(self, series: Series, size_bytes: int) -> list[Key]:
        return [
            (series.operation, series.algorithm, series.in_place, scope, size_bytes)
            for scope in self._scopes(series)
        ]

    def _leave_out(self, sentence: str) -> None:
        if self._team.leads:
            self._kept.measurement.unmeasured.append(sentence)


def _series(build: Build, operation: str, in_place: bool, ring: Ring, inside: bool = False) -> Series:
    return Series(operation, in_place, ring, lambda size: build(ring, size, in_place), inside=inside)


def _expected_s(done: Sequence[tuple[int, float]], size: int) -> float:
    """How long a repetition will take at the next size, on the line through the last two; 0 when nothing is known."""
    if len(done) < 2:
        return done[-1][1] if done else 0.0
    (before_bytes, before_s), (last_bytes, last_s) = done[-2:]
    slope = max(0.0, last_s - before_s) / max(1, last_bytes - before_bytes)
    return last_s + slope * (size - last_bytes)
