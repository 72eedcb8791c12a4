"""Writes that survive a power cut."""

import os
from contextlib import suppress
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Make renames and new names within a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def drop_from_memory(path: Path) -> None:
    """Have the next reading of a file that was synced come from its disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems cannot: then memory is compared with memory
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
