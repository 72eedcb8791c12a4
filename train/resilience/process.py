"""What a process of a run asks of the kernel: to die with its parent, to end without exit handlers, to be forked."""

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

CRASHED = 1
ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask for a stop, by one or another scheduler, launcher or person."""

_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
"""What glibc accepts; larger blocks go back to the kernel whatever is set."""


def leave(code: int) -> NoReturn:
    """End the process without running exit handlers: gloo's can abort after a correct run."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # the disk with the log may be full
        os._exit(code)


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel end this process with its parent: an orphan would train on, unseen, on the user's GPU.

    `parent` is its number where it is known; a parent that was quicker ends the process here.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1 if parent is None else os.getppid() != parent:
        leave(CRASHED)


def let_trace(tracer: int) -> None:
    """Let the process `tracer` and its children look into this one where the kernel allows that to parents only."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PTRACER, tracer)


def keep_freed_memory() -> None:
    """Have the C library keep freed memory, which each step needs again: the kernel's zeroed pages cost a tenth of it.

    Only where glibc is, and the user has set nothing else (`MALLOC_*_`).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt(_M_TRIM_THRESHOLD, -1)
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)


def thread_count() -> int:
    """Number of threads of this process, those that Python doesn't know of included."""
    return len(list(Path("/proc/self/task").iterdir()))


def process_state(pid: int) -> str:
    """The state of a process as in /proc: R, S, D (waits for a device or a file system), T (stopped), Z, X (gone)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X"
    return stat.rpartition(")")[2].split()[0]


def fork(run: Callable[[], int], close: Iterable[int] = ()) -> int:
    """Fork a child that ends with `run()`'s code, and with this process; return its number.

    The child leads a process group of its own, has no signal handlers, doesn't hold the descriptors in `close`,
    and has the signals of `ASKING` blocked until it has handlers for them: one that is sent meanwhile waits.
    """
    parent = os.getpid()
    # Whatever is buffered would be written by both.
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        child = os.fork()
        if child == 0:
            _be_child(run, parent, close)
        # By both, so that neither can be too late.
        os.setpgid(child, child)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return child


def _be_child(run: Callable[[], int], parent: int, close: Iterable[int]) -> NoReturn:
    code = CRASHED
    try:
        os.setpgid(0, 0)
        die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        for number in (*ASKING, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        for descriptor in close:
            os.close(descriptor)
        code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        leave(code)
