"""Look at the tensors of a checkpoint side by side."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tools.ckpt.pieces import Entry
from tools.ckpt.source import Source

MOST_THREADS = 8
BATCH_BYTES = 16 << 20
"""Of tensors that a thread takes at a time, if they are smaller than that: each time costs something."""

T = TypeVar("T")
Batch = tuple[int, Sequence[Entry]]
"""Some tensors that follow each other, and the number of the first."""


def cores() -> int:
    """Return how many threads are of use, `MOST_THREADS` at most."""
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))


def for_each(
    source: Source, entries: Sequence[Entry], look: Callable[[Source, Entry], T], threads: int
) -> list[T]:
    """Return what `look` finds of each tensor, in their order; each thread has files and buffers of its own."""
    batches = list(_batches(entries))
    threads = min(threads, len(batches))
    if threads <= 1:
        return [look(source, entry) for entry in entries]
    waiting, found = deque(batches), dict[int, T]()

    def work() -> None:
        with source.twin() as own:
            for begin, batch in taken_from(waiting):
                for number, entry in enumerate(batch, begin):
                    found[number] = look(own, entry)

    work_off(waiting, work, threads)
    return [found[number] for number in range(len(entries))]


def work_off(waiting: "deque[T]", work: Callable[[], None], threads: int) -> None:
    """Run `work`, which takes from `waiting` until nothing is left, in some threads; raises what one of them does."""
    with ThreadPoolExecutor(threads) as pool:
        try:
            for worker in [pool.submit(work) for _ in range(threads)]:
                worker.result()
        finally:
            waiting.clear()  # interrupted: the others end with what they are at


def taken_from(waiting: "deque[T]") -> Iterator[T]:
    """Yield what waits, which other threads take from too."""
    while True:
        try:
            yield waiting.popleft()
        except IndexError:
            return


def _batches(entries: Sequence[Entry]) -> Iterator[Batch]:
    begin = nbytes = 0
    for number, entry in enumerate(entries):
        nbytes += entry.nbytes
        if nbytes >= BATCH_BYTES or number + 1 == len(entries):
            yield begin, entries[begin : number + 1]
            begin, nbytes = number + 1, 0
