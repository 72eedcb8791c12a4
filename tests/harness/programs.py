"""Stand-ins for programs: shell scripts in a folder that goes first into PATH."""

import os
import shlex
import sys
from pathlib import Path


def write_program(path: Path, body: str) -> Path:
    """Make a program of a bash script, with its folder where that is missing; it may replace an earlier one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    return path


def search_path(folder: Path) -> str:
    """PATH with the programs of `folder` first."""
    return f"{folder}:{os.environ['PATH']}"


def write_python(path: Path, trainer: str) -> Path:
    """Make an interpreter whose `-m train` is the bash script `trainer`, with the same arguments."""
    return write_program(path, f'[ "$3" = train ] || exec {shlex.quote(sys.executable)} "$@"\n{trainer}')


class Commands:
    """A folder of commands that note how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        folder.mkdir()

    def put(self, name: str, body: str = "") -> None:
        """Set what a command does, after it has noted the call."""
        note = f'echo "$(basename "$0") $*" >> {shlex.quote(str(self.calls))}'
        write_program(self.folder / name, f"{note}\n{body}")

    def noted(self) -> list[str]:
        """All calls so far."""
        return self.calls.read_text().splitlines() if self.calls.exists() else []
