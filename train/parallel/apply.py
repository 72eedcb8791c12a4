"""Build the parts of a model that a rank holds: the one fixed order in which parallelism is applied."""

from dataclasses import dataclass

import torch
from torch import nn

from train.config import TrainConfig
from train.layout.dims import is_sharded
from train.mesh import Mesh
from train.model.llama import Llama
from train.offload import activations
from train.offload.config import Tier
from train.offload.parameters import Shelved, shelve
from train.parallel import context, data, pipeline, recompute, tensor
from train.parallel.compile import compile_layers
from train.parallel.engine import Direct, Engine
from train.parallel.fill import draw, fill
from train.parallel.held import GradientTypes, hold, keep_gradients
from train.precision.backward import compute_backward_in
from train.precision.float8 import use_float8
from train.precision.policy import prepare_device
from train.precision.rows import hold_rows


@dataclass(frozen=True)
class Sharded:
    """A model, spread over the ranks."""

    parts: nn.ModuleList
    """The `Llama`s of this rank: one, or with some pipeline schedules several, each a range of layers."""
    mesh: Mesh
    shelved: Shelved | None = None
    """The weights, where they lie elsewhere between their uses."""
    carrier: activations.Carrier | None = None
    """What takes activations to the host, where that is done."""


def build_parts(config: TrainConfig, mesh: Mesh, device: torch.device, seed: int | None) -> Sharded:
    """Build this rank's parts on `device` with the weights of `seed`. Collective.

    `seed` None leaves the weights as they are in memory: for a checkpoint that is loaded next. Nothing is allocated
    that the rank does not keep: parts are cut and sharded before they have memory.
    """
    prepare_device(config.precision, device)
    return materialise(shape_parts(config, mesh), config, mesh, device, seed)


def shape_parts(config: TrainConfig, mesh: Mesh) -> list[Llama]:
    """The first half of `build_parts`: parts that are what they will be, but have no memory."""
    parts = []
    for stage in pipeline.own_stages(config, mesh):
        with torch.device("meta"):
            part = Llama(config.model)
        pipeline.cut(part, stage)
        if config.has_masters:
            hold(part, getattr(torch, config.held.value))
        if mesh.dims.tp > 1:
            tensor.shard(part, config, mesh)
        if mesh.dims.cp > 1:
            context.shard(part, config, mesh)
        _choose_types(part, config)
        # Before recomputation: with that inside, the compiler fails on what tensor parallelism exchanges.
        if config.parallel.compile:
            compile_layers(part)
        recompute.apply(part, config, mesh)
        if is_sharded(config, mesh.dims):
            data.shard(part, config, mesh)
        parts.append(part)
    return parts


def _choose_types(part: Llama, config: TrainConfig) -> None:
    """Have single modules of a part hold or compute in types of their own, in place."""
    precision = config.precision
    if precision.embedding is not None and part.embed_tokens is not None:
        hold_rows(part.embed_tokens)
    if precision.float8:
        use_float8(part.layers)
    if precision.backward not in (None, precision.compute):
        modules: list[nn.Module] = [module for module in part.modules() if isinstance(module, nn.Linear)]
        if part.norm is not None and part.lm_head is None:
            modules.append(part)  # which multiplies by the embedding
        for module in modules:
            compute_backward_in(getattr(torch, precision.backward.value), module)


def materialise(
    parts: list[Llama], config: TrainConfig, mesh: Mesh, device: torch.device, seed: int | None
) -> Sharded:
    """The second half of `build_parts`: give the parts memory on `device`, and values."""
    shelved = None
    if config.offload.parameters is Tier.none:
        for part in parts:
            part.to_empty(device=device)
    else:
        shelved = shelve(parts, config, device)
    for part in parts:
        context.give_positions(part, config, mesh, device)
        if config.has_masters or config.precision.needs_policy:
            keep_gradients(part, GradientTypes.of(config.precision))
        if seed is not None:
            values = draw(config.model, seed)
            if shelved is None:
                fill(part, config.model, values)
            else:
                shelved.fill(part, config.model, values)
    carrier = None
    if config.offload.activations is not Tier.none:
        plan = recompute.plan_of(config, mesh)
        carrier = activations.offload(parts, plan, config.offload.prefetch_layers, device)
    return Sharded(nn.ModuleList(parts), mesh, shelved, carrier)


def build_engine(sharded: Sharded, config: TrainConfig, device: torch.device) -> Engine:
    """Return what runs the parts. Collective; call it when the parts have their values."""
    mesh = sharded.mesh
    if mesh.dims.pp > 1:
        return pipeline.Pipelined(sharded.parts, config, mesh, device, sharded.carrier)
    (part,) = sharded.parts
    model: nn.Module = part
    if mesh.dims.dp * mesh.dims.cp > 1 and not is_sharded(config, mesh.dims):
        assert isinstance(part, Llama)
        model = data.replicate_plain(part, config, mesh, device)
    return Direct(model, config, mesh, device, sharded.carrier)
