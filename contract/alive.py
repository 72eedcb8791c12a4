"""Is a process on another host alive? It touches a file every few seconds, and who wants to know looks for a while."""

import time
from pathlib import Path

TOUCH_EVERY_S = 2.0


def is_touched(path: Path, watch_s: float) -> bool:
    """Whether somebody touches the file within `watch_s`; a missing one is touched by nobody.

    Clocks of two hosts differ; a file that changes while we look does not lie.
    """
    before = _modified(path)
    deadline = time.monotonic() + watch_s
    while before and time.monotonic() < deadline:
        time.sleep(0.2)
        if _modified(path) not in (0, before):
            return True
    return False


def _modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
