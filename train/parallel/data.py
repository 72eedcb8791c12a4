"""Data parallelism: what the ranks of one stage replicate and what they shard (ZeRO), and when they communicate.

One mechanism, torch's `fully_shard` (and `replicate`, which is the same without shards), has three switches: whether
parameters are freed after forward, whether they are freed after backward, and whether a backward reduces gradients.
Where nothing but plain replication is asked for, `DistributedDataParallel` does it with less work a step.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from train.comm.replicas import choose_allreduce
from train.config import TrainConfig
from train.mesh import Mesh
from train.model.llama import Llama
from train.precision.policy import autocast, sharded_policy


def shard(part: Llama, config: TrainConfig, mesh: Mesh) -> None:
    """Shard or replicate a part of the model in place, each layer on its own, so that they travel one by one.

    Parameters become DTensors over the data-parallel axes, on top of what tensor parallelism has made of them.
    """
    policy = sharded_policy(config.precision)
    groups: list[list[nn.Module]] = [[layer] for layer in part.layers.values()]
    # The first and the last to be needed: their weights are as large as several layers'.
    if part.embed_tokens is not None and not (part.norm is not None and part.lm_head is None):
        groups.insert(0, [part.embed_tokens])
    if part.lm_head is not None:
        groups.append([module for module in (part.norm, part.lm_head) if module is not None])
    for group in groups:
        # Between forward and backward of the last group nothing else is needed: freeing it is wasted work.
        _distribute(group, config, mesh, policy, keep=group is groups[-1] and part.lm_head is not None)
    _distribute([part], config, mesh, policy, keep=True)
    if isinstance(part.embed_tokens, FSDPModule):
        # The gradient of a table needs to know which rows were looked up, not what is in them.
        part.embed_tokens.set_unshard_in_backward(False)
    _prefetch([group[0] for group in groups])


def replicate_plain(part: Llama, config: TrainConfig, mesh: Mesh, device: torch.device) -> nn.Module:
    """Return the module to call in place of `part`: its gradients are averaged bucket by bucket during backward."""
    replicated = DistributedDataParallel(
        part,
        device_ids=[device] if device.type == "cuda" else None,
        process_group=mesh.dp_cp.get_group(),
        gradient_as_bucket_view=True,
        # The tables of RoPE are the same on all ranks; else they would travel with each micro-batch.
        forward_sync_buffers=False,
    )
    choose_allreduce(replicated, config, mesh, device)
    # As in a step, not in fp32: some attention has no such kernel. Compiled code for this shape would be of no use.
    with autocast(config.precision, device), torch.compiler.set_stance("force_eager"):
        _settle_buckets(replicated, device)
    _add_up_in_buckets(replicated)
    return replicated


@contextmanager
def accumulate(model: nn.Module, zero: int, last: bool) -> Iterator[None]:
    """Context of one micro-batch: what is communicated with it, at the given ZeRO stage, and what with the last."""
    if isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(last)
        # Stages 2 and 3 keep no whole gradients: each micro-batch is reduced, copies agree once a step.
        model.set_requires_gradient_sync(last or zero >= 2)
        model.set_requires_all_reduce(last)
        # Stages 0 to 2 gather parameters once a step.
        model.set_reshard_after_backward(last or zero == 3)
    yield


def _distribute(
    modules: list[nn.Module], config: TrainConfig, mesh: Mesh, policy: MixedPrecisionPolicy, keep: bool
) -> None:
    target = modules[0] if len(modules) == 1 else modules
    if config.parallel.zero == 0:
        replicate(target, mesh=mesh.dp_cp, mp_policy=policy)
        return
    fully_shard(
        target,
        mesh=mesh.hybrid if mesh.dims.dp_replicate > 1 else mesh.shard,
        mp_policy=policy,
        reshard_after_forward=config.parallel.zero == 3 and not keep,
        shard_placement_fn=_placement,
    )


def _placement(parameter: nn.Parameter) -> Shard | None:
    """Which dimension the ranks share; None is the first.

    Two shardings of one dimension, of which the outer is uneven, are more than a DTensor's placements can describe:
    a checkpoint would put rows where they don't belong.
    """
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if placement.is_shard(0) and parameter.shape[0] % parameter.device_mesh.size(axis):
                return Shard(1)
    return None


def _prefetch(modules: list[nn.Module]) -> None:
    """Ask for the next module's parameters while one computes; without a GPU's streams this only changes the order.

    In a backward torch by itself asks for those of the module that ran before.
    """
    sharded = [module for module in modules if isinstance(module, FSDPModule)]
    for module, following in itertools.pairwise(sharded):
        module.set_modules_to_forward_prefetch([following])
    for module in sharded[:1]:
        # What ran before the first is another micro-batch: it is to ask for nothing but what it has already.
        module.set_modules_to_backward_prefetch([module])


def _settle_buckets(model: DistributedDataParallel, device: torch.device) -> None:
    """Run two small steps, so that the buckets have their final order before the first real one.

    DDP orders its buckets anew after the first backward. On more than two ranks the order decides in which
    order an all-reduce adds, so a resumed run, whose first step has the initial order, would differ in its
    last bits from the run that it continues.
    """
    tokens = torch.zeros((1, 2), dtype=torch.int64, device=device)
    positions = torch.arange(2, device=device)
    for _ in range(2):
        model(tokens, positions=positions).float().sum().mul(0.0).backward()


def _add_up_in_buckets(model: DistributedDataParallel) -> None:
    """Have the micro-batches of a step add up their gradients where they will be averaged; they are None after it.

    Else those of all but the last micro-batch would add up beside the buckets, in as much memory again.
    """
    buckets = [(parameter, parameter.grad) for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)

    def begin(*_: object) -> None:
        # A step of one micro-batch needs no zeros to add to.
        if model.require_backward_grad_sync or not torch.is_grad_enabled():
            return
        for parameter, place in buckets:
            if parameter.grad is None and place is not None:
                parameter.grad = place.zero_()

    model.register_forward_pre_hook(begin)
