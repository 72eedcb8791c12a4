"""PrecisionState: what the types of numbers depend on and a restart must not forget."""

from dataclasses import dataclass, field

from torch import Tensor

from train.precision.config import PrecisionConfig
from train.precision.dynamic import Dynamic
from train.precision.scale import LossScale


@dataclass
class PrecisionState:
    """The loss scale and the choice of types for gradients; the same on every rank."""

    scale: LossScale = field(default_factory=lambda: LossScale.of(PrecisionConfig()))
    dynamic: Dynamic | None = None
    """With precision.dynamic."""

    @classmethod
    def of(cls, config: PrecisionConfig) -> "PrecisionState":
        """At the start of a run."""
        return cls(LossScale.of(config), Dynamic.of(config) if config.dynamic else None)

    def metrics(self) -> dict[str, float]:
        """What there is to log."""
        return self.scale.metrics() | ({} if self.dynamic is None else self.dynamic.metrics())

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, fp64; empty where nothing changes in a run."""
        return self.scale.state_dict() | ({} if self.dynamic is None else self.dynamic.state_dict())

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what a checkpoint has, which may be nothing."""
        self.scale.load_state_dict(state)
        if self.dynamic is not None:
            self.dynamic.load_state_dict(state)
