"""A folder on a local disk that one living process owns, and what to do with those whose owner is dead.

The owner holds a lock on `owner.json` in its folder for as long as it lives; the kernel frees it with the process,
however that ends. So a folder of this host whose lock is free is a leftover. Folders of other hosts (on a shared
file system) and of other users are never touched, nor is any whose file doesn't say what it belongs to.
"""

import fcntl
import json
import os
import re
import shutil
import socket
import tempfile
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from contract.errors import NodeError
from contract.run_folder import job_identity

OWNER_FILE = "owner.json"
BLOCKS_FILE = "blocks.bin"
_PREFIX = "trierarch-"
_NEW = ".trierarch-new-"
_DEAD = ".trierarch-dead-"
_WAIT_S = 30.0
"""How long to wait for another rank that removes a leftover, and for a killed predecessor that is not yet gone."""
_RETRY_S = 0.05


@dataclass(frozen=True)
class Identity:
    """Whose folder it is."""

    run: str
    """The run folder."""
    job: str
    rank: int
    role: str
    """What the folder is for; a rank may have several."""
    host: str

    @classmethod
    def of(cls, run: Path, rank: int, role: str) -> "Identity":
        """Identify a rank of this process's job, on this host."""
        return cls(str(run), job_identity()[0], rank, role, socket.gethostname())

    @property
    def folder_name(self) -> str:
        """Name of its folder on every path; differs for runs of one name in two places."""
        run = re.sub(r"[^\w.-]", "_", Path(self.run).name)[:80]
        place = f"{zlib.crc32(self.run.encode()):08x}"
        return f"{_PREFIX}{run}-{place}-{self.job}-{self.host}-{self.rank}-{self.role}"


class OwnedFolder:
    """A folder that this process owns until `remove`, or until its end."""

    def __init__(self, parent: Path, identity: Identity) -> None:
        """Make the folder, owned from the first moment that it can be seen by its name.

        Raises `NodeError` where that can't be, or where a living process has the same identity.
        """
        self.path = parent / identity.folder_name
        about = asdict(identity) | {
            "pid": os.getpid(),
            "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        }
        try:
            new = Path(tempfile.mkdtemp(prefix=_NEW, dir=parent))
            self._lock = os.open(new / OWNER_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with suppress(OSError):  # without locks nobody can take it for a leftover: see `_is_free`
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            os.write(self._lock, json.dumps(about).encode())
        except OSError as error:
            raise NodeError(
                f"{identity.host}: the NVMe path {parent} cannot be written to ({error.strerror}): give a folder "
                "of a local disk where you may write"
            ) from None
        self._publish(new, identity)

    def _publish(self, new: Path, identity: Identity) -> None:
        deadline = time.monotonic() + _WAIT_S
        while True:
            try:
                new.rename(self.path)
                return
            except OSError as error:
                # A rename onto a folder with content. The process that had this rank before may still be dying.
                _remove_if_dead(self.path, identity.host)
                if self.path.exists() and time.monotonic() > deadline:
                    shutil.rmtree(new, ignore_errors=True)
                    raise NodeError(
                        f"{identity.host}: {self.path} is in use ({error.strerror}; {_owner_of(self.path)}): end "
                        "that process, or remove the folder if there is none"
                    ) from None
                time.sleep(_RETRY_S)

    def remove(self) -> None:
        """Remove the folder with what this package has put there, and give it up."""
        _remove(self.path)
        os.close(self._lock)

    def leave(self) -> None:
        """Give the folder up as it is: a leftover."""
        os.close(self._lock)


def clear_leftovers(parent: Path, host: str, tell: Callable[[str], None]) -> None:
    """Remove what dead processes of this user on this host have left in `parent`; `tell` what was freed.

    Returns when others that remove such folders at the same time are done, so that the space is there.
    """
    with _alone(parent):
        for folder in _folders(parent):
            if folder.name.startswith(_DEAD):
                _wait_for(folder, host)
                continue
            about = _owner_of(folder)
            freed = _remove_if_dead(folder, host)
            if freed is not None:
                whose = ", ".join(f"{name} {about.get(name, 'unknown')}" for name in ("run", "job", "rank"))
                tell(
                    f"freed {freed / 1e9:.2f} GB in {parent} that a process has left which is dead ({whose})"
                )


@contextmanager
def _alone(parent: Path) -> Iterator[None]:
    """Context of one process at a time; on a file system without locks, and after a while, of any."""
    try:
        lock = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        deadline = time.monotonic() + _WAIT_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_RETRY_S)
            except OSError:
                break
        yield
    finally:
        os.close(lock)


def _folders(parent: Path) -> list[Path]:
    """Folders that are named as ours."""
    return sorted(path for path in parent.iterdir() if path.name.startswith((_PREFIX, _NEW, _DEAD)))


def _wait_for(folder: Path, host: str) -> None:
    """Another process is removing `folder`, or was when it died."""
    deadline = time.monotonic() + _WAIT_S
    while _remove_if_dead(folder, host) is None and time.monotonic() < deadline:
        with suppress(OSError):
            folder.rmdir()  # it is empty when the other died at the very end
        if not folder.exists():
            return
        time.sleep(_RETRY_S)


def _remove_if_dead(folder: Path, host: str) -> int | None:
    """Remove a folder if its owner is dead; return the bytes that it took, None if it was left alone."""
    with _dead(folder, host) as dead:
        if not dead:
            return None
        # Under another name first: its own is free at once, and whoever sees it waits instead of running short.
        away = folder
        if not folder.name.startswith(_DEAD):
            away = folder.with_name(f"{_DEAD}{uuid.uuid4().hex}")
            folder.rename(away)
        taken = sum(file.stat().st_blocks * 512 for file in away.iterdir())
        _remove(away)
        return taken


@contextmanager
def _dead(folder: Path, host: str) -> Iterator[bool]:
    """Whether `folder` is ours, of this host and its owner dead; while the context lasts nobody else removes it."""
    path = folder / OWNER_FILE
    try:
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        yield _is_free(lock, path) and _is_ours(lock, folder, host)
    finally:
        os.close(lock)


def _is_ours(lock: int, folder: Path, host: str) -> bool:
    """Whether this user made it on this host, and put nothing else there."""
    names = {file.name for file in folder.iterdir()}
    return (
        os.fstat(lock).st_uid == os.getuid()
        and not folder.is_symlink()
        and names <= {OWNER_FILE, BLOCKS_FILE}
        and _owner_of(folder).get("host") == host
    )


def _is_free(lock: int, path: Path) -> bool:
    """Lock the file, if nobody has, and if it still is the one at `path`."""
    try:
        # Also fails where the file system has no locks: then nothing is known to be dead.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(lock), path.stat())
    except OSError:
        return False


def _owner_of(folder: Path) -> dict[str, object]:
    try:
        about = json.loads((folder / OWNER_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def _remove(folder: Path) -> None:
    """Remove what is ours in a folder, and the folder if nothing else is there; the owner's file goes last."""
    with suppress(OSError):
        for name in (BLOCKS_FILE, OWNER_FILE):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
