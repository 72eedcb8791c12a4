"""Where on a node the fast tier of a run lies, and whether it is of use. Imports no torch."""

import os
import re
import shutil
import socket
from pathlib import Path

from contract.errors import ConfigError
from contract.run_folder import RunFolder
from train.checkpoint.digests import digest

_GB = 1e9
_STEPS = 2
"""The one that is being copied to the shared folder, or waits for it, and the one that is being written."""


def fast_folder(given: str, run: RunFolder) -> Path:
    """Return a run's folder on this node below `checkpoint.fast_path`, and make it.

    It differs for runs of one name in two places, which may share a node. Raises `ConfigError`.
    """
    path = _expand(given)
    folder = path / f"trierarch-{_plain(run.name)}-{digest(str(run.path.absolute()).encode())[:16]}"
    if not path.is_dir():
        raise ConfigError(
            f"{_said(given, path)}: there is no such folder on {socket.gethostname()}: give one that each node has "
            "on a disk of its own"
        )
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        _try_write(folder)
    except OSError as error:
        raise ConfigError(
            f"{_said(given, path)}: {folder} cannot be written on {socket.gethostname()} ({error.strerror}): give a "
            "folder that belongs to you"
        ) from error
    return folder


def no_gain(folder: Path, run: RunFolder) -> str | None:
    """Say in a sentence why a fast tier in `folder` gains nothing; None where it may."""
    if folder.stat().st_dev != run.path.stat().st_dev:
        return None
    return (
        f"checkpoint.fast_path gains nothing: {folder.parent} and the run folder {run.path} are on the same file "
        f"system of {socket.gethostname()}"
    )


def check_room(folder: Path, step_bytes: int, known: bool) -> str | None:
    """Make sure that two steps, of which this node's ranks have `step_bytes` each, fit.

    Raises `ConfigError` where they do not; where the size is not `known`, but reckoned, returns a sentence instead.
    """
    taken = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder).free + taken
    if free >= _STEPS * step_bytes:
        return None
    sentence = (
        f"checkpoint.fast_path has {free / _GB:.3g} GB free in {folder.parent} on {socket.gethostname()}, and two "
        f"steps take {_STEPS * step_bytes / _GB:.3g} GB there: free some space, or give a larger disk"
    )
    if known:
        raise ConfigError(sentence)
    return sentence


def _expand(given: str) -> Path:
    text = os.path.expandvars(given)
    if unset := re.search(r"\$\{?(\w+)", text):
        raise ConfigError(
            f"checkpoint.fast_path={given}: {unset[1]} is not set on {socket.gethostname()}: set it on every node, or "
            "give a path"
        )
    path = Path(text).expanduser()
    if not path.is_absolute():
        raise ConfigError(f"{_said(given, path)}: give an absolute path")
    return path


def _said(given: str, path: Path) -> str:
    """The setting, with what it stands for where that is something else."""
    return f"checkpoint.fast_path={given}" + f" ({path})" * (str(path) != given)


def _plain(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)[:80]


def _try_write(folder: Path) -> None:
    """Raise OSError where files cannot be written, or where somebody else's folder has the name."""
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(0, "it belongs to somebody else")
    trial = folder / f".trial-{os.getpid()}"
    trial.write_bytes(b"1")
    trial.unlink()
