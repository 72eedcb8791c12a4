"""How rank 0 tells a person about the run, on stdout."""

import os
import sys
import time
from datetime import timedelta

from contract.variables import PROGRESS_MARK, TERMINAL
from train.config import Progress

REFRESH_EVERY_S = 0.2


def tell(text: str) -> None:
    """Print one line. When nobody reads any more, as after `| head`, training must not end for that."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class ProgressLine:
    """Shows step, loss, tokens/s and the time left; silent on ranks that are not the leader."""

    def __init__(self, mode: Progress, steps: int, leader: bool) -> None:
        self._on = leader and mode is not Progress.off
        self._live = self._on and os.environ.get(TERMINAL) == "1"
        self._steps = steps
        self._first: tuple[int, float] | None = None
        """The first step done and when: what came before, such as imports, says nothing about the rest."""
        self._shown_s = 0.0
        self._loss: float | None = None
        self._tokens_per_s: float | None = None

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if self._on:
            tell(text)

    def step(self, step: int) -> None:
        """Tell that `step` steps are done; cheap enough for every step."""
        now = time.monotonic()
        self._first = self._first or (step, now)
        if self._live and now - self._shown_s >= REFRESH_EVERY_S:
            self._shown_s = now
            tell(PROGRESS_MARK + self._line(step))

    def logged(self, step: int, loss: float, tokens_per_s: float) -> None:
        """Tell the loss of a logged step; where there is no live line one is printed for it."""
        self._loss, self._tokens_per_s = loss, tokens_per_s
        if not self._live:
            self.say(self._line(step))

    def _line(self, step: int) -> str:
        loss = "-" if self._loss is None else f"{self._loss:.4f}"
        speed = "-" if self._tokens_per_s is None else f"{self._tokens_per_s:,.0f}"
        return f"step {step}/{self._steps}  loss {loss}  {speed} tokens/s  {self._time_left(step)} left"

    def _time_left(self, step: int) -> str:
        if self._first is None or step <= self._first[0]:
            return "-" if step < self._steps else str(timedelta(0))
        first_step, first_s = self._first
        per_step_s = (time.monotonic() - first_s) / (step - first_step)
        return str(timedelta(seconds=round(per_step_s * (self._steps - step))))
