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

from contract.alive import TOUCH_EVERY_S, is_touched
from contract.errors import PeerError, UserError
from contract.run_folder import HAND_STARTED, RunFolder, job_identity, start_number

WATCH_S = 10.0
SETTLE_S = 0.1
"""How far apart two launches may be that have both found the run free."""


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
            "start": start_number(),
        }
        self._done = threading.Event()
        self._claimed_s = 0.0

    def acquire(self) -> None:
        """Claim the run; raise `RunTakenError` when a living process owns it.

        Change nothing of the run before `settle`.
        """
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
        self._claimed_s = time.monotonic()
        threading.Thread(target=self._touch, name="run-owner", daemon=True).start()

    def settle(self) -> None:
        """Make sure of the run; raise `RunTakenError` when another launch has claimed it at the same time.

        Two launches may have found the run free at once: the last to write has it.
        """
        time.sleep(max(0.0, self._claimed_s + SETTLE_S - time.monotonic()))
        try:
            self.check()
        except PeerError as error:
            raise RunTakenError(str(error)) from error

    @property
    def token(self) -> str:
        """What tells this owner from all others."""
        return str(self._me["token"])

    def sees(self, token: str) -> bool:
        """Whether the run folder, as it is seen from here, belongs to the owner with this token."""
        with suppress(OSError):
            current = self._read()
            return current is not None and current["token"] == token
        return False

    def check(self) -> None:
        """Raise `PeerError` unless this process still owns the run, OSError when that cannot be seen."""
        current = self._read()
        if current is None or current["token"] != self._me["token"]:
            other = f"process {current['pid']} on {current['host']}" if current else "nobody we know"
            raise PeerError(f"run {self._run.name} was taken over by {other}: this process leaves it alone")

    def release(self) -> None:
        """Give the run up, if it is still ours."""
        self._done.set()
        with suppress(OSError):
            if self.sees(self.token):
                self._path.unlink(missing_ok=True)

    def _is_alive(self, other: dict[str, Any]) -> bool:
        if other["job"] == self._me["job"] != HAND_STARTED and _launch(other) < _launch(self._me):
            # Its supervisor has ended it before it started this one, or Slurm has.
            return False
        if other["host"] == self._me["host"]:
            return bool(_process_start(other["pid"]) == other["started"])
        return is_touched(self._path, WATCH_S)

    def _touch(self) -> None:
        while not self._done.wait(TOUCH_EVERY_S):
            with suppress(OSError):
                os.utime(self._path)

    def _read(self) -> dict[str, Any] | None:
        try:
            value = json.loads(self._path.read_text())
        # Not any OSError: a file system that stumbles says nothing of who has the run.
        except (FileNotFoundError, ValueError):
            return None
        # A file that somebody has spoilt names no living owner.
        if not isinstance(value, dict) or not {"start", *value} >= self._me.keys():
            return None
        return {"start": 0} | value


def _launch(owner: dict[str, Any]) -> tuple[int, int]:
    """Which launch of its job a process belongs to; later ones are greater."""
    return owner["restart"], owner["start"]


def _process_start(pid: int) -> str | None:
    """Start time of a process (its number may be in use again), or None when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]
