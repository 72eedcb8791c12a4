"""One run, one owner: two launches of the same run must not write into one folder.

The owner is a file in the run's heartbeat folder that rank 0 touches every few seconds. A second launch sees
that it is alive and refuses; what a killed process left behind is recognised and taken over. A process that
has lost its run to another (its node was cut off while Slurm restarted the job elsewhere) finds out before
it publishes a checkpoint.
"""

import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from contract.errors import PeerError, UserError
from contract.run_folder import HAND_STARTED, RunFolder, job_identity

TOUCH_EVERY_S = 2.0
WATCH_S = 10.0


class RunTakenError(UserError):
    """Another living process trains the run."""


class RunOwner:
    """Ownership of a run, held by rank 0 from `acquire` to `release`."""

    def __init__(self, run: RunFolder) -> None:
        self._path = run.owner
        self._run = run
        job, restart = job_identity()
        pid = os.getpid()
        self._me = {
            "token": uuid.uuid4().hex,
            "host": socket.gethostname(),
            "pid": pid,
            "started": _process_start(pid),
            "job": job,
            "restart": restart,
        }
        self._done = threading.Event()

    def acquire(self) -> None:
        """Become the owner; raise `RunTakenError` when a living process owns the run."""
        current = self._read()
        if current is not None and self._is_alive(current):
            who = f"process {current['pid']} on {current['host']}"
            if current["job"] != HAND_STARTED:
                who = f"job {current['job']} ({who})"
            raise RunTakenError(
                f"run {self._run.name} is already being trained by {who}: wait for it, stop it, or give this one "
                "another run.name"
            )
        temporary = self._path.with_suffix(f".{self._me['token']}")
        temporary.write_text(json.dumps(self._me))
        temporary.replace(self._path)
        # Two launches may have found the run free at once: the last to write has it.
        time.sleep(0.1)
        self.check()
        threading.Thread(target=self._touch, name="run-owner", daemon=True).start()

    @property
    def token(self) -> str:
        """What tells this owner from all others."""
        return str(self._me["token"])

    def sees(self, token: str) -> bool:
        """Whether the run folder, as it is seen from here, belongs to the owner with this token."""
        current = self._read()
        return current is not None and current["token"] == token

    def check(self) -> None:
        """Raise `PeerError` unless this process still owns the run."""
        current = self._read()
        if current is None or current["token"] != self._me["token"]:
            other = f"process {current['pid']} on {current['host']}" if current else "nobody we know"
            raise PeerError(f"run {self._run.name} was taken over by {other}: this process leaves it alone")

    def release(self) -> None:
        """Give the run up, if it is still ours."""
        self._done.set()
        current = self._read()
        if current is not None and current["token"] == self._me["token"]:
            self._path.unlink(missing_ok=True)

    def _is_alive(self, other: dict[str, Any]) -> bool:
        if other["job"] == self._me["job"] != HAND_STARTED and other["restart"] < self._me["restart"]:
            return False
        if other["host"] == self._me["host"]:
            return bool(_process_start(other["pid"]) == other["started"])
        # Clocks of two hosts differ; a file that changes while we look does not lie.
        before = _modified(self._path)
        deadline = time.monotonic() + WATCH_S
        while time.monotonic() < deadline:
            time.sleep(0.2)
            if _modified(self._path) != before:
                return True
        return False

    def _touch(self) -> None:
        while not self._done.wait(TOUCH_EVERY_S):
            with suppress(OSError):
                os.utime(self._path)

    def _read(self) -> dict[str, Any] | None:
        try:
            value = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return None
        # A file that somebody has spoilt names no living owner.
        return value if isinstance(value, dict) and value.keys() >= self._me.keys() else None


def _modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _process_start(pid: int) -> str | None:
    """Start time of a process (its number may be in use again), or None when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]
