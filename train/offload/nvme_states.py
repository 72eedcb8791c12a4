"""fp32 weights and moments in files on NVMe, of which a bounded number of blocks is in memory (ZeRO-Infinity,
arXiv 2104.07857)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from train.offload.nvme.files import round_up
from train.offload.nvme.plan import Slot
from train.offload.nvme.pool import BufferPool, bytes_of
from train.offload.nvme.store import NvmeStore
from train.offload.nvme.threads import Handle
from train.offload.states import KINDS, StatesTraffic


@dataclass
class _Place:
    """A buffer that holds a block, or will when `handle` is done."""

    buffer: Tensor
    handle: Handle | None
    """Of a read or write that nobody has waited for."""
    used: bool = False
    """Between `get` and `put`."""
    wanted: bool = True
    """Asked for, and not yet put back."""


class NvmeStates:
    """Blocks that are read from a store before they are needed, and written back behind the caller's back.

    See `States`. For blocks of each size `ahead` + 2 buffers, or as many as there are such blocks: for those that were
    asked for, the one in use, and the one before it, which is being written. What stays in a buffer until it is needed
    again is not read again.
    """

    device = torch.device("cpu")

    def __init__(self, store: NvmeStore, ahead: int, pinned: bool) -> None:
        """`store` has no slots yet; it is closed with this."""
        self.ahead = ahead
        self._store = store
        self._pinned = pinned
        self._pools: dict[int, BufferPool] = {}
        """By size, so that a large embedding does not widen all."""
        self._buffers: Counter[int] = Counter()
        """How many buffers there are of each size."""
        self._slots: list[Slot] = []
        self._sizes: list[int] = []
        self._places: dict[int, _Place] = {}
        """By block, the one that was used longest ago first."""

    @property
    def held_bytes(self) -> int:
        """Memory that the buffers take, whatever the number of blocks."""
        return sum(pool.held_bytes for pool in self._pools.values())

    def allocate(self, sizes: Sequence[int]) -> None:
        """See `States`; also sets the space on the disks aside."""
        self._sizes = list(sizes)
        widths = [KINDS * size * torch.float32.itemsize for size in sizes]
        self._slots = [self._store.allocate(f"states {index}", width) for index, width in enumerate(widths)]
        self._store.open()
        blocks = Counter(self._size(index) for index in range(len(sizes)))
        self._buffers = Counter({size: min(self.ahead + 2, count) for size, count in blocks.items()})
        self._pools = {size: BufferPool(count, size, self._pinned) for size, count in self._buffers.items()}

    def ask(self, index: int) -> None:
        """See `States`."""
        if index not in self._places:
            buffer = self._room(self._size(index))
            handle = self._store.read(self._slots[index], bytes_of(buffer))
            self._places[index] = _Place(buffer, handle)

    def get(self, index: int) -> Tensor:
        """See `States`."""
        self.ask(index)
        place = self._places[index] = self._places.pop(index)  # now the one used last
        self._wait(place)
        place.used = place.wanted = True
        width = KINDS * self._sizes[index] * torch.float32.itemsize
        return place.buffer[:width].view(torch.float32).view(KINDS, -1 if width else 0)

    def put(self, index: int, changed: bool = True) -> None:
        """See `States`."""
        place = self._places[index]
        place.used = place.wanted = False
        if changed:
            place.handle = self._store.write(self._slots[index], bytes_of(place.buffer))

    def traffic(self) -> StatesTraffic:
        """See `States`."""
        return StatesTraffic(**asdict(self._store.traffic()))

    def close(self) -> None:
        """See `States`; the files go."""
        self._store.close()
        for pool in self._pools.values():
            pool.close()
        self._places.clear()

    def _size(self, index: int) -> int:
        """Bytes of the buffers for a block."""
        return round_up(max(1, KINDS * self._sizes[index] * torch.float32.itemsize))

    def _room(self, size: int) -> Tensor:
        """A buffer that nothing needs, else that of the block put back longest ago, else of the one asked for first."""
        alike = [index for index in self._places if self._size(index) == size]
        if len(alike) == self._buffers[size]:
            free = [index for index in alike if not self._places[index].used]
            index = next((index for index in free if not self._places[index].wanted), free[0])
            place = self._places.pop(index)
            self._wait(place)
            self._pools[size].release(place.buffer)
        return self._pools[size].acquire()

    @staticmethod
    def _wait(place: _Place) -> None:
        if place.handle is not None:
            place.handle.wait()
            place.handle = None
