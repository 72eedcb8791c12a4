"""What autograd keeps of a layer goes to memory of the host, and comes back some layers ahead of its backward.

A layer is watched by hooks on what is saved within it. Tensors go by their memory, each piece once, however many of
them share it. What stays on the device: small tensors, integers and masks, what all layers are given beside the hidden
state, and parameters, whose memory ZeRO frees and fills by itself.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from train.layout.recompute import Plan
from train.model.llama import Llama
from train.monitor.live_bytes import storages
from train.monitor.progress import tell
from train.offload.host_pool import HostPool
from train.offload.transfer import Event, Stopwatch, Transfer

LEAST_BYTES = 1024
"""What a copy is worth: less stays."""
MARGIN = 0.05
"""By how much more than reckoned the host may have."""
OUTGOING = 1
"""Layers whose memory may wait for its copies: where those are slower than what is computed, that waits for them."""


class Carrier:
    """Takes memory of a device to the host and back, each way on a stream of its own."""

    def __init__(self, pool: HostPool, device: torch.device) -> None:
        self.pool = pool
        self.moved_bytes = 0
        """Both ways, since `metrics` was called."""
        self.steps = 0
        """That have begun since then."""
        self._device = device
        self._out, self._in = Transfer(device), Transfer(device)
        self._waits = Stopwatch(device)
        self._before_s = 0.0, 0.0
        """Seconds of copies and of waits when `metrics` was last called."""
        self._module = torch.get_device_module(device)
        self._sent: list[torch.UntypedStorage] = []
        self._leaving: list[tuple[Event, list[torch.UntypedStorage]]] = []
        """Memory on the device that must stay until the event."""
        self._told = False

    def send(self, storage: torch.UntypedStorage) -> Tensor | None:
        """Begin to copy memory of the device to the host; None where the pool has no room for it."""
        host = self.pool.take(storage.nbytes())
        if host is None:
            self._tell()
            return None
        with self._out.beside():
            host.copy_(_bytes_of(storage), non_blocking=True)
        self._sent.append(storage)
        self.moved_bytes += host.nbytes
        return host

    def settle(self, most: int = OUTGOING) -> None:
        """Let go of memory whose copies are done; what is computed next waits for all but the newest `most` layers."""
        if self._sent:
            self._leaving.append((self._out.mark(), self._sent))
            self._sent = []
        while self._leaving and (len(self._leaving) > most or self._leaving[0][0].query()):
            event, _ = self._leaving.pop(0)
            self.wait(event)

    def fetch(self, host: Tensor) -> tuple[torch.UntypedStorage, Event]:
        """Begin to copy back what was sent, into memory that is its own when the event comes."""
        self.settle(most=0)
        back = torch.empty_like(host, device=self._device)
        with self._in.beside():
            back.copy_(host, non_blocking=True)
        self.moved_bytes += host.nbytes
        return back.untyped_storage(), self._in.mark()

    def wait(self, event: Any) -> None:
        """Have what the device is told from now on wait for `event`."""
        stream = self._module.current_stream(self._device)
        with self._waits.around(stream):
            stream.wait_event(event)

    def metrics(self) -> dict[str, float]:
        """What there was since the last call, a step; and the memory of the host that is taken."""
        steps = max(self.steps, 1)
        copies_s = self._out.copies.total_s() + self._in.copies.total_s()
        # A CPU does nothing beside its copies.
        waits_s = copies_s if self._device.type == "cpu" else self._waits.total_s()
        moved_bytes, before_s = self.moved_bytes, self._before_s
        self.moved_bytes, self.steps, self._before_s = 0, 0, (copies_s, waits_s)
        return {
            "offload_activations_moved_bytes": moved_bytes / steps,
            "offload_activations_copies_s": (copies_s - before_s[0]) / steps,
            "offload_activations_exposed_s": (waits_s - before_s[1]) / steps,
            "offload_activations_host_bytes": float(self.pool.held_bytes),
        }

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            tell(
                f"activations are larger than was reckoned: beyond {self.pool.limit_bytes / 1e9:.2f} GB of memory of "
                "the host they stay on the device (said once)"
            )


class _Piece:
    """A piece of memory that has left the device; it lives as long as autograd keeps what was saved in it."""

    def __init__(self, host: Tensor, carrier: Carrier) -> None:
        self._host = host
        self._carrier = carrier
        self._back: torch.UntypedStorage | None = None
        self._event: Event | None = None
        """Of the copy back, until what is computed waits for it."""

    def fetch(self) -> None:
        """Begin to bring the memory back, unless that was begun."""
        if self._back is None:
            self._back, self._event = self._carrier.fetch(self._host)

    def get(self) -> torch.UntypedStorage:
        """The memory on the device, for what that is told next."""
        self.fetch()
        if self._event is not None:
            self._carrier.wait(self._event)
            self._event = None
        assert self._back is not None
        return self._back

    def __del__(self) -> None:
        if self._event is not None:  # brought back for nothing, as when a step is given up
            self._event.synchronize()
        self._carrier.pool.give(self._host)


class _Saved:
    """A saved tensor: where it lies in a piece."""

    def __init__(self, piece: _Piece, tensor: Tensor) -> None:
        self._piece = piece
        self._dtype = tensor.dtype
        self._place = tensor.storage_offset(), tensor.size(), tensor.stride()

    def tensor(self) -> Tensor:
        """The tensor, on the device again."""
        storage = self._piece.get()
        return torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, *self._place)


class _Passage:
    """One micro-batch on its way through one layer: takes what is saved, and knows how to get it back."""

    def __init__(self, carrier: Carrier, before: "_Passage | None", staying: Iterable[Tensor]) -> None:
        """`before`: through the layer whose backward follows. `staying`: tensors whose memory stays."""
        self.before = before
        self._carrier = carrier
        self._staying = storages(staying)
        self._pieces: list[weakref.ref[_Piece]] = []
        self._known: dict[int, tuple[StorageWeakRef, int, weakref.ref[_Piece]]] = {}

    def over(self) -> None:
        """Forget what is of use during the forward pass only."""
        self._staying.clear()
        self._known.clear()

    def fetch(self, ahead: int) -> None:
        """Begin to bring back what was saved, and what was in the `ahead` layers whose backwards follow."""
        passage: _Passage | None = self
        for _ in range(ahead + 1):
            if passage is not None:
                for piece in reversed(passage._pieces):
                    if (found := piece()) is not None:
                        found.fetch()
                passage = passage.before

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps in place of a tensor."""
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.trigger_wait()
        if isinstance(tensor, DTensor) or not tensor.is_floating_point():
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() < LEAST_BYTES or storage._cdata in self._staying:
            return tensor
        piece = self._piece_of(storage, tensor._version)
        return tensor if piece is None else _Saved(piece, tensor)

    def unpack(self, kept: Any) -> Tensor:
        """The tensor that was packed."""
        return kept.tensor() if isinstance(kept, _Saved) else kept

    def _piece_of(self, storage: torch.UntypedStorage, version: int) -> _Piece | None:
        """Where memory with this content is, or goes now; None if there is no room for it."""
        if storage._cdata in self._known:
            reference, known_version, known = self._known[storage._cdata]
            piece = known()
            # Memory that was freed may have become another's; what was changed since is another content.
            if piece is not None and version == known_version and not reference.expired():
                return piece
        host = self._carrier.send(storage)
        if host is None:
            return None
        piece = _Piece(host, self._carrier)
        self._pieces.append(weakref.ref(piece))
        self._known[storage._cdata] = StorageWeakRef(storage), version, self._pieces[-1]
        return piece


def offload(parts: Iterable[Llama], plan: Plan, ahead: int, device: torch.device) -> Carrier:
    """Have the layers of a rank's parts keep on the host what `plan` says, in place.

    `ahead`: layers that are brought back before their backward begins.
    """
    # Whole pages are taken for each tensor, and the plan leaves out the smallest.
    limit_bytes = int(plan.host_bytes * (1 + MARGIN))
    carrier = Carrier(HostPool(limit_bytes, pinned=device.type == "cuda"), device)
    for part in parts:
        numbers = [number for number in map(int, part.layers) if plan.layers[number].host_bytes]
        Offloader(carrier, ahead).watch(part, numbers)
    return carrier


class Offloader:
    """Watches layers of one part of a model."""

    def __init__(self, carrier: Carrier, ahead: int) -> None:
        """`ahead`: layers that are brought back before their backward begins."""
        self._carrier = carrier
        self._ahead = ahead
        self._newest: _Passage | None = None

    def watch(self, part: Llama, numbers: Iterable[int]) -> None:
        """Have these layers of a part, by their numbers in the whole model, keep what they save on the host."""
        part.register_forward_pre_hook(self._begin)
        for number in numbers:
            layer = part.layers[str(number)]
            layer.forward = self._watched(layer, layer.forward)
        part.register_forward_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self._newest = None

    def _end(self, _part: nn.Module, _arguments: Any, out: Tensor) -> None:
        """Have the last layers come back while the backward of what follows them runs."""
        if self._newest is not None:
            self._fetch_with(out, self._newest, self._ahead - 1)
            self._newest = None

    def _watched(self, layer: nn.Module, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def watched(hidden: Tensor, *shared: Any) -> Tensor:
            if not torch.is_grad_enabled():
                return forward(hidden, *shared)
            given = (value for value in shared if isinstance(value, Tensor))
            passage = _Passage(self._carrier, self._newest, [*layer.parameters(), *layer.buffers(), *given])
            with saved_tensors_hooks(passage.pack, passage.unpack):
                out = forward(hidden, *shared)
            passage.over()
            self._carrier.settle()
            self._fetch_with(out, passage, self._ahead)
            self._newest = passage
            return out

        return watched

    def _fetch_with(self, out: Tensor, passage: _Passage, ahead: int) -> None:
        """Have a passage and those before it come back when the gradient of `out` is there."""

        def fetch(_gradient: Tensor) -> None:
            passage.fetch(ahead)

        out.register_hook(fetch)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
