"""The collective operations: what each sends, and what must be in its buffer afterwards."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tools.nccl.measure.both_ways import both_ways
from tools.nccl.measure.pattern import POISON, Added, Moved, count_wrong, fill

Reduce = Callable[[Tensor], object]
"""Adds a tensor up over all ranks, in place."""


@dataclass(frozen=True)
class Ring:
    """The ranks that take part, seen from one of them."""

    group: dist.ProcessGroup | None
    """None: all ranks."""
    rank: int
    """Number of this rank in the group."""
    ranks: int
    device: torch.device
    dtype: torch.dtype

    def share(self, size_bytes: int) -> int:
        """Elements of each rank in a whole of at most so many bytes; at least one."""
        return max(1, size_bytes // self.dtype.itemsize // self.ranks)

    def buffer(self, count: int) -> Tensor:
        """Memory for so many elements."""
        return torch.empty(count, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Operation:
    """One operation at one size, with buffers of its own, to be done as often as wanted."""

    prepare: Callable[[], None]
    """Gives the buffers their contents."""
    run: Callable[[], object]
    """Does it; on a GPU the current stream then waits for it. This alone is timed."""
    count_wrong: Callable[[], Tensor]
    """How many elements of this rank's result are wrong."""


def all_reduce(ring: Ring, size_bytes: int, in_place: bool, reduce: Reduce | None = None) -> Operation:
    """Everybody gets the sum of all; `reduce`: another way to do that than the library's."""
    buffer = ring.buffer(ring.share(size_bytes) * ring.ranks)
    pattern = Added(ring.ranks, ring.dtype, ring.device)
    add_up = reduce or (lambda tensor: dist.all_reduce(tensor, group=ring.group))
    return Operation(
        lambda: fill(buffer, pattern.table(ring.rank)),
        lambda: add_up(buffer),
        lambda: count_wrong(buffer, pattern.sum),
    )


def all_gather(ring: Ring, size_bytes: int, in_place: bool) -> Operation:
    """Everybody gets the parts of all."""
    whole, own, parts = _whole_and_part(ring, size_bytes, in_place)
    pattern = Moved(ring.dtype, ring.device)

    def prepare() -> None:
        whole.fill_(POISON)
        fill(own, pattern.table(ring.rank))

    return Operation(
        prepare,
        lambda: dist.all_gather_single(whole, own, group=ring.group),
        lambda: _sum(count_wrong(part, pattern.table(rank)) for rank, part in enumerate(parts)),
    )


def reduce_scatter(ring: Ring, size_bytes: int, in_place: bool) -> Operation:
    """Everybody gets a part of the sum of all."""
    whole, own, _ = _whole_and_part(ring, size_bytes, in_place)
    pattern = Added(ring.ranks, ring.dtype, ring.device)

    def prepare() -> None:
        own.fill_(POISON)
        fill(whole, pattern.table(ring.rank))

    return Operation(
        prepare,
        lambda: dist.reduce_scatter_single(own, whole, group=ring.group),
        lambda: count_wrong(own, pattern.sum, first=ring.rank * own.numel()),
    )


def all_to_all(ring: Ring, size_bytes: int, in_place: bool) -> Operation:
    """Everybody gets a part of each."""
    sent, _, to = _whole_and_part(ring, size_bytes, True)
    received, _, source = _whole_and_part(ring, size_bytes, True)
    pattern = Moved(ring.dtype, ring.device)

    def prepare() -> None:
        received.fill_(POISON)
        for rank, part in enumerate(to):
            fill(part, pattern.table(ring.rank, rank))

    return Operation(
        prepare,
        lambda: dist.all_to_all_single(received, sent, group=ring.group),
        lambda: _sum(count_wrong(part, pattern.table(rank, ring.rank)) for rank, part in enumerate(source)),
    )


def broadcast(ring: Ring, size_bytes: int, in_place: bool) -> Operation:
    """Everybody gets what the first rank has."""
    buffer = ring.buffer(ring.share(size_bytes) * ring.ranks)
    table = Moved(ring.dtype, ring.device).table(0)
    return Operation(
        lambda: fill(buffer, table) if ring.rank == 0 else _poison(buffer),
        lambda: dist.broadcast(buffer, group=ring.group, group_src=0),
        lambda: count_wrong(buffer, table),
    )


def send_and_receive(ring: Ring, size_bytes: int, in_place: bool) -> Operation:
    """Everybody sends to the next and receives from the one before."""
    sent, received = (ring.buffer(ring.share(size_bytes) * ring.ranks) for _ in range(2))
    pattern = Moved(ring.dtype, ring.device)
    before, after = (ring.rank - 1) % ring.ranks, (ring.rank + 1) % ring.ranks

    def prepare() -> None:
        received.fill_(POISON)
        fill(sent, pattern.table(ring.rank))

    def run() -> None:
        if after == ring.rank:
            received.copy_(sent)  # not every library sends to oneself
            return
        for work in dist.batch_isend_irecv(both_ways(ring.group, after, sent, before, received)):
            work.wait()

    return Operation(prepare, run, lambda: count_wrong(received, pattern.table(before)))


Build = Callable[[Ring, int, bool], Operation]
"""(ring, size_bytes, in_place): size as nccl-tests count it, rounded down so that every rank has the same share."""

KINDS: dict[str, tuple[Build, tuple[bool, ...]]] = {
    "all_reduce": (all_reduce, (True,)),
    "all_gather": (all_gather, (False, True)),
    "reduce_scatter": (reduce_scatter, (False, True)),
    "all_to_all": (all_to_all, (False,)),
    "broadcast": (broadcast, (True,)),
    "sendrecv": (send_and_receive, (False,)),
}
"""Each operation and whether it is done in place, out of place or both: torch has no other ways."""


def _whole_and_part(ring: Ring, size_bytes: int, in_place: bool) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """A buffer for all, one for this rank's part (in it, or apart), and the parts of all in the first."""
    share = ring.share(size_bytes)
    whole = ring.buffer(share * ring.ranks)
    parts = whole.split(share)
    return whole, parts[ring.rank] if in_place else ring.buffer(share), parts


def _poison(buffer: Tensor) -> None:
    buffer.fill_(POISON)


def _sum(counts: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(counts)).sum()
