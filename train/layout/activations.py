"""What a rank keeps of activations, and what it costs to compute it again instead, by arithmetic.

Counts what torch keeps between forward and backward: the saved inputs of each operation, each tensor once.
Imports no torch.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from train.layout.config import ContextMethod, Recompute
from train.layout.dims import ParallelDims, is_sharded
from train.layout.stages import stage_count, stage_layers, stages_of
from train.offload.config import Tier

if TYPE_CHECKING:
    from train.config import TrainConfig

RESULTS = ("q_proj", "k_proj", "v_proj", "core", "o_proj", "gate_proj", "up_proj")
"""Results of a layer that can be kept, by the name of the module that computes them.

That of `down_proj` is not one of them: the backward pass does not ask for it.
"""


DEVICE_FLOPS = 2e14
"""Work a second that the price of a transfer is reckoned with: what a large model reaches on an H100 in bf16."""


@dataclass(frozen=True)
class Keep:
    """What one layer keeps, and the price: both for one micro-batch on one rank."""

    results: frozenset[str] | None
    """The results of `RESULTS` that are kept beside the layer's input; None keeps all there is."""
    kept_bytes: int
    """On the device."""
    recomputed_flops: int
    host_bytes: int = 0
    """In memory of the host: the layer's input, or all there is."""
    transfer_flops: int = 0
    """What the device could compute while that is under way."""

    @property
    def price_flops(self) -> int:
        """What the choice costs, as work."""
        return self.recomputed_flops + self.transfer_flops


@dataclass(frozen=True)
class LayerCost:
    """Sizes and work of one layer for one micro-batch on one rank."""

    everything_bytes: int
    """Kept when nothing is computed again."""
    input_bytes: int
    """Kept of a layer that computes everything again."""
    halfway_bytes: int
    """Kept besides between the two halves of a backward: gradients of all that has been computed with weights."""
    kept_bytes: Mapping[str, int]
    """Size of each result of `RESULTS`, those that can be kept."""
    flops: Mapping[str, int]
    """Work of each result, kept or not; `down_proj` and what lies `between` the matrix products included."""
    flops_a_byte: float | None = None
    """What the device could compute while one byte is on its way to the host and back; None: no byte is."""

    def keep(self, results: frozenset[str] | None, offload: bool = False) -> Keep:
        """Price of keeping `results`; with `offload` the input, or all there is, goes to the host."""
        again, results_bytes = 0, 0
        if results is not None:
            again = sum(
                flops for name, flops in self.flops.items() if name not in results and name != "down_proj"
            )
            results_bytes = sum(self.kept_bytes[name] for name in results)
        rest_bytes = self.everything_bytes if results is None else self.input_bytes
        if not offload:
            return Keep(results, rest_bytes + results_bytes, again)
        assert self.flops_a_byte is not None
        return Keep(results, results_bytes, again, rest_bytes, int(rest_bytes * self.flops_a_byte))

    @property
    def forward_flops(self) -> int:
        """Work of a whole forward pass."""
        return sum(self.flops.values())

    def frontier(self) -> list[Keep]:
        """All choices that no other beats in both bytes on the device and price, the leanest first."""
        sets: Iterator[tuple[str, ...]] = itertools.chain.from_iterable(
            itertools.combinations(self.kept_bytes, count) for count in range(len(self.kept_bytes) + 1)
        )
        ways = [False] if self.flops_a_byte is None else [False, True]
        every = [self.keep(results, offload) for results in (*map(frozenset, sets), None) for offload in ways]
        best: list[Keep] = []
        for one in sorted(every, key=lambda keep: (keep.kept_bytes, keep.price_flops)):
            if not best or one.price_flops < best[-1].price_flops:
                best.append(one)
        return best


@dataclass(frozen=True)
class StageLayers:
    """Layers of one pipeline stage on a rank."""

    layers: range
    first: bool = True
    last: bool = True
    next_here: bool = False
    """Whether the next stage is on the same rank, which keeps what it is handed as its input."""


def stages_of_rank(config: "TrainConfig", dims: ParallelDims, pp_rank: int) -> list[StageLayers]:
    """Stages of a rank at `pp_rank` of the pipeline."""
    if dims.pp == 1:
        return [StageLayers(range(config.model.layers))]
    layers = stage_layers(config.parallel, config.model, config.data.sequence_length)
    last, own = stage_count(config.parallel) - 1, stages_of(config.parallel, pp_rank)
    return [
        StageLayers(layers[stage], first=stage == 0, last=stage == last, next_here=stage + 1 in own)
        for stage in own
    ]


def layer_cost(config: "TrainConfig", dims: ParallelDims, device_type: str = "cuda") -> LayerCost:
    """Sizes and work of one layer for one micro-batch on one rank."""
    model, size = config.model, _Sizes(config, dims, device_type)
    query = _share(model.dim, dims.tp)
    # A rank has at least the one head of keys and values that its queries need.
    key = max(_share(model.kv_dim, dims.tp), model.head_dim)
    heads, ffn = _share(model.heads, dims.tp), _share(model.ffn_dim, dims.tp)
    tokens, item = size.tokens, size.item_bytes

    attention_bytes = query * item + heads * 4  # and the log of each row's sum
    everything = 2 * size.norm_bytes(model.dim)
    everything += tokens * item * model.dim * (size.copies(3) + size.copies(2))
    everything += tokens * (item * (query + 2 * key) + attention_bytes + 4 * item * ffn)
    if config.data.mask_documents:
        everything += item * size.mask_positions
    if size.casts:
        matrices = 2 * model.dim * (query + key) + 3 * model.dim * ffn
        everything += matrices * item
    core_bytes = attention_bytes
    if dims.cp > 1:
        everything += tokens * item * query  # it comes out in another order than the next product reads
    if dims.cp > 1 and config.parallel.context is ContextMethod.heads:
        # What has been exchanged before and after attention.
        core_bytes += item * (2 * query + 2 * key * _repeats(dims.cp, key // model.head_dim))
    kept = {
        "q_proj": tokens * item * query,
        "k_proj": tokens * item * key,
        "v_proj": tokens * item * key,
        "core": tokens * core_bytes,
        "o_proj": size.tokens * item * model.dim // size.shares_norm,
        "gate_proj": tokens * item * ffn,
        "up_proj": tokens * item * ffn,
    }
    sequence_length = config.data.sequence_length
    flops = {
        "q_proj": 2 * tokens * model.dim * query,
        "k_proj": 2 * tokens * model.dim * key,
        "v_proj": 2 * tokens * model.dim * key,
        # The whole square, as `flops_per_token` counts it.
        "core": 4 * tokens * sequence_length * query,
        "o_proj": 2 * tokens * query * model.dim,
        "gate_proj": 2 * tokens * model.dim * ffn,
        "up_proj": 2 * tokens * model.dim * ffn,
        "down_proj": 2 * tokens * ffn * model.dim,
        # Norms and the residual sum, the rotation, SwiGLU: operations on each element.
        "between": tokens * (9 * model.dim // size.shares_norm + 3 * (query + key) + 5 * ffn),
    }
    if dims.tp > 1:
        # The product is of full width on each rank before the ranks' parts are added: only the sum is worth keeping,
        # which saves traffic and no work.
        flops["o_proj_part"], flops["o_proj"] = flops["o_proj"], 0
    halfway = tokens * item * (query + 2 * key + 2 * ffn + 2 * model.dim) + 2 * size.normed_bytes(model.dim)
    offload = config.offload
    flops_a_byte = None
    if offload.activations is not Tier.none:
        flops_a_byte = 2 * DEVICE_FLOPS / (offload.link_gb_s * 1e9)
    return LayerCost(everything, size.hidden_bytes(model.dim), halfway, kept, flops, flops_a_byte)


def outside_bytes(
    config: "TrainConfig", dims: ParallelDims, stage: StageLayers, device_type: str = "cuda"
) -> int:
    """Bytes that a stage keeps of one micro-batch outside its layers: RoPE, masks, last norm, head, loss, output."""
    model, size = config.model, _Sizes(config, dims, device_type)
    # Tables in fp32 are the model's own.
    total = 0 if size.item_bytes == 4 else 2 * config.data.sequence_length * model.head_dim * size.item_bytes
    if config.data.mask_documents:
        total += size.mask_positions
    if stage.first:
        total += size.tokens * 8
    offloads = config.offload.activations is not Tier.none
    if not stage.first and (offloads or size.copies_input(config.parallel.recompute)):
        total += size.boundary_bytes
    if not stage.last and not stage.next_here:
        # What is handed on is kept until its gradient comes back.
        total += size.boundary_bytes
    if stage.last:
        total += size.norm_bytes(model.dim) + size.tokens * model.dim * size.item_bytes
        total += size.tokens * (4 * size.logits + 8)
        total += model.dim * size.logits * size.item_bytes if size.casts else 0
    return total


def outside_halfway_bytes(
    config: "TrainConfig", dims: ParallelDims, stage: StageLayers, device_type: str = "cuda"
) -> int:
    """Bytes that a stage keeps outside its layers, more or less than before, between the two halves of a backward."""
    size = _Sizes(config, dims, device_type)
    if stage.last:
        # The gradient of the logits in place of the loss's share of them, and that of what the last norm has made.
        logits_bytes = size.tokens * size.logits * (size.item_bytes - 4)
        return logits_bytes + size.normed_bytes(config.model.dim)
    return 0 if stage.next_here else -size.boundary_bytes


def boundary_bytes(config: "TrainConfig", dims: ParallelDims) -> int:
    """Bytes of what one stage hands to the next of one micro-batch."""
    return _Sizes(config, dims, "cuda").boundary_bytes


class _Sizes:
    """How wide and how many things are on one rank."""

    def __init__(self, config: "TrainConfig", dims: ParallelDims, device_type: str) -> None:
        self.tokens = config.parallel.micro_batch_size * config.data.sequence_length // dims.cp
        self.mask_positions = config.parallel.micro_batch_size * config.data.sequence_length**2
        self.item_bytes = config.precision.compute_bytes
        # Plain modules compute under autocast, which keeps casts of the weights; others in the type they are given.
        self.casts = self.item_bytes == 2 and not is_sharded(config, dims)
        self._residual_bytes = 4 if self.casts else self.item_bytes
        self._fused_norm = device_type == "cuda"
        self.shares_norm = dims.tp if config.parallel.sequence_parallel else 1
        self.boundary_bytes = self.tokens * config.model.dim * self.item_bytes // self.shares_norm
        self.logits = _share(config.model.vocab_size or 0, dims.tp if config.parallel.loss_parallel else 1)
        """Of a token on one rank."""

    def hidden_bytes(self, dim: int) -> int:
        """The residual stream."""
        return self.tokens * dim * self._residual_bytes // self.shares_norm

    def norm_bytes(self, dim: int) -> int:
        """Its input and a factor a token; where torch has no kernel of its own, both in fp32 and their product."""
        each = dim * self._residual_bytes if self._fused_norm else 2 * dim * 4
        return self.tokens * (each + 4) // self.shares_norm

    def normed_bytes(self, dim: int) -> int:
        """What a norm has made, before it is cast."""
        return self.tokens * dim * (self._residual_bytes if self._fused_norm else 4) // self.shares_norm

    def copies_input(self, recompute: Recompute) -> bool:
        """Whether what a stage has received is kept beside what its first layer keeps of it."""
        if self.casts:
            return True
        # A layer that computes again keeps what it is given; so does a norm of one kernel.
        again = recompute in (Recompute.selective, Recompute.full)
        return self.item_bytes == 2 and not self._fused_norm and not again

    def copies(self, users: int) -> int:
        """How often the input of `users` matrix products is kept: autocast casts it for each of them."""
        return users if self.casts else 1


def _repeats(cp: int, kv_heads: int) -> int:
    """How often each head of keys and values is there when `cp` ranks share heads."""
    return cp // math.gcd(cp, kv_heads)


def _share(size: int, ranks: int) -> int:
    return -(-size // ranks)
