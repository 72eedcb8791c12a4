"""Where gradients wait for the update: on their device, or in the memory of the host."""

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from train.offload.buckets import Bucket, cut, elements, local, slots
from train.offload.config import STAGED
from train.offload.transfer import Event, Transfer

Given = list[Tensor | None]
"""The gradients of a bucket, flat, one a slot; None where there was none."""


class Taken(Protocol):
    """The gradients of one step, in the hands of an update."""

    def ask(self, index: int) -> None:
        """Say that a bucket is wanted next."""
        ...

    def get(self, index: int) -> Given:
        """Wait for the gradients of a bucket, where the update can read them."""
        ...

    def put(self, index: int) -> None:
        """Say that they have been read."""
        ...


class Gradients(Protocol):
    """The gradients of this rank, while backward passes add them up, and until an update takes them."""

    moved_bytes: int
    """That have left the device so far."""

    def found(self) -> dict[nn.Parameter, Tensor]:
        """What there is when the backward passes of a step are done."""
        ...

    def take(self) -> Taken:
        """Give all to an update, and begin anew."""
        ...

    def drop(self) -> None:
        """Forget all."""
        ...

    def close(self) -> None:
        """Give up memory of the host."""
        ...


class OnDevice:
    """Gradients stay where the backward pass leaves them; an update on the host brings them, a bucket at a time."""

    def __init__(self, buckets: Sequence[Bucket], transfer: Transfer | None) -> None:
        """`transfer`: to where the update runs; None if that is the device itself."""
        self.moved_bytes = 0
        self._buckets = buckets
        self._transfer = transfer
        self._places: list[Tensor] = []
        if transfer is not None:
            size = max(map(elements, buckets))
            self._places = [transfer.empty(size, torch.float32) for _ in range(STAGED)]

    def found(self) -> dict[nn.Parameter, Tensor]:
        """See `Gradients`."""
        return {
            slot.parameter: slot.parameter.grad
            for slot in slots(self._buckets)
            if slot.parameter.grad is not None
        }

    def take(self) -> Taken:
        """See `Gradients`."""
        flat: list[Given] = [
            [
                None if slot.parameter.grad is None else local(slot.parameter.grad).reshape(-1)
                for slot in bucket
            ]
            for bucket in self._buckets
        ]
        self.drop()
        if self._transfer is None:
            return _Near(flat)
        self._transfer.follow()
        return _Far(flat, self)

    def drop(self) -> None:
        """See `Gradients`."""
        for slot in slots(self._buckets):
            slot.parameter.grad = None

    def close(self) -> None:
        """See `Gradients`."""
        if self._transfer is not None:
            self._transfer.close()

    def bring(self, index: int, gradients: Given) -> tuple[Given, Event]:
        """Begin to copy the gradients of a bucket to the host; the event comes when they are there."""
        assert self._transfer is not None
        here = cut(self._places[index % len(self._places)], self._buckets[index])
        with self._transfer.copying():
            for target, gradient in zip(here, gradients, strict=True):
                if gradient is not None:
                    target.copy_(gradient, non_blocking=True)
                    self.moved_bytes += gradient.nbytes
            event = self._transfer.mark()
        return [
            None if gradient is None else target for target, gradient in zip(here, gradients, strict=True)
        ], event


class _Near:
    """Gradients that the update reads where they are."""

    def __init__(self, gradients: list[Given]) -> None:
        self._gradients = gradients

    def ask(self, index: int) -> None:
        """See `Taken`."""

    def get(self, index: int) -> Given:
        """See `Taken`."""
        return self._gradients[index]

    def put(self, index: int) -> None:
        """See `Taken`."""
        self._gradients[index] = []


class _Far:
    """Gradients on a device, of which the host holds two buckets at a time."""

    def __init__(self, gradients: list[Given], source: OnDevice) -> None:
        self._gradients = gradients
        self._source = source
        self._coming: dict[int, tuple[Given, Event]] = {}

    def ask(self, index: int) -> None:
        """See `Taken`."""
        if index not in self._coming:
            self._coming[index] = self._source.bring(index, self._gradients[index])

    def get(self, index: int) -> Given:
        """See `Taken`."""
        self.ask(index)
        here, event = self._coming[index]
        event.synchronize()
        return here

    def put(self, index: int) -> None:
        """See `Taken`."""
        del self._coming[index]
        self._gradients[index] = []


class OnHost:
    """Gradients leave the device as soon as they are reduced, and add up in memory of the host."""

    def __init__(self, buckets: Sequence[Bucket], staying: Collection[Tensor], transfer: Transfer) -> None:
        """`staying`: parameters whose gradients are changed after a backward; theirs leave when they are looked at."""
        self.moved_bytes = 0
        self._buckets = buckets
        self._transfer = transfer
        self._held: dict[nn.Parameter, Tensor] = {}
        self._spare: dict[nn.Parameter, list[Tensor]] = {}
        self._leaving: list[tuple[Event, Tensor]] = []
        """Gradients whose copies may be under way: their memory on the device must stay."""
        stay = {id(parameter) for parameter in staying}
        for slot in slots(buckets):
            self._spare[slot.parameter] = []
            if id(slot.parameter) not in stay:
                slot.parameter.register_post_accumulate_grad_hook(self._leave)

    def found(self) -> dict[nn.Parameter, Tensor]:
        """See `Gradients`."""
        self._arrive()
        return {
            slot.parameter: slot.like(self._held[slot.parameter])
            for slot in slots(self._buckets)
            if slot.parameter in self._held
        }

    def take(self) -> Taken:
        """See `Gradients`."""
        self._arrive()
        self._transfer.follow()  # weights that this update sends must not overtake those that read the old ones
        held, self._held = self._held, {}
        return _Lent(self._buckets, held, self._spare)

    def drop(self) -> None:
        """See `Gradients`."""
        taken = self.take()
        for index in range(len(self._buckets)):
            taken.put(index)

    def close(self) -> None:
        """See `Gradients`."""
        self._transfer.close()

    @torch.no_grad()
    def _leave(self, parameter: Tensor) -> None:
        """Copy a gradient to the host, or add it to what is there, and free its memory on the device."""
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        gradient, parameter.grad = local(parameter.grad).reshape(-1), None
        self.moved_bytes += gradient.nbytes
        with self._transfer.beside():
            if parameter in self._held:
                # A sum on the host would have to wait for the copy: both ways are free, a core may not be.
                there = self._held[parameter].to(gradient.device, non_blocking=True)
                gradient = there.add_(gradient)
            else:
                self._held[parameter] = self._room(parameter, gradient.dtype)
            self._held[parameter].copy_(gradient, non_blocking=True)
            self._leaving.append((self._transfer.mark(), gradient))
        self._leaving = [(event, kept) for event, kept in self._leaving if not event.query()]

    def _arrive(self) -> None:
        """Wait for all gradients to be on the host."""
        for slot in slots(self._buckets):
            if slot.parameter.grad is not None:
                self._leave(slot.parameter)
        for event, _ in self._leaving:
            event.synchronize()
        self._leaving.clear()

    def _room(self, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """Memory for a gradient: that of an earlier one, or of a new set for all of them."""
        spare = self._spare[parameter]
        if spare and spare[-1].dtype != dtype:  # the type of gradients may change between steps
            spare.clear()
        if not spare:
            everything = slots(self._buckets)
            memory = self._transfer.empty(sum(slot.size for slot in everything), dtype)
            for slot, room in zip(everything, memory.split([slot.size for slot in everything]), strict=True):
                self._spare[slot.parameter].append(room)
        return spare.pop()


class _Lent:
    """Gradients on the host, whose memory goes back when they are read."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        held: dict[nn.Parameter, Tensor],
        spare: dict[nn.Parameter, list[Tensor]],
    ) -> None:
        self._buckets = buckets
        self._held = held
        self._spare = spare

    def ask(self, index: int) -> None:
        """See `Taken`."""

    def get(self, index: int) -> Given:
        """See `Taken`."""
        return [self._held.get(slot.parameter) for slot in self._buckets[index]]

    def put(self, index: int) -> None:
        """See `Taken`."""
        for slot in self._buckets[index]:
            if slot.parameter in self._held:
                self._spare[slot.parameter].append(self._held.pop(slot.parameter))
