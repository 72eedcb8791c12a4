"""Why gradients are not finite: where in the model numbers first go wrong, and how."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from train.data.loader import Batch
from train.optim.adamw import Optimizer
from train.parallel.engine import Engine

LARGEST_FLOAT16 = 65504


@dataclass(frozen=True, order=True)
class Fault:
    """Numbers that are not finite, in one place of the model."""

    place: tuple[float, int]
    """In the order of the forward pass."""
    what: str


@torch.no_grad()
def diagnose(
    parts: nn.ModuleList, optimizer: Optimizer, engine: Engine, micro_batches: Sequence[Batch]
) -> str:
    """Say where in the model the micro-batches of a step lead to numbers that are not finite, and how. Collective.

    `optimizer` still has the gradients of that step.
    """
    # In a layer, parameters come in the order in which they are used.
    names = {p: (name.partition(".")[2], index) for index, (name, p) in enumerate(parts.named_parameters())}
    found: list[Fault] = []
    with _watching(parts, found):
        engine.evaluate(micro_batches)
    backward: list[Fault] = []
    for parameter, gradient in optimizer.gradients().items():
        name, index = names[parameter]
        if how := _wrong(gradient, "is"):
            backward.append(
                Fault((_depth(name), index), f"the gradient of {name.removesuffix('.weight')} {how}")
            )
    own = (min(found, default=None), max(backward, default=None))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    forward_faults = [one for one, _ in everyone if one is not None]
    if forward_faults:
        return f"{min(forward_faults).what} in the forward pass"
    # The backward pass comes from the other end: what lies before a fault has it too.
    backward_faults = [one for _, one in everyone if one is not None]
    return (
        f"{max(backward_faults).what}, and no other nearer to the loss"
        if backward_faults
        else "none is found again"
    )


@contextmanager
def _watching(parts: nn.ModuleList, found: list[Fault]) -> Iterator[None]:
    """Context in which modules whose results go wrong, though what they are given does not, are added to `found`."""

    def look(name: str, module: nn.Module, given: tuple[Any, ...], result: Any) -> None:
        if not isinstance(result, Tensor) or any(_wrong(x, "") for x in given if isinstance(x, Tensor)):
            return
        weights = [(own, how) for own, weight in module.named_parameters() if (how := _wrong(weight, "is"))]
        how = _wrong(result, "is")
        if weights:
            found.append(Fault((_depth(name), len(found)), f"{name}.{weights[0][0]} {weights[0][1]}"))
        elif how is not None:
            found.append(Fault((_depth(name), len(found)), f"the result of {name} {how}"))

    hooks = [
        module.register_forward_hook(
            lambda module, given, result, name=name: look(name, module, given, result)
        )
        for part in parts
        for name, module in part.named_modules()
        if not list(module.children())
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _wrong(tensor: Tensor, verb: str) -> str | None:
    """What is wrong with a tensor's numbers, if anything."""
    if not tensor.is_floating_point():
        return None
    values = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if values.isnan().any():
        return f"{verb} NaN"
    if not values.isinf().any():
        return None
    if values.dtype is torch.float16:
        return f"overflows float16, whose largest number is {LARGEST_FLOAT16},"
    return f"{verb} infinite"


def _depth(name: str) -> float:
    """Place of a module in the order of the forward pass."""
    words = name.split(".")
    if words[0] == "layers":
        return float(words[1])
    return -1.0 if words[0] == "embed_tokens" else math.inf
