"""A rank that nobody watches from outside ends itself when it hangs, and says where it was."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from contract.exit_codes import ExitCode
from contract.run_folder import Event, RunFolder

PROGRAM = """
import ctypes, sys, time
from pathlib import Path
from contract.run_folder import RunFolder
from train.config import ResilienceConfig
from train.resilience import pulse, watch

watch.POLL_S, watch.SUSPENDED_S, watch.HELD_S = 0.05, 0.5, 0.5
run = RunFolder(Path(sys.argv[1]))
pulse.own().limits = dict.fromkeys(pulse.Phase, 1.0)
pulse.beat(pulse.Phase.START, 0)
watch.start(pulse.own(), run, 3)

def beat_for(seconds):
    # Work, not sleep: who was suspended has all of it still to do.
    for _ in range(round(seconds / 0.1)):
        pulse.beat(pulse.Phase.STEP, 7)
        began = time.process_time()
        while time.process_time() - began < 0.1:
            pass

def stuck_in_a_collective():
    time.sleep(60)

def stuck_with_the_lock():
    ctypes.PyDLL(None).sleep(60)

beat_for(1)
print("beating", flush=True)
"""


def start(run: RunFolder, then: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM + then, str(run.path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


@pytest.mark.req("C12", "A17")
def test_a_hung_rank_ends_itself_and_says_where_it_was(run: RunFolder) -> None:
    process = start(run, "stuck_in_a_collective()")
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (ExitCode.PEER_FAILED, "beating\n")
    assert f"rank 3 on {socket.gethostname()} hung: no sign of life for" in errors
    assert "in phase step, step 7 (its limit is 1 s)" in errors
    assert "in stuck_in_a_collective" in errors
    (event,) = run.read_events()
    assert (event["event"], event["rank"], event["phase"], event["step"]) == (Event.HUNG, 3, "step", 7)


@pytest.mark.req("C12")
def test_a_rank_that_holds_the_interpreters_lock_is_ended_too(run: RunFolder) -> None:
    process = start(run, "stuck_with_the_lock()")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "in stuck_with_the_lock" in errors


def test_a_rank_that_beats_or_was_suspended_is_left_alone(run: RunFolder) -> None:
    """As by Slurm's gang scheduling: the time in which nobody ran is nobody's silence."""
    process = start(run, "beat_for(2); print('done', flush=True)")
    assert process.stdout is not None
    assert process.stdout.readline() == "beating\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.2)  # longer than the limit, shorter than that of a held lock
    process.send_signal(signal.SIGCONT)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "done\n")
