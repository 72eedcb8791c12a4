"""`trierarch status | logs | cancel | resubmit` as a user types them; tests/slurm has them with a real Slurm."""

import json
import os
import pty
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from harness.command import COMMAND, Trierarch

from contract.exit_codes import ExitCode
from contract.run_folder import Event, RunFolder

ENDS = {"good": Event.FINISHED, "bad": Event.FAILED, "tired": Event.STOPPED}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three runs that are over and a sweep of two tasks, in the folder in which the command runs."""
    for name, end in ENDS.items():
        over(tmp_path / "runs" / name, end)
    for index, end in enumerate((Event.FINISHED, Event.FAILED)):
        over(tmp_path / "runs/lr" / f"lr={index}", end)
    (tmp_path / "runs/lr/sweep.json").write_text("{}")
    return tmp_path / "runs"


def over(path: Path, end: Event) -> None:
    run = RunFolder(path)
    run.create()
    run.append_event(Event.SUBMITTED, job_id="4194305", scheduler="local", host=os.uname().nodename)
    run.append_event(Event.STARTED)
    run.append_event(end, reason="boom", by="supervisor")
    run.submit_settings.touch()
    (run.logs / "4194305.r0.log").write_text("".join(f"line {number}\n" for number in range(60)))


@pytest.mark.req("C12")
def test_status_filters_and_speaks_to_scripts(trierarch: Trierarch, runs: Path) -> None:
    names = [line.split()[0] for line in trierarch("status").stdout.splitlines()[1:]]
    assert sorted(names) == ["bad", "good", "lr/", "tired"]
    assert "lr/lr=1" in trierarch("status", "--tasks").stdout
    failed = trierarch("status", "--state", "failed").stdout.splitlines()[1:]
    assert sorted(line.split()[0] for line in failed) == ["bad", "lr/lr=1"]
    assert all("boom" in line for line in failed)
    objects = json.loads(trierarch("status", "good", "lr", "--json").stdout)
    assert [(one["run"], one["state"]) for one in objects] == [
        ("good", "finished"),
        ("lr=0", "finished"),
        ("lr=1", "failed"),
    ]
    wrong = trierarch("status", "--state", "faild")
    assert wrong.returncode == ExitCode.CONFIG and "did you mean failed?" in wrong.stderr
    assert "did you mean good?" in trierarch("status", "godo").stderr


def test_watch_draws_in_place_and_keeps_the_end_of_a_long_table(runs: Path) -> None:
    for number in range(40):
        over(runs / f"many-{number}", Event.FINISHED)
    ours, theirs = pty.openpty()
    environ = {**os.environ, "LINES": "10", "COLUMNS": "100"}
    with subprocess.Popen(
        [*COMMAND, "status", "--every", "0.2"], cwd=runs.parent, env=environ, stdout=theirs, stderr=theirs
    ) as watcher:
        os.close(theirs)
        shown = b""
        deadline = time.monotonic() + 20
        while shown.count(b"\x1b[H\x1b[J") < 3 and time.monotonic() < deadline:
            shown += os.read(ours, 65_536)
        watcher.send_signal(signal.SIGINT)
        assert watcher.wait(timeout=20) == 0
    os.close(ours)
    screen = shown.split(b"\x1b[H\x1b[J")[1].decode().splitlines()
    assert screen[0].startswith("run") and "Ctrl-C ends" in screen[-1]
    assert len(screen) <= 10


def test_logs_show_the_end_of_the_log_and_take_either_name(trierarch: Trierarch, runs: Path) -> None:
    for name in ("bad", "runs/bad"):
        lines = trierarch("logs", name).stdout.splitlines()
        assert lines[0] == "run bad: failed: boom"
        assert lines[1] == "== runs/bad/logs/4194305.r0.log" and lines[2:] == [
            f"line {number}" for number in range(10, 60)
        ]
    assert len(trierarch("logs", "bad", "--lines", "3").stdout.splitlines()) == 5
    assert trierarch("logs", "good", "--follow", "-n", "1").stdout.splitlines()[-2:] == [
        "line 59",
        "run good: finished",
    ]
    for words, sentence in (
        (("bad", "--rank", "1", "--all"), "--rank, --all and --batch exclude each other"),
        (("bad", "--attempt", "0", "--follow"), "--attempt names a start of the ranks that is over"),
        (("lr",), "is a sweep and this command takes one run"),
        (("bda",), "did you mean bad?"),
    ):
        done = trierarch("logs", *words)
        assert done.returncode == ExitCode.CONFIG and sentence in done.stderr


def test_cancel_and_resubmit_ask_before_they_do_much(trierarch: Trierarch, runs: Path) -> None:
    done = trierarch("cancel", "good")
    assert (done.returncode, done.stdout) == (0, "run good: has no live job (finished)\n")
    done = trierarch("cancel", "good", "tired", "bad")
    assert (done.returncode, done.stdout) == (0, "3 of 3 runs have no live job\n")
    done = trierarch("resubmit", "--failed")
    assert done.returncode == ExitCode.CONFIG and "would submit 2 runs again: give --yes" in done.stderr
    assert "run bad: failed: boom" in done.stdout
    assert trierarch("resubmit", "--failed", "good").stdout == "no failed or lost runs\n"
    assert "name the runs to submit again, or give --failed" in trierarch("resubmit").stderr
    assert "run good is finished" in trierarch("resubmit", "good").stderr
    # A = in a word makes it a setting, unless a run is called so.
    assert (
        "optim.lr=1: a resubmission keeps the training" in trierarch("resubmit", "bad", "optim.lr=1").stderr
    )
    assert "run lr/lr=0 is finished" in trierarch("resubmit", "lr/lr=0").stderr


@pytest.mark.req("C12")
def test_a_job_that_slurm_does_not_speak_of_is_not_called_dead(trierarch: Trierarch, runs: Path) -> None:
    waits = RunFolder(runs / "waits")
    waits.create()
    waits.append_event(Event.SUBMITTED, job_id="7", scheduler="slurm")
    done = trierarch("cancel", "waits", PATH="/nowhere")
    assert done.returncode == ExitCode.CONFIG and "Slurm does not say what job 7 is doing" in done.stdout


@pytest.mark.req("C12")
def test_a_sweeps_name_stands_for_what_of_it_did_not_finish(trierarch: Trierarch, runs: Path) -> None:
    # The second task failed: it is the one that is taken, and its manifest is none here.
    assert "sweep.json cannot be read" in trierarch("resubmit", "lr").stderr
    (runs / "lr/lr=1/events.jsonl").write_text((runs / "lr/lr=0/events.jsonl").read_text())
    assert "sweep lr has no task that ended without finishing" in trierarch("resubmit", "lr").stderr


@pytest.mark.req("C11")
def test_a_script_is_printed_without_a_run(trierarch: Trierarch, tmp_path: Path) -> None:
    settings = ("cluster=local", "loop.global_batch_size=16", f"data.prefix={tmp_path}/none")
    rendered = trierarch("submit", "--render", *settings)
    assert rendered.stdout == trierarch("submit", "--dry-run", *settings).stdout
    assert rendered.stdout.startswith("#!") and f"note:  {tmp_path}/none.bin is not there" in rendered.stderr
    assert list(tmp_path.iterdir()) == []
    assert "leonardo_booster" in trierarch("cluster", "list").stdout


@pytest.mark.req("C11", "C12")
@pytest.mark.parametrize("target", ["submit", "sweep"])
def test_what_make_submits_is_taken(trierarch: Trierarch, target: str) -> None:
    root = Path(__file__).resolve().parents[2]
    shown = subprocess.run(["make", "-n", target], cwd=root, capture_output=True, text=True, check=True)
    (line,) = [line for line in shown.stdout.splitlines() if f"/trierarch {target} " in line]
    words = line.split()[1:]
    done = trierarch(*words, "--dry-run", "cluster=a100_ib", "job.account=project")
    if shutil.which("sbatch") is None:
        assert "there is no sbatch in PATH" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --account=project" in done.stdout and "slurm.supervise" in done.stdout
