"""Cancelling: who is asked for what; tests/slurm has it with a real Slurm and a real trainer."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.programs import search_path, write_program

from contract.errors import UserError
from contract.run_folder import Event, RunFolder
from slurm.runs.cancel import Cancelled, cancel, refuse

Slurm = Callable[..., None]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make(tmp_path, "one", "7")


def make(tmp_path: Path, name: str, job: str | None = None) -> RunFolder:
    run = RunFolder(tmp_path / "runs" / name)
    run.create()
    if job is not None:
        run.append_event(Event.SUBMITTED, job_id=job, scheduler="slurm", slurm_conf=None)
    return run


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """`slurm(squeue=..., scancel=...)` sets what the commands do; calls of scancel are kept in bin/calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", search_path(folder))

    def put(squeue: str = "", scancel: str = "true") -> None:
        bodies = {
            "squeue": squeue if squeue.startswith("exit") else f"cat <<'END'\n{squeue}\nEND",
            "scancel": f'echo "$*" >> {folder}/calls\n{scancel}',
            "sacct": "exit 1",
        }
        for name, body in bodies.items():
            write_program(folder / name, body)

    put()
    return put


def calls(tmp_path: Path) -> list[str]:
    path = tmp_path / "bin/calls"
    return path.read_text().splitlines() if path.exists() else []


def only(run: RunFolder, now: bool = False) -> Cancelled:
    (done,) = cancel([run], now=now)
    return done


@pytest.mark.parametrize(
    ("state", "now", "call", "what"),
    [
        ("RUNNING", False, "--batch --signal=TERM 7", "job 7 is asked to save and to end"),
        ("RUNNING", True, "7", "job 7 is ended at once"),
        ("SUSPENDED", False, "--batch --signal=TERM 7", "is asked"),
        ("PENDING", False, "7", "job 7 waited in the queue and is taken out of it"),
        ("REQUEUE_HOLD", False, "7", "waited in the queue"),
        ("CONFIGURING", False, "7", "is ended at once"),
    ],
)
def test_a_live_job_is_ended_in_the_way_that_suits(
    run: RunFolder, slurm: Slurm, tmp_path: Path, state: str, now: bool, call: str, what: str
) -> None:
    slurm(f"7|{state}|None|0:10|{run.job_script}")
    done = only(run, now)
    assert done.acted and not done.failed and what in done.what
    assert calls(tmp_path) == [call]
    assert run.cancel_is_requested()
    # Submitted anew it is a new story.
    run.append_event(Event.SUBMITTED, job_id="8")
    assert not run.cancel_is_requested()


def test_a_new_job_does_not_take_the_last_ones_cancel_for_its_own(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.append_event(Event.CANCEL_REQUESTED, job_id="7")

    def inside(job: str) -> bool:
        monkeypatch.setenv("SLURM_JOB_ID", job)
        return run.cancel_is_requested()

    assert inside("7")
    # It was submitted again and has begun before that was written down.
    assert not inside("8")
    run.append_event(Event.REQUEUED, job_id="8")
    assert inside("8"), "a successor that was on its way when its run was cancelled"
    run.append_event(Event.SUBMITTED, job_id="9")
    assert not inside("9")


@pytest.mark.parametrize(
    ("squeue", "what", "failed"),
    [
        ("", "has no live job", False),
        ("7|COMPLETED|None|0:10|{script}", "has no live job: 7 ended as COMPLETED", False),
        # The id has come again on a Slurm that was set up anew.
        ("7|RUNNING|None|0:10|/elsewhere/job.sbatch", "has no live job", False),
        ("7|RUNNING|None|0:10|(null)", "if it is, `scancel 7`", True),
        ("exit 1", "Slurm does not say what job 7 is doing", True),
    ],
)
def test_what_is_not_surely_the_runs_own_is_left_alone(
    run: RunFolder, slurm: Slurm, tmp_path: Path, squeue: str, what: str, failed: bool
) -> None:
    slurm(squeue.format(script=run.job_script))
    done = only(run)
    assert what in done.what and done.failed is failed and not done.acted
    assert calls(tmp_path) == [] and not run.cancel_is_requested()


def test_many_jobs_take_few_calls_and_a_refusal_is_told(slurm: Slurm, tmp_path: Path) -> None:
    runs = [make(tmp_path, f"r{number}", str(number)) for number in range(100, 105)]
    states = ["RUNNING", "PENDING", "RUNNING", "PENDING", "COMPLETED"]
    slurm(
        "\n".join(
            f"{number}|{state}|None|0:10|{tmp_path}/runs/r{number}/job.sbatch"
            for number, state in enumerate(states, start=100)
        ),
        scancel='[[ "$*" = *102* ]] || exit 0; echo "Kill job error on job id 102: Access denied" >&2; exit 1',
    )
    done = cancel(runs)
    assert [one.acted for one in done] == [True, True, False, True, False]
    assert sorted(calls(tmp_path)) == ["--batch --signal=TERM 100 102", "101 103"]
    assert done[2].failed and "Access denied" in done[2].what
    with pytest.raises(UserError, match=r"not cancelled: r102"):
        refuse(done)
    refuse([one for one in done if not one.failed])


@pytest.mark.parametrize(
    ("scancel", "ended"),
    [
        # Slurm 22.05, for a task that runs while others of its array wait: the signal has arrived.
        ("exit 229", True),
        ("echo 'scancel: error: Unable to contact slurm controller (connect failure)' >&2; exit 1", False),
    ],
)
def test_an_answer_that_names_no_job_is_about_all_of_them(
    slurm: Slurm, tmp_path: Path, scancel: str, ended: bool
) -> None:
    runs = [make(tmp_path, f"r{task}", f"7_{task}") for task in (0, 1)]
    slurm(
        "\n".join(f"7_{task}|RUNNING|None|0:10|{tmp_path}/runs/r{task}/job.sbatch" for task in (0, 1)),
        scancel,
    )
    for done in (cancel(runs), cancel(runs[:1])):
        assert {(one.acted, one.failed) for one in done} == {(ended, not ended)}


def test_the_slurm_that_has_the_job_is_spoken_to(slurm: Slurm, tmp_path: Path) -> None:
    run = make(tmp_path, "one")
    run.append_event(Event.SUBMITTED, job_id="7", scheduler="slurm", slurm_conf="/x", clusters="big")
    slurm(f"7|RUNNING|None|0:10|{run.job_script}", scancel=f'echo "$SLURM_CONF" >> {tmp_path}/conf')
    assert only(run).acted
    assert calls(tmp_path) == ["--batch --signal=TERM --clusters=big 7"]
    assert (tmp_path / "conf").read_text() == "/x\n"


@pytest.fixture
def by_hand(tmp_path: Path) -> Iterator["tuple[RunFolder, subprocess.Popen[bytes]]"]:
    """A run that a process of this host trains, started in a terminal."""
    run = make(tmp_path, "one")
    run.append_event(Event.STARTED)
    code = "import time; print('on', flush=True); time.sleep(60)  # train"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        owner = {"job": "local", "host": socket.gethostname(), "pid": process.pid}
        run.owner.write_text(json.dumps(owner))
        yield run, process
        process.kill()


@pytest.mark.parametrize(("now", "number"), [(False, signal.SIGTERM), (True, signal.SIGKILL)])
def test_a_run_that_was_started_by_hand_is_ended_too(
    by_hand: "tuple[RunFolder, subprocess.Popen[bytes]]", now: bool, number: int
) -> None:
    run, process = by_hand
    assert only(run, now).acted
    assert process.wait(timeout=20) == -number
    assert only(run).what == "has no live job"


def test_a_process_of_another_host_is_left_to_that(
    by_hand: "tuple[RunFolder, subprocess.Popen[bytes]]",
) -> None:
    run, process = by_hand
    run.owner.write_text(json.dumps({"job": "local", "host": "elsewhere", "pid": process.pid}))
    done = only(run)
    assert done.failed and done.what == "was started by hand on elsewhere: cancel it there"
    # One of a job is that job's: its rank is not ended alone.
    run.owner.write_text(json.dumps({"job": "7", "host": socket.gethostname(), "pid": process.pid}))
    assert not only(run).acted and process.poll() is None


@pytest.mark.parametrize("said", ["Invalid job id specified", "Job/step already completing or completed"])
def test_a_job_that_has_just_ended_is_no_failure(
    slurm: Slurm, run: RunFolder, tmp_path: Path, said: str
) -> None:
    slurm(
        f"7|RUNNING|None|0:10|{run.job_script}",
        f"echo 'scancel: error: Kill job error on job id 7: {said}' >&2; exit 1",
    )
    done = only(run)
    assert (done.what, done.acted, done.failed) == ("has no live job", False, False)


def test_what_waits_is_ended_before_what_runs(slurm: Slurm, tmp_path: Path) -> None:
    runs = [make(tmp_path, f"r{task}", f"7_{task}") for task in (0, 1)]
    states = ("RUNNING", "PENDING")
    slurm(
        "\n".join(
            f"7_{task}|{state}|None|0:10|{tmp_path}/runs/r{task}/job.sbatch"
            for task, state in enumerate(states)
        )
    )
    assert [one.run.name for one in cancel(runs) if one.acted] == ["r0", "r1"]
    assert calls(tmp_path) == ["7_1", "--batch --signal=TERM 7_0"]
