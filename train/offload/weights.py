"""How new weights get from an update to where they compute."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from train.offload.buckets import Bucket, cut, elements
from train.offload.config import STAGED
from train.offload.transfer import Event, Transfer


class Weights(Protocol):
    """The weights that compute, as the update of a bucket sees them."""

    later: bool
    """Whether weights are sent when the next update begins, not when their own is done."""

    def get(self, index: int) -> list[Tensor]:
        """Where the new weights of a bucket are to be written, all of them: flat, one a slot."""
        ...

    def send(self, index: int) -> Event:
        """Begin to bring what was written to where it computes; the event comes when it is there."""
        ...

    def totals(self) -> dict[str, float]:
        """What has been moved so far beside what every update sends, for the metrics of a run."""
        ...

    def close(self) -> None:
        """Give up what is held elsewhere than on the device."""
        ...


class Arrived:
    """The event of what is there at once."""

    def query(self) -> bool:
        """See `Event`."""
        return True

    def synchronize(self) -> None:
        """See `Event`."""


class InPlace:
    """Weights that compute where the update runs: it writes into them."""

    later = False

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets

    def get(self, index: int) -> list[Tensor]:
        """See `Weights`."""
        return [slot.held for slot in self._buckets[index]]

    def totals(self) -> dict[str, float]:
        """See `Weights`."""
        return {}

    def close(self) -> None:
        """See `Weights`."""

    def send(self, index: int) -> Event:
        """See `Weights`."""
        return Arrived()


class Staged:
    """Weights that are written to the memory of the host first, and sent from there.

    That memory is two buckets large, or with `later` as large as all weights.
    """

    def __init__(self, buckets: Sequence[Bucket], transfer: Transfer, later: bool) -> None:
        self.later = later
        self._buckets = buckets
        self._transfer = transfer
        sizes = [elements(bucket) for bucket in buckets]
        if not later:
            sizes = [max(sizes)] * min(STAGED, len(buckets))
        dtype = buckets[0][0].parameter.dtype
        self._places = [transfer.empty(size, dtype) for size in sizes]
        self._sent: list[Event] = [Arrived() for _ in sizes]

    def get(self, index: int) -> list[Tensor]:
        """See `Weights`."""
        place = index % len(self._places)
        self._sent[place].synchronize()
        return cut(self._places[place], self._buckets[index])

    def totals(self) -> dict[str, float]:
        """See `Weights`."""
        return {}

    def close(self) -> None:
        """See `Weights`."""
        self._transfer.close()

    @torch.no_grad()
    def send(self, index: int) -> Event:
        """See `Weights`."""
        place = index % len(self._places)
        if self.later:  # else an update has followed, when it took the gradients
            self._transfer.follow()
        with self._transfer.copying():
            for slot, written in zip(
                self._buckets[index], cut(self._places[place], self._buckets[index]), strict=True
            ):
                slot.held.copy_(written, non_blocking=True)
            self._sent[place] = self._transfer.mark()
        return self._sent[place]
