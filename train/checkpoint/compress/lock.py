"""One process at a time replaces, or removes, steps of a run. Imports no torch."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from contract.lock import hold

# A file system that has no locks on folders: NFS wants to write to what it locks.
_NO_LOCKS = (errno.EBADF, errno.EINVAL, errno.EISDIR)


@contextmanager
def locked_folder(folder: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Hold a lock on a folder; raises TimeoutError if another process still holds it after `wait_s`, or OSError.

    On a file system without such locks it goes on without one: what it guards has to survive that.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            hold(descriptor, folder, wait_s)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield
    finally:
        os.close(descriptor)
