"""How blocks get from a shelf to where torch gathers weights from: some layers ahead where that is another memory."""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from train.offload.seam import hand_over
from train.offload.shelf import Shelf
from train.offload.transfer import Transfer


class Staging(Protocol):
    """Blocks of a shelf on the device that computes."""

    moved_bytes: int
    """That were copied to the device so far."""

    @property
    def copies_s(self) -> float:
        """Seconds that this has taken."""
        ...

    def begin(self, number: int) -> None:
        """Begin to bring a block; waits for the shelf unless the block is ready there."""
        ...

    def take(self, number: int, group: FSDPParamGroup) -> Tensor:
        """Return a block, where it is when what `group` is about to do comes to read it."""
        ...

    def release(self, number: int) -> None:
        """Give back what was taken, when what reads it has been queued."""
        ...

    def forget(self, number: int) -> None:
        """Drop what was begun, because the block is about to change."""
        ...


class Near:
    """The device computes in the memory of the host."""

    moved_bytes = 0
    copies_s = 0.0

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def begin(self, number: int) -> None:
        """See `Staging`."""

    def take(self, number: int, group: FSDPParamGroup) -> Tensor:
        """See `Staging`."""
        return self._shelf.get(number)

    def release(self, number: int) -> None:
        """See `Staging`."""
        self._shelf.put(number)

    def forget(self, number: int) -> None:
        """See `Staging`."""


class Far:
    """The device has memory of its own: blocks are copied there beside what it computes."""

    def __init__(self, shelf: Shelf, transfer: Transfer) -> None:
        self.moved_bytes = 0
        self._shelf = shelf
        self._transfer = transfer
        self._copies: dict[int, tuple[Tensor, Any]] = {}
        """On the device, or on their way there until the event."""
        self._leaving: dict[int, Any] = {}
        """Blocks of the shelf that are being copied, until the event."""

    @property
    def copies_s(self) -> float:
        """See `Staging`."""
        return self._transfer.copies.total_s()

    def begin(self, number: int) -> None:
        """See `Staging`."""
        if number in self._copies:
            return
        # One that has to wait for the shelf may need the memory of any other.
        self._settle(wait=number in self._leaving or not self._shelf.ready(number))
        block = self._shelf.get(number)
        copy = torch.empty_like(block, device=self._transfer.device)
        with self._transfer.beside():
            copy.copy_(block, non_blocking=True)
        self.moved_bytes += block.nbytes
        self._leaving[number] = self._transfer.mark()
        self._copies[number] = copy, self._leaving[number]

    def take(self, number: int, group: FSDPParamGroup) -> Tensor:
        """See `Staging`."""
        self.begin(number)
        copy, event = self._copies[number]
        hand_over(group, copy, event)
        return copy

    def release(self, number: int) -> None:
        """See `Staging`."""
        del self._copies[number]

    def forget(self, number: int) -> None:
        """See `Staging`."""
        if number in self._leaving:
            self._settle(wait=True)
        self._copies.pop(number, None)

    def _settle(self, wait: bool) -> None:
        """Give blocks back to the shelf whose copies are done, or with `wait` all."""
        for number, event in list(self._leaving.items()):
            if wait:
                event.synchronize()
            if wait or event.query():
                del self._leaving[number]
                self._shelf.put(number)
