"""Exchanges between pairs of ranks: rank 0 says who with whom, all do theirs at the same time.

Two messages at once, one each way, so that both ends do the same and no order can lock up. A message of a few bytes
both ways is as long under way as one of them: the next begins when the other end's has arrived.
"""

import math
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from tools.nccl.campaign import Pair
from tools.nccl.measure.both_ways import both_ways
from tools.nccl.measure.kept import Kept
from tools.nccl.measure.pattern import POISON, Moved, count_wrong, fill
from tools.nccl.measure.progress import Progress
from tools.nccl.measure.stopwatch import Stopwatch
from tools.nccl.measure.team import Team
from tools.nccl.measurement import Exchange

LATENCY_BYTES = 8
_SMALL_WARM_UPS = 4
_SMALL_REPETITIONS = (8, 40)
_REPETITIONS = (3, 10)
"""At least and at most, within `pair_s`."""
_IDLE, _END = -1, -2
"""In place of a partner's number."""


class RankProber:
    """A `tools.nccl.campaign.Prober` of live ranks: `exchange` on rank 0, `serve` on all others."""

    def __init__(
        self,
        team: Team,
        kept: Kept,
        progress: Progress,
        *,
        message_bytes: int,
        skip: set[Pair],
        renew_rounds: int,
        pair_s: float,
        dtype: torch.dtype,
    ) -> None:
        """`kept`: what an earlier start has measured, and where results go; `skip`: pairs that get no answer;
        `renew_rounds` and `pair_s`: see `Spec`.
        """
        self._team = team
        self._kept, self._progress = kept, progress
        self._skip = skip
        self._renew_rounds = renew_rounds
        self._pair_s = pair_s
        self._round = 0
        self._made = 0
        self._group: dist.ProcessGroup | None = None
        self._watch = Stopwatch(team.device)
        self._moved = Moved(dtype, team.device)
        count = max(1, message_bytes // dtype.itemsize)
        self.message_bytes = count * dtype.itemsize
        """What is really sent."""
        small = LATENCY_BYTES // dtype.itemsize
        self._out, self._in = (torch.empty(count, dtype=dtype, device=team.device) for _ in range(2))
        self._small_out, self._small_in = self._out[:small].clone(), self._in[:small].clone()
        # Also for NCCL, which must have seen all ranks before some of them exchange anything.
        self._warm_up()

    def exchange(self, pairs: Sequence[Pair]) -> list[Exchange]:
        """Have the ranks make one round; what was measured before, and what gets no answer, is not tried."""
        known = {pair: self._known(pair) for pair in pairs}
        to_make = [pair for pair, exchange in known.items() if exchange is None]
        made = dict(zip(to_make, self._make(to_make) if to_make else [], strict=True))
        self._round += 1
        results = [known[pair] or made[pair] for pair in pairs]
        self._kept.add_exchanges(results)
        self._progress.say("exchanges", f"round {self._round}: {len(pairs)} pairs at once", self._round)
        return results

    def serve(self) -> None:
        """Take part in what rank 0 asks for, until it ends."""
        while (partner := self._partner([])) != _END:
            self._report(partner)

    def end(self) -> None:
        """On rank 0: let the others go on."""
        self._team.told([_END] * self._team.ranks)

    def _known(self, pair: Pair) -> Exchange | None:
        if pair in self._skip or pair[::-1] in self._skip:
            return Exchange(*pair, latency_s=math.nan, bandwidth=0.0, slowest=0.0, round=self._round)
        # The first round is there to warm up, and its results are thrown away.
        return self._kept.take_exchange(pair, self._round) if self._round > 0 else None

    def _make(self, pairs: Sequence[Pair]) -> list[Exchange]:
        found = self._report(self._partner(pairs))
        results = []
        for first, second in pairs:
            ends = found[first], found[second]
            results.append(
                Exchange(
                    first,
                    second,
                    latency_s=max(end[0] for end in ends),
                    bandwidth=self.message_bytes / max(end[1] for end in ends),
                    slowest=self.message_bytes / max(end[2] for end in ends),
                    round=self._round,
                    wrong=int(sum(end[3] for end in ends)),
                )
            )
        return results

    def _partner(self, pairs: Sequence[Pair]) -> int:
        """Tell all ranks their partners (rank 0's `pairs`); return this rank's."""
        partners = [_IDLE] * self._team.ranks
        for first, second in pairs:
            partners[first], partners[second] = second, first
        return self._team.told(partners)[self._team.rank]

    def _report(self, partner: int) -> list[list[float]]:
        """Make this rank's exchange of a round; return to rank 0 what each rank has found."""
        self._made += 1
        if self._renew_rounds and self._made % self._renew_rounds == 0:
            self._warm_up()
        paired = partner != _IDLE
        latency_s = self._latency_s(partner) if paired else 0.0
        # Large messages of all pairs at once: what they share shows.
        self._team.meet(f"the large messages of round {self._made}", 2 * self._team.limit_s)
        times = self._large(partner) if paired else (0.0, 0.0, 0)
        # Longer than a pair may take: the ends of a bad one are to be the first who give up.
        return self._team.gathered(
            [latency_s, *times], f"the end of round {self._made}", 2 * self._team.limit_s
        )

    def _latency_s(self, partner: int) -> float:
        """Return the median time of a small message."""
        self._step(partner)
        # Connections are made at first use.
        self._swap(partner, small=True)
        began_s = time.monotonic()
        for _ in range(_SMALL_WARM_UPS):
            self._timed(partner, small=True)
        one_s = (time.monotonic() - began_s) / _SMALL_WARM_UPS
        repetitions = self._repetitions(partner, one_s, _SMALL_REPETITIONS)
        times = [self._timed(partner, small=True)[0] for _ in range(repetitions)]
        return statistics.median(times or [one_s])

    def _large(self, partner: int) -> tuple[float, float, int]:
        """Return the median and the longest time of a large message, and how many elements came wrong."""
        self._step(partner)
        first_s, wrong = self._timed(partner)
        times = []
        for _ in range(self._repetitions(partner, first_s, _REPETITIONS)):
            seconds, more = self._timed(partner)
            times.append(seconds)
            wrong += more
        times = times or [first_s]
        return statistics.median(times), max(times), wrong

    def _step(self, partner: int) -> None:
        self._team.watch.step("round", f"round {self._made} of exchanges", self._team.limit_s, [partner])

    def _repetitions(self, partner: int, one_s: float, bounds: tuple[int, int]) -> int:
        """How often both ends repeat what takes `one_s`: a slow pair less or not at all, for all others wait for it."""
        mine = torch.tensor([one_s], dtype=torch.float32, device=self._team.device)
        theirs = torch.empty_like(mine)
        _wait_for(self._group, partner, mine, theirs)
        # Rounded alike on both ends: each knows both times.
        slower_s = max(float(mine), float(theirs))
        least, most = bounds
        bearable = int(self._team.limit_s / 2 / slower_s)
        return min(most, max(least, int(self._pair_s / slower_s)), bearable)

    def _timed(self, partner: int, small: bool = False) -> tuple[float, int]:
        """Exchange once; return how long it took, s, and how many elements came wrong."""
        received = self._small_in if small else self._in
        fill(self._small_out if small else self._out, self._moved.table(self._team.rank))
        received.fill_(POISON)
        # Both ends begin together.
        self._swap(partner, small=True)
        self._watch.start()
        self._swap(partner, small)
        self._watch.stop()
        return self._watch.seconds(), int(count_wrong(received, self._moved.table(partner)))

    def _swap(self, partner: int, small: bool) -> None:
        sent, received = (self._small_out, self._small_in) if small else (self._out, self._in)
        _wait_for(self._group, partner, sent, received)

    def _warm_up(self) -> None:
        """Make new connections; the buffers of the old ones are free again."""
        team = self._team
        team.watch.step("plan", "connecting all ranks", team.limit_s)
        if team.backend == "nccl" or self._renew_rounds:
            old = self._group
            group = dist.new_group()
            assert isinstance(group, dist.ProcessGroup)
            self._group = group
            if old is not None:
                dist.destroy_process_group(old)
        dist.all_reduce(self._small_out, group=self._group)


def _wait_for(
    group: dist.ProcessGroup | None, partner: int, sent: torch.Tensor, received: torch.Tensor
) -> None:
    for work in dist.batch_isend_irecv(both_ways(group, partner, sent, partner, received)):
        work.wait()
