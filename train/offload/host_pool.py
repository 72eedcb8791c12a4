"""Memory of the host in pieces of whatever sizes are asked for, within a bound; what is given back is used again."""

from collections import defaultdict

from torch import Tensor

from train.offload.nvme.files import round_up
from train.offload.nvme.pool import BufferPool


class HostPool:
    """Pieces of memory, page-locked where a GPU copies from and to them in the background.

    Made for work that asks for the same sizes over and over: a free piece serves its own size only, and whole pages
    are taken for each.
    """

    def __init__(self, limit_bytes: int, pinned: bool) -> None:
        """`limit_bytes`: what is never exceeded."""
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        """Memory that is taken so far; none is given up before the end."""
        self._pinned = pinned
        self._pools: list[BufferPool] = []
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)

    def take(self, nbytes: int) -> Tensor | None:
        """Return `nbytes` bytes with any content, or None where that would exceed the limit."""
        if self._free[nbytes]:
            return self._free[nbytes].pop()
        if self.held_bytes + round_up(nbytes) > self.limit_bytes:
            return None
        self._pools.append(BufferPool(1, nbytes, self._pinned))
        self.held_bytes += self._pools[-1].held_bytes
        return self._pools[-1].acquire()[:nbytes]

    def give(self, piece: Tensor) -> None:
        """Give a piece back that nothing reads or writes any more."""
        self._free[piece.numel()].append(piece)
