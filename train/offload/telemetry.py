"""What an offloaded optimizer has moved, and how much of its time the computing has hidden."""

from collections.abc import Sequence
from dataclasses import dataclass

from train.offload.buckets import Bucket, local, slots
from train.offload.gradients import Gradients
from train.offload.states import States
from train.offload.update import Worker
from train.offload.weights import Weights


@dataclass(frozen=True)
class _Totals:
    """Of the run so far."""

    updates: int
    values: dict[str, float]


class Telemetry:
    """Keeps the totals, and tells what they have grown by."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        states: States,
        gradients: Gradients,
        weights: Weights,
        worker: Worker,
    ) -> None:
        self.updates = 0
        """That have begun."""
        self.waited_s = 0.0
        """Seconds that what computes has waited for updates."""
        self._weight_bytes = sum(local(slot.parameter).nbytes for slot in slots(buckets))
        self._states, self._gradients, self._weights, self._worker = states, gradients, weights, worker
        self._before = self._totals()

    def take(self) -> dict[str, float]:
        """What there was since the last call, a step: bytes by role, seconds of updates and those that nothing hid."""
        before, self._before = self._before, self._totals()
        steps = max(self._before.updates - before.updates, 1)
        found = {name: (value - before.values[name]) / steps for name, value in self._before.values.items()}
        found["offload_hidden_s"] = max(found["offload_update_s"] - found["offload_exposed_s"], 0.0)
        return found

    def _totals(self) -> _Totals:
        disk = self._states.traffic()
        values = {
            "offload_gradients_to_cpu_bytes": self._gradients.moved_bytes,
            "offload_parameters_from_cpu_bytes": self.updates * self._weight_bytes,
            "offload_states_from_nvme_bytes": disk.read_bytes,
            "offload_states_to_nvme_bytes": disk.written_bytes,
            "offload_nvme_busy_s": disk.busy_s,
            "offload_nvme_exposed_s": disk.waited_s,
            "offload_update_s": self._worker.busy_s,
            "offload_exposed_s": self.waited_s,
            **self._weights.totals(),
        }
        return _Totals(self.updates, values)
