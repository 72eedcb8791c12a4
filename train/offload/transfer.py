"""Copies between a device and the memory of the host, beside what the device computes."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from train.offload.nvme.pool import BufferPool


class Event(Protocol):
    """A point in the work of a device."""

    def query(self) -> bool:
        """Whether it has come."""
        ...

    def synchronize(self) -> None:
        """Wait for it."""
        ...


class Stopwatch:
    """Adds up the seconds that work takes by the clock of its device; a CPU does at once what it is told."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._on_cpu = device.type == "cpu"
        self._done_s = 0.0
        self._under_way: deque[tuple[Any, Any]] = deque()

    @contextmanager
    def around(self, stream: Any) -> Iterator[None]:
        """Context in which work is given to a stream."""
        if self._on_cpu:
            began_s = time.perf_counter()
            yield
            self._done_s += time.perf_counter() - began_s
            return
        start, end = (self._module.Event(enable_timing=True) for _ in range(2))
        start.record(stream)
        yield
        end.record(stream)
        self._under_way.append((start, end))

    def total_s(self) -> float:
        """Of all work that is done."""
        for _ in range(len(self._under_way)):
            start, end = self._under_way.popleft()
            if end.query():
                self._done_s += start.elapsed_time(end) / 1000
            else:
                self._under_way.append((start, end))
        return self._done_s


class Transfer:
    """A stream for copies to or from one device. A CPU has streams too, which do at once what they are told."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream()
        self._pools: list[BufferPool] = []
        self.copies = Stopwatch(device)

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host for so many values, page-locked where a GPU copies from and to it, until `close`."""
        size = count * dtype.itemsize
        # Not `pin_memory`, which takes up to twice as much.
        self._pools.append(BufferPool(1, max(size, 1), pinned=self.device.type == "cuda"))
        return self._pools[-1].acquire()[:size].view(dtype)

    def follow(self) -> None:
        """Have copies from now on wait for all that this thread has told the device before."""
        self._stream.wait_stream(self._module.current_stream(self.device))

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Context of copies, which nothing on the device waits for by itself."""
        with self._module.stream(self._stream), self.copies.around(self._stream):
            yield

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Context of copies that also `follow`."""
        self.follow()
        with self.copying():
            yield

    def close(self) -> None:
        """Unlock the memory that was given; what is under way must be over."""
        for pool in self._pools:
            pool.close()
        self._pools.clear()

    def mark(self) -> Event:
        """The end of all copies so far."""
        event: Event = self._module.Event()
        event.record(self._stream)  # type: ignore[attr-defined]
        return event
