"""Matrix products whose backward is computed in another type than their forward."""

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def compute_backward_in(dtype: torch.dtype, module: nn.Module) -> None:
    """Have the gradients of `module`'s products with weights computed in `dtype`, in place.

    Whatever `module` computes by now, with whatever share of a weight: outside of its forward nothing changes.
    """
    forward = module.forward

    def changed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _Products(dtype):
            return forward(*args, **kwargs)

    # A method, for the compiler's sake: see `train.parallel.tensor`.
    module.forward = MethodType(changed, module)


class _Products(TorchFunctionMode):
    """While entered, every `F.linear` is a `_Product`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        x, weight, *bias = args
        assert bias in ([], [None]) and not kwargs, "the model's products have no bias"
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return _Product.apply(x, weight, self._dtype)


class _Product(torch.autograd.Function):
    """x (..., in) times the transpose of weight (out, in), in the type of x; gradients in `dtype`.

    The gradient of a weight keeps the bits of `dtype` where the weight is wide enough to have such a gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiply."""
        ctx.save_for_backward(x, weight)
        ctx.dtype = dtype
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Both products in `dtype`: beyond its range they are infinite, which the loss scale is there for."""
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        narrow = gradient.to(ctx.dtype)
        given = (narrow @ weight.to(ctx.dtype)).to(x.dtype) if needs_x else None
        own = None
        if needs_weight:
            own = narrow.flatten(0, -2).T @ x.to(ctx.dtype).flatten(0, -2)
        return given, own, None
