"""Copies between a device and the memory of the host, beside what the device computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

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


class Transfer:
    """A stream for copies to or from one device. A CPU has streams too, which do at once what they are told."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream()
        self._pools: list[BufferPool] = []

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
        with self._module.stream(self._stream):
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
