"""How the supervisor starts what it supervises."""

import ctypes
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO

_PR_SET_PDEATHSIG = 1


def start(
    command: Sequence[str],
    *,
    stdin: int | None = subprocess.DEVNULL,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    environ: Mapping[str, str] | None = None,
) -> "subprocess.Popen[bytes]":
    """Start a command that dies with this process; raises OSError when it cannot be run.

    It has a session of its own: a terminal's Ctrl-C and hang-up reach it through the supervisor, once.
    """
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=None if environ is None else dict(environ),
        bufsize=0,
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )


def _die_with_parent() -> None:
    """Have the kernel end the launcher with the supervisor, so that no rank outlives a killed job."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
