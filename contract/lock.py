"""A lock file: one process at a time, also over nodes where the file system has locks."""

import errno
import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# A file system that has no locks.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_RETRY_S = 0.05


@contextmanager
def locked(path: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the lock file `path`; raises TimeoutError if another process still holds it after `wait_s`.

    On a file system without locks it goes on without one: what it guards has to survive that.
    """
    with path.open("w") as file:
        hold(file.fileno(), path, wait_s)
        yield


def hold(descriptor: int, path: Path, wait_s: float) -> None:
    """Lock what is open as `descriptor` until that is closed; raises as `locked` does."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{path} is locked by another process") from None
            time.sleep(_RETRY_S)
            continue
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        return
