"""Time of a step, averaged over the steps since the last logged one."""

import time


class StepClock:
    """Averages over steps, because on a GPU a single step's time says only when it was queued."""

    def __init__(self, step: int) -> None:
        self.restart(step)

    def restart(self, step: int) -> None:
        """Begin a new average at `step`: after a logged step, an evaluation or a save."""
        self._step = step
        self._started_s = time.perf_counter()

    def step_time_s(self, step: int) -> float:
        """Return the average time of the steps from the last restart to `step`."""
        return (time.perf_counter() - self._started_s) / max(step - self._step, 1)
