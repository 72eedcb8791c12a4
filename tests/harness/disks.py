"""Small file systems of a test's own: a full, a hanging and a broken disk are real ones."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[Path]:
    """Mount on `folder`, with these arguments of mount(8); the test is skipped where that is not allowed."""
    if os.getuid() != 0:
        pytest.skip("only root may mount file systems")
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["mount", *arguments, str(folder)], capture_output=True, text=True, timeout=30, check=False
    )
    if done.returncode:
        pytest.skip(f"mount {' '.join(arguments)}: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        _unmount(folder)


@contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[Path]:
    """An ext4 file system of `nbytes` bytes in the file `<folder>.img`; skips the test as `mounted` does."""
    for command in ("mkfs.ext4", "fsfreeze"):
        if shutil.which(command) is None:
            pytest.skip(f"{command} is not installed")
    image = folder.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(nbytes)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, timeout=30)
    with mounted(folder, "-o", "loop", str(image)):
        yield folder


def fill(folder: Path) -> None:
    """Leave not a byte free on the disk at `folder`."""
    for size in (1 << 20, 1 << 12):
        with suppress(OSError), (folder / f"fill{size}").open("wb", buffering=0) as file:
            while file.write(b"x" * size):
                os.fsync(file.fileno())


def lose(folder: Path, path: Path, begin: int, end: int) -> None:
    """Have the `small_disk` at `folder` fail with input/output errors, of a file there only for whole pages in a range.

    The rest of the file is still in memory.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read ahead
        for at in range(0, os.fstat(descriptor).st_size, page):
            if not begin <= at <= end - page:
                os.pread(descriptor, page, at)
    finally:
        os.close(descriptor)
    os.truncate(folder.with_suffix(".img"), 1 << 16)


@contextmanager
def frozen(folder: Path) -> Iterator[None]:
    """Have every write to the file system at `folder` hang."""
    subprocess.run(["fsfreeze", "--freeze", str(folder)], check=True, timeout=30)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(folder)], check=True, timeout=30)


def _unmount(folder: Path) -> None:
    for _ in range(50):
        if (
            subprocess.run(["umount", str(folder)], capture_output=True, timeout=30, check=False).returncode
            == 0
        ):
            return
        time.sleep(0.1)  # the last request of a thread may be under way
    subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=30)
