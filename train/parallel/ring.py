"""Attention over a sequence that is split over a ring of ranks (Liu et al. 2023), with equal work for all of them.

Each rank holds two chunks of the sequence, an early and a late one (`part_of_sequence`). Keys and values travel from
rank to rank while the block that is there is computed. What came from a rank before this one is seen by all queries,
but only its early chunk; what came from a rank behind is seen by the late queries alone, but both its chunks: every
block costs the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from train.model.llama import CoreAttention

_aten = torch.ops.aten


class RingAttention(CoreAttention):
    """Causal attention of this rank's queries to the keys of all ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group_name = group.group_name

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """See `CoreAttention.forward`; tensors are two chunks of a sequence, side by side."""
        assert mask is None, "a ring has no mask of documents"
        out: Tensor
        out, _ = ring_attention(query, key, value, self._group_name)
        return out


def attend_around(query: Tensor, key: Tensor, value: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    """Take the keys and values once around the ring.

    Returns attention in the shape and type of `query`, and the logarithm of each query's sum of weights over the
    whole sequence (batch, heads, sequence), fp32. Partial results are added up in fp32.
    """
    assert query.stride(-1) == 1, (
        "the operators read the values of a head from adjacent memory, whatever the strides"
    )
    out = query.new_zeros(query.shape, dtype=torch.float32)
    logsumexp = query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32)
    for block, keys, values in _visits(key, value, _resolve_process_group(GroupName(group_name))):
        part = _attend(query[block.queries], keys[block.keys], values[block.keys], block.causal)
        _merge(out[block.queries], logsumexp[block.queries], *part)
    return out.to(query.dtype), logsumexp


def attend_around_backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, group_name: str
) -> tuple[Tensor, Tensor]:
    """Take the keys, the values and their gradients once around the ring.

    The gradients travel behind, in fp32, one block late so that this overlaps too. Returns the gradients of the query,
    and of key and value as one tensor (2, the shape of `key`), in the types of these.
    """
    group = _resolve_process_group(GroupName(group_name))
    d_query = torch.zeros_like(query, dtype=torch.float32)
    travelling: _Transfer | None = None
    for block, keys, values in _visits(key, value, group):
        rows = block.queries
        dq, dk, dv = _attend_backward(
            d_out[rows],
            query[rows],
            keys[block.keys],
            values[block.keys],
            out[rows],
            logsumexp[rows],
            block.causal,
        )
        d_query[rows] += dq
        # What the ranks before have added up for the keys and values that are here now.
        here = d_query.new_zeros((2, *key.shape)) if travelling is None else travelling.wait()
        here[0][block.keys] += dk
        here[1][block.keys] += dv
        travelling = _pass_on(here, group)
    assert travelling is not None
    return d_query.to(query.dtype), travelling.wait().to(key.dtype)


# One operator each way: what has no name inside one could not be kept when a layer is computed again, and the compiler
# would stop at each send and receive.
ring_attention = torch.library.custom_op("trierarch::ring_attention", attend_around, mutates_args=())
ring_attention_backward = torch.library.custom_op(
    "trierarch::ring_attention_backward", attend_around_backward, mutates_args=()
)
OPERATOR = torch.ops.trierarch.ring_attention.default
"""`ring_attention` as torch's dispatcher shows it to those who watch."""


@ring_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=torch.float32)


@ring_attention_backward.register_fake
def _(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, group_name: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), key.new_empty((2, *key.shape))


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, str], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.group_name = inputs
    ctx.set_materialize_grads(False)  # of the logarithms there is none
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, d_out: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor, Tensor, None]:
    d_query, d_key_value = ring_attention_backward(d_out, *ctx.saved_tensors, ctx.group_name)
    d_key, d_value = d_key_value
    return d_query, d_key, d_value, None


ring_attention.register_autograd(_gradients, setup_context=_keep)


@dataclass(frozen=True)
class _Block:
    """What of the queries here sees what of the keys that visit; the rest of the two does not meet."""

    queries: tuple[slice, ...]
    keys: tuple[slice, ...]
    causal: bool


@dataclass(frozen=True)
class _Transfer:
    sent: Tensor
    """Held until it has left."""
    received: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


def _visits(key: Tensor, value: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[_Block, Tensor, Tensor]]:
    """Keys and values of each rank as they come by, the own ones first; the next travel while a block is computed."""
    rank, size = group.rank(), group.size()
    everything, half = slice(None), key.shape[2] // 2
    whole = (everything, everything)
    early, late = (*whole, slice(0, half)), (*whole, slice(half, None))
    here = torch.stack((key, value))
    for step in range(size):
        coming = _pass_on(here, group) if step < size - 1 else None
        source = (rank - step) % size
        if source == rank:
            block = _Block(whole, whole, causal=True)
        elif source < rank:
            block = _Block(whole, early, causal=False)
        else:
            block = _Block(late, whole, causal=False)
        yield block, here[0], here[1]
        if coming is not None:
            here = coming.wait()


def _pass_on(x: Tensor, group: dist.ProcessGroup) -> _Transfer:
    """Send x to the next rank of the ring and receive from the one before, which sends the same shape."""
    rank, size = group.rank(), group.size()
    received = torch.empty_like(x)
    # In one batch: with NCCL a send alone waits for its receive, all ranks for each other.
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % size),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),
        ]
    )
    return _Transfer(x, received, works)


def _merge(out: Tensor, logsumexp: Tensor, block_out: Tensor, block_logsumexp: Tensor) -> None:
    """Add what some more keys give to the attention that `out` is so far, in place and in fp32."""
    total = torch.logaddexp(logsumexp, block_logsumexp)
    out *= (logsumexp - total).exp()[..., None]
    out += block_out.float() * (block_logsumexp - total).exp()[..., None]
    logsumexp.copy_(total)


def _attend(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of a block, and the logarithm of each query's sum of weights (batch, heads, sequence), fp32.

    The operators are what `scaled_dot_product_attention` calls, which does not return the logarithms. Of those for a
    GPU the tests try the signatures alone, on meta tensors.
    """
    key, value = (_repeat_heads(x, query.shape[1]) for x in (key, value))
    if query.device.type == "cpu":
        out, logsumexp = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)
    else:
        out, logsumexp, *_ = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)
    return out, logsumexp


def _attend_backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a block's query, key and value; `out` and `logsumexp` are those over the whole sequence.

    With these the block's weights are its share of the whole softmax, so gradients of blocks just add up.
    """
    heads = key.shape[1]
    key, value = (_repeat_heads(x, query.shape[1]) for x in (key, value))
    if query.device.type == "cpu":
        gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out, query, key, value, out, logsumexp, 0.0, causal
        )
    else:
        # Read from memory row after row. The random state belongs to dropout, of which there is none.
        tensors = (x.contiguous() for x in (d_out, query, key, value, out, logsumexp))
        seed = torch.empty(2, dtype=torch.uint64, device=query.device)
        unused = torch.empty((), dtype=torch.uint64, device=query.device)
        gradients = _aten._scaled_dot_product_flash_attention_backward(
            *tensors, None, None, query.shape[2], key.shape[2], 0.0, causal, seed, unused
        )
    d_query, d_key, d_value = gradients
    return d_query, _add_heads(d_key, heads), _add_heads(d_value, heads)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """A head of keys or values for each query head: only what does not travel is repeated."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _add_heads(gradient: Tensor, heads: int) -> Tensor:
    """The gradient, fp32, of what `_repeat_heads` has repeated."""
    repeated: Tensor = gradient.float().unflatten(1, (heads, -1))
    return repeated.sum(2)
