"""Writes that survive a power cut."""

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Make renames and new names within a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
