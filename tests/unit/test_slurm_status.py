"""`status` from markers, events and a stand-in for squeue; tests/slurm has it with a real one."""

import json
import os
import socket
import time
from pathlib import Path

import pytest
from harness.programs import search_path, write_program

from contract.errors import UserError
from contract.run_folder import Event, RunFolder, append_json_line
from slurm.client import job_states
from slurm.runs.find import find_runs
from slurm.runs.status import RunState, RunStatus, status
from tools.table import as_json, render

FORGOTTEN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
SILENT = "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "one")
    folder.create()
    folder.config.write_text("seed: 1\nloop:\n  global_batch_size: 16\n  steps: 40\n")
    return folder


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", search_path(folder))
    put(folder, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    return folder


def put(folder: Path, name: str, body: str) -> None:
    write_program(folder / name, f"echo x >> {folder}/{name}.calls\n{body}")


def submitted(run: RunFolder, *events: Event, job: str = "7") -> None:
    run.append_event(Event.SUBMITTED, job_id=job, profile="site", scheduler="slurm", slurm_conf=None)
    for event in events:
        append_json_line(run.events, {"event": str(event), "job": job, "reason": "boom", "step": 3})


def only(path: Path) -> RunStatus:
    (one,) = status(path)
    return one


ON = Event.STARTED


@pytest.mark.parametrize(
    ("squeue", "events", "state", "reason"),
    [
        ("7|PENDING|Resources", (), RunState.queued, "Resources"),
        ("7|CONFIGURING|None", (), RunState.queued, ""),
        ("7|PENDING|BeginTime", (ON, Event.STOPPED, Event.REQUEUED), RunState.requeued, "BeginTime"),
        # Requeued by Slurm itself after a node failed: the run could leave no word.
        ("7|PENDING|BeginTime", (ON, Event.SAVED), RunState.requeued, "BeginTime"),
        ("7|RUNNING|None", (), RunState.running, ""),
        ("7|RUNNING|None", (ON, Event.STOP_REQUESTED), RunState.stopping, ""),
        ("7|RUNNING|None", (ON, Event.STOPPED, Event.REQUEUED, ON), RunState.running, ""),
        ("7|SUSPENDED|None", (ON,), RunState.running, "suspended"),
        ("7|COMPLETING|None", (ON, Event.STOPPED), RunState.stopping, ""),
        ("7|COMPLETING|None", (ON, Event.STOPPED, Event.REQUEUED), RunState.requeued, ""),
        ("7|COMPLETED|None", (ON, Event.FINISHED), RunState.finished, ""),
        ("7|FAILED|NonZeroExitCode", (ON, Event.FAILED), RunState.failed, "boom"),
        ("7|CANCELLED by 1000|None", (ON,), RunState.stopped, "job 7 ended as CANCELLED"),
        ("7|CANCELLED|None", (ON, Event.STOPPED), RunState.stopped, "cancelled"),
        ("7|CANCELLED|None", (ON, Event.FINISHED), RunState.finished, ""),
        ("7|NODE_FAIL|NodeDown", (ON,), RunState.lost, "NODE_FAIL: job 7 lost a node and was not requeued"),
        ("7|TIMEOUT|TimeLimit", (ON, Event.STOP_REQUESTED), RunState.lost, "with a longer job.time_limit"),
        ("7|PREEMPTED|None", (ON,), RunState.lost, "PREEMPTED: job 7 was pre-empted and not requeued"),
        ("7|PREEMPTED|None", (ON, Event.STOPPED), RunState.stopped, "PREEMPTED: job 7 was pre-empted"),
        ("7|OUT_OF_MEMORY|OutOfMemory", (ON,), RunState.lost, "raise cluster.memory, then resubmit it"),
        ("7|OUT_OF_MEMORY|OutOfMemory", (ON, Event.FAILED), RunState.failed, "boom; OUT_OF_MEMORY"),
        ("7|BOOT_FAIL|None", (), RunState.lost, "BOOT_FAIL: job 7 lost a node that did not boot"),
        ("7|DEADLINE|None", (ON,), RunState.lost, "DEADLINE: job 7 could not end before its deadline"),
        ("7|FAILED|NonZeroExitCode", (ON,), RunState.lost, "job 7 ended as FAILED and the run left no word"),
        # Cancelled, and what becomes of it on the way to its end.
        ("7|RUNNING|None", (ON, Event.CANCEL_REQUESTED), RunState.stopping, "cancelled"),
        ("7|COMPLETING|None", (ON, Event.CANCEL_REQUESTED), RunState.stopping, "cancelled"),
        ("7|COMPLETED|None", (ON, Event.CANCEL_REQUESTED, Event.STOPPED), RunState.stopped, "cancelled"),
        ("7|PENDING|BeginTime", (ON, Event.CANCEL_REQUESTED), RunState.requeued, "it leaves when it starts"),
        ("", (Event.CANCEL_REQUESTED,), RunState.stopped, "cancelled"),
        ("", (ON, Event.CANCEL_REQUESTED, Event.FINISHED), RunState.finished, ""),
        ("", (ON,), RunState.lost, "Slurm does not know job 7"),
        ("", (ON, Event.FINISHED), RunState.finished, ""),
    ],
)
def test_state_from_slurm(
    run: RunFolder, commands: Path, squeue: str, events: tuple[Event, ...], state: RunState, reason: str
) -> None:
    put(commands, "squeue", f"echo '{squeue}'" if squeue else FORGOTTEN)
    submitted(run, *events)
    one = only(run.path)
    assert one.state is state and one.job_id == "7"
    assert reason in one.reason and bool(reason) == bool(one.reason)


@pytest.mark.req("D6")
def test_a_job_that_runs_without_a_sign_of_life_is_silent(run: RunFolder, commands: Path) -> None:
    submitted(run, ON)
    put(commands, "squeue", f"echo '7|RUNNING|None|2:00:00|{run.job_script}'")
    assert only(run.path).state is RunState.running
    (late,) = status(run.path, now=time.time() + 1800)
    assert late.state is RunState.silent and "no sign of life for 30 minutes" in late.reason
    # It waited long and has just begun, or is suspended.
    put(commands, "squeue", f"echo '7|RUNNING|None|0:30|{run.job_script}'")
    assert status(run.path, now=time.time() + 1800)[0].state is RunState.running
    put(commands, "squeue", f"echo '7|SUSPENDED|None|2:00:00|{run.job_script}'")
    assert status(run.path, now=time.time() + 1800)[0].state is RunState.running


def test_another_runs_job_under_the_same_id_is_not_this_runs(
    run: RunFolder, commands: Path, tmp_path: Path
) -> None:
    submitted(run, ON)
    put(commands, "squeue", f"echo '7|RUNNING|None|0:10|{tmp_path}/runs/other/job.sbatch'")
    one = only(run.path)
    assert one.state is RunState.lost and "Slurm does not know job 7" in one.reason
    # The same folder by another path is the same folder.
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    put(commands, "squeue", f"echo '7|RUNNING|None|0:10|{tmp_path}/link/one/job.sbatch'")
    assert only(run.path).state is RunState.running


def test_what_a_run_has_got_over_is_told(run: RunFolder, commands: Path) -> None:
    put(commands, "squeue", "echo '7|RUNNING|None'")
    submitted(run, ON)
    run.append_event(Event.NODE_FAILED, node="n4", reason="lost")
    run.append_event(Event.RESTARTED, rank=3, node="n4", reason="killed by signal 9")
    run.append_event(Event.RESTARTED, rank=1, node="n2", reason="out of luck")
    run.append_event(Event.STARTED)
    append_json_line(run.metrics, {"step": 10, "loss": 2.5, "step_time_s": 0.5})
    one = only(run.path)
    assert (one.state, one.restarts, one.bad_nodes, one.left_s) == (RunState.running, 2, ("n4",), 15.0)
    assert one.reason == "restarted after rank 1, node n2: out of luck; bad nodes: n4 (lost)"
    assert "came back 2 times; restarted after" in render([one]) and "15 s" in render([one])


def tested(run: RunFolder, verdict: str | None = "DEGRADED", reason: str = "nic n7 rail 1 is slow") -> None:
    exclude = ["n7"] if verdict else []
    run.append_event(
        Event.NETWORK_TESTED, verdict=verdict, reason=reason, exclude=exclude, order=[], seconds=9.0
    )


@pytest.mark.req("C10")
@pytest.mark.parametrize("after", [(), (Event.FINISHED,)])
def test_what_a_test_of_the_network_has_found_is_told_of_one_run(
    run: RunFolder, commands: Path, after: tuple[Event, ...]
) -> None:
    put(commands, "squeue", "echo '7|RUNNING|None'")
    submitted(run, ON)
    tested(run, "OK", "no fault was found")
    tested(run)
    for event in after:
        run.append_event(event)
    one = only(run.path)
    line = f"network: DEGRADED: nic n7 rail 1 is slow; nodes to leave out: n7; report in {run.nccl}"
    assert line in render([one]).splitlines() and f"network: {one.network}" == line
    assert json.loads(as_json([one]))[0]["network"] == one.network
    # Of many runs only what they do.
    assert "network" not in render([one, one])
    assert all(len(row) <= 60 for row in render([one], width=60).splitlines() if str(run.nccl) not in row)
    # A new submission has not been tested yet.
    submitted(run, ON)
    assert only(run.path).network == "" and "network" not in render([only(run.path)])


@pytest.mark.req("C10")
def test_a_test_without_a_verdict_says_why_once(run: RunFolder, commands: Path) -> None:
    put(commands, "squeue", "echo '7|RUNNING|None'")
    submitted(run, ON)
    tested(run, None, "rank 0 on a ended with code 1: the disk is full")
    why = "tested without a verdict: rank 0 on a ended with code 1: the disk is full"
    assert only(run.path).network == why
    reason = "the network test did not end: rank 0 on a ended with code 1: the disk is full"
    run.append_event(Event.FAILED, reason=reason, by="supervisor")
    run.failed.touch()  # on a full disk the marker stays empty
    one = only(run.path)
    assert (one.state, one.reason, one.network) == (RunState.failed, reason, "tested without a verdict")


def test_tasks_of_an_array_are_asked_for_by_their_array(tmp_path: Path, commands: Path) -> None:
    sweep = tmp_path / "runs" / "lr"
    for index in range(3):
        folder = RunFolder(sweep / f"lr={index}")
        folder.create()
        submitted(folder, job=f"7_{index}")
    (sweep / "sweep.json").write_text("{}")
    put(
        commands,
        "squeue",
        f'echo "$*" > {commands}/asked; script={sweep}/job.sbatch\n'
        'echo "7_0|RUNNING|None|0:10|$script"; echo "7_1|PENDING|JobArrayTaskLimit|0:00|$script"',
    )
    now = time.time()
    found = status(tmp_path / "runs", now)
    assert [one.state for one in found] == [RunState.running, RunState.queued, RunState.lost]
    assert {one.sweep for one in found} == {str(sweep)} and status(sweep, now) == found
    asked = (commands / "asked").read_text()
    assert "--jobs=7 " in f"{asked.strip()} " and "--array" in asked
    assert status(sweep / "lr=1")[0].sweep == str(sweep)


def test_thousands_of_jobs_are_asked_for_in_pieces(commands: Path) -> None:
    put(commands, "squeue", "exit 0")
    put(commands, "sacct", "exit 1")
    assert job_states([str(index) for index in range(2500)], os.environ) == {}
    assert (commands / "squeue.calls").read_text().count("x") == 3
    # Without accounting the first refusal is enough.
    assert (commands / "sacct.calls").read_text().count("x") == 1


def test_a_run_that_is_over_is_not_asked_for(run: RunFolder, commands: Path) -> None:
    put(commands, "squeue", "echo '7|RUNNING|None'")
    submitted(run, ON, Event.FINISHED)
    assert only(run.path).state is RunState.finished
    run.append_event(Event.FAILED, by="supervisor", reason="no luck")
    one = only(run.path)
    assert (one.state, one.reason, one.job_id) == (RunState.failed, "no luck", "7")
    assert not (commands / "squeue.calls").exists()
    # Submitted again, or started by hand: its old last word counts no more.
    run.append_event(Event.STARTED)
    assert only(run.path).state is RunState.running


def test_a_long_history_is_read_to_its_beginning(run: RunFolder, commands: Path) -> None:
    put(commands, "squeue", "echo '8|RUNNING|None'")
    submitted(run, ON, Event.FAILED)
    submitted(run, ON, job="8")
    for step in range(2000):
        run.append_event(Event.SAVED, step=step)
    assert run.events.stat().st_size > 2 * 65_536
    one = only(run.path)
    assert (one.state, one.job_id) == (RunState.running, "8")


def test_markers_count_more_than_events(run: RunFolder, commands: Path) -> None:
    put(commands, "squeue", FORGOTTEN)
    submitted(run, ON)
    run.mark_failed("Exit code 78: no such file")
    assert (only(run.path).state, only(run.path).reason) == (RunState.failed, "Exit code 78: no such file")
    run.mark_finished()
    assert only(run.path).state is RunState.finished


def test_accounting_is_asked_for_what_squeue_forgot(run: RunFolder, commands: Path) -> None:
    put(commands, "squeue", FORGOTTEN)
    submitted(run, ON)
    put(commands, "sacct", "echo '7|OUT_OF_MEMORY'")
    assert "OUT_OF_MEMORY" in only(run.path).reason
    # Without a database sacct calls every job pending.
    put(commands, "sacct", "echo '7|PENDING'")
    assert only(run.path).state is RunState.lost


def test_silent_slurm_is_said_and_nothing_runs_for_ever(run: RunFolder, commands: Path) -> None:
    put(commands, "squeue", SILENT)
    submitted(run)
    assert only(run.path).state is RunState.queued, "it may wait there"
    submitted(run, ON)
    fresh = only(run.path)
    assert fresh.state is RunState.running and "Slurm does not answer" in fresh.reason
    (late,) = status(run.path, now=time.time() + 7200)
    assert late.state is RunState.lost and "no sign of life for 120 minutes" in late.reason


def test_successor_is_the_runs_job(run: RunFolder, commands: Path) -> None:
    put(commands, "squeue", "echo '7|COMPLETED|None'; echo '8|PENDING|Dependency'")
    submitted(run, ON, Event.STOPPED)
    run.append_event(Event.REQUEUED, job_id="8")
    one = only(run.path)
    assert (one.state, one.job_id, one.reason) == (RunState.requeued, "8", "Dependency")


def test_run_that_was_submitted_anew_is_queued(run: RunFolder, commands: Path) -> None:
    put(commands, "squeue", "echo '7|CANCELLED|None'; echo '9|PENDING|Priority'")
    submitted(run, ON, Event.STOPPED, Event.REQUEUED)
    submitted(run, job="9")
    assert only(run.path).state is RunState.queued


def test_local_job_is_told_by_its_process(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    # The profile's name says nothing.
    event = {"job_id": str(os.getpid()), "profile": "laptop", "scheduler": "local"}
    run.append_event(Event.SUBMITTED, **event, host=socket.gethostname())
    monkeypatch.setenv("SUBMITIT_LOCAL_JOB_ID", str(os.getpid()))
    run.append_event(Event.STARTED)
    # This process has that id, but it is another one.
    assert only(run.path).state is RunState.lost
    run.append_event(Event.STOPPED)
    assert only(run.path).state is RunState.stopped


def test_local_job_of_another_host_is_told_by_the_run_folder(run: RunFolder) -> None:
    run.append_event(Event.SUBMITTED, job_id="1", profile="local", scheduler="local", host="login7")
    run.append_event(Event.STARTED)
    one = only(run.path)
    assert (one.state, one.reason) == (RunState.running, "on login7")
    (late,) = status(run.path, now=time.time() + 3600)
    assert late.state is RunState.lost and late.reason.endswith("on login7")
    run.append_event(Event.STOPPED)
    assert only(run.path).state is RunState.stopped


def test_an_earlier_submission_is_not_told_of(run: RunFolder, commands: Path) -> None:
    put(commands, "squeue", "echo '8|RUNNING|None'")
    submitted(run, ON, Event.STOPPED)
    submitted(run, job="8")
    assert only(run.path).state is RunState.running
    put(commands, "squeue", "echo '9|NODE_FAIL|NodeDown'")
    submitted(run, ON, Event.FAILED)
    submitted(run, job="9")
    one = only(run.path)
    assert one.state is RunState.lost and "NODE_FAIL: job 9" in one.reason


def test_a_trainer_that_was_turned_away_says_nothing_of_the_run(run: RunFolder, commands: Path) -> None:
    put(commands, "squeue", "echo '7|COMPLETED|None'")
    submitted(run, ON, Event.STOPPED)
    run.append_event(Event.FAILED, refused=True, reason="owned", code=78)
    assert only(run.path).state is RunState.stopped


def test_a_state_that_slurm_may_have_one_day_is_said(run: RunFolder, commands: Path) -> None:
    put(commands, "squeue", "echo '7|HIBERNATING|None'")
    submitted(run, ON)
    assert (only(run.path).state, only(run.path).reason) == (RunState.running, "Slurm says HIBERNATING")
    (late,) = status(run.path, now=time.time() + 3600)
    assert late.state is RunState.lost and "HIBERNATING" in late.reason


def test_where_to_look_when_there_is_no_word(run: RunFolder, commands: Path) -> None:
    put(commands, "squeue", "echo '7|FAILED|NonZeroExitCode'")
    submitted(run)
    assert f"{run.path} is not the same folder on the compute nodes" in only(run.path).reason
    log = run.logs / "7.batch.log"
    log.write_text("module: not found")
    assert f"read {log}" in only(run.path).reason


def test_only_the_slurm_that_took_the_job_is_asked(
    run: RunFolder, commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(
        commands,
        "squeue",
        f'echo "${{SLURM_CONF-none}} ${{SLURM_CLUSTERS-none}} $*" > {commands}/asked; echo "7|RUNNING|"',
    )
    monkeypatch.setenv("SLURM_CONF", "/a/lab/slurm.conf")
    monkeypatch.setenv("SLURM_CLUSTERS", "other")
    submitted(run)
    assert only(run.path).state is RunState.running
    asked = (commands / "asked").read_text()
    assert asked.startswith("none none ") and "--clusters" not in asked
    run.append_event(Event.SUBMITTED, job_id="7", scheduler="slurm", slurm_conf="/x", clusters="big")
    assert only(run.path).state is RunState.running
    asked = (commands / "asked").read_text()
    assert asked.startswith("/x none ") and "--clusters=big" in asked


def test_run_without_a_job(run: RunFolder) -> None:
    assert only(run.path).state is RunState.new
    run.append_event(Event.STARTED)
    assert only(run.path).state is RunState.running
    (late,) = status(run.path, now=time.time() + 3600)
    assert late.state is RunState.lost
    # A heartbeat is a sign of life too.
    beat = run.heartbeat / "rank0"
    beat.write_text("")
    os.utime(beat, (time.time() + 3590, time.time() + 3590))
    assert status(run.path, now=time.time() + 3600)[0].state is RunState.running


def test_run_that_goes_on_by_hand_after_its_job(run: RunFolder, commands: Path) -> None:
    put(commands, "squeue", "echo '7|CANCELLED|None'")
    submitted(run, ON, Event.STOPPED)
    run.append_event(Event.STARTED)
    assert only(run.path).state is RunState.running


def test_many_runs_cost_one_squeue(tmp_path: Path, commands: Path) -> None:
    lines = []
    for index in range(5):
        folder = RunFolder(tmp_path / "runs" / f"r{index}")
        folder.create()
        submitted(folder, ON, job=str(100 + index))
        lines.append(f"echo '{100 + index}|{'RUNNING' if index % 2 else 'PENDING'}|None'")
    put(commands, "squeue", "\n".join(lines))
    (tmp_path / "runs" / "not-a-run").mkdir()
    found = status(tmp_path / "runs")
    assert [one.run.name for one in found] == [f"r{index}" for index in range(5)]
    assert [one.state is RunState.running for one in found] == [False, True, False, True, False]
    assert (commands / "squeue.calls").read_text() == "x\n"
    (tmp_path / "empty").mkdir()
    assert find_runs(tmp_path / "empty") == []


def test_figures_and_table(run: RunFolder, commands: Path) -> None:
    put(commands, "squeue", "echo '7|RUNNING|None'")
    submitted(run, ON)
    with run.metrics.open("w") as file:
        for step in range(30):
            file.write(json.dumps({"step": step, "loss": 9.0 - step / 10}) + "\n")
        file.write('{"step": 30, "lo')  # torn by a crash
    (run.checkpoints / "step_20").mkdir()
    (run.checkpoints / "step_25.tmp").mkdir()
    one = only(run.path)
    assert (one.step, one.steps, one.checkpoint_step) == (29, 40, 20)
    assert one.loss == pytest.approx(6.1)
    assert one.age_s is not None and one.age_s < 60
    table = render([one])
    for word in ("one", "running", "7", "29/40", "6.1000", "20", "ago"):
        assert word in table
    assert table.endswith("\n") and max(map(len, table.splitlines())) <= 120
    assert render([]) == "no runs\n"


def test_evaluation_lines_do_not_hide_the_loss(run: RunFolder) -> None:
    append_json_line(run.metrics, {"step": 10, "loss": 2.5})
    append_json_line(run.metrics, {"step": 10, "eval_loss": 2.7})
    assert only(run.path).loss == 2.5


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("events.jsonl", b'5\n[1]\n{"event": "started", "job": "local"}\n\xff\xfe{"ev'),
        ("metrics.jsonl", b'[1]\n{"loss": "y", "step": 3}\n\xff'),
        ("FAILED", b"\xff\xfe out of luck"),
        ("config.yaml", b"\xff\xfe"),
        ("heartbeat/owner.json", b"{}"),
    ],
)
def test_one_spoilt_run_does_not_hide_the_others(run: RunFolder, name: str, content: bytes) -> None:
    other = RunFolder(run.path.parent / "other")
    other.create()
    other.append_event(Event.STARTED)
    run.append_event(Event.STARTED)
    (run.path / name).write_bytes(content)
    shown = render(status(run.path.parent))
    assert shown.count("\n") >= 3
    assert "other" in shown


def test_a_folder_that_is_none_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere cannot be read \(No such file or directory\)"):
        status(tmp_path / "nowhere")
    assert status(tmp_path / "runs") == []


def test_a_killed_process_of_this_host_is_not_running(run: RunFolder) -> None:
    run.append_event(Event.STARTED)
    run.owner.write_text(json.dumps({"host": socket.gethostname(), "pid": 2**22 + 1}))
    assert only(run.path).state is RunState.lost
    run.owner.write_text(json.dumps({"host": "elsewhere", "pid": 2**22 + 1}))
    assert only(run.path).state is RunState.running
