"""What a user sees of the ranks: one live line, no banner of mpirun, and Ctrl-C that always ends."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from contract.exit_codes import ExitCode
from contract.variables import PROGRESS_MARK
from slurm.foreground import show_progress, without_banner

RULE = "-" * 74 + "\n"
BANNER = [
    RULE,
    "prterun detected that one or more processes exited with non-zero status,\n",
    "thus causing the job to be terminated.\n",
    RULE,
]


def test_mpirun_s_banner_is_left_out_and_nothing_else() -> None:
    other = [RULE, "There are not enough slots available\n", RULE]
    lines = ["before\n", *BANNER, "between\n", *other, "-----\n", "after\n"]
    assert list(without_banner(lines)) == ["before\n", "between\n", *other, "-----\n", "after\n"]
    signal_banner = [
        RULE,
        "prterun noticed that process rank 0 exited on\n",
        "signal 12 (User signal).\n",
        RULE,
    ]
    assert list(without_banner(signal_banner)) == []
    assert list(without_banner([RULE, "never closed\n"])) == [RULE, "never closed\n"]


def test_marked_lines_are_drawn_over_each_other() -> None:
    screen = "".join(
        show_progress(["hello\n", PROGRESS_MARK + "step 1\n", PROGRESS_MARK + "step 2\n", "done\n"])
    )
    erase = "\r\x1b[2K"
    assert screen == f"hello\n{erase}step 1{erase}step 2{erase}done\n"


RUN = """
import signal, sys
from slurm.foreground import run_in_foreground
sys.exit(run_in_foreground([sys.executable, "-uc", sys.argv[1]], {}, signal.SIGUSR2))
"""


@pytest.mark.parametrize(
    ("program", "requests", "code", "said"),
    [
        # It listens, and leaves as asked.
        (
            "import signal, sys, time; signal.signal(12, lambda *a: sys.exit(75)); print('up'); time.sleep(60)",
            1,
            ExitCode.STOPPED,
            "stopping at the next step",
        ),
        # It does not listen yet.
        (
            "import time; print('up'); time.sleep(60)",
            1,
            ExitCode.STOPPED,
            "stopped before the training began",
        ),
        # It takes every request for one to stop, and is busy: the second request ends it all the same.
        (
            "import signal, time; [signal.signal(n, lambda *a: 0) for n in (12, 15)]; print('up')\n"
            "while True: time.sleep(1)",
            2,
            128 + signal.SIGKILL,
            "again: at once",
        ),
    ],
)
def test_ctrl_c_always_ends(program: str, requests: int, code: int, said: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    for _ in range(requests):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == code
    assert said in errors


def test_a_reader_that_leaves_does_not_end_the_run() -> None:
    """As `| head` does."""
    program = "for n in range(20000): print('line', n)"
    process = subprocess.Popen([sys.executable, "-c", RUN, program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=20) == 0


def test_ranks_end_with_a_killed_command() -> None:
    """Nobody may train on unseen after `kill -9` of the command."""
    program = "import os, time; print(os.getpid()); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", RUN, program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    rank = int(process.stdout.readline())
    process.kill()
    process.wait(timeout=10)
    deadline = time.monotonic() + 10
    while _runs(rank):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
