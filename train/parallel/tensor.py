"""Tensor parallelism: every matrix product shared by the ranks of a node (Shoeybi 2019, Korthikanti 2022).

Parameters are DTensors over the tensor-parallel ranks, whole ones too, so that optimizers, clipping and checkpoints
know what each rank holds. What flows through the layers are plain tensors: a rank computes with its own shards, and
only where a block begins and ends is something communicated. Heads, hidden units of the MLP and vocabulary rows are
dealt out; sizes that do not divide leave the last ranks with fewer.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

from train.config import TrainConfig
from train.mesh import Mesh
from train.model.config import ModelConfig
from train.model.llama import Layer, Llama, next_token_loss


def shard(part: Llama, config: TrainConfig, mesh: Mesh) -> None:
    """Turn the parameters of `part` into shards over the tensor-parallel ranks, in place.

    With `sequence_parallel` the hidden states that a part takes from another, or gives to it, are this rank's share of
    the sequence, else whole. The logits of the last part are a DTensor, split along the vocabulary or, without
    `loss_parallel`, whole. The layout must have passed `train.layout.check.lay_out`.
    """
    stream = Stream(mesh["tp"], Shard(1) if config.parallel.sequence_parallel else Replicate())
    if part.embed_tokens is not None:
        _place(part.embed_tokens, stream.mesh, Shard(0))
        _compute_by(part.embed_tokens, _embed, stream)
    for layer in part.layers.values():
        assert isinstance(layer, Layer)
        _shard_layer(layer, config.model, stream)
    if part.norm is None:
        return
    _place(part.norm, stream.mesh, Replicate())
    _compute_by(part.norm, _last_norm, stream)
    if part.lm_head is not None:
        _place(part.lm_head, stream.mesh, Shard(0))
    if not config.parallel.loss_parallel:
        part.register_forward_hook(_gather_logits)


def loss_context(config: TrainConfig, mesh: Mesh) -> AbstractContextManager[object]:
    """Context of a loss and its backward."""
    if mesh.dims.tp > 1 and config.parallel.loss_parallel:
        context: AbstractContextManager[object] = loss_parallel()
        return context
    return nullcontext()


def vocabulary_loss(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """`next_token_loss`, also of logits that are a DTensor, split along the vocabulary or whole.

    Split ones need `loss_context` around this and the backward. Returns a plain tensor.
    """
    if isinstance(logits, DTensor) and logits.placements[0].is_replicate():
        logits = logits.to_local()
    loss = next_token_loss(logits, targets, reduction)
    return loss.to_local() if isinstance(loss, DTensor) else loss


@dataclass(frozen=True)
class Stream:
    """The residual stream between the blocks, and the ways into a block and out of it."""

    mesh: DeviceMesh
    placement: Placement
    """`Shard(1)`: a share of the sequence on each rank; `Replicate()`: the same on all."""

    def whole(self, x: Tensor) -> DTensor:
        """Gather a hidden state (batch, own share of the sequence, dim) along the sequence."""
        return DTensor.from_local(x, self.mesh, [self.placement], run_check=False).redistribute(
            placements=[Replicate()]
        )

    def enter(self, x: Tensor) -> Tensor:
        """`whole`, for ranks that each compute another share of the result: their gradients are added."""
        return self.whole(x).to_local(grad_placements=[Partial()])

    def leave(self, x: Tensor) -> Tensor:
        """Add what the ranks have computed (batch, sequence, dim) and give each its share."""
        parts = DTensor.from_local(x, self.mesh, [Partial()], run_check=False)
        return parts.redistribute(placements=[self.placement]).to_local()

    def shared(self, weight: Tensor) -> Tensor:
        """A whole weight of which each rank computes another share of the gradient: the shares are added."""
        assert isinstance(weight, DTensor)
        # The redistribution moves nothing; its backward does.
        return weight.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def _shard_layer(layer: Layer, model: ModelConfig, stream: Stream) -> None:
    attention, mlp = layer.self_attn, layer.mlp
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        _place(norm, stream.mesh, Replicate())
        _compute_by(norm, _norm, stream)
    for block in (attention, mlp):
        block.register_forward_pre_hook(partial(_enter, stream))
    for linear in (attention.q_proj, mlp.gate_proj, mlp.up_proj):
        _place(linear, stream.mesh, Shard(0))
        _compute_by(linear, _columns)
    for linear in (attention.o_proj, mlp.down_proj):
        _place(linear, stream.mesh, Shard(1))
        _compute_by(linear, _rows, stream)
    heads = model.kv_dim // model.head_dim
    ranks_per_head, rest = divmod(stream.mesh.size(), heads)
    for linear in (attention.k_proj, attention.v_proj):
        if heads % stream.mesh.size() == 0:
            _place(linear, stream.mesh, Shard(0))
            _compute_by(linear, _columns)
            continue
        assert rest == 0, "lay_out refuses heads of keys and values that cannot be dealt out"
        _place(linear, stream.mesh, Replicate())
        head = stream.mesh.get_local_rank() // ranks_per_head
        _compute_by(linear, _one_head, stream, slice(head * model.head_dim, (head + 1) * model.head_dim))


def _place(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    weight = module.weight
    assert isinstance(weight, nn.Parameter) and weight.is_meta, "cut before it has memory"
    module.weight = nn.Parameter(distribute_tensor(weight.data, mesh, [placement], src_data_rank=None))


def _compute_by(module: nn.Module, function: Callable[..., Any], *arguments: Any) -> None:
    """Exchange what `module` computes, in place: hooks, names and parameters stay."""

    def forward(module: nn.Module, x: Tensor) -> Any:
        return function(module, *arguments, x)

    # Equal methods of equal layers are the same to the compiler, while it tells partials apart: it would compile
    # each layer anew, until at its limit it gave up.
    module.forward = MethodType(forward, module)


def _enter(stream: Stream, block: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return stream.enter(arguments[0]), *arguments[1:]


def _columns(linear: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, _own(linear.weight))


def _rows(linear: nn.Linear, stream: Stream, x: Tensor) -> Tensor:
    return stream.leave(F.linear(x, _own(linear.weight)))


def _one_head(linear: nn.Linear, stream: Stream, rows: slice, x: Tensor) -> Tensor:
    """The only head of keys or values that this rank's queries see; other ranks may compute it too."""
    return F.linear(x, stream.shared(linear.weight)[rows])


def _norm(norm: nn.RMSNorm, stream: Stream, x: Tensor) -> Tensor:
    weight = stream.shared(norm.weight) if stream.placement.is_shard() else _own(norm.weight)
    return F.rms_norm(x, norm.normalized_shape, weight, norm.eps)


def _last_norm(norm: nn.RMSNorm, stream: Stream, x: Tensor) -> DTensor:
    """A DTensor, so that its product with the head, or with the embedding in place of one, is one too."""
    return stream.whole(_norm(norm, stream, x))


def _embed(embedding: nn.Embedding, stream: Stream, tokens: Tensor) -> Tensor:
    """Look up the tokens whose rows are here; the other ranks have the others."""
    own = _own(embedding.weight)
    first = stream.mesh.get_local_rank() * -(-embedding.weight.shape[0] // stream.mesh.size())
    missing = (tokens < first) | (tokens >= first + own.shape[0])
    rows = F.embedding((tokens - first).masked_fill(missing, 0), own)
    # ZeRO warns of a module that returns a view.
    return stream.leave(rows.masked_fill(missing[..., None], 0.0)).clone()


def _own(weight: Tensor) -> Tensor:
    assert isinstance(weight, DTensor)
    return weight.to_local()


def _gather_logits(part: nn.Module, arguments: tuple[Any, ...], logits: DTensor) -> DTensor:
    return logits.redistribute(placements=[Replicate()])
