"""The lab's daemons as processes: started with a mark in their environment, found and ended by that mark.

No file holds a process id, so a stale one can never name a stranger and a lost one never hides a daemon.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MARK = "TRIERARCH_LAB_DAEMON"

_children: dict[int, "subprocess.Popen[bytes]"] = {}
"""What this process started: they are its children until it ends, so it has to reap them."""


@dataclass(frozen=True)
class Process:
    """A process that a lab started: `daemon` is its name there, `command` what the kernel calls it."""

    pid: int
    parent_pid: int
    daemon: str
    command: str


def spawn(command: Sequence[str], folder: Path, daemon: str, environment: dict[str, str]) -> None:
    """Start a daemon of the lab in a session of its own; its output is appended to log/<daemon>.out."""
    with (folder / "log" / f"{daemon}.out").open("ab") as output:
        child = subprocess.Popen(
            command,
            cwd=folder,
            env=environment | {MARK: f"{folder}:{daemon}"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _children[child.pid] = child
    for _ in range(1000):  # for a moment after exec the kernel shows no environment, as of a dead process
        if child.poll() is not None or daemon in daemons(folder):
            break
        time.sleep(0.001)


def find(folder: Path) -> list[Process]:
    """All living processes that carry the mark of the lab in `folder`: daemons and what they forked.

    Tasks of jobs carry no mark, their environment comes from the user; they live in their node's namespace.
    """
    for pid in [pid for pid, child in _children.items() if child.poll() is not None]:
        del _children[pid]
    prefix = f"{MARK}={folder}:".encode()
    return list(_marked(prefix))


def _marked(prefix: bytes) -> Iterator[Process]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            if not _is_ours((entry / "status").read_text()):
                continue
            variables = (entry / "environ").read_bytes().split(b"\0")
            status = (entry / "stat").read_text()
        except (OSError, UnicodeDecodeError):  # it has ended, or it is someone else's
            continue
        for variable in variables:
            if variable.startswith(prefix):
                name, rest = status[status.index("(") + 1 :].rsplit(")", 1)
                parent_pid = int(rest.split()[1])
                yield Process(int(entry.name), parent_pid, variable[len(prefix) :].decode(), name)


def _is_ours(status: str) -> bool:
    """Whether a process has only the caller's user ids: anyone can set a mark, and root can read all of them."""
    ids = re.search(r"^Uid:(.*)$", status, re.MULTILINE)
    return ids is not None and set(ids[1].split()) == {str(os.geteuid())}


def daemons(folder: Path) -> dict[str, int]:
    """The pid of each living daemon by its name: of its marked processes, the one the lab itself started."""
    found = find(folder)
    marked = {process.pid for process in found}
    return {process.daemon: process.pid for process in found if process.parent_pid not in marked}


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Signal processes; one that has just ended is no error."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def wait_ended(folder: Path, names: Iterable[str], timeout_s: float) -> set[str]:
    """Wait until no process of the named daemons lives; returns those that still do after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    wanted = set(names)
    while living := wanted & {process.daemon for process in find(folder)}:
        if time.monotonic() > deadline:
            return living
        time.sleep(0.02)
    return set()
