"""Where every rank is: the stacks of its threads, into its log, also when it is stuck or stopped."""

import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

STACK_SIGNAL = signal.SIGRTMIN + 10
"""Asks a rank for its stacks. A real-time signal: NCCL, profilers and schedulers take the named ones (Slurm sends
SIGXCPU, NCCL takes SIGUSR1), and threading libraries the first few real-time ones."""

ANSWER_S = 1.0
PY_SPY_S = 5.0
_LAST_THREAD = b"Current thread 0x"


@dataclass(frozen=True)
class Asked:
    """A rank whose stacks are wanted."""

    rank: int
    pid: int
    log: Path


def install() -> None:
    """Have this process write its stacks to stderr at `STACK_SIGNAL`, and when it crashes in C code.

    The handler is C code: it needs no lock of the interpreter and works within a blocked collective.
    """
    faulthandler.enable(file=2)
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=True, chain=False)


def write_stacks(ranks: Sequence[Asked]) -> list[int]:
    """Ask each rank, which is a child of this process's parent, for its stacks; return the ranks without any.

    One that gives no answer, since it is stopped, is read from outside by py-spy.
    """
    sizes = {asked.rank: _size(asked.log) for asked in ranks}
    for asked in ranks:
        _signal(asked.pid)
    deadline = time.monotonic() + ANSWER_S
    silent = list(ranks)
    while silent and time.monotonic() < deadline:
        time.sleep(0.02)
        silent = [asked for asked in silent if not _has_answered(asked.log, sizes[asked.rank])]
    return [asked.rank for asked in silent if not _read_from_outside(asked)]


def _signal(pid: int) -> None:
    try:
        os.kill(pid, STACK_SIGNAL)
    except ProcessLookupError:
        return


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0


def _has_answered(log: Path, since: int) -> bool:
    try:
        with log.open("rb") as file:
            file.seek(since)
            return _LAST_THREAD in file.read()
    except OSError:
        return False


def _read_from_outside(asked: Asked) -> bool:
    """Append py-spy's account of a rank to its log, or why there is none; return whether there is one."""
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    try:
        with asked.log.open("ab", buffering=0) as log:
            log.write(f"trierarch: rank {asked.rank} (process {asked.pid}) does not answer; ".encode())
            if program is None:
                log.write(b"py-spy, which could read its stacks all the same, is not installed\n")
                return False
            log.write(b"py-spy reads:\n")
            return _run_py_spy(program, asked.pid, log)
    except OSError as error:
        print(f"trierarch: {asked.log} cannot be written ({error.strerror})", file=sys.stderr)
        return False


def _run_py_spy(program: str, pid: int, log: IO[bytes]) -> bool:
    # --nonblocking: it must not stop the process, nor wait until it has stopped.
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        code = process.wait(PY_SPY_S)
    except subprocess.TimeoutExpired:
        # Not waited for: it may hang in the kernel, as the rank may.
        process.kill()
        log.write(f"trierarch: py-spy did not end within {PY_SPY_S:g} s\n".encode())
        return False
    if code:
        log.write(b"trierarch: py-spy was not allowed to, or failed, as it says above\n")
    return code == 0
