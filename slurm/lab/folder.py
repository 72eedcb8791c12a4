"""The folder that a lab lives in: where it is, whether it may be used, and who may change it now."""

import fcntl
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from contract.errors import UserError

SETTINGS_FILE = "lab.json"
LOCK_FILE = "lock"
# A Unix socket's path has 107 characters; Slurm adds up to 40 for a job step's.
MAX_PATH_LENGTH = 65


def default_folder() -> Path:
    """The calling user's own lab folder: short, because sockets live in it."""
    return Path(tempfile.gettempdir()) / f"trierarch-lab-{os.getuid()}"


def make_folder(folder: Path) -> None:
    """Create the lab's folder, or check that the one there is a lab of the calling user and of nobody else.

    Raises UserError if the path cannot be used, someone else owns or can write it, or it holds other files.
    """
    check_path(folder)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"The lab's folder {folder} cannot be made ({error.strerror}): choose another."
        ) from None
    check_owner(folder)
    content = {entry.name for entry in folder.iterdir()} - {LOCK_FILE}
    if content and SETTINGS_FILE not in content:
        raise UserError(f"The folder {folder} holds other files: give the lab an empty or a new folder.")


def check_path(folder: Path) -> None:
    """Raise UserError if slurm.conf or a socket in `folder` could not carry its path."""
    path = str(folder)
    if len(path) > MAX_PATH_LENGTH:
        raise UserError(
            f"The lab's folder {path} is {len(path)} characters long and sockets allow {MAX_PATH_LENGTH}: "
            f"choose a shorter one, such as {default_folder()}."
        )
    if not re.fullmatch(r"[A-Za-z0-9/._-]+", path):
        raise UserError(
            f"The lab's folder {path!r} has characters that Slurm's configuration cannot carry: "
            "use letters, digits and /._- only."
        )


def check_owner(folder: Path) -> None:
    """Raise UserError unless `folder` is a real folder that only the calling user can write."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise UserError(
            f"The lab's folder {folder} is a link or someone else owns it or can write in it: "
            "choose a folder of your own, with mode 0700."
        )


@contextmanager
def locked(folder: Path, timeout_s: float = 90.0) -> Iterator[None]:
    """Hold the lab's lock, so that two commands never change one lab at once; `folder` exists.

    Raises UserError if another process still holds it after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    with (folder / LOCK_FILE).open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"Another command has been changing the lab in {folder} for {timeout_s:.0f} s: "
                        "wait for it to end, then try again."
                    ) from None
                time.sleep(0.1)
        yield
