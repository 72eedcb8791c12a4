"""What reading, hashing and writing reach by themselves: one thread that does no more than is needed."""

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

BUFFER_BYTES = 4 << 20
Bytes = NDArray[np.uint8]


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return seconds, and seconds of cores, that `work` takes."""
    began_s, began_core_s = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began_s, time.process_time() - began_core_s


def read_files(paths: Iterable[Path], memory: Bytes | None = None) -> int:
    """Read files from begin to end, into one buffer again and again, or one after the other into `memory`.

    Return their bytes.
    """
    buffer, total = np.empty(BUFFER_BYTES, np.uint8), 0
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer if memory is None else memory[total : total + BUFFER_BYTES]):
                total += count
    return total


def hash_bytes(nbytes: int) -> None:
    """Hash so many bytes that were just touched."""
    buffer, made = np.ones(BUFFER_BYTES, np.uint8), xxhash.xxh3_128()
    for _ in range(0, nbytes, BUFFER_BYTES):
        made.update(buffer)  # type: ignore[arg-type]


def side_by_side(*works: Callable[[], object]) -> None:
    """Do several things at the same time, each in a thread."""
    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(work) for work in works]:
            done.result()


def write_file(path: Path, nbytes: int) -> None:
    """Write a new file of so many bytes and have it on its disk."""
    buffer = np.ones(BUFFER_BYTES, np.uint8)
    with path.open("wb", buffering=0) as file:
        for _ in range(0, nbytes, BUFFER_BYTES):
            file.write(buffer)
        os.fsync(file.fileno())


def drop(paths: Iterable[Path]) -> None:
    """Have the next reading of files come from their disk."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
