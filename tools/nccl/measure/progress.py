"""Where a measurement is, for whoever waits for it. Imports no torch."""

import json
import time
from contextlib import suppress
from pathlib import Path

EVERY_S = 1.0


class Progress:
    """Appends lines of JSON to `progress.json`: time_s, phase, done, text."""

    def __init__(self, path: Path | None) -> None:
        """`path`: None on ranks that do not tell."""
        self._path = path
        self._phase = ""
        self._told_s = 0.0

    def say(self, phase: str, text: str, done: int = 0) -> None:
        """Tell of a phase, and of each further step at most once a second."""
        now = time.monotonic()
        if self._path is None or (phase == self._phase and now - self._told_s < EVERY_S):
            return
        self._phase, self._told_s = phase, now
        line = {"time_s": round(time.time(), 3), "phase": phase, "done": done, "text": text}
        # A full disk must not end what can still be measured.
        with suppress(OSError), self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
