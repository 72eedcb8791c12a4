"""The supervisor's signals: what asks it to stop, and what wakes it when it waits."""

import select
import signal
import socket
from collections.abc import Collection
from contextlib import suppress
from types import FrameType

# srun and mpirun pass only these on to the ranks and do nothing else about them.
STOP_SIGNALS = ("SIGUSR1", "SIGUSR2")


class StopRequest:
    """The one owner of this process's signals; `reason` says why the job is to stop, None as long as it is not."""

    def __init__(self, numbers: Collection[signal.Signals]) -> None:
        """Take `numbers` as requests to stop, and SIGCHLD as a reason to wake."""
        self.reason: str | None = None
        # A signal that comes just before a wait must end it: the kernel keeps the byte that it writes.
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def request(self, reason: str) -> None:
        """Ask for a stop; the first reason is kept."""
        self.reason = self.reason or reason

    def fileno(self) -> int:
        """What a selector watches: readable after a signal."""
        return self._reader.fileno()

    def drain(self) -> None:
        """Forget the signals that have woken somebody."""
        with suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def wait(self, timeout_s: float) -> None:
        """Sleep, at most until the next signal."""
        select.select([self], [], [], max(0.0, timeout_s))
        self.drain()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.request(signal.Signals(number).name)
