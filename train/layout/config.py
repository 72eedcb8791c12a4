"""The `parallel` section of the configuration. Imports no torch."""

from dataclasses import dataclass
from enum import StrEnum

from contract.errors import ConfigError

LARGEST_DEGREE = 10**9
LARGEST_GB = 1e6


class ContextMethod(StrEnum):
    """How attention sees the whole of a sequence that is split over `cp` ranks."""

    heads = "heads"
    """An all-to-all gives each rank the whole sequence for its share of the heads (DeepSpeed-Ulysses)."""
    ring = "ring"
    """Keys and values travel around; each rank keeps two chunks, an early and a late one, so that causal attention
    costs all ranks the same."""


class Recompute(StrEnum):
    """Which activations are computed again in the backward pass instead of kept."""

    none = "none"
    selective = "selective"
    """The results of matrix products and of attention are kept, everything between them is computed again."""
    full = "full"
    """Of each layer only the input is kept."""
    auto = "auto"
    """Of all choices that fit `recompute_budget_gb` the one that computes least again."""


@dataclass
class ParallelConfig:
    """How the work is split over ranks.

    The number of ranks is `dp_replicate * dp_shard * cp * tp * pp`; degrees that are null take what the others
    leave.
    """

    micro_batch_size: int = 8
    """Samples that one rank takes through forward and backward at once."""
    gradient_accumulation_steps: int | None = None
    """Micro-batches a rank takes for one optimizer step; null follows from loop.global_batch_size."""
    dp: int | None = None
    """Data-parallel ranks in all, `dp_replicate * dp_shard`."""
    dp_replicate: int | None = None
    """Copies of the sharded state; between them only gradients are averaged. Null: one, or all of dp with zero=0."""
    dp_shard: int | None = None
    """Ranks that share one copy of the state between them, as `zero` says. Null: what dp_replicate leaves."""
    tp: int = 1
    """Ranks that share every matrix product (tensor parallel)."""
    pp: int = 1
    """Ranks that share the layers (pipeline parallel)."""
    cp: int = 1
    """Ranks that share a sequence (context parallel)."""
    zero: int = 0
    """What dp_shard ranks share: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.

    With pp and a schedule that splits the backward (interleaved_zero_bubble, zbv, dualpipev) 2 keeps whole gradients
    until the end of a step, as 1 does, and 3 is refused.
    """
    sequence_parallel: bool = True
    """With tp: norms and residuals are split along the sequence too, for the same traffic."""
    loss_parallel: bool = True
    """With tp: logits stay split along the vocabulary."""
    schedule: str = "1f1b"
    """With pp: gpipe, 1f1b, looped_bfs, interleaved_1f1b, interleaved_zero_bubble, zbv or dualpipev."""
    stages_per_rank: int | None = None
    """With pp: stages that a rank holds; null is 2 for schedules that need several."""
    split: list[int] | None = None
    """With pp: layers of each stage, first to last; null balances them, the embedding and the loss counted."""
    context: ContextMethod = ContextMethod.heads
    """With cp: how attention sees the whole sequence."""
    recompute: Recompute = Recompute.none
    recompute_budget_gb: float | None = None
    """With recompute=auto: what a rank may keep of activations, GB (1e9 bytes)."""
    compile: bool = False
    """Compile each layer with torch.compile."""

    def validate(self) -> None:
        """Raise `ConfigError` for values that are wrong by themselves, on any number of ranks."""
        for name in (
            "micro_batch_size",
            "gradient_accumulation_steps",
            "dp",
            "dp_replicate",
            "dp_shard",
            "tp",
            "pp",
            "cp",
            "stages_per_rank",
        ):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= LARGEST_DEGREE:
                raise ConfigError(
                    f"parallel.{name}={value}: must be at least 1 and at most {LARGEST_DEGREE:,}"
                )
        budget_gb = self.recompute_budget_gb
        if budget_gb is not None and not 0 < budget_gb <= LARGEST_GB:
            raise ConfigError(
                f"parallel.recompute_budget_gb={budget_gb}: must be above 0 and at most {LARGEST_GB:g}"
            )
        if not 0 <= self.zero <= 3:
            raise ConfigError(f"parallel.zero={self.zero}: choose 0, 1, 2 or 3")
