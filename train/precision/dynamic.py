"""Gradients in bfloat16 while that is harmless: the type of their sums follows the phase of training.

Rounding a gradient to bfloat16 each time something is added to it is noise. A step's gradient has noise of its own, for
it comes from a few samples of all (McCandlish et al. 2018, arXiv 1812.06162). Every `precision.dynamic_steps` steps:

    narrow   if  noise of the samples >= MARGIN x noise of the rounding
             and no gradient has overflowed since the last look
             and the loss does not bend up: its means over the last three intervals do not rise towards the end by more
                 than DEVIATIONS standard errors, faster than before
    wide     else, and then for at least HOLD intervals; so does a run begin

where narrow is bfloat16, and wide what precision.accumulate and precision.reduce say.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from train.precision.config import PrecisionConfig, Sum

MARGIN = 1000.0
"""How much larger the noise of the samples must be, as a variance."""
ROUNDING = 2.0**-18 / 3
"""Variance of the relative error of rounding to bfloat16, which has 8 bits: uniform up to 2^-9."""
DEVIATIONS = 2.0
HOLD = 3
_NUMBERS = ("narrow", "hold", "noise", "count", "sum", "squares", "skipped", "switches")
_MEANS = 3


@dataclass(frozen=True)
class Noise:
    """What the moments of Adam tell of the gradients that they have seen."""

    steps: int
    """So many."""
    first: float
    """Sum of the squares of the first moments."""
    second: float
    """Sum of the second moments."""

    def relative(self, beta1: float, beta2: float) -> float:
        """Variance of a step's gradient as a share of its mean's square, over all parameters.

        With weights w that add up to 1, the mean of n gradients has E|m|^2 = |G|^2 + S sum(w^2), and each has
        E|g|^2 = |G|^2 + S: two equations for S, the variance, and G. inf where the mean drowns in it.
        """
        decay1, decay2 = beta1**self.steps, beta2**self.steps
        first, second = self.first / (1 - decay1) ** 2, self.second / (1 - decay2)
        squares = (1 - beta1) * (1 + decay1) / ((1 + beta1) * (1 - decay1))
        if self.steps < 2 or squares >= 1:
            return 0.0
        variance = max(0.0, (second - first) / (1 - squares))
        mean = second - variance
        return variance / mean if mean > 0 else math.inf


@dataclass
class Dynamic:
    """The choice, and what it comes from; the same on every rank."""

    config: PrecisionConfig
    narrow: bool = False
    hold: int = 0
    """Looks for which it stays wide."""
    noise: float = 0.0
    """Of the samples, at the last look."""
    switches: int = 0
    skipped: int = 0
    """Overflows up to the last look."""
    count: int = 0
    sum: float = 0.0
    squares: float = 0.0
    """Of the losses since the last look: how many, their sum, that of their squares."""
    means: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    """Mean losses of the last intervals, oldest first, and the squares of their standard errors."""

    @classmethod
    def of(cls, config: PrecisionConfig) -> "Dynamic":
        """At the start of a run."""
        return cls(config)

    @property
    def types(self) -> PrecisionConfig:
        """The configuration with the types of now."""
        if not self.narrow:
            return self.config
        return replace(self.config, accumulate=Sum.bfloat16, reduce=Sum.bfloat16)

    def observe(self, loss: float) -> None:
        """Take note of the mean loss of a step."""
        self.count += 1
        self.sum += loss
        self.squares += loss * loss

    def due(self, step: int) -> bool:
        """Whether to look after so many steps of the run."""
        return step % self.config.dynamic_steps == 0

    def look(self, noise: float, additions: int, skipped: int) -> str | None:
        """Decide anew; returns why the types change, or None.

        `noise`: see `Noise.relative`; `additions`: how often a gradient is rounded in a step; `skipped`: overflows so
        far.
        """
        self.noise = noise
        self._close_interval()
        reason = self._against(noise, additions, skipped)
        self.skipped = skipped
        if reason is not None:
            self.hold = HOLD
        elif self.hold > 0:
            self.hold -= 1
        narrow = self.hold == 0
        if narrow == self.narrow:
            return None
        self.narrow = narrow
        self.switches += 1
        return (
            reason
            or f"the samples' noise is {noise:.3g} of the gradient's square, far above that of rounding"
        )

    def _against(self, noise: float, additions: int, skipped: int) -> str | None:
        """Why gradients should be wide."""
        if skipped > self.skipped:
            return f"{skipped - self.skipped} gradients have overflowed"
        bound = MARGIN * ROUNDING * additions
        if not noise >= bound:
            return f"the samples' noise is {noise:.3g} of the gradient's square, below {bound:.3g}"
        if self.bends_up():
            return f"the loss bends up, to {self.means[-1]:.4f}"
        return None

    def bends_up(self) -> bool:
        """Whether the loss rises, and its curvature is beyond its noise."""
        if len(self.means) < _MEANS:
            return False
        oldest, middle, newest = self.means
        curvature = newest - 2 * middle + oldest
        error = math.sqrt(self.errors[0] + 4 * self.errors[1] + self.errors[2])
        # Not a number is no reason to be narrow.
        return not (newest <= middle or curvature <= DEVIATIONS * error)

    def _close_interval(self) -> None:
        if self.count < 2:
            return
        mean = self.sum / self.count
        variance = max(0.0, self.squares / self.count - mean * mean) / (self.count - 1)
        self.means, self.errors = [*self.means, mean][-_MEANS:], [*self.errors, variance][-_MEANS:]
        self.count, self.sum, self.squares = 0, 0.0, 0.0

    def metrics(self) -> dict[str, float]:
        """What there is to log: the bits of the sums, and what decides on them."""
        values = {
            "accumulate_bits": 8.0 * self.types.accumulate.bytes,
            "reduce_bits": 8.0 * self.types.reduce.bytes,
            "precision_switches": float(self.switches),
        }
        # Where the mean drowns in noise there is no number for it.
        return values | {"gradient_noise": self.noise} if math.isfinite(self.noise) else values

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        missing = [math.nan] * (_MEANS - len(self.means))
        values = [float(getattr(self, name)) for name in _NUMBERS]
        return {
            "dynamic": torch.tensor(
                [*values, *missing, *self.means, *missing, *self.errors], dtype=torch.float64
            )
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what a checkpoint has; one without leaves it as at the start."""
        if "dynamic" not in state:
            return
        values = state["dynamic"].tolist()
        for name, value in zip(_NUMBERS, values, strict=False):
            kind = type(getattr(self, name))
            setattr(self, name, kind(value))
        means, errors = values[-2 * _MEANS : -_MEANS], values[-_MEANS:]
        self.means, self.errors = _known(means), _known(errors)


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]
