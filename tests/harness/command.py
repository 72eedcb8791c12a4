"""Running the `trierarch` command from tests."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from contract.run_folder import Event, RunFolder

Trierarch = Callable[..., "subprocess.CompletedProcess[str]"]
COMMAND = [sys.executable, "-m", "tools.cli"]


def wait_until(what: str, condition: Callable[[], bool], timeout_s: float = 180) -> None:
    """Wait for a condition; fail with `what` it was when it does not come."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.05)


def wait_for_event(run: Path, event: Event, count: int = 1, timeout_s: float = 180) -> dict[str, object]:
    """Wait until a run has had an event `count` times; return the newest of them."""
    folder = RunFolder(run)

    def found() -> list[dict[str, object]]:
        return [line for line in folder.read_events() if line["event"] == event]

    wait_until(f"{count} x {event} in {run}", lambda: len(found()) >= count, timeout_s)
    return found()[-1]
