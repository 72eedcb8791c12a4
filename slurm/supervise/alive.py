"""The supervisor's sign of life: an agent that it has given up must not take it for dead, and bring the job back."""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from contract.alive import TOUCH_EVERY_S, is_touched
from contract.run_folder import RunFolder

WATCH_S = 8.0
"""Network file systems keep the times of a file that changes to themselves for 3 s."""


def show_life(run: RunFolder, job: str) -> None:
    """Have a thread touch a file of the run as long as this process runs, whatever holds up the others."""
    threading.Thread(target=_touch, args=(_sign(run), job), name="alive", daemon=True).start()


def supervisor_lives(run: RunFolder, job: str) -> bool:
    """Whether the supervisor that `job` runs shows signs of life; takes up to `WATCH_S`."""
    with suppress(OSError):
        return _sign(run).read_text() == job and is_touched(_sign(run), WATCH_S)
    return False


def _touch(sign: Path, job: str) -> None:
    written = False
    while True:
        with suppress(OSError):
            if written:
                os.utime(sign)
            else:
                sign.write_text(job)
                written = True
        time.sleep(TOUCH_EVERY_S)


def _sign(run: RunFolder) -> Path:
    return run.heartbeat / "supervisor"
