"""Something that may take long or hang, done by a forked child while its parent goes on."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from train.resilience.process import fork


class Errand:
    """A function that a forked child runs; what it returns, as JSON, comes back through a pipe."""

    def __init__(self, action: Callable[[], Any], limit_s: float, close: Iterable[int] = ()) -> None:
        """`limit_s`: when to give up; `close`: descriptors that the child must not hold."""
        self.reader, self._writer = os.pipe()
        self.deadline = time.monotonic() + limit_s
        self._data = b""
        self._action = action
        self.pid = fork(self._run, [*close, self.reader])
        os.close(self._writer)

    def _run(self) -> int:
        data = json.dumps(self._action()).encode()
        while data:
            data = data[os.write(self._writer, data) :]
        return 0

    def read(self) -> bool:
        """Take what the pipe holds, call it when `reader` is readable; return whether the child has ended."""
        part = os.read(self.reader, 65536)
        self._data += part
        return not part

    def result(self) -> Any:
        """Return what the function did; raise `ChildProcessError` when it failed."""
        try:
            return json.loads(self._data)
        except ValueError as error:
            raise ChildProcessError("it failed: the agent's own output says why") from error

    def close(self) -> None:
        """Forget a child that has ended."""
        os.close(self.reader)

    def abort(self) -> None:
        """End the child with what it has started, and forget it; one that hangs in the kernel is left to it."""
        os.close(self.reader)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
