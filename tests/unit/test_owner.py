"""One run, one owner: a living one is respected, a dead one is replaced."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from contract.errors import PeerError, UserError
from contract.run_folder import RunFolder, read_json_lines
from train.monitor.recorder import Recorder
from train.resilience import owner as module
from train.resilience.owner import RunOwner, RunTakenError

HOLD = """
import sys, time
from pathlib import Path
from contract.run_folder import RunFolder
from train.resilience.owner import RunOwner
RunOwner(RunFolder(Path(sys.argv[1]))).acquire()
print("mine", flush=True)
time.sleep(60)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


def hold(run: RunFolder) -> "subprocess.Popen[str]":
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(run.path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "mine\n"
    return process


def test_a_living_owner_is_respected_and_a_killed_one_replaced(run: RunFolder) -> None:
    process = hold(run)
    try:
        with pytest.raises(UserError, match=rf"already being trained by process {process.pid} on "):
            RunOwner(run).acquire()
    finally:
        process.kill()
        process.wait(timeout=10)
    owner = RunOwner(run)
    owner.acquire()
    owner.check()
    owner.release()
    assert not run.owner.exists()


def rewrite(run: RunFolder, **changes: object) -> None:
    path = run.owner
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_process_number_in_use_again_is_not_the_owner(run: RunFolder) -> None:
    RunOwner(run).acquire()
    rewrite(run, token="other", started="1")
    RunOwner(run).acquire()


def test_a_silent_owner_on_another_host_is_replaced(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WATCH_S", 1.0)
    first = RunOwner(run)
    first.acquire()
    first._done.set()  # it no longer touches the file, as after a power cut
    rewrite(run, host="elsewhere")
    second = RunOwner(run)
    second.acquire()
    with pytest.raises(PeerError, match="was taken over by process"):
        first.check()
    second.check()
    first.release()
    assert run.owner.exists(), "a process that lost the run must not release it"


def test_a_living_owner_on_another_host_is_respected(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen by the file that it touches: its process number means nothing here."""
    monkeypatch.setattr(module, "TOUCH_EVERY_S", 0.3)
    first = RunOwner(run)
    first.acquire()
    rewrite(run, host="elsewhere", pid=1)
    with pytest.raises(UserError, match="already being trained by process 1 on elsewhere"):
        RunOwner(run).acquire()
    first._done.set()


def test_a_restarted_job_takes_over_from_its_former_self(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a network split Slurm restarts a job elsewhere while its old processes still run."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    first = RunOwner(run)
    first.acquire()
    rewrite(run, host="elsewhere")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    started = time.monotonic()
    RunOwner(run).acquire()
    assert time.monotonic() - started < module.WATCH_S
    with pytest.raises(PeerError):
        first.check()
    first._done.set()


def test_a_start_in_the_same_job_takes_over_from_an_earlier_one(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor has ended it, on whatever node: there is nothing to watch."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    first = RunOwner(run)
    first.acquire()
    rewrite(run, host="elsewhere")
    monkeypatch.setattr(module, "is_touched", lambda *args: pytest.fail("the earlier start was watched"))
    monkeypatch.setenv("TRIERARCH_START", "1")
    later = RunOwner(run)
    later.acquire()
    later.settle()
    monkeypatch.undo()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(RunTakenError, match="was taken over by process"):
        first.settle()
    first._done.set()
    later.release()


def test_of_two_launches_at_once_the_last_to_write_has_the_run(run: RunFolder) -> None:
    first, second = RunOwner(run), RunOwner(run)
    first.acquire()
    run.owner.unlink()  # as the second has seen the folder, before the first wrote
    second.acquire()
    second.settle()
    with pytest.raises(RunTakenError):
        first.settle()
    first._done.set()
    second.release()


@pytest.mark.parametrize("text", ["{}", "[]", "nonsense", "\x00\xff"])
def test_a_spoilt_owner_file_names_nobody(run: RunFolder, text: str) -> None:
    run.owner.write_bytes(text.encode("latin-1"))
    owner = RunOwner(run)
    owner.acquire()
    owner.release()


def test_an_owner_file_that_cannot_be_read_for_a_moment_costs_a_line_and_not_the_run(run: RunFolder) -> None:
    owner = RunOwner(run)
    owner.acquire()
    recorder = Recorder(run, 0, tensorboard=False, redo_evaluation=False, check_owner=owner.check)
    away = run.owner.rename(run.owner.with_suffix(".away"))
    run.owner.mkdir()
    recorder.log(1, {"loss": 1.0})
    with pytest.raises(OSError):
        owner.check()
    assert not owner.sees(owner.token)
    run.owner.rmdir()
    away.rename(run.owner)
    recorder.log(2, {"loss": 1.0})
    assert [line["step"] for line in read_json_lines(run.metrics)] == [2]
    owner.release()
    assert not run.owner.exists()


def test_an_owner_that_is_me_is_known_by_its_start(run: RunFolder) -> None:
    assert module._process_start(os.getpid()) is not None
    assert module._process_start(2**22 + 1) is None
