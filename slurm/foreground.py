"""Run ranks in front of a user: their output, the live line, and Ctrl-C as a request to stop."""

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import IO, TextIO

from contract.exit_codes import ExitCode
from contract.variables import PROGRESS_MARK, TERMINAL

KILL_AFTER_S = 2.0
PR_SET_PDEATHSIG = 1
BANNERS = ("exited with non-zero status", "exited on signal")
"""What tells mpirun's notices about how a rank ended: exit codes are our language."""
_RULE = re.compile(r"-{60,}\s*")


def run_in_foreground(argv: list[str], environment: dict[str, str], stop_signal: signal.Signals) -> int:
    """Run a launcher until it ends and return its exit code.

    The first Ctrl-C (or SIGTERM, or the terminal closing) asks the ranks to stop with a checkpoint, the
    second ends them.
    """
    terminal = sys.stdout.isatty()
    process = subprocess.Popen(
        argv,
        env={**os.environ, **environment, TERMINAL: "1" if terminal else "0"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A session of its own: the terminal's Ctrl-C would reach mpirun too, which answers by killing the ranks.
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    readers = [
        _start_reader(process.stdout, show_progress, sys.stdout),
        _start_reader(process.stderr, without_banner, sys.stderr),
    ]
    requests = 0

    def on_signal(number: int, frame: object) -> None:
        nonlocal requests
        requests += 1
        if requests == 1:
            os.write(
                2, b"\ntrierarch: stopping at the next step with a checkpoint (again: at once, without)\n"
            )
            process.send_signal(stop_signal)
        elif requests == 2:
            # mpirun answers by ending its ranks; a rank on its own takes it for another request to stop.
            process.terminate()
            threading.Timer(KILL_AFTER_S, process.kill).start()
        else:
            process.kill()

    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, on_signal) for number in handled}
    try:
        code = process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    for reader in readers:
        reader.join(timeout=5)
    if requests == 1 and code in (-stop_signal, 128 + stop_signal):
        # It came before the ranks could listen: nothing had begun.
        print("trierarch: stopped before the training began, nothing has changed", file=sys.stderr)
        return ExitCode.STOPPED
    return code if code >= 0 else 128 - code


def show_progress(lines: Iterable[str]) -> Iterator[str]:
    """Draw the ranks' marked lines over each other, as one live line, above which all others scroll.

    Here and not in the ranks: mpirun holds output back until a line ends.
    """
    width = shutil.get_terminal_size().columns - 1
    drawn = False
    for line in lines:
        if line.startswith(PROGRESS_MARK):
            yield "\r\x1b[2K" + line[len(PROGRESS_MARK) :].rstrip()[:width]
            drawn = True
        else:
            yield ("\r\x1b[2K" if drawn else "") + line
            drawn = False
    if drawn:
        yield "\r\x1b[2K"


def without_banner(lines: Iterable[str]) -> Iterator[str]:
    """Leave out mpirun's framed notices about how its processes ended."""
    framed: list[str] = []
    for line in lines:
        rule = _RULE.fullmatch(line) is not None
        if not framed and not rule:
            yield line
            continue
        framed.append(line)
        if rule and len(framed) > 1:
            if not any(words in " ".join("".join(framed).split()) for words in BANNERS):
                yield from framed
            framed = []
    yield from framed


def _start_reader(
    stream: IO[bytes], change: Callable[[Iterable[str]], Iterator[str]], target: TextIO
) -> threading.Thread:
    def copy() -> None:
        readable = True
        for text in change(line.decode(errors="replace") for line in stream):
            # Nobody reads any more, as after `| head`: the ranks must not block for that, nor end.
            if readable:
                try:
                    target.write(text)
                    target.flush()
                except OSError:
                    readable = False

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    return thread


def _die_with_parent() -> None:
    """Have the kernel end the launcher with this process, and the ranks with it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
