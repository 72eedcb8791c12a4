"""How rank 0 shows the run on the terminal: one live line, or a line every few steps."""

import os
import sys
import time
from datetime import timedelta

from rich.console import Console
from rich.live import Live
from rich.text import Text

from contract.variables import TERMINAL
from train.config import Progress

REFRESH_EVERY_S = 0.2


class ProgressLine:
    """Shows step, loss, tokens/s and the time left; silent on ranks that are not the leader."""

    def __init__(self, mode: Progress, steps: int, first_step: int, leader: bool) -> None:
        if mode is Progress.auto:
            terminal = os.environ.get(TERMINAL, "1" if sys.stdout.isatty() else "0") == "1"
            mode = Progress.live if terminal else Progress.lines
        self._mode = mode if leader else Progress.off
        self._steps = steps
        self._first_step = first_step
        self._started_s = time.monotonic()
        self._shown_s = 0.0
        self._loss: float | None = None
        self._tokens_per_s: float | None = None
        self._live: Live | None = None
        if self._mode is not Progress.off:
            self._console = Console(
                force_terminal=self._mode is Progress.live, highlight=False, soft_wrap=True
            )

    def say(self, text: str) -> None:
        """Print a line of its own above the live one."""
        if self._mode is not Progress.off:
            self._console.print(text, markup=False)

    def step(self, step: int) -> None:
        """Tell that `step` steps are done; cheap enough for every step."""
        now = time.monotonic()
        if self._mode is not Progress.live or now - self._shown_s < REFRESH_EVERY_S:
            return
        self._shown_s = now
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(Text(self._line(step)), refresh=True)

    def logged(self, step: int, loss: float, tokens_per_s: float) -> None:
        """Tell the loss of a logged step; the place where a line is printed when there is no live one."""
        self._loss, self._tokens_per_s = loss, tokens_per_s
        if self._mode is Progress.lines:
            self.say(self._line(step))

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self, step: int) -> str:
        done = step - self._first_step
        per_step_s = (time.monotonic() - self._started_s) / max(done, 1)
        left = timedelta(seconds=round(per_step_s * (self._steps - step)))
        loss = "-" if self._loss is None else f"{self._loss:.4f}"
        speed = "-" if self._tokens_per_s is None else f"{self._tokens_per_s:,.0f}"
        return f"step {step}/{self._steps}  loss {loss}  {speed} tokens/s  {left} left"
