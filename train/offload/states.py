"""Where the fp32 weights and moments of an optimizer lie between their uses."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from train.offload.nvme.pool import BufferPool

KINDS = 3
"""The fp32 weight and the two moments of Adam."""


@dataclass
class StatesTraffic:
    """What blocks have moved to and from a disk."""

    read_bytes: int = 0
    written_bytes: int = 0
    busy_s: float = 0.0
    """Time in which a request was under way."""
    waited_s: float = 0.0
    """Time in which nothing hid that."""


class States(Protocol):
    """Blocks of KINDS rows, one block a bucket of parameters; each is in use by one caller at a time."""

    device: torch.device
    """Where a block is while it is in use."""
    ahead: int
    """How many blocks are worth asking for before the first of them is needed."""

    def allocate(self, sizes: Sequence[int]) -> None:
        """Make one block for each of `sizes`, of so many fp32 columns, filled with zeros."""
        ...

    def ask(self, index: int) -> None:
        """Say that a block will be wanted soon."""
        ...

    def get(self, index: int) -> Tensor:
        """Wait for a block, shape (KINDS, size), fp32, and return it."""
        ...

    def put(self, index: int, changed: bool = True) -> None:
        """Give a block back; what was `changed` is kept."""
        ...

    def traffic(self) -> StatesTraffic:
        """What has been moved so far."""
        ...

    def close(self) -> None:
        """Give up what is held; keeps nothing."""
        ...


class Resident:
    """Blocks that stay in the memory of a device or of the host."""

    ahead = 0

    def __init__(self, device: torch.device, pinned: bool) -> None:
        """`pinned`: page-locked memory of the host, so that a GPU copies from and to it in the background."""
        self.device = device
        self._pinned = pinned
        self._pool: BufferPool | None = None
        self._blocks: list[Tensor] = []

    def allocate(self, sizes: Sequence[int]) -> None:
        """See `States`."""
        widths = [KINDS * size for size in sizes]
        if self.device.type == "cpu":
            # torch would page-lock up to twice as much.
            self._pool = BufferPool(1, max(4 * sum(widths), 1), self._pinned)
            memory = self._pool.acquire()[: 4 * sum(widths)].view(torch.float32)
        else:
            memory = torch.zeros(sum(widths), device=self.device)
        self._blocks = [
            block.view(KINDS, size) for block, size in zip(memory.split(widths), sizes, strict=True)
        ]

    def ask(self, index: int) -> None:
        """See `States`."""

    def get(self, index: int) -> Tensor:
        """See `States`."""
        return self._blocks[index]

    def put(self, index: int, changed: bool = True) -> None:
        """See `States`."""

    def traffic(self) -> StatesTraffic:
        """See `States`."""
        return StatesTraffic()

    def close(self) -> None:
        """See `States`."""
        self._blocks.clear()
        if self._pool is not None:
            self._pool.close()
