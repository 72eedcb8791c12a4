"""Let something new appear whole or not at all."""

import os
import shutil
from collections.abc import Iterator
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

    Whatever happens, it is gone afterwards. Raises `SaveError` for what the system refuses.
    """
    refuse_existing(target)
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
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
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):
            temporary.unlink()


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
