"""Let something new appear whole or not at all."""

import glob
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from contract.errors import ConfigError, SaveError


def refuse_existing(target: Path) -> None:
    """Raise `ConfigError` if `target` is there already, or cannot be made."""
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} exists: give a new path, nothing is overwritten")
    if not target.parent.is_dir():
        raise ConfigError(f"{target.parent} is no folder: make it first")


@contextmanager
def draft(target: Path) -> Iterator[Path]:
    """Yield a path beside `target` at which to make a file or a folder; it is renamed when all went well.

    Whatever happens, SIGTERM included, it is gone afterwards; after SIGKILL, with the next draft of that name on this
    host. Raises `SaveError` for what the system refuses.
    """
    refuse_existing(target)
    _remove_leftovers(target)
    temporary = target.with_name(f"{_begin(target)}{os.getpid()}")
    stopped = _stop_by_sigterm()
    try:
        yield temporary
        _sync(temporary)
        refuse_existing(target)  # another may have come first
        temporary.rename(target)
        _sync_one(target.parent)
    except OSError as reason:
        raise SaveError(
            f"{target} could not be written ({reason.strerror or reason}): nothing was kept"
        ) from reason
    finally:
        _remove(temporary)
        stopped()


def _begin(target: Path) -> str:
    """How the names of drafts of this host begin: a process of another one, with the same folder, is not seen here."""
    return f".{target.name}.tmp-{socket.gethostname()}-"


def _remove_leftovers(target: Path) -> None:
    for path in target.parent.glob(f"{glob.escape(_begin(target))}*"):
        process = path.name.removeprefix(_begin(target))
        if process.isdecimal() and not Path(f"/proc/{process}").exists():
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink()


def _stop_by_sigterm() -> Callable[[], object]:
    """Have SIGTERM leave by SystemExit, as SIGINT does by KeyboardInterrupt; return what undoes that."""
    if threading.current_thread() is not threading.main_thread():  # only that one gets signals
        return lambda: None
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    return lambda: signal.signal(signal.SIGTERM, before)


def _sync(path: Path) -> None:
    for inner in path.rglob("*"):
        _sync_one(inner)
    _sync_one(path)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
