"""What this host is like, read from /proc, /sys and the environment: nothing here judges it.

Every path is below `root`, so that a tree of another machine can be looked at.
"""

import os
import re
import resource
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path

_OCTAL = re.compile(r"\\([0-7]{3})")


class Place(StrEnum):
    """What this host is to the run."""

    ranks = "the host of the ranks"
    """They will run here: without Slurm, or inside of an allocation."""
    login = "a login node"
    """Of the cluster that the run is for."""
    elsewhere = "another machine"
    """Not of the cluster that the run is for."""


@dataclass(frozen=True)
class Mount:
    """A file system that is mounted."""

    point: str
    kind: str
    source: str


@dataclass(frozen=True)
class Limits:
    """Of this process and what it starts, soft; None: unlimited."""

    locked_bytes: int | None
    open_files: int | None
    most_open_files: int | None
    """How far a process may raise it."""

    @classmethod
    def of_this_process(cls) -> "Limits":
        """Ask the kernel."""
        locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        known = [None if value == resource.RLIM_INFINITY else value for value in (locked, files, most)]
        return cls(*known)


@dataclass(frozen=True)
class Room:
    """Of a file system."""

    free_bytes: int
    total_bytes: int
    free_files: int | None
    """None where it does not count them."""


@dataclass
class Host:
    """One host."""

    place: Place
    environ: Mapping[str, str]
    root: Path = Path("/")
    """Where /proc, /sys, /dev and /etc are."""
    limits: Limits = field(default_factory=Limits.of_this_process)

    @cached_property
    def mounts(self) -> tuple[Mount, ...]:
        """In the order in which they were mounted."""
        found = []
        for line in self._read("proc/self/mounts").splitlines() or self._read("proc/mounts").splitlines():
            source, point, kind, *_ = [*line.split(), "", "", ""]
            if point:
                found.append(Mount(_plain(point), kind, _plain(source)))
        return tuple(found)

    def mount_of(self, path: Path) -> Mount | None:
        """Return the file system that a path is on, or would be on; None where the kernel does not say."""
        real = os.path.realpath(path)
        holding = [
            one for one in self.mounts if real == one.point or real.startswith(one.point.rstrip("/") + "/")
        ]
        # Of two on one point the later one is seen.
        return max(reversed(holding), key=lambda one: len(one.point), default=None)

    @cached_property
    def interfaces(self) -> tuple[str, ...]:
        """Network interfaces."""
        return self._names("sys/class/net")

    @cached_property
    def adapters(self) -> tuple[str, ...]:
        """InfiniBand and RoCE adapters."""
        return self._names("sys/class/infiniband")

    @cached_property
    def gpus(self) -> int:
        """GPUs of this host that have a device file."""
        return sum(name.removeprefix("nvidia").isdigit() for name in self._names("dev"))

    @cached_property
    def driver(self) -> str:
        """Version of NVIDIA's driver; empty without."""
        found = re.search(
            r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", self._read("proc/driver/nvidia/version")
        )
        return found[1] if found else ""

    @cached_property
    def exports(self) -> tuple[str, ...]:
        """Folders that this host gives to others by NFS."""
        lines = [line.split("#")[0].split() for line in self._read("etc/exports").splitlines()]
        return tuple(words[0].strip('"') for words in lines if words)

    @cached_property
    def shared_memory_bytes(self) -> int | None:
        """Size of /dev/shm; None without."""
        try:
            return shutil.disk_usage(self.root / "dev/shm").total
        except OSError:
            return None

    def room(self, path: Path) -> Room | None:
        """Return what is free where a path is or would be; None where that cannot be said."""
        try:
            said = os.statvfs(existing(path))
        except OSError:
            return None
        return Room(
            free_bytes=said.f_bavail * said.f_frsize,
            total_bytes=said.f_blocks * said.f_frsize,
            free_files=said.f_favail if said.f_files else None,
        )

    def skew_s(self, folder: Path) -> float:
        """By how many seconds the clock of a folder's file server is ahead of this host's; raises OSError.

        A file is written for it and taken away again.
        """
        import tempfile

        before = time.time()
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".trierarch-doctor-") as file:
            file.write(b"?")
            file.flush()
            os.fsync(file.fileno())
            written = Path(file.name).stat().st_mtime
        after = time.time()
        # File systems keep times in steps: of a clock tick, or of a whole second.
        return written - after if written > after else min(0.0, written + 1 - before)

    def _names(self, folder: str) -> tuple[str, ...]:
        try:
            return tuple(sorted(entry.name for entry in (self.root / folder).iterdir()))
        except OSError:
            return ()

    def _read(self, path: str) -> str:
        try:
            return (self.root / path).read_text(errors="replace")
        except OSError:
            return ""


def existing(path: Path) -> Path:
    """Return the nearest folder above that is there: what is to be made will lie on its file system."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _plain(text: str) -> str:
    """Undo what the kernel writes for spaces: \\040."""
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), text)
