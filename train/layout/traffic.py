"""What each group of ranks sends in a training step, by arithmetic alone. Imports no torch.

Volumes as in Narayanan et al. 2021 (pipeline), Korthikanti et al. 2022 (tensor and sequence parallel), Rajbhandari et
al. 2020 (ZeRO), Jacobs et al. 2023 and Liu et al. 2023 (context), fitted to what `train/parallel` does. Left out:
padding of sizes that do not divide, single numbers such as the gradient norm, evaluation and checkpoints.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from train.layout.activations import stages_of_rank
from train.layout.batch import micro_batches
from train.layout.config import ContextMethod
from train.layout.dims import ParallelDims, is_sharded
from train.layout.holding import share, units
from train.layout.recompute import plan
from train.layout.stages import schedule_of, stage_count, stages_of

if TYPE_CHECKING:
    from train.config import TrainConfig

FULL = 4
"""Bytes of fp32."""

BUCKET_BYTES = 25 * 2**20
"""Of `DistributedDataParallel`, which ignores how parameters are grouped."""


class Operation(StrEnum):
    """How a group exchanges."""

    all_reduce = "all-reduce"
    all_gather = "all-gather"
    reduce_scatter = "reduce-scatter"
    all_to_all = "all-to-all"
    send = "send"


@dataclass(frozen=True)
class Transfer:
    """One kind of exchange in one kind of group, over a whole training step, seen from one rank."""

    axes: tuple[str, ...]
    """The group: ranks that differ in nothing but these."""
    operation: Operation
    what: str
    times: int
    """How often a step."""
    tensor_bytes: int
    """Of all times together: what is reduced, what comes out of a gather, what goes into a scatter or is sent."""
    ranks: int
    """Size of the group."""

    @property
    def sent_bytes(self) -> float:
        """What the rank sends a step, by the ring algorithms of NCCL."""
        share_sent = (self.ranks - 1) / self.ranks
        if self.operation is Operation.all_reduce:
            return 2 * share_sent * self.tensor_bytes
        return self.tensor_bytes if self.operation is Operation.send else share_sent * self.tensor_bytes


def traffic(config: "TrainConfig", dims: ParallelDims, rank: int = 0) -> list[Transfer]:
    """Return what `rank` exchanges in a step of a layout that `lay_out` has passed. Needs `model.vocab_size`."""
    sizes = _Sizes(config, dims, rank)
    totals: dict[tuple[tuple[str, ...], Operation, str], list[int]] = defaultdict(lambda: [0, 0])
    for item in (*_data(sizes), *_tensor(sizes), *_context(sizes), *_pipeline(sizes)):
        total = totals[item.axes, item.operation, item.what]
        total[0] += item.times
        total[1] += item.times * item.each_bytes
    found = (
        Transfer(axes, operation, what, times, tensor_bytes, len(dims.group(axes)))
        for (axes, operation, what), (times, tensor_bytes) in totals.items()
    )
    return [transfer for transfer in found if transfer.ranks > 1 and transfer.times > 0]


@dataclass(frozen=True)
class _Item:
    """A part of a `Transfer`."""

    axes: tuple[str, ...]
    operation: Operation
    what: str
    times: int
    each_bytes: int


class _Sizes:
    """What the formulas below share."""

    def __init__(self, config: "TrainConfig", dims: ParallelDims, rank: int) -> None:
        parallel, model = config.parallel, config.model
        self.config, self.dims = config, dims
        self.place = dims.coordinates(rank)
        self.steps = micro_batches(config, dims)
        self.stages = stages_of_rank(config, dims, self.place["pp"])
        self.units = [unit for stage in self.stages for unit in units(config, dims, stage, self.place["tp"])]
        self.element_bytes = config.precision.compute_bytes
        self.reduced_bytes = config.precision.reduce.bytes
        """Of a gradient on its way."""
        self.positions = parallel.micro_batch_size * config.data.sequence_length // dims.cp
        self.hidden_bytes = self.positions * model.dim * self.element_bytes
        # Where a rank computes under autocast embedding and norms are in fp32.
        self.normed_bytes = (
            self.positions * model.dim * (self.element_bytes if is_sharded(config, dims) else FULL)
        )
        keeps = plan(config, dims, self.place["pp"], self.steps).layers.values()
        self.layers = len(keeps)
        self.repeated = [keep.results for keep in keeps if keep.results is not None]
        """Of each layer that computes again: the results that it does not."""

    def repeats_of(self, result: str) -> int:
        """Layers that compute `result` twice for each micro-batch."""
        return sum(result not in kept for kept in self.repeated)


def _data(sizes: _Sizes) -> Iterator[_Item]:
    """Gradients, and with ZeRO weights."""
    config, dims, steps = sizes.config, sizes.dims, sizes.steps
    zero = config.parallel.zero
    if zero == 0:
        group: tuple[str, ...] = ("dp_replicate", "dp_shard", "cp")
        each = [unit.parameters * sizes.reduced_bytes for unit in sizes.units]
        if not is_sharded(config, dims):
            buckets, rest = divmod(sum(each), BUCKET_BYTES)
            each = [BUCKET_BYTES] * buckets + [rest] * (rest > 0)
        for each_bytes in each:
            yield _Item(group, Operation.all_reduce, "gradients", 1, each_bytes)
        return
    group = ("dp_shard", "cp")
    sharers = dims.dp_shard * dims.cp
    at_end = dims.pp > 1 and schedule_of(config.parallel).splits_backward
    reductions = steps if zero >= 2 and not at_end else 1
    for unit in sizes.units:
        gathers = 1 if zero < 3 else unit.gathers * steps
        weight_bytes = unit.parameters * sizes.element_bytes
        if unit.is_table and config.precision.embedding is not None:
            weight_bytes = config.precision.embedding.bytes(unit.parameters, config.model.dim)
        yield _Item(group, Operation.all_gather, "weights", gathers, weight_bytes)
        gradient_bytes = unit.parameters * sizes.reduced_bytes
        yield _Item(group, Operation.reduce_scatter, "gradients", reductions, gradient_bytes)
        own_bytes = gradient_bytes // sharers
        yield _Item(("dp_replicate",), Operation.all_reduce, "gradients", 1, own_bytes)


def _tensor(sizes: _Sizes) -> Iterator[_Item]:
    """What goes into a block and comes out of it, forward and backward; the loss; gradients of what all ranks hold."""
    config, steps = sizes.config, sizes.steps
    gather, scatter, reduce = Operation.all_gather, Operation.reduce_scatter, Operation.all_reduce
    blocks, first, last = 2 * sizes.layers, _count(sizes, "first"), _count(sizes, "last")
    # The last thing that a layer does need not be done again.
    into, out_of = blocks + 2 * len(sizes.repeated), blocks + sizes.repeats_of("o_proj")
    normed, hidden, what = sizes.normed_bytes, sizes.hidden_bytes, "activations"
    if config.parallel.sequence_parallel:
        yield _Item(("tp",), gather, what, (into + first + last) * steps, normed)
        yield _Item(("tp",), scatter, what, (blocks + first + last) * steps, normed)
        yield _Item(("tp",), scatter, what, out_of * steps, hidden)
        yield _Item(("tp",), gather, what, blocks * steps, hidden)
    else:
        yield _Item(("tp",), reduce, what, out_of * steps, hidden)
        yield _Item(("tp",), reduce, what, (blocks + first + last) * steps, normed)
    yield from _loss(sizes, last * steps)
    yield from _shared_weights(sizes, blocks + last)


def _loss(sizes: _Sizes, times: int) -> Iterator[_Item]:
    if sizes.config.parallel.loss_parallel:
        # Of each token the largest logit, the sum of the exponentials and the logit of the target.
        yield _Item(("tp",), Operation.all_reduce, "losses", 3 * times, sizes.positions * FULL)
    else:
        logits_bytes = sizes.positions * sizes.config.model.vocabulary * sizes.element_bytes
        yield _Item(("tp",), Operation.all_gather, "logits", times, logits_bytes)


def _shared_weights(sizes: _Sizes, norms: int) -> Iterator[_Item]:
    """Gradients of weights that each rank has whole, of which each computes a share."""
    model, steps, what = sizes.config.model, sizes.steps, "gradients"
    weight_bytes = sizes.element_bytes if is_sharded(sizes.config, sizes.dims) else FULL
    if sizes.config.parallel.sequence_parallel:
        yield _Item(("tp",), Operation.all_reduce, what, norms * steps, model.dim * weight_bytes)
    if model.kv_dim // model.head_dim % sizes.dims.tp:
        each_bytes = model.kv_dim * model.dim * weight_bytes
        yield _Item(("tp",), Operation.all_reduce, what, 2 * sizes.layers * steps, each_bytes)


def _context(sizes: _Sizes) -> Iterator[_Item]:
    """What attention exchanges, forward and backward."""
    model, dims, steps = sizes.config.model, sizes.dims, sizes.steps
    forward = (sizes.layers + sizes.repeats_of("core")) * steps
    backward = sizes.layers * steps
    head = sizes.positions * model.head_dim
    queries = model.heads // dims.tp
    keys = max(1, model.kv_dim // model.head_dim // dims.tp)
    if sizes.config.parallel.context is ContextMethod.ring:
        pair = 2 * keys * head
        others = dims.cp - 1
        passing = (forward + backward) * others
        yield _Item(("cp",), Operation.send, "keys and values", passing, pair * sizes.element_bytes)
        yield _Item(("cp",), Operation.send, "their gradients", backward * dims.cp, pair * FULL)
        return
    keys *= dims.cp // math.gcd(dims.cp, keys)
    for times in (forward, backward):
        for heads in (queries + 2 * keys, queries):
            yield _Item(
                ("cp",), Operation.all_to_all, "activations", times, heads * head * sizes.element_bytes
            )


def _pipeline(sizes: _Sizes) -> Iterator[_Item]:
    """Hidden states to the next stage, their gradients to the one before; the gradient of a tied embedding."""
    parallel, dims = sizes.config.parallel, sizes.dims
    each_bytes = sizes.hidden_bytes // (dims.tp if parallel.sequence_parallel else 1)
    stages = stages_of(parallel, sizes.place["pp"])
    for stage in stages:
        for neighbour, what in ((stage + 1, "activations"), (stage - 1, "gradients")):
            if 0 <= neighbour < stage_count(parallel) and neighbour not in stages:
                yield _Item(("pp",), Operation.send, what, sizes.steps, each_bytes)
    ends = _count(sizes, "first") + _count(sizes, "last")
    if sizes.config.model.tie_embeddings and ends == 1:
        model, sharers = sizes.config.model, dims.dp_shard * dims.cp if parallel.zero > 0 else 1
        table = share(model.vocabulary, dims.tp, sizes.place["tp"]) * model.dim
        yield _Item(
            ("pp",),
            Operation.send,
            "tied gradient",
            1,
            table * sizes.config.precision.accumulate.bytes // sharers,
        )


def _count(sizes: _Sizes, end: str) -> int:
    return sum(getattr(stage, end) for stage in sizes.stages)
