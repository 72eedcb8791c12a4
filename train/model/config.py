"""The shape of a model. Imports no torch."""

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

    def validate(self) -> None:
        """Raise `ConfigError` for a shape that cannot be built."""
        for name in ("dim", "layers", "heads", "ffn_dim", "max_sequence_length", "rope_theta", "norm_eps"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"model.{name}={getattr(self, name)}: must be above 0")
        if self.vocab_size is not None and self.vocab_size <= 0:
            raise ConfigError(f"model.vocab_size={self.vocab_size}: give one above 0, or null")
        if self.dim % self.heads or self.head_dim % 2:
            raise ConfigError(
                f"model.dim={self.dim} and model.heads={self.heads}: dim must be an even multiple of heads"
            )
        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        if kv_heads <= 0 or self.heads % kv_heads:
            raise ConfigError(f"model.kv_heads={kv_heads}: must divide model.heads={self.heads}")
