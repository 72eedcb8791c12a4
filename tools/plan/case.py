"""What is to be predicted: a model on a machine in a layout. The one form that all of the planner works on.

Our own configurations (`own`) and published rows (`rows`) are brought into it. Sizes are bytes, rates bytes/s or
FLOP/s, times seconds, unless a name says otherwise.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from tools.plan.gpu import Gpu


class Attention(StrEnum):
    """How attention is computed."""

    flash = "flash"
    """In tiles, without the square of scores in memory (Dao et al. 2022)."""
    square = "square"
    """Scores in memory, between batched matrix products, as before 2022."""


class Recompute(StrEnum):
    """What the backward pass computes again."""

    none = "none"
    attention = "attention"
    """Of attention the part between the products with keys and with values (Korthikanti et al. 2022, `selective`)."""
    between = "between"
    """All but the results of matrix products and of attention (`parallel.recompute=selective` of the trainer)."""
    alternate = "alternate"
    """As `between`, but of matrix products every second result is kept (torchtitan's `selective` by operation)."""
    half = "half"
    """Half of the layers in full."""
    full = "full"
    """Each layer from its input."""


class Number(StrEnum):
    """In what matrix products compute."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp8 = "fp8"
    fp32 = "fp32"
    tf32 = "tf32"


@dataclass(frozen=True)
class Model:
    """A decoder of equal layers."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    gated: bool = True
    """SwiGLU: three matrices of the MLP; else two."""
    tied: bool = False
    """The head is the embedding."""
    biases: bool = False
    """Matrices have biases, and norms too."""
    positions: int = 0
    """Rows of a learned table of positions; 0: rotary or none."""
    name: str = "model"

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    @property
    def kv_width(self) -> int:
        """Width of all heads of keys (or of values)."""
        return self.kv_heads * self.head_dim

    @property
    def layer_matrices(self) -> int:
        """Weights in the matrices of one layer."""
        attention = 2 * self.hidden * (self.hidden + self.kv_width)
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def layer_parameters(self) -> int:
        """All parameters of one layer."""
        norms = 2 * self.hidden * (2 if self.biases else 1)
        biases = 0
        if self.biases:
            biases = 2 * self.hidden + 2 * self.kv_width + self.hidden + self.ffn * (2 if self.gated else 1)
        return self.layer_matrices + norms + biases

    @property
    def table_parameters(self) -> int:
        """Of the embedding, or of the head."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """In all; a tied table counts once."""
        norm = self.hidden * (2 if self.biases else 1)
        tables = self.table_parameters * (1 if self.tied else 2) + self.positions * self.hidden
        return self.layers * self.layer_parameters + tables + norm

    def flops_per_token(self, sequence: int) -> float:
        """Forward and backward of one token, nothing computed again; the whole square of attention counts."""
        matrices = self.layers * self.layer_matrices + self.table_parameters
        return 6.0 * matrices + 12.0 * self.layers * self.hidden * sequence


@dataclass(frozen=True)
class Machine:
    """GPUs and what lies between them."""

    gpu: Gpu
    gpus: int
    gpus_per_node: int
    network: float
    """What all adapters of a node carry in one direction, bytes/s."""
    network_known: bool = True
    """False: taken for granted, since nobody says."""

    @property
    def nodes(self) -> int:
        """Number of nodes, the last one perhaps not full."""
        return -(-self.gpus // self.gpus_per_node)


@dataclass(frozen=True)
class Layout:
    """How the work is split; the number of GPUs is tp * pp * cp * dp."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    vpp: int = 1
    """Stages that a rank of the pipeline holds."""
    micro_batch: int = 1
    """Sequences that a rank takes at once."""
    micro_batches: int = 1
    """That a rank takes in a step."""
    zero: int = 0
    """What `sharers` share: 0 nothing, 1 optimizer, 2 gradients too, 3 weights too."""
    sharers: int = 1
    """Ranks that share one copy of the state, of dp * cp."""
    split: tuple[int, ...] | None = None
    """Layers of each stage, first to last; None: evenly."""
    schedule: str = "1f1b"
    """As `train.layout.stages` and `tools.plan.pipeline` name them."""
    recompute: Recompute = Recompute.none
    sequence_parallel: bool = False
    offload_optimizer: bool = False
    """The optimizer's state lies, and its step is computed, on the host."""
    offload_parameters: bool = False
    """With zero 3: weights and gradients lie on the host too, between their uses."""
    offload_activations: bool = False
    """What is kept of layers lies on the host from their forward to their backward pass."""

    @property
    def ranks(self) -> int:
        """GPUs that it takes."""
        return math.prod((self.tp, self.pp, self.cp, self.dp))


@dataclass(frozen=True)
class Case:
    """One thing to predict."""

    model: Model
    machine: Machine
    layout: Layout
    sequence: int
    """Tokens of one sequence."""
    number: Number = Number.bf16
    attention: Attention = Attention.flash
    compiled: bool = False
    """Layers are fused by a compiler."""
    gradient_bytes: int = 4
    """Of a gradient that is kept and travels."""
    early_stop: bool = True
    """Computing a layer again stops before its last product, which the backward pass does not ask for (torch's
    checkpoint without reentry)."""
    waits_for_host: bool = False
    """The host waits whenever stages of a pipeline hand over (DeepSpeed's engine), so that kernels start late."""
    fused_loss: bool = False
    """Logits are never whole in fp32."""

    @property
    def item_bytes(self) -> int:
        """Of an activation."""
        return 4 if self.number in (Number.fp32, Number.tf32) else 2

    @property
    def samples(self) -> int:
        """Sequences of a step."""
        return self.layout.micro_batch * self.layout.micro_batches * self.layout.dp

    @property
    def tokens(self) -> int:
        """Of a step, on all GPUs."""
        return self.samples * self.sequence

    @property
    def model_flops(self) -> float:
        """Of a step on one GPU, nothing computed again."""
        return self.model.flops_per_token(self.sequence) * self.tokens / self.layout.ranks

    @property
    def tokens_of_rank(self) -> float:
        """Of a micro-batch, outside attention."""
        return self.layout.micro_batch * self.sequence / self.layout.cp

    def on(self, layout: Layout) -> "Case":
        """The same in another layout."""
        return replace(self, layout=layout)
