"""Build one rank of a layout of any size in this process, without devices or peers, and see what it holds.

The very code that a training runs builds and shards the model; only the process group is a fake one, and tensors have
shapes but no memory.
"""

import copy
import logging
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining._backward import stage_backward_input
from torch.testing._internal.distributed.fake_pg import FakeStore

from train.config import TrainConfig
from train.data.loader import Batch
from train.data.metadata import Metadata
from train.layout.activations import StageLayers, boundary_bytes, stages_of_rank
from train.layout.batch import micro_batches
from train.layout.check import lay_out
from train.layout.dims import ParallelDims
from train.layout.holding import zero_of_gradients
from train.layout.in_flight import in_flight, received_early, splits_backward
from train.layout.memory import Memory, Role, accumulates, as_tree, check_host_budget, memory
from train.layout.recompute import most_bytes, plan
from train.mesh import Mesh
from train.model.config import padded_vocabulary
from train.model.llama import Llama
from train.monitor.live_bytes import LiveBytes, local, local_bytes, storages
from train.offload.buckets import elements, make_buckets
from train.offload.config import Tier
from train.offload.states import KINDS
from train.optim.adamw import build_optimizer
from train.optim.compact import CompactAdamW
from train.parallel.apply import materialise, shape_parts
from train.parallel.context import own_share
from train.parallel.data import accumulate
from train.parallel.stage import Boundary, run_part
from train.parallel.tensor import loss_context, vocabulary_loss


@dataclass(frozen=True)
class Held:
    """Bytes of one rank, wherever they are kept."""

    parameters: int
    """Weights at rest, as the optimizer sees them."""
    gradients: int
    """When the optimizer steps."""
    optimizer: int
    """Moments, and weights in fp32 beside those that compute in another type."""
    accumulated: int
    """Whole gradients that add up until the last micro-batch of a step, where ZeRO stages 0 and 1 reduce them."""
    gathered: int
    """Weights of all ranks, in the type of the matrix products, that stay from forward to backward."""
    activations: int
    """Kept from forward to backward, of all micro-batches that are under way, when that is most."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(asdict(self).values())


@dataclass(frozen=True)
class DryRun:
    """What a rank holds."""

    layout: str
    rank: int
    coordinates: dict[str, int]
    layers: list[int]
    """Numbers of its layers in the whole model."""
    parameters: int
    """Number of parameters at rest on the rank."""
    micro_batches_in_flight: int
    """Most that are under way at once in one of its stages."""
    recompute: str
    built: Held
    """Of the rank that was built, on a CPU."""
    reckoned: Held
    """By arithmetic, for the same."""
    reckoned_on_gpu: Held
    """By arithmetic, where norms have a kernel of their own."""
    on_gpu: Memory
    """The same, and what single layers need for a while, by where it is."""

    def as_tree(self) -> dict[str, Any]:
        """Return plain data, totals included."""
        tree = asdict(self)
        for name in ("built", "reckoned", "reckoned_on_gpu"):
            tree[name] = {f"{key}_bytes": value for key, value in tree[name].items()}
            tree[name]["total_bytes"] = getattr(self, name).total
        tree["on_gpu"] = as_tree(self.on_gpu)
        return tree


def dry_run(config: TrainConfig, ranks: int, rank: int = 0, ranks_per_node: int | None = None) -> DryRun:
    """Build `rank` of `ranks` and take one micro-batch through it.

    Raises `ConfigError` for a layout that training would refuse. Once in a process, which must have no process group:
    what torch remembers of a mesh outlives its groups.
    """
    if config.model.vocab_size is None:
        config.model.vocab_size = padded_vocabulary(Metadata.read(Path(config.data.prefix)).vocab_size)
    config.model.check_sequence_length(config.data.sequence_length)
    dims = lay_out(config, ranks, ranks_per_node)
    check_host_budget(config, dims, "cuda")
    # It explains at length how a tensor travels over two axes, for every parameter.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        return _look(config, dims, rank)
    finally:
        dist.destroy_process_group()


def _look(config: TrainConfig, dims: ParallelDims, rank: int) -> DryRun:
    mesh, device = Mesh.build(dims, "cpu"), torch.device("cpu")
    pp_rank, steps = mesh.coordinate("pp"), micro_batches(config, dims)
    times = in_flight(config.parallel, pp_rank, steps)
    splits = dims.pp > 1 and splits_backward(config.parallel)
    shaped = shape_parts(config, mesh)
    still = _without_moving(config)
    # What is compiled cannot be looked into; it keeps no more.
    with FakeTensorMode(allow_non_fake_inputs=True), torch.compiler.set_stance("force_eager"):
        sharded = materialise(shaped, still, mesh, device, seed=None)
        accumulated = gathered = 0
        kept, halfway = [], []
        stages = stages_of_rank(config, dims, pp_rank)
        for part, stage in zip(sharded.parts, stages, strict=True):
            assert isinstance(part, Llama)
            # The first stage does its whole backward in the second half.
            half_bytes = _half_backward(part, still, mesh) if splits and not stage.first else 0
            if accumulates(config, dims):
                with LiveBytes() as live:
                    _forward_backward(part, stage, still, mesh, last=False)
                accumulated += live.count(without=part.parameters())
            more = _forward_backward(part, stage, still, mesh, last=True)
            gathered += more[0]
            kept.append(more[1])
            halfway.append(half_bytes - kept[-1] if half_bytes else 0)
        parameters = list(sharded.parts.parameters())
        gradients = local_bytes(p.grad for p in parameters if p.grad is not None)
        built = Held(
            parameters=local_bytes(parameters),
            gradients=gradients,
            optimizer=_optimizer_bytes(sharded.parts, still, device),
            accumulated=accumulated,
            gathered=gathered,
            activations=most_bytes(times, kept, halfway)
            + received_early(config.parallel) * boundary_bytes(config, dims),
        )
    on_gpu = memory(config, dims, rank, "cuda")
    return DryRun(
        layout=str(dims),
        rank=rank,
        coordinates=dims.coordinates(rank),
        layers=[number for stage in stages for number in stage.layers],
        parameters=sum(local(parameter).numel() for parameter in parameters),
        micro_batches_in_flight=max(max(time.kept) for time in times),
        recompute=str(plan(config, dims, pp_rank, steps, "cpu")),
        built=built,
        reckoned=_reckon(memory(config, dims, rank, "cpu")),
        reckoned_on_gpu=_reckon(on_gpu),
        on_gpu=on_gpu,
    )


def _forward_backward(
    part: Llama, stage: StageLayers, config: TrainConfig, mesh: Mesh, last: bool
) -> tuple[int, int]:
    """Take a micro-batch through a part; returns bytes of gathered weights and of activations in between."""
    with accumulate(part, zero_of_gradients(config, mesh.dims), last), loss_context(config, mesh):
        with LiveBytes() as live:
            _given, out = _forward(part, config, mesh)
        elsewhere = [out] if stage.next_here else []
        activations = live.count(without=[*part.parameters(), *elsewhere])
        in_use = storages(part.parameters())
        out.backward(torch.ones_like(out))
    at_rest = storages(part.parameters())
    return sum(size for key, size in in_use.items() if key not in at_rest), activations


def _half_backward(part: Llama, config: TrainConfig, mesh: Mesh) -> int:
    """Take a micro-batch through a part and back to its input; returns bytes kept for the gradients of its weights."""
    with accumulate(part, zero_of_gradients(config, mesh.dims), last=False), loss_context(config, mesh):
        with LiveBytes() as live:
            given, out = _forward(part, config, mesh)
            # What it returns holds the gradients that are kept.
            _gradients = stage_backward_input([out], [torch.ones_like(out)], [given], part.parameters())[1]
            given.grad = None
            del out
        kept_bytes: int = live.count(without=part.parameters())
        return kept_bytes


def _forward(part: Llama, config: TrainConfig, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """Take a micro-batch through a part; returns what goes in, and what comes out: of the last part the loss."""
    shape = (config.parallel.micro_batch_size, config.data.sequence_length)
    tokens = torch.zeros(shape, dtype=torch.int64)
    documents = torch.zeros(shape, dtype=torch.int64) if config.data.mask_documents else None
    own = own_share(Batch(tokens=tokens, targets=tokens.clone(), documents=documents), config, mesh)
    boundary, last = Boundary.of(config, mesh, torch.device("cpu")), part.norm is not None
    given = own.tokens
    if part.embed_tokens is None:
        given = torch.empty(boundary.shape, dtype=boundary.dtype, requires_grad=True)
    out = run_part(part, given, own.documents, last, config, mesh, boundary)
    return given, vocabulary_loss(out, own.targets, "mean") if last else out


def _reckon(rank_memory: Memory) -> Held:
    """By arithmetic, wherever it is kept."""
    return Held(**{name: rank_memory[Role[name]].total for name in (field.name for field in fields(Held))})


def _without_moving(config: TrainConfig) -> TrainConfig:
    """The same types and sizes, with weights and activations on the device."""
    changed = copy.copy(config)
    changed.offload = replace(config.offload, parameters=Tier.none, activations=Tier.none)
    return changed


def _optimizer_bytes(parts: nn.ModuleList, config: TrainConfig, device: torch.device) -> int:
    """Bytes of the optimizer's state; takes its step where that makes it."""
    if config.has_masters:
        # Its blocks may be larger than all memory here, and are made from these sizes alone.
        return KINDS * torch.float32.itemsize * sum(map(elements, make_buckets(parts, config.model)))
    optimizer = build_optimizer(parts, config, device)
    if isinstance(optimizer, CompactAdamW):
        return sum(kept.moments_bytes for kept in optimizer.kept)
    optimizer.step()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return local_bytes(value for value in moments if isinstance(value, Tensor))
