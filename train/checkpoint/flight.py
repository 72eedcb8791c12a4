"""A save that goes on in a thread while training does."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from train.resilience.pulse import Phase, beat

LOOK_EVERY_S = 1.0


@dataclass
class Flight:
    """One save, of its own thread, and what becomes of it."""

    step: int
    attempts: int = 0
    """That have begun so far."""
    stall_s: float = 0.0
    """How long training has stood still for it."""
    copied: threading.Event = field(default_factory=threading.Event)
    """Set when the state may change again."""
    _outcome: "Future[bool]" = field(default_factory=Future)

    def begin(self, work: Callable[[], bool]) -> None:
        """Have a thread do `work`, which returns whether it has saved."""
        # A daemon: a process that has failed must not wait for ranks that are gone.
        threading.Thread(target=self._run, args=[work], name="checkpoint", daemon=True).start()

    @property
    def over(self) -> bool:
        """Whether `result` returns at once."""
        return self._outcome.done()

    def pause(self) -> None:
        """Wait for the end, but no longer than a moment."""
        wait([self._outcome], timeout=LOOK_EVERY_S)

    def result(self) -> bool:
        """Wait for the end; return whether it has saved, or raise what the thread has raised.

        Each attempt may take as long as a save may.
        """
        seen = -1
        while not self.over:
            if self.attempts != seen:
                seen = self.attempts
                beat(Phase.SAVE)
            self.pause()
        return self._outcome.result()

    def _run(self, work: Callable[[], bool]) -> None:
        try:
            self._outcome.set_result(work())
        except BaseException as error:
            self._outcome.set_exception(error)
        finally:
            self.copied.set()
