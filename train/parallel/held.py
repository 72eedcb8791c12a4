"""The types in which a part's weights are held, and its gradients add up and arrive.

A gradient that was rounded to the type of its weight would lose what ranks and micro-batches have added up in a wider
one.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from train.precision.config import PrecisionConfig


@dataclass(frozen=True)
class GradientTypes:
    """The types of gradients on their way to the optimizer."""

    accumulate: torch.dtype
    """In which micro-batches add up and the optimizer gets them."""
    reduce: torch.dtype
    """In which they travel and ranks add them up."""
    arrive: torch.dtype | None = None
    """That of the gradients of weights that are narrower than the products they come from; None: as the weights."""

    @classmethod
    def of(cls, config: PrecisionConfig) -> "GradientTypes":
        """As configured."""
        accumulate = getattr(torch, config.accumulate.value)
        # The backward's products have more bits than weights in bfloat16.
        arrive = None if config.backward in (None, config.compute) else accumulate
        return cls(accumulate, getattr(torch, config.reduce.value), arrive)


def hold(part: nn.Module, dtype: torch.dtype) -> None:
    """Make every parameter of a part one of `dtype`, in place; buffers stay as they are."""
    held: dict[nn.Parameter, nn.Parameter] = {}  # a tied parameter stays one
    for module in part.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in held:
                held[parameter] = nn.Parameter(parameter.detach().to(dtype))
            setattr(module, name, held[parameter])


def keep_gradients(part: nn.Module, types: GradientTypes) -> None:
    """Have the gradients of a sharded part add up and arrive in `types`, whatever types its parameters are of.

    torch's `fully_shard` turns a reduced gradient into the type of its parameter. Call it when the parameters have
    their memory, and again, between two steps, to change the types.
    """
    for parameter in part.parameters():
        parameter.grad_dtype = None  # any
    for module in part.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                group._init_mp_dtypes = partial(_set_types, group, types)  # type: ignore[method-assign]
                group._init_mp_dtypes()


def _set_types(group: FSDPParamGroup, types: GradientTypes) -> None:
    """In place of what a group does when it looks at the types of its parameters."""
    FSDPParamGroup._init_mp_dtypes(group)
    group._orig_dtype, group._reduce_dtype = types.accumulate, types.reduce
    for parameter in group.fsdp_params:
        parameter.reduce_dtype = types.accumulate
        if types.arrive is not None:
            parameter.init_unsharded_param = partial(  # type: ignore[method-assign]
                _init_unsharded, parameter, types.arrive
            )


def _init_unsharded(parameter: FSDPParam, dtype: torch.dtype) -> None:
    """In place of what makes, or fills, the parameter that computes."""
    FSDPParam.init_unsharded_param(parameter)
    if parameter._unsharded_param.grad_dtype != dtype:
        parameter._unsharded_param.grad_dtype = dtype
