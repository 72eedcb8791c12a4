"""Where something is done around the moment in which `fully_shard` reads the shards of a module's parameters.

torch has no hook there. Its groups of parameters belong to it: this is the only place that changes what they do, and
`tests/ranks/test_offload_parameters.py` guards what it relies on.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


def sharded_modules(parts: nn.Module) -> list[nn.Module]:
    """Modules whose own parameters are gathered together, each with others that share in it left out.

    In the order of the forward pass.
    """
    found: list[nn.Module] = []
    seen: set[int] = set()
    for module in parts.modules():
        if isinstance(module, FSDPModule):
            groups = {id(group) for group in groups_of(module)}
            if groups - seen:
                found.append(module)
            seen |= groups
    return found


def groups_of(module: nn.Module) -> list[FSDPParamGroup]:
    """torch's groups of the parameters that are gathered for a module, those of modules within it left out."""
    assert isinstance(module, FSDPModule)
    return module._get_fsdp_state()._fsdp_param_groups


def gathered_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of `groups_of` a module, as they are between uses."""
    return [held.sharded_param for group in groups_of(module) for held in group.fsdp_params]


def before_unshard(module: nn.Module, call: Callable[[], None]) -> None:
    """Have `call` run each time just before the shards of a module's parameters are read.

    It runs before what was asked for earlier. What it raises ends the pass.
    """
    for group in groups_of(module):
        around_read(group, call, _nothing)


def around_read(group: FSDPParamGroup, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Have `before` run each time just before the shards of a group are read, `after` when their copying is queued.

    Several ranks read when they begin to gather, which may be ahead of time; one alone when it needs the parameters.
    """
    unshard, wait_for_unshard = group.unshard, group.wait_for_unshard
    alone = not isinstance(group.mesh_info, FSDPMeshInfo) or group.mesh_info.shard_mesh_size == 1

    def unshard_around(async_op: bool = False) -> None:
        if alone or not _gathers(group):
            unshard(async_op)
            return
        before()
        unshard(async_op)
        after()

    def wait_around() -> None:
        if not alone or group._all_gather_result is None:
            wait_for_unshard()
            return
        before()
        wait_for_unshard()
        after()

    group.unshard = unshard_around  # type: ignore[method-assign]
    group.wait_for_unshard = wait_around  # type: ignore[method-assign]


def hand_over(group: FSDPParamGroup, tensor: Tensor, event: torch.Event) -> None:
    """Have what reads a group's shards on a device wait for `event`; the memory of `tensor` stays until it has read."""
    current = torch.get_device_module(group.device).current_stream(group.device)
    current.wait_event(event)
    group._wait_all_gather_streams_on_event(event)
    if tensor.device.type != "cpu":
        for stream in (current, group.comm_ctx.all_gather_copy_in_stream):
            tensor.record_stream(stream)


def in_backward(group: FSDPParamGroup) -> bool:
    """Whether what a group is about to do is for a backward pass."""
    return group._training_state is TrainingState.PRE_BACKWARD


def read_again(group: FSDPParamGroup) -> bool:
    """Whether a backward pass gathers the parameters of a group once more."""
    return group._reshard_after_forward and group.unshard_in_backward


def _gathers(group: FSDPParamGroup) -> bool:
    """Whether `unshard` would do anything."""
    if group._all_gather_result is not None or group.is_unsharded:
        return False
    return group.unshard_in_backward or not in_backward(group)


def _nothing() -> None:
    """Do nothing."""
