"""Activation checkpointing: layers that keep less and compute it again in the backward pass (Chen et al. 2016).

What is kept is a choice of results by the module that computes them, see `train.layout.activations`.
"""

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from train.config import TrainConfig
from train.layout.activations import RESULTS
from train.layout.batch import micro_batches
from train.layout.config import Recompute
from train.layout.recompute import Plan, plan
from train.mesh import Mesh
from train.model.llama import Layer, Llama
from train.parallel import ring

_PRODUCTS = ("mm", "addmm", "bmm", "_scaled_mm")
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
_COLLECTIVES = ("all_to_all_single", "reduce_scatter_tensor", "all_reduce", "wait_tensor")


def apply(part: Llama, config: TrainConfig, mesh: Mesh) -> None:
    """Make the layers of `part` recompute what `parallel.recompute` says, in place.

    Names of parameters stay. Raises `ConfigError` for a budget that is too small.
    """
    if config.parallel.recompute is Recompute.none:
        return
    chosen = plan_of(config, mesh).layers
    for number, layer in part.layers.items():
        results = chosen[int(number)].results
        if results is not None:
            assert isinstance(layer, Layer)
            _recompute(layer, results, reduced=mesh.dims.tp > 1)


def plan_of(config: TrainConfig, mesh: Mesh) -> Plan:
    """What the layers of this rank keep."""
    steps = micro_batches(config, mesh.dims)
    return plan(config, mesh.dims, mesh.coordinate("pp"), steps, mesh.root.device_type)


def _recompute(layer: Layer, results: frozenset[str], reduced: bool) -> None:
    # Nothing in a layer draws random numbers: saving the generator's state, a wait for the device, is left out.
    again: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if results:
        again["context_fn"] = _Selection(layer, results, reduced).contexts
    layer.forward = functools.partial(checkpoint, layer.forward, **again)  # type: ignore[method-assign]


class _Selection:
    """Keeps the results of some modules of a layer, told apart by which of them is being executed."""

    def __init__(self, layer: Layer, results: frozenset[str], reduced: bool) -> None:
        """`reduced`: the result of `o_proj` is a sum over ranks, which is kept in place of its addends."""
        self._running: str | None = None
        self._kept = {name: _operators(name, reduced) for name in results}
        for name in RESULTS:
            block = layer.mlp if name in ("gate_proj", "up_proj") else layer.self_attn
            module = getattr(block, name)
            module.register_forward_pre_hook(functools.partial(self._begin, name))
            module.register_forward_hook(self._end)

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Contexts of a forward pass and of its repetition."""
        forward, again = create_selective_checkpoint_contexts(self._policy)
        return forward, again

    def _begin(self, name: str, *_: Any) -> None:
        self._running = name

    def _end(self, *_: Any) -> None:
        self._running = None

    def _policy(
        self, context: SelectiveCheckpointContext, operator: Any, *_: Any, **__: Any
    ) -> CheckpointPolicy:
        kept = self._running in self._kept and operator in self._kept[self._running]
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _operators(name: str, reduced: bool) -> frozenset[Any]:
    """Operators whose results are kept of what the module `name` does."""
    aten, collectives = torch.ops.aten, torch.ops._c10d_functional
    if name == "o_proj" and reduced:
        return frozenset(getattr(collectives, operator).default for operator in _COLLECTIVES)
    found = [getattr(aten, operator).default for operator in _PRODUCTS]
    if name == "core":
        found += [getattr(aten, operator).default for operator in _ATTENTION]
        found.append(ring.OPERATOR)
        found += [getattr(collectives, operator).default for operator in _COLLECTIVES]
    return frozenset(found)
