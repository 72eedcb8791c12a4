"""Reading the run folder while its file system stumbles."""

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 300.0
_RETRY_S = 2.0
_T = TypeVar("_T")


def read_patiently(read: Callable[[], _T]) -> _T:
    """Return what `read` returns; it is tried again for a bounded time when it raises OSError.

    A shared file system that fails over, or that has thrown this node out, gives errors for a while: that must not
    end a supervisor whose ranks go on, for nobody would bring its job back.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return read()
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_S)
