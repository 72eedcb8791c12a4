"""Dynamic loss scaling (Micikevicius et al. 2018): gradients that float16 can hold.

The loss is multiplied by a scale, and so is every gradient; the optimizer divides by it. A step whose gradients are
not finite updates nothing, and the scale halves; after a number of good steps it doubles.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from train.precision.config import LARGEST_SCALE, PrecisionConfig


@dataclass
class LossScale:
    """What the loss is multiplied by, and what that has led to so far; the same on every rank."""

    config: PrecisionConfig
    value: float = 1.0
    """A power of two times the one it started from."""
    good_steps: int = 0
    """Since the scale last changed or a step was skipped."""
    skipped: int = 0
    """Steps in all that updated nothing."""
    stuck: int = 0
    """Steps skipped in a row at the lowest scale."""
    spared: int = 0
    """Overflows since the scale last doubled that have not halved it."""

    @classmethod
    def of(cls, config: PrecisionConfig) -> "LossScale":
        """At the start of a run; without float16 it stays 1 and passes every step."""
        return cls(config, value=config.loss_scale if config.scales_loss else 1.0)

    @property
    def active(self) -> bool:
        """Whether there is anything to scale."""
        return self.config.scales_loss

    @property
    def exhausted(self) -> bool:
        """Whether lowering the scale has not helped and will not."""
        return self.stuck >= self.config.loss_scale_patience

    def passes(self, norm: Tensor) -> bool:
        """Whether the step with gradients of this norm may be taken; adapts the scale to the answer.

        Every rank has the same norm, so all come to the same answer without asking each other. Waits for the device
        where there is a scale.
        """
        if not self.active:
            return True
        if math.isfinite(float(norm)):
            self.stuck = 0
            self.good_steps += 1
            if self.good_steps >= self.config.loss_scale_growth_steps:
                self.value, self.good_steps = min(2 * self.value, LARGEST_SCALE), 0
                self.spared = 0
            return True
        self.skipped += 1
        self.good_steps = 0
        if self.spared < self.config.loss_scale_hysteresis - 1:
            self.spared += 1
            return False
        if self.value <= self.config.loss_scale_min:
            self.stuck += 1
        self.value = max(self.value / 2, self.config.loss_scale_min)
        return False

    def metrics(self) -> dict[str, float]:
        """What there is to log."""
        return {"loss_scale": self.value, "skipped_steps": float(self.skipped)} if self.active else {}

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint keeps; nothing without a scale."""
        if not self.active:
            return {}
        values = {
            "loss_scale": self.value,
            "good_steps": self.good_steps,
            "skipped": self.skipped,
            "stuck": self.stuck,
            **({"spared": self.spared} if self.config.loss_scale_hysteresis > 1 else {}),
        }
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what a checkpoint has; one from before there was a scale has nothing."""
        if not self.active or "loss_scale" not in state:
            return
        # The floor may have been raised since.
        self.value = max(float(state["loss_scale"]), self.config.loss_scale_min)
        self.good_steps, self.skipped = int(state["good_steps"]), int(state["skipped"])
        self.stuck = int(state["stuck"])
        self.spared = int(state.get("spared", torch.zeros(())))
