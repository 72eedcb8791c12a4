"""A table of numbers held in one byte each, with a scale for each row.

There is no other copy of it: an update that is smaller than a step between two numbers is rounded up or down at
random, so that it is right on average (stochastic rounding, Gupta et al. 2015). Values that are taken from a table and
put back into one are the same to the bit, so that a checkpoint may hold plain numbers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from train.precision.config import SCALE_BYTES

LARGEST = 127
_SCALE_BITS = 0xFFFF
"""Bits of an fp32 scale that are left zero, so that the product with a code has no more bits than fp32."""
aten = torch.ops.aten


class Rows(Tensor):
    """Looks like a matrix of floating-point numbers, and can be looked up, cut by rows, and copied into."""

    packed: Tensor
    """int8, (rows, columns + SCALE_BYTES): codes, and the bytes of the row's fp32 scale."""

    @staticmethod
    def __new__(cls, packed: Tensor, dtype: torch.dtype) -> "Rows":
        """`dtype` is what it looks like, and what is looked up comes in."""
        shape = (packed.shape[0], packed.shape[1] - SCALE_BYTES)
        made: Rows = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=packed.device)
        made.packed = packed
        return made

    @classmethod
    def like(cls, tensor: Tensor) -> "Rows":
        """Without values, of the shape of `tensor`, where that is."""
        rows, columns = tensor.shape
        packed = torch.empty((rows, columns + SCALE_BYTES), dtype=torch.int8, device=tensor.device)
        return cls(packed, tensor.dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        """Say what it is."""
        return f"Rows(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def decode(self, first: int = 0, last: int | None = None) -> Tensor:
        """Rows `first` to `last` (all, if None) as fp32 numbers."""
        return unpack(self.packed[first:last])

    def replace_rows(self, first: int, values: Tensor, generator: torch.Generator | None = None) -> None:
        """Replace rows from `first` on by fp32 `values`, rounded at random with a generator, else to the nearest."""
        self.packed[first : first + len(values)].copy_(pack(values, generator))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """See torch: all that may be done with it."""
        if func not in _OPERATORS:
            # The few that a lookup, fully_shard and a checkpoint need are there; any other would decode the table.
            raise RuntimeError(f"a table held in int8 has no {func}")
        return _OPERATORS[func](func, args, kwargs or {})

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor], None]:
        """See torch's `fully_shard`: what travels."""
        return (self.packed,), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """See torch's `fully_shard`: what is made of it; `out` shares the memory of `outputs`."""
        return (Rows(outputs[0], dtype), outputs) if out is None else None


def hold_rows(embedding: nn.Embedding) -> None:
    """Have an embedding without memory hold its table as `Rows`, in place."""
    weight = embedding.weight
    table: Tensor
    if isinstance(weight, DTensor):
        table = DTensor.from_local(
            Rows.like(weight.to_local().detach()),
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )
    else:
        table = Rows.like(weight.detach())
    embedding.weight = nn.Parameter(table)


def pack(values: Tensor, generator: torch.Generator | None) -> Tensor:
    """Rows of fp32 numbers as `Rows.packed`, rounded at random with a generator, else to the nearest."""
    values = values.float()
    scale = values.abs().amax(1, keepdim=True) / LARGEST
    # To the nearest number of fewer bits. The largest value is exactly LARGEST steps then, and gives the same scale.
    bits = scale.view(torch.int32)
    scale = ((bits + (_SCALE_BITS + 1) // 2) & ~_SCALE_BITS).view(torch.float32)
    steps = values / scale.clamp_min(torch.finfo(torch.float32).tiny)
    if generator is None:
        rounded = steps.round()
    else:
        noise = torch.rand(steps.shape, generator=generator, device=steps.device)
        rounded = torch.where(steps.abs() > LARGEST - 0.5, steps.round(), (steps + noise).floor())
    codes = rounded.clamp_(-LARGEST, LARGEST).to(torch.int8)
    return torch.cat((codes, scale.view(torch.int8)), 1)


def unpack(packed: Tensor) -> Tensor:
    """fp32 numbers (..., columns) of rows of `Rows.packed`."""
    scale = packed[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return packed[..., :-SCALE_BYTES] * scale


def _embedding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    table, tokens = args[:2]
    return unpack(table.packed[tokens]).to(table.dtype)


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[:2]
    if isinstance(target, Rows) and isinstance(source, Rows):
        target.packed.copy_(source.packed)
    elif isinstance(target, Rows):
        target.replace_rows(0, source)
    else:
        target.copy_(source.decode())
    return target


def _by_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What cuts rows, or none."""
    table, *more = args
    cuts = func in (aten.slice.Tensor, aten.split.Tensor)
    assert not cuts or kwargs.get("dim", more[func is aten.split.Tensor] if len(more) > 1 else 0) == 0
    packed = func(table.packed, *more, **kwargs)
    if isinstance(packed, (list, tuple)):
        return [Rows(one, table.dtype) for one in packed]
    return return_and_correct_aliasing(func, args, kwargs, Rows(packed, table.dtype))


def _same(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view of all of it. `fully_shard` asks for a flat one, too, which it does not look at."""
    table = args[0]
    return return_and_correct_aliasing(func, args, kwargs, Rows(table.packed, table.dtype))


def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rows:
    """Another table, filled with zeros or not."""
    table = args[0]
    rows, columns = args[1] if func is aten.new_zeros.default else table.shape
    make = torch.empty if func is aten.empty_like.default else torch.zeros
    device = kwargs.get("device") or table.device
    packed = make((rows, columns + SCALE_BYTES), dtype=torch.int8, device=device)
    return Rows(packed, kwargs.get("dtype") or table.dtype)


_OPERATORS: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    aten.embedding.default: _embedding,
    aten.copy_.default: _copy,
    aten.detach.default: _by_rows,
    aten.slice.Tensor: _by_rows,
    aten.split.Tensor: _by_rows,
    aten.view.default: _same,
    aten.as_strided.default: _same,
    aten.new_zeros.default: _new,
    aten.empty_like.default: _new,
}
