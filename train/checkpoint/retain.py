"""Which checkpoints of a run are kept. Imports no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from contract.run_folder import RunFolder, read_json_lines

_GB = 1e9


@dataclass(frozen=True)
class Whole:
    """A published step that nothing is wrong with."""

    step: int
    bytes: int
    verified: bool
    """Whether it was read back when it was written; only such steps count."""


@dataclass(frozen=True)
class Retention:
    """What is kept: a step that any of the first three asks for, as far as there is room."""

    keep_last: int
    """Newest steps; 0 keeps all."""
    keep_every_steps: int = 0
    """All steps that are multiples of it; 0 for none."""
    keep_best: int = 0
    """Steps with the lowest loss of an evaluation."""
    disk_budget_gb: float | None = None
    """What all may take, GB (1e9 bytes)."""

    def surplus(
        self, steps: Sequence[Whole], losses: Mapping[int, float], others_bytes: int = 0
    ) -> list[int]:
        """Return the steps to remove, oldest first.

        `losses`: of the steps that were evaluated; `others_bytes`: what else counts against the budget. The newest
        verified step always stays, and so does everything as long as there are too few verified ones.
        """
        verified = sorted(one.step for one in steps if one.verified)
        if not verified:
            return []
        best = sorted((step for step in verified if step in losses), key=lambda step: (losses[step], -step))
        best = best[: self.keep_best]
        removed = self._beyond(steps, verified, best)
        return sorted(removed | self._over_budget(steps, verified[-1], best, removed, others_bytes))

    def exceeded(self, steps: Sequence[Whole], removed: Sequence[int], others_bytes: int = 0) -> float | None:
        """By how many GB the budget is exceeded when `removed` are gone; None when it is not."""
        if self.disk_budget_gb is None:
            return None
        left = others_bytes + sum(one.bytes for one in steps if one.step not in set(removed))
        over_gb = left / _GB - self.disk_budget_gb
        return over_gb if over_gb > 0 else None

    def _beyond(self, steps: Sequence[Whole], verified: list[int], best: list[int]) -> set[int]:
        if self.keep_last <= 0 or len(verified) < self.keep_last:
            return set()
        first = verified[-self.keep_last]
        wanted = set(best)
        if self.keep_every_steps > 0:
            wanted |= {step for step in verified if step % self.keep_every_steps == 0}
        return {one.step for one in steps if one.step < first} - wanted

    def _over_budget(
        self, steps: Sequence[Whole], newest: int, best: list[int], removed: set[int], others_bytes: int
    ) -> set[int]:
        sizes = {one.step: one.bytes for one in steps if one.step not in removed}
        # The best go last, the best of them at the very end.
        order = [*(step for step in sorted(sizes) if step not in best), *reversed(best)]
        gone: set[int] = set()
        for step in order:
            if self.exceeded(steps, [*removed, *gone], others_bytes) is None:
                break
            if step != newest:
                gone.add(step)
        return gone


def eval_losses(run: RunFolder) -> dict[int, float]:
    """The loss of each evaluation of a run, by step."""
    lines = (line for line in read_json_lines(run.metrics) if "eval_loss" in line)
    found = {line.get("step"): line["eval_loss"] for line in lines}
    return {
        step: loss
        for step, loss in found.items()
        if isinstance(step, int) and isinstance(loss, float) and math.isfinite(loss)
    }
