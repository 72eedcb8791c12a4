"""Build the parts of a model that a rank holds: the one fixed order in which parallelism is applied."""

from dataclasses import dataclass

import torch
from torch import nn

from train.config import TrainConfig
from train.mesh import Mesh
from train.model.llama import Llama
from train.parallel import context, data, pipeline, recompute, tensor
from train.parallel.compile import compile_layers
from train.parallel.engine import Direct, Engine
from train.parallel.fill import draw, fill


@dataclass(frozen=True)
class Sharded:
    """A model, spread over the ranks."""

    parts: nn.ModuleList
    """The `Llama`s of this rank: one, or with some pipeline schedules several, each a range of layers."""
    mesh: Mesh


def build_parts(config: TrainConfig, mesh: Mesh, device: torch.device, seed: int | None) -> Sharded:
    """Build this rank's parts on `device` with the weights of `seed`. Collective.

    `seed` None leaves the weights as they are in memory: for a checkpoint that is loaded next. Nothing is allocated
    that the rank does not keep: parts are cut and sharded before they have memory.
    """
    return materialise(shape_parts(config, mesh), config, mesh, device, seed)


def shape_parts(config: TrainConfig, mesh: Mesh) -> list[Llama]:
    """The first half of `build_parts`: parts that are what they will be, but have no memory."""
    parts = []
    for stage in pipeline.own_stages(config, mesh):
        with torch.device("meta"):
            part = Llama(config.model)
        pipeline.cut(part, stage)
        if mesh.dims.tp > 1:
            tensor.shard(part, config, mesh)
        if mesh.dims.cp > 1:
            context.shard(part, config, mesh)
        recompute.apply(part, config, mesh)
        if config.parallel.compile:
            compile_layers(part)
        if data.is_sharded(config, mesh.dims):
            data.shard(part, config, mesh)
        parts.append(part)
    return parts


def materialise(
    parts: list[Llama], config: TrainConfig, mesh: Mesh, device: torch.device, seed: int | None
) -> Sharded:
    """The second half of `build_parts`: give the parts memory on `device`, and values."""
    for part in parts:
        part.to_empty(device=device)
        context.give_positions(part, config, mesh, device)
        if seed is not None:
            fill(part, config.model, draw(config.model, seed))
    return Sharded(nn.ModuleList(parts), mesh)


def build_engine(sharded: Sharded, config: TrainConfig, device: torch.device) -> Engine:
    """Return what runs the parts. Collective; call it when the parts have their values."""
    mesh = sharded.mesh
    if mesh.dims.pp > 1:
        return pipeline.Pipelined(sharded.parts, config, mesh, device)
    (part,) = sharded.parts
    model: nn.Module = part
    if mesh.dims.dp * mesh.dims.cp > 1 and not data.is_sharded(config, mesh.dims):
        assert isinstance(part, Llama)
        model = data.replicate_plain(part, config, mesh, device)
    return Direct(model, config, mesh, device)
