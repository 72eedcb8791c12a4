"""What a stage of a pipeline takes for one micro-batch: what schedules are played with."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """Seconds, with the communication inside the stage that is waited for."""

    forward_s: float
    backward_s: float
    """For the input, and what is computed again for it."""
    weights_s: float
    """For the weights, which some schedules do apart."""

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.forward_s + self.backward_s + self.weights_s
