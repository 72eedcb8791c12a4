"""A Llama-style decoder in plain torch; it knows nothing of parallelism.

Parameter names are those of Hugging Face's LlamaForCausalLM without the `model.` in front, listed by
`train.model.config.parameter_shapes`.
"""

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.model.config import ModelConfig

IGNORED = -100
"""A target that does not count, as in torch's cross entropy."""
INIT_BLOCK = 2**20
"""Values that are drawn from one generator; part of what a seed means, like the order of the names."""


class Llama(nn.Module):
    """Token ids in, logits out.

    A pipeline stage keeps a part of it: entries of `layers` (keyed by their number in the whole model)
    may be deleted, `embed_tokens`, `norm` and `lm_head` may be set to None. Without `embed_tokens` the
    input is the hidden state of the stage before, without `norm` the output is the hidden state.
    """

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens: nn.Embedding | None = nn.Embedding(config.vocabulary, config.dim)
        self.layers = nn.ModuleDict({str(index): Layer(config) for index in range(config.layers)})
        self.norm: nn.RMSNorm | None = nn.RMSNorm(config.dim, config.norm_eps)
        # Two modules that share a Parameter lose the tie in to_empty and in fully_shard: a tied model has
        # no head of its own instead.
        self.lm_head: nn.Linear | None = None
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.dim, config.vocabulary, bias=False)
        device = self.embed_tokens.weight.device
        for name, table in zip(("rope_cos", "rope_sin"), rope_tables(config, device), strict=True):
            self.register_buffer(name, table, persistent=False)

    def forward(
        self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Logits (batch, sequence, vocabulary) for `tokens` (batch, sequence), int64.

        With `documents` (batch, sequence), integers, a position sees only those before it that have the
        same number. `positions` (sequence), int64, says where in the sequence the tokens stand, when they are not
        the first ones in order. Raises `ConfigError` for a sequence beyond `max_sequence_length`.
        """
        hidden = tokens if self.embed_tokens is None else self.embed_tokens(tokens)
        # One cast here instead of one in each layer.
        dtype = _compute_dtype(hidden)
        if positions is None:
            sequence_length = tokens.shape[1]
            self.config.check_sequence_length(sequence_length)
            cos, sin = self.rope_cos[:sequence_length].to(dtype), self.rope_sin[:sequence_length].to(dtype)
        else:
            cos, sin = self.rope_cos[positions].to(dtype), self.rope_sin[positions].to(dtype)
        mask = None if documents is None else document_mask(documents)
        for layer in self.layers.values():
            hidden = layer(hidden, cos, sin, mask)
        if self.norm is None:
            return hidden
        hidden = self.norm(hidden)
        if self.lm_head is None:
            assert self.embed_tokens is not None, "a last stage needs lm_head, or embed_tokens when tied"
            return F.linear(hidden, self.embed_tokens.weight)
        logits: Tensor = self.lm_head(hidden)
        return logits

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> "Llama":
        """Materialise on `device`: parameters are uninitialised memory, the RoPE tables are right."""
        super().to_empty(device=device, recurse=recurse)
        self.rope_cos, self.rope_sin = rope_tables(self.config, self.rope_cos.device)
        return self

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fill every parameter with `initial_rows`."""
        for name, parameter in self.named_parameters():
            parameter.copy_(initial_rows(self.config, seed, name, parameter.shape))


class Layer(nn.Module):
    """One decoder layer: attention and MLP, each on a normed input and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.dim, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Hidden states (batch, sequence, dim) in and out; see `Attention.forward` for the rest."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, mask)
        change: Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + change


class Attention(nn.Module):
    """Causal self-attention with rotary positions; several query heads share a head of keys and values."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.k_proj = nn.Linear(config.dim, config.kv_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, config.kv_dim, bias=False)
        self.o_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.core = CoreAttention()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Map x (batch, sequence, dim) to the same shape.

        `cos` and `sin` are (sequence, 1, head_dim). `mask` (batch, 1, sequence, sequence) is true where a
        query (dim 2) sees a key (dim 3); None is causal.
        """
        # The number of heads is left to the weights: a tensor-parallel rank holds a share of them.
        query = rotate(self.q_proj(x).unflatten(-1, (-1, self.head_dim)), cos, sin).transpose(1, 2)
        key = rotate(self.k_proj(x).unflatten(-1, (-1, self.head_dim)), cos, sin).transpose(1, 2)
        value = self.v_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        heads = self.core(query, key, value, mask)
        out: Tensor = self.o_proj(heads.transpose(1, 2).flatten(2))
        return out


class CoreAttention(nn.Module):
    """The part of attention without weights, where tokens meet; a module so that it can be exchanged."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Mix values: query (batch, heads, sequence, head_dim); key and value may have fewer heads.

        `mask` is that of `Attention.forward`. Returns the shape of `query`.
        """
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=query.shape[1] != key.shape[1],
        )


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down_proj = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., dim) to the same shape."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def build(config: ModelConfig, seed: int | None, device: torch.device | str) -> Llama:
    """Build the model on `device` with the weights of `seed`; nothing is allocated twice.

    `seed` None leaves the weights as they are in memory: for a checkpoint that is loaded next.
    """
    with torch.device("meta"):
        model = Llama(config)
    model.to_empty(device=device)
    if seed is not None:
        model.init_weights(seed)
    return model


def initial_rows(
    config: ModelConfig, seed: int, name: str, shape: tuple[int, ...], first: int = 0, last: int | None = None
) -> Tensor:
    """Initial value of rows `first` to `last` (all, if None) of the parameter `name`, fp32 on the CPU.

    A function of (config, seed, name) alone, so that every layout and device starts from the same model; `shape`
    is that of the whole parameter. Norms are 1; matrices are normal with `init_std`, those that write to the
    residual stream narrower by sqrt(2 * layers), as in GPT-2 (Radford et al. 2019).
    """
    last = shape[0] if last is None else last
    if len(shape) == 1:
        return torch.ones(last - first)
    std = config.init_std
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        std /= math.sqrt(2 * config.layers)
    # Drawn in blocks of rows, each from a generator of its own: a rank draws no more than it holds.
    rows = max(1, INIT_BLOCK // math.prod(shape[1:]))
    blocks = []
    for block in range(first // rows, -(-last // rows)):
        digest = hashlib.sha256(f"{seed}:{name}:{block}".encode()).digest()
        generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        begin, end = block * rows, min((block + 1) * rows, shape[0])
        # Explicit device and dtype: torch's defaults may be changed around this call.
        value = torch.empty((end - begin, *shape[1:]), dtype=torch.float32, device="cpu")
        value.normal_(0.0, std, generator=generator)
        blocks.append(value[max(first - begin, 0) : last - begin])
    return torch.cat(blocks) if blocks else torch.empty((0, *shape[1:]))


def rope_tables(config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines (max_sequence_length, 1, head_dim), fp32, for `rotate`.

    Pairs are (i, i + head_dim / 2), as in Hugging Face's Llama, not neighbours, as in the paper (Su et
    al. 2021). The sines of the first half carry the minus of the rotation.
    """
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    frequencies = 1.0 / config.rope_theta**half
    positions = torch.arange(config.max_sequence_length, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies)[:, None]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (batch, sequence, heads, head_dim) by the tables of its positions."""
    # Twice as fast on a CPU as splitting and concatenating the halves, forward and backward.
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def document_mask(documents: Tensor) -> Tensor:
    """Mask (batch, 1, sequence, sequence): true where a position (dim 2) sees another (dim 3).

    That is one in the same document (`documents`: (batch, sequence), integers) and not after it.
    """
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril()[:, None]


def next_token_loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy in fp32, in nats: the mean over the tokens, or with `reduction` "sum" their sum.

    `targets` (batch, sequence) holds the token that follows each position; `IGNORED` leaves a position out.
    """
    return F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction=reduction
    )


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return hidden.dtype
