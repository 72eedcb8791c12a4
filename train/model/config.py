"""The shape of a model and what follows from it by arithmetic. Imports no torch."""

import math
from dataclasses import dataclass

from contract.errors import ConfigError


@dataclass
class ModelConfig:
    """A Llama-style decoder: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU."""

    name: str = "llama"
    vocab_size: int | None = None
    """Rows of the embedding; null takes the vocabulary of the data, rounded up to a multiple of 64."""
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int | None = None
    """Heads of keys and values; null has as many as `heads`."""
    ffn_dim: int = 352
    max_sequence_length: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    init_std: float = 0.02

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    @property
    def kv_dim(self) -> int:
        """Width of all heads of keys (or of values) together."""
        return (self.heads if self.kv_heads is None else self.kv_heads) * self.head_dim

    @property
    def vocabulary(self) -> int:
        """`vocab_size` when it is known; raises `ConfigError` while it still waits for the data."""
        if self.vocab_size is None:
            raise ConfigError("model.vocab_size=null: give the vocabulary of the data, or a number")
        return self.vocab_size

    def validate(self) -> None:
        """Raise `ConfigError` for a shape that cannot be built."""
        for name in ("dim", "layers", "heads", "ffn_dim", "max_sequence_length", "rope_theta", "norm_eps"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"model.{name}={getattr(self, name)}: must be above 0")
        if self.init_std < 0:
            raise ConfigError(f"model.init_std={self.init_std}: must not be below 0")
        if self.vocab_size is not None and self.vocab_size <= 0:
            raise ConfigError(f"model.vocab_size={self.vocab_size}: give one above 0, or null")
        if self.dim % self.heads or self.head_dim % 2:
            raise ConfigError(
                f"model.dim={self.dim} and model.heads={self.heads}: dim must be an even multiple of heads"
            )
        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        if kv_heads <= 0 or self.heads % kv_heads:
            raise ConfigError(f"model.kv_heads={kv_heads}: must divide model.heads={self.heads}")

    def check_sequence_length(self, sequence_length: int) -> None:
        """Raise `ConfigError` for a sequence (in tokens) beyond the positions that the model has."""
        if sequence_length > self.max_sequence_length:
            raise ConfigError(
                f"a sequence of {sequence_length} tokens is longer than model.max_sequence_length="
                f"{self.max_sequence_length}: shorten it, or raise model.max_sequence_length"
            )


def padded_vocabulary(tokens: int) -> int:
    """Rows of the embedding for a vocabulary of `tokens`: a multiple of 64 suits the tiles of matrix units."""
    return -(-tokens // 64) * 64


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter, in the order of the model.

    Names are those of Hugging Face's LlamaForCausalLM without the `model.` in front. A tied model has no
    `lm_head.weight`.
    """
    dim, ffn_dim, kv_dim = config.dim, config.ffn_dim, config.kv_dim
    layer = {
        "input_layernorm.weight": (dim,),
        "self_attn.q_proj.weight": (dim, dim),
        "self_attn.k_proj.weight": (kv_dim, dim),
        "self_attn.v_proj.weight": (kv_dim, dim),
        "self_attn.o_proj.weight": (dim, dim),
        "post_attention_layernorm.weight": (dim,),
        "mlp.gate_proj.weight": (ffn_dim, dim),
        "mlp.up_proj.weight": (ffn_dim, dim),
        "mlp.down_proj.weight": (dim, ffn_dim),
    }
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config.vocabulary, dim)}
    for index in range(config.layers):
        shapes.update({f"layers.{index}.{name}": shape for name, shape in layer.items()})
    shapes["norm.weight"] = (dim,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocabulary, dim)
    return shapes


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters, a tied embedding counted once. Needs `vocab_size`, else `ConfigError`."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """Floating-point operations to train on one token (forward and backward, nothing recomputed).

    6 for each weight that is multiplied with (the output head is, the embedding lookup and the norms are
    not), and 12 * layers * dim * sequence_length for attention. The whole attention square is counted,
    not its causal half, as in the tables of PaLM (Chowdhery et al. 2022, appendix B), Megatron-LM and
    llm-foundry: an MFU from this number can be compared with theirs.
    """
    matrices = sum(math.prod(shape) for shape in parameter_shapes(config).values() if len(shape) == 2)
    if not config.tie_embeddings:
        matrices -= config.vocabulary * config.dim
    return 6.0 * matrices + 12.0 * config.layers * config.dim * sequence_length
