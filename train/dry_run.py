"""Build one rank of a layout of any size in this process, without devices or peers, and see what it holds.

The very code that a training runs builds and shards the model; only the process group is a fake one, and tensors have
shapes but no memory.
"""

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from train.config import TrainConfig
from train.data.loader import Batch
from train.data.metadata import Metadata
from train.layout.activations import stages_of_rank
from train.layout.check import lay_out, micro_batches
from train.layout.dims import ParallelDims
from train.layout.holding import holdings, units
from train.layout.recompute import plan
from train.layout.stages import schedule_of
from train.mesh import Mesh
from train.model.config import padded_vocabulary
from train.model.llama import Llama
from train.monitor.live_bytes import LiveBytes, local_bytes, storages
from train.optim.adamw import build_optimizer
from train.parallel.apply import materialise, shape_parts
from train.parallel.context import own_share
from train.parallel.data import accumulate, is_sharded
from train.parallel.engine import compute_context
from train.parallel.stage import Boundary
from train.parallel.tensor import loss_context, vocabulary_loss


@dataclass(frozen=True)
class Held:
    """Bytes of one rank."""

    parameters: int
    """Weights at rest, as the optimizer sees them."""
    gradients: int
    """When the optimizer steps."""
    optimizer: int
    accumulated: int
    """Whole gradients that add up until the last micro-batch of a step, where ZeRO stages 0 and 1 reduce them."""
    gathered: int
    """Weights of all ranks, in the type of the matrix products, that stay from forward to backward."""
    activations: int
    """Kept from forward to backward, for all micro-batches that are under way at once."""

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
    recompute: str
    built: Held
    """Of the rank that was built, on a CPU."""
    reckoned: Held
    """By arithmetic, for the same."""
    reckoned_on_gpu: Held
    """By arithmetic, where norms have a kernel of their own."""

    def as_tree(self) -> dict[str, Any]:
        """Return plain data, totals included."""
        tree = asdict(self)
        for name in ("built", "reckoned", "reckoned_on_gpu"):
            tree[name] = {f"{key}_bytes": value for key, value in tree[name].items()}
            tree[name]["total_bytes"] = getattr(self, name).total
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
    # It explains at length how a tensor travels over two axes, for every parameter.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        return _look(config, dims, rank)
    finally:
        dist.destroy_process_group()


def _look(config: TrainConfig, dims: ParallelDims, rank: int) -> DryRun:
    mesh, device = Mesh.build(dims, "cpu"), torch.device("cpu")
    stages = stages_of_rank(config, dims, mesh.coordinate("pp"), micro_batches(config, dims))
    (in_flight,) = {stage.in_flight for stage in stages}
    shaped = shape_parts(config, mesh)
    with FakeTensorMode(allow_non_fake_inputs=True):
        sharded = materialise(shaped, config, mesh, device, seed=None)
        optimizer = build_optimizer(sharded.parts, config.optim)
        accumulated = gathered = activations = 0
        for part in sharded.parts:
            assert isinstance(part, Llama)
            if _accumulates(config, dims):
                with LiveBytes() as live:
                    _forward_backward(part, config, mesh, last=False)
                accumulated += live.count(without=part.parameters())
            more = _forward_backward(part, config, mesh, last=True)
            gathered, activations = gathered + more[0], activations + more[1]
        parameters = list(sharded.parts.parameters())
        gradients = local_bytes(p.grad for p in parameters if p.grad is not None)
        optimizer.step()
        moments = [value for state in optimizer.state.values() for value in state.values()]
        built = Held(
            parameters=local_bytes(parameters),
            gradients=gradients,
            optimizer=local_bytes(value for value in moments if isinstance(value, Tensor)),
            accumulated=accumulated,
            gathered=gathered,
            activations=activations * in_flight,
        )
    kept = plan(config, dims, stages, "cpu")
    return DryRun(
        layout=str(dims),
        rank=rank,
        coordinates=dims.coordinates(rank),
        layers=[number for stage in stages for number in stage.layers],
        parameters=built.parameters // 4,
        micro_batches_in_flight=in_flight,
        recompute=str(kept),
        built=built,
        reckoned=_reckon(config, dims, rank, kept.kept_bytes),
        reckoned_on_gpu=_reckon(config, dims, rank, plan(config, dims, stages, "cuda").kept_bytes),
    )


def _accumulates(config: TrainConfig, dims: ParallelDims) -> bool:
    """Whether gradients add up apart from those that the optimizer sees: whole ones, before they are reduced."""
    reduced = dims.dp * dims.cp > 1
    return reduced and _zero_of_gradients(config, dims) < 2 and micro_batches(config, dims) > 1


def _zero_of_gradients(config: TrainConfig, dims: ParallelDims) -> int:
    """The ZeRO stage as far as gradients go: whole ones wait for the end of a step where a backward is split."""
    split = dims.pp > 1 and schedule_of(config.parallel).splits_backward
    return min(config.parallel.zero, 1) if split else config.parallel.zero


def _forward_backward(part: Llama, config: TrainConfig, mesh: Mesh, last: bool) -> tuple[int, int]:
    """Take a micro-batch through a part; returns bytes of gathered weights and of activations in between."""
    shape = (config.parallel.micro_batch_size, config.data.sequence_length)
    tokens = torch.zeros(shape, dtype=torch.int64)
    documents = torch.zeros(shape, dtype=torch.int64) if config.data.mask_documents else None
    own = own_share(Batch(tokens=tokens, targets=tokens.clone(), documents=documents), config, mesh)
    boundary = Boundary.of(config, mesh, torch.device("cpu"))
    with accumulate(part, _zero_of_gradients(config, mesh.dims), last), loss_context(config, mesh):
        with LiveBytes() as live:
            given = own.tokens
            if part.embed_tokens is None:
                given = torch.empty(boundary.shape, dtype=boundary.dtype, requires_grad=True)
            with compute_context(config, mesh, torch.device("cpu")):
                out = part(given, own.documents)
            if part.norm is not None:
                out = vocabulary_loss(out, own.targets, "mean")
        activations = live.count(without=part.parameters())
        in_use = storages(part.parameters())
        out.backward(torch.ones_like(out))
    at_rest = storages(part.parameters())
    return sum(size for key, size in in_use.items() if key not in at_rest), activations


def _reckon(config: TrainConfig, dims: ParallelDims, rank: int, activation_bytes: int) -> Held:
    """What the formulas of ZeRO say (Rajbhandari et al. 2020), for weights and moments in fp32."""
    (holding,) = holdings(config, dims, [rank])
    share = round(holding.parameters / holding.sharers)
    gathered = 0
    if is_sharded(config, dims):
        item_bytes = config.precision.compute_bytes
        tp_rank = holding.coordinates["tp"]
        gathered = item_bytes * sum(
            unit.parameters
            for stage in holding.stages
            for unit in units(config, dims, stage, tp_rank)
            if unit.stays or config.parallel.zero < 3
        )
    return Held(
        parameters=4 * share,
        gradients=4 * share,
        optimizer=8 * share,
        accumulated=4 * holding.parameters if _accumulates(config, dims) else 0,
        gathered=gathered,
        activations=activation_bytes,
    )
