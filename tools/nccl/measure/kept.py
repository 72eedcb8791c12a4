"""What is known already: results are kept as they come, and a later start takes them up. Imports no torch."""

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from contract.errors import UserError
from tools.nccl.campaign import Pair
from tools.nccl.measurement import Collective, Exchange, Exchanges, Measurement

PARTIAL = "partial.npz"
SAVE_EVERY_S = 10.0

Key = tuple[str, str, bool, str, int]


class Kept:
    """The measurement as it grows (on rank 0), and that of an earlier start."""

    def __init__(self, measurement: Measurement, folder: Path, resume: bool) -> None:
        """`measurement`: with nodes and all else that is known before anything is measured."""
        self.measurement = measurement
        self._path = folder / PARTIAL
        self._exchanges: list[Exchange] = []
        self._saved_s = time.monotonic()
        self._earlier: defaultdict[Pair, deque[Exchange]] = defaultdict(deque)
        self._collectives: dict[Key, Collective] = {}
        if resume and self._path.exists():
            self._take_up()

    def _take_up(self) -> None:
        """Take what holds for the nodes of today: exchanges between them, operations over exactly them."""
        # A damaged file costs time, no more.
        with suppress(UserError):
            earlier = Measurement.load(self._path)
            today = self.measurement
            if (earlier.gpus_per_node, earlier.backend) != (today.gpus_per_node, today.backend):
                return
            places = {name: number for number, name in enumerate(today.nodes)}

            def rank_today(rank: int) -> int | None:
                node = places.get(earlier.nodes[earlier.node_of(rank)])
                return None if node is None else node * today.gpus_per_node + rank % today.gpus_per_node

            for exchange in rows(earlier.exchanges):
                first, second = rank_today(exchange.first), rank_today(exchange.second)
                if first is not None and second is not None:
                    found = replace(exchange, first=first, second=second)
                    self._earlier[min(first, second), max(first, second)].append(found)
            if earlier.nodes == today.nodes:
                self._collectives = {key_of(one): one for one in earlier.collectives}

    def take_exchange(self, pair: Pair, number: int) -> Exchange | None:
        """Return the next result of an earlier start for a pair, as one of this round; None if there is no more."""
        found = self._earlier[min(pair), max(pair)]
        if not found:
            return None
        return replace(found.popleft(), first=pair[0], second=pair[1], round=number)

    def add_exchanges(self, exchanges: Iterable[Exchange]) -> None:
        """Keep a round."""
        self._exchanges += exchanges
        self._save_sometimes()

    def close_exchanges(self, exchanges: Exchanges) -> None:
        """Have these in the measurement, and no others."""
        self._exchanges = list(rows(exchanges))
        self._earlier.clear()
        self.save()

    def take_collectives(self, keys: Sequence[Key]) -> list[Collective]:
        """Take over what an earlier start has of an operation; nothing unless all is there."""
        found = [self._collectives[key] for key in keys if key in self._collectives]
        if len(found) < len(keys):
            return []
        self.measurement.collectives += found
        return found

    def add_collectives(self, collectives: Iterable[Collective]) -> None:
        """Keep what was measured of one operation at one size."""
        self.measurement.collectives += collectives
        self._save_sometimes()

    def _save_sometimes(self) -> None:
        if time.monotonic() - self._saved_s > SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Write down all there is; raises OSError."""
        self._collect()
        # Results of an earlier start that were not asked for yet are worth keeping too.
        left = [exchange for queue in self._earlier.values() for exchange in queue]
        known = {key_of(one) for one in self.measurement.collectives}
        more = [one for key, one in self._collectives.items() if key not in known]
        replace(
            self.measurement,
            exchanges=Exchanges.of([*self._exchanges, *left]),
            collectives=[*self.measurement.collectives, *more],
        ).save(self._path)
        self._saved_s = time.monotonic()

    def finish(self, path: Path) -> None:
        """Write the whole measurement and forget the partial one; raises OSError."""
        self._collect()
        self.measurement.save(path)
        self._path.unlink(missing_ok=True)

    def _collect(self) -> None:
        self.measurement.exchanges = Exchanges.of(self._exchanges)


def key_of(one: Collective) -> Key:
    """What tells one measured operation from another."""
    return one.operation, one.algorithm, one.in_place, one.scope, one.size_bytes


def rows(exchanges: Exchanges) -> Iterable[Exchange]:
    """The single exchanges."""
    columns = (
        exchanges.first,
        exchanges.second,
        exchanges.latency_s,
        exchanges.bandwidth,
        exchanges.slowest,
        exchanges.round,
        exchanges.wrong,
    )
    for first, second, latency_s, bandwidth, slowest, number, wrong in zip(
        *(c.tolist() for c in columns), strict=True
    ):
        yield Exchange(first, second, latency_s, bandwidth, slowest, number, wrong)
