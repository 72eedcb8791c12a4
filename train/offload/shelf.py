"""Blocks of bytes in the memory of the host or in files, each read often and overwritten as a whole.

Reads come from the thread that computes, new values from that of an update, which may be another.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from train.offload.config import WRITERS
from train.offload.nvme.files import round_up
from train.offload.nvme.pool import BufferPool, bytes_of
from train.offload.nvme.store import NvmeStore
from train.offload.nvme.threads import Handle, Traffic


class Shelf(Protocol):
    """Blocks, by number. What is read is `uint8`, aligned to a page, and as it was last kept."""

    host_bytes: int
    """Memory of the host that is taken, whatever is asked for."""

    def want(self, numbers: Sequence[int]) -> None:
        """Say which blocks are read next, in that order; what was wanted before and is not any more may go."""
        ...

    def ready(self, number: int) -> bool:
        """Whether `get` would return at once."""
        ...

    def get(self, number: int) -> Tensor:
        """Wait for a block and return it: not to be changed, in use until `put`."""
        ...

    def put(self, number: int) -> None:
        """Give a block back that nothing reads any more."""
        ...

    def edit(self, number: int) -> Tensor:
        """Return memory for new bytes of a block, with any content; nothing may read the block until `keep`."""
        ...

    def keep(self, number: int) -> None:
        """Make what was written the block."""
        ...

    def traffic(self) -> Traffic:
        """What has been moved from and to files so far."""
        ...

    def close(self) -> None:
        """Give up what is held; keeps nothing."""
        ...


class MemoryShelf:
    """Blocks that stay in the memory of the host."""

    def __init__(self, sizes: Sequence[int], pinned: bool) -> None:
        """`sizes`: bytes of each block. `pinned`: page-locked, so that a GPU copies from it in the background."""
        ends = [0]
        for size in sizes:
            ends.append(ends[-1] + round_up(size))
        self._pool = BufferPool(1, max(ends[-1], 1), pinned)
        memory = self._pool.acquire()
        self._blocks = [memory[begin : begin + size] for begin, size in zip(ends, sizes, strict=False)]
        self.host_bytes = self._pool.held_bytes

    def want(self, numbers: Sequence[int]) -> None:
        """See `Shelf`."""

    def ready(self, number: int) -> bool:
        """See `Shelf`."""
        return True

    def get(self, number: int) -> Tensor:
        """See `Shelf`."""
        return self._blocks[number]

    def put(self, number: int) -> None:
        """See `Shelf`."""

    def edit(self, number: int) -> Tensor:
        """See `Shelf`."""
        return self._blocks[number]

    def keep(self, number: int) -> None:
        """See `Shelf`."""

    def traffic(self) -> Traffic:
        """See `Shelf`."""
        return Traffic()

    def close(self) -> None:
        """See `Shelf`."""
        self._blocks.clear()
        self._pool.close()


@dataclass
class _Read:
    """A buffer that has a block, or will when the handle is done."""

    buffer: Tensor
    handle: Handle
    used: bool = False
    """Between `get` and `put`."""


@dataclass
class _Buffers:
    """Memory for blocks of one size: each size has its own, so that a large embedding does not widen all."""

    readers: list[Tensor]
    """Free ones."""
    writers: list[Tensor]
    pools: list[BufferPool]


class DiskShelf:
    """Blocks in files on NVMe; a bounded number of buffers has those that are needed now or soon (ZeRO-Infinity)."""

    def __init__(self, store: NvmeStore, sizes: Sequence[int], ahead: int, pinned: bool) -> None:
        """`store` has no slots yet, and is closed with this. `sizes`: bytes of each block, more than 0.

        `ahead`: blocks that are wanted beside the one in use.

        Raises `ConfigError` or `NodeError`, in a sentence, where there is no room or no right to write.
        """
        self._store = store
        self._sizes = sizes
        self._slots = [store.allocate(f"block {number}", size) for number, size in enumerate(sizes)]
        store.open()
        counts = {round_up(size): 0 for size in sizes}
        for size in sizes:
            counts[round_up(size)] += 1
        # Beside those wanted and the one in use there is one that is on its way to a device.
        self._buffers = {
            size: _buffers(size, min(count, ahead + 2), min(count, WRITERS), pinned)
            for size, count in counts.items()
        }
        self.host_bytes = sum(pool.held_bytes for one in self._buffers.values() for pool in one.pools)
        self._lock = threading.RLock()
        self._reads: dict[int, _Read] = {}
        """The one that was asked for first comes first."""
        self._edits: dict[int, Tensor] = {}
        self._writes: dict[int, tuple[Tensor, Handle]] = {}
        """The oldest first."""

    def want(self, numbers: Sequence[int]) -> None:
        """See `Shelf`."""
        with self._lock:
            for number in numbers:
                if number in self._reads or number in self._edits or self._is_being_written(number):
                    continue
                buffer = self._reader(number, numbers)
                if buffer is None:
                    return
                self._begin(number, buffer)

    def ready(self, number: int) -> bool:
        """See `Shelf`."""
        with self._lock:
            return number in self._reads and self._reads[number].handle.done

    def get(self, number: int) -> Tensor:
        """See `Shelf`."""
        with self._lock:
            assert number not in self._edits, "it is being written"
            self._finish_write(number)
            if number not in self._reads:
                buffer = self._reader(number, ())
                assert buffer is not None, "more blocks in use than there are buffers"
                self._begin(number, buffer)
            read = self._reads[number]
            read.used = True
        read.handle.wait()
        return read.buffer[: self._sizes[number]]

    def put(self, number: int) -> None:
        """See `Shelf`."""
        with self._lock:
            self._drop(number)

    def edit(self, number: int) -> Tensor:
        """See `Shelf`."""
        with self._lock:
            if number in self._reads:
                self._drop(number)  # it is about to be of the past
            self._finish_write(number)
            size = round_up(self._sizes[number])
            writers = self._buffers[size].writers
            for other in list(self._writes):
                if not writers and round_up(self._sizes[other]) == size:
                    self._finish_write(other)
            self._edits[number] = writers.pop()
            return self._edits[number][: self._sizes[number]]

    def keep(self, number: int) -> None:
        """See `Shelf`."""
        with self._lock:
            buffer = self._edits.pop(number)
            self._writes[number] = buffer, self._store.write(self._slots[number], bytes_of(buffer))

    def traffic(self) -> Traffic:
        """See `Shelf`."""
        with self._lock:
            return self._store.traffic()

    def close(self) -> None:
        """See `Shelf`; the files go."""
        with self._lock:
            self._store.close()
            for one in self._buffers.values():
                for pool in one.pools:
                    pool.close()
            self._reads.clear()

    def _begin(self, number: int, buffer: Tensor) -> None:
        self._reads[number] = _Read(buffer, self._store.read(self._slots[number], bytes_of(buffer)))

    def _reader(self, number: int, wanted: Sequence[int]) -> Tensor | None:
        """A buffer to read a block into: a free one, or that of a block which is neither in use nor wanted."""
        size = round_up(self._sizes[number])
        free = self._buffers[size].readers
        for other, read in list(self._reads.items()):
            if not free and not read.used and other not in wanted and round_up(self._sizes[other]) == size:
                self._drop(other)
        return free.pop() if free else None

    def _drop(self, number: int) -> None:
        read = self._reads.pop(number)
        read.handle.wait()
        self._buffers[round_up(self._sizes[number])].readers.append(read.buffer)

    def _is_being_written(self, number: int) -> bool:
        if number in self._writes and self._writes[number][1].done:
            self._finish_write(number)
        return number in self._writes

    def _finish_write(self, number: int) -> None:
        if number in self._writes:
            buffer, handle = self._writes.pop(number)
            handle.wait()
            self._buffers[round_up(self._sizes[number])].writers.append(buffer)


def _buffers(size: int, readers: int, writers: int, pinned: bool) -> _Buffers:
    reads, writes = BufferPool(readers, size, pinned), BufferPool(writers, size, pinned)
    return _Buffers(
        [reads.acquire() for _ in range(readers)], [writes.acquire() for _ in range(writers)], [reads, writes]
    )
