"""A bounded number of buffers for blocks on their way between disk, host and device."""

import queue
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contract.errors import NodeError
from train.offload.nvme.files import aligned_buffer, round_up

WAIT_S = 300.0
_PORTABLE = 1
"""`cudaHostRegisterPortable`: locked for every GPU."""


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in the host's memory, for `NvmeStore.read` and `write`."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    array: NDArray[np.uint8] = tensor.detach().view(-1).view(torch.uint8).numpy()
    return array.data


class BufferPool:
    """`count` buffers of `nbytes` bytes, aligned for direct I/O; page-locked with `pinned`, for copies to a GPU."""

    def __init__(self, count: int, nbytes: int, pinned: bool) -> None:
        """All memory is taken here: `held_bytes`, whatever is asked for later."""
        assert count > 0 and nbytes > 0
        self._size = round_up(nbytes)
        self.held_bytes = count * self._size
        self._memory = torch.frombuffer(aligned_buffer(self.held_bytes), dtype=torch.uint8)
        self._pinned = pinned
        if pinned:
            self._lock_pages()
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._used: set[int] = set()
        for index in range(count):
            self._free.put(index)

    def acquire(self, timeout_s: float = WAIT_S) -> Tensor:
        """Return a free buffer, `uint8`, at least `nbytes` long, with any content.

        Waits for one; raises `NodeError` after `timeout_s`.
        """
        try:
            index = self._free.get(timeout=timeout_s)
        except queue.Empty:
            raise NodeError(
                f"no buffer of {self._size:,} bytes came free within {timeout_s:g} s: a disk or a device hangs"
            ) from None
        self._used.add(index)
        return self._memory[index * self._size : (index + 1) * self._size]

    def release(self, buffer: Tensor) -> None:
        """Give back a buffer, or a view of its beginning, that nothing reads or writes any more."""
        index = (buffer.data_ptr() - self._memory.data_ptr()) // self._size
        assert index in self._used, "not a buffer that this pool has given out"
        self._used.remove(index)
        self._free.put(index)

    @contextmanager
    def buffer(self) -> Iterator[Tensor]:
        """Context in which a buffer is the caller's."""
        buffer = self.acquire()
        try:
            yield buffer
        finally:
            self.release(buffer)

    def close(self) -> None:
        """Unlock the memory; it is freed with the last view of it."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
            self._pinned = False

    def _lock_pages(self) -> None:
        # Not `pin_memory`, which rounds sizes up to powers of two.
        failed = int(
            torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), self.held_bytes, _PORTABLE)
        )
        if failed:
            raise NodeError(
                f"{socket.gethostname()}: {self.held_bytes / 1e9:.2f} GB of memory could not be locked for the "
                f"GPU (CUDA error {failed}): free memory of the host, or offload less"
            )
