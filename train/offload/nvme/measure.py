"""What disks give to a store: bandwidth of reads, of writes, and of both at once, by block size and threads."""

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from contract.errors import ConfigError
from train.offload.nvme.files import BlockFile, aligned_buffer
from train.offload.nvme.leftovers import Identity
from train.offload.nvme.plan import Plan, Slot
from train.offload.nvme.settings import NvmeSettings
from train.offload.nvme.threads import Handle, IoThreads, Request
from train.offload.nvme.volume import Volume

BLOCKS_BYTES = (256 << 10, 1 << 20, 4 << 20, 16 << 20)
THREADS = (1, 2, 4, 8)
LEAST_BYTES = 128 << 20
"""Of a path: two slots of the largest size."""
_SLOT_BYTES = 16 << 20
_MOST_AT_ONCE_BYTES = 64 << 20
"""Block size times threads; more gains nothing, and takes memory."""
_SLOTS_AT_ONCE = 2
_AS_GOOD = 0.95


class Way(StrEnum):
    """What is done with the disks."""

    read = "read"
    write = "write"
    mixed = "mixed"
    """Every other slot is written."""


@dataclass(frozen=True)
class Figure:
    """Bandwidth with one block size and number of threads, bytes/s over all paths."""

    block_bytes: int
    threads: int
    """For each path; as many requests are in its queue."""
    read: float
    write: float
    mixed: float
    """Bytes read and bytes written, together."""

    def as_settings(self, before: NvmeSettings) -> NvmeSettings:
        """Return the settings of a store that works so, with the limits of those `before`."""
        figures = {f"{way}_bytes_per_s": round(getattr(self, way)) for way in Way}
        return replace(before, block_bytes=self.block_bytes, threads=self.threads, measured=figures)


def combinations() -> list[tuple[int, int]]:
    """Return the (block size, threads) that are measured."""
    pairs = [(block, threads) for block in BLOCKS_BYTES for threads in THREADS]
    return [(block, threads) for block, threads in pairs if block * threads <= _MOST_AT_ONCE_BYTES]


def best(figures: Sequence[Figure]) -> Figure:
    """Return the one to use.

    An optimizer on NVMe reads and writes at once, so mixed bandwidth counts; of those within 5 % of the highest the
    one with the fewest threads and then the smallest blocks, which takes least of the processor and of memory.
    """
    highest = max(figure.mixed for figure in figures)
    good = [figure for figure in figures if figure.mixed >= _AS_GOOD * highest]
    return min(good, key=lambda figure: (figure.threads, figure.block_bytes))


def measure(
    paths: Sequence[Path], size_bytes: int, seconds: float, tell: Callable[[str], None]
) -> Generator[Figure]:
    """Measure every combination with files of `size_bytes` in all; each of its three figures takes `seconds`.

    The files are removed when the iterator is closed. Raises `ConfigError` for a size that is too small, and what
    `Volume` does.
    """
    path_bytes = size_bytes // len(paths)
    if path_bytes < LEAST_BYTES:
        raise ConfigError(
            f"--size of {size_bytes:,} bytes is too small: give at least {-(-LEAST_BYTES * len(paths) // 10**6)}MB"
        )
    identity = Identity.of(Path("nvme-bench"), os.getpid(), "bench")
    with closing(Volume(paths, [path_bytes] * len(paths), identity, tell)) as volume:
        buffers = [aligned_buffer(_MOST_AT_ONCE_BYTES * len(paths)) for _ in range(_SLOTS_AT_ONCE)]
        for buffer in buffers:
            _fill(buffer)
        # A file's first writes are slower than all later ones, and space that was never written costs no reading.
        _Run(volume.files, path_bytes, *combinations()[-1], buffers, tell).once()
        for block_bytes, threads in combinations():
            run = _Run(volume.files, path_bytes, block_bytes, threads, buffers, tell)
            yield Figure(block_bytes, threads, *(run.bytes_per_s(way, seconds) for way in Way))


def _fill(buffer: memoryview) -> None:
    """With what no disk can store in less."""
    noise = os.urandom(1 << 20)
    for begin in range(0, len(buffer), len(noise)):
        buffer[begin : begin + len(noise)] = noise


class _Run:
    """Slots that fill the files, moved two at a time: as a tier of a training does."""

    def __init__(
        self,
        files: Sequence[BlockFile],
        path_bytes: int,
        block_bytes: int,
        threads: int,
        buffers: Sequence[memoryview],
        tell: Callable[[str], None],
    ) -> None:
        self._files = files
        self._settings = NvmeSettings(block_bytes, threads)
        self._plan = Plan(len(files), block_bytes)
        self._buffers = buffers
        self._tell = tell
        # Enough blocks for every thread of every path.
        size = max(_SLOT_BYTES, block_bytes * threads)
        self._slots = [self._plan.add("", size * len(files)) for _ in range(path_bytes // size)]

    def bytes_per_s(self, way: Way, seconds: float) -> float:
        """Move slots for so long."""
        return self._move(way, seconds, _SLOTS_AT_ONCE)

    def once(self) -> None:
        """Write every slot."""
        self._move(Way.write, 0.0, len(self._slots))

    def _move(self, way: Way, seconds: float, least: int) -> float:
        """Return bytes/s; goes on until `least` slots are moved and the time is over."""
        threads = IoThreads(self._files, self._settings, self._tell)
        try:
            began_s = time.perf_counter()
            moved, turn = 0, 0
            under_way: deque[Handle] = deque()
            while turn < least or time.perf_counter() < began_s + seconds:
                if len(under_way) == _SLOTS_AT_ONCE:
                    under_way.popleft().wait()
                slot = self._slots[turn % len(self._slots)]
                write = way is Way.write or (way is Way.mixed and turn % 2 == 1)
                under_way.append(threads.start(self._requests(slot, turn), write))
                moved += slot.nbytes
                turn += 1
            for handle in under_way:
                handle.wait()
            if way is not Way.read:
                for file in self._files:
                    file.sync()
            return moved / (time.perf_counter() - began_s)
        finally:
            threads.close()

    def _requests(self, slot: Slot, turn: int) -> list[Request]:
        buffer = self._buffers[turn % _SLOTS_AT_ONCE]
        return [
            Request(piece.path, piece.offset, buffer[piece.begin : piece.end])
            for piece in self._plan.pieces(slot)
        ]
