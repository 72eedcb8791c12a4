"""One agent seen from its supervisor: a process that is spoken to in lines, and that must not block anybody."""

import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from contract.agent import Decoder, Request, encode
from slurm.supervise.processes import start

_READ_BYTES = 65536


class AgentProcess:
    """The command that runs an agent on a node, and its two pipes."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start it; its messages to people go to this process's stderr. Raises OSError when it cannot be run."""
        self._child = start(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None, environ=environ
        )
        assert self._child.stdin is not None and self._child.stdout is not None
        self._stdin, self._stdout = self._child.stdin, self._child.stdout
        os.set_blocking(self._stdin.fileno(), False)
        os.set_blocking(self._stdout.fileno(), False)
        self._decoder = Decoder()
        self._unsent = b""
        self._lock = threading.RLock()
        """Guards what is sent: also another thread sends, and must not write into a pipe that is closed."""
        self.ended = False

    def fileno(self) -> int:
        """The descriptor on which replies come, for a selector."""
        return self._stdout.fileno()

    def send(self, kind: Request, **fields: Any) -> None:
        """Send a request; what a full pipe does not take is kept for `flush`."""
        with self._lock:
            self._unsent += encode(kind, **fields)
            self.flush()

    def flush(self) -> None:
        """Send what is left, as far as the pipe takes it."""
        with self._lock:
            try:
                while self._unsent and not self._stdin.closed:
                    self._unsent = self._unsent[os.write(self._stdin.fileno(), self._unsent) :]
            except BlockingIOError:
                pass
            except OSError:  # it has ended: reading will tell
                self._unsent = b""

    def read(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the messages that have come, and lines that are none; notes when the agent has ended."""
        messages: list[dict[str, Any]] = []
        while not self.ended:
            try:
                data = os.read(self._stdout.fileno(), _READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.ended = not data
            messages += self._decoder.feed(data)
        noise, self._decoder.noise = self._decoder.noise, []
        return messages, noise

    def leave(self) -> None:
        """Ask the agent to end."""
        with self._lock, suppress(OSError):
            self.send(Request.QUIT)
            self._stdin.close()

    def has_ended(self) -> bool:
        """Whether the process is gone; asked again until it is, so that no dead one stays."""
        return self._child.poll() is not None

    def close(self) -> None:
        """Let go of the pipes: nothing more is sent or read."""
        self.ended = True
        for pipe in (self._stdin, self._stdout):
            with self._lock, suppress(OSError):
                pipe.close()

    def kill(self) -> None:
        """End the process by force."""
        self._child.kill()
