"""Which log matters, its last lines, and following it over restarts."""

import os
import threading
import time
from pathlib import Path

import pytest
from harness.programs import search_path, write_program
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import UserError
from contract.run_folder import Event, RunFolder
from slurm.runs.logs import Wish, attempts, batch_logs, choose, culprit, follow, last_lines, until_over


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "one")
    folder.create()
    folder.append_event(Event.SUBMITTED, job_id="7", scheduler="slurm", slurm_conf=None)
    return folder


def write(run: RunFolder, name: str, text: str = "x\n", age_s: float = 0.0) -> Path:
    path = run.logs / name
    path.write_text(text)
    moment = time.time() - age_s
    os.utime(path, (moment, moment))
    return path


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_the_newest_start_of_the_newest_job_counts(run: RunFolder) -> None:
    for rank in (0, 1, 10):
        write(run, f"9.r0.{rank}.log", age_s=500)  # an id of an earlier Slurm
        write(run, f"7.r0.{rank}.log", age_s=90)
        write(run, f"7.r0-10.{rank}.log", age_s=60)
        write(run, f"7.r0-9.{rank}.log", age_s=60)
        write(run, f"7.r1.{rank}.log", "")
    write(run, "7.batch.log")
    (run.logs / "submitit").mkdir()
    assert [logs[0].attempt for logs in attempts(run)] == ["0", "0", "0-9", "0-10", "1"]
    assert [log.rank for log in attempts(run)[-1]] == [0, 1, 10]
    assert names(choose(run, Wish(), failed=False)) == ["7.r1.0.log"]
    assert names(choose(run, Wish(rank=10), failed=False)) == ["7.r1.10.log"]
    assert names(choose(run, Wish(all_ranks=True), failed=False)) == [
        f"7.r1.{rank}.log" for rank in (0, 1, 10)
    ]
    assert names(choose(run, Wish(attempt="0-9"), failed=False)) == ["7.r0-9.0.log"]
    assert names(choose(run, Wish(batch=True), failed=False)) == ["7.batch.log"]
    with pytest.raises(UserError, match="no attempt 3: those of job 7 are 0, 0-9, 0-10, 1"):
        choose(run, Wish(attempt="3"), failed=False)
    with pytest.raises(UserError, match=r"no log of rank 5 in attempt 1 of job 7: its ranks are 0 to 10"):
        choose(run, Wish(rank=5), failed=False)


def test_of_a_failed_run_the_rank_that_failed_first_is_shown(run: RunFolder) -> None:
    for rank in range(4):
        write(run, f"7.r0.{rank}.log")
    run.append_event(Event.STARTED)
    run.append_event(Event.FAILED, rank=2, reason="an earlier start")
    run.append_event(Event.STARTED)
    assert culprit(run) is None
    run.append_event(Event.FAILED, rank=3, reason="boom")
    run.append_event(Event.FAILED, rank=1, reason="a peer is gone")
    run.append_event(Event.FAILED, by="supervisor", reason="crashed too often")
    assert culprit(run) == 3
    assert names(choose(run, Wish(), failed=True)) == ["7.r0.3.log"]
    assert names(choose(run, Wish(), failed=False)) == ["7.r0.0.log"]
    write(run, "7.r0.3.log", "")
    write(run, "7.batch.log", "srun: error: n4: killed\n")
    assert names(choose(run, Wish(), failed=True)) == ["7.r0.3.log", "7.batch.log"]


def test_without_a_rank_the_job_itself_is_shown(run: RunFolder) -> None:
    with pytest.raises(UserError, match="run one has no logs to show"):
        choose(run, Wish(), failed=False)
    write(run, "7.batch.log", "module: not found\n")
    assert names(choose(run, Wish(), failed=True)) == ["7.batch.log"]


def test_a_sweeps_log_of_the_task_and_that_of_a_local_job_are_found(tmp_path: Path) -> None:
    task = RunFolder(tmp_path / "lr" / "lr=1")
    task.create()
    (tmp_path / "lr/sweep.json").touch()
    (tmp_path / "lr/logs").mkdir()
    (tmp_path / "lr/logs/7_3.batch.log").write_text("module: not found\n")
    task.append_event(Event.SUBMITTED, job_id="7_3", scheduler="slurm")
    write(task, "7_3.batch.log")
    assert [path.parent.parent.name for path in batch_logs(task)] == ["lr", "lr=1"]
    task.append_event(Event.SUBMITTED, job_id="123", scheduler="local")
    (task.logs / "submitit").mkdir()
    write(task, "submitit/123_0_log.out")
    write(task, "submitit/123_0_log.err", "")
    assert names(batch_logs(task)) == ["123_0_log.out"]
    write(task, "123.r0.log")  # one file for all ranks
    assert names(choose(task, Wish(rank=1), failed=False)) == ["123.r0.log"]


@given(st.lists(st.text("ab \u00e9", max_size=40), max_size=30), st.integers(0, 40), st.booleans())
def test_last_lines_are_the_last_lines(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], count: int, ends: bool
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    path.write_text("\n".join(lines) + "\n" * (ends and bool(lines)))
    wanted = path.read_text().splitlines()[-count:] if count else []
    assert last_lines(path, count).splitlines() == wanted


def test_last_lines_of_a_large_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"line {number}\n" for number in range(100_000)))
    assert last_lines(path, 20_000).splitlines() == [f"line {number}" for number in range(80_000, 100_000)]
    assert last_lines(tmp_path / "gone", 5) == ""


class Reader:
    """Follows a run in a thread until it is told that the run has ended."""

    def __init__(self, run: RunFolder, wish: Wish, lines: int) -> None:
        self.texts: list[str] = []
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(run, wish, lines), daemon=True)
        self._thread.start()

    def _read(self, run: RunFolder, wish: Wish, lines: int) -> None:
        for text in follow(run, wish, lines, self.ended.is_set):
            self.texts.append(text)

    def waits_for(self, text: str) -> bool:
        deadline = time.monotonic() + 20
        while text not in "".join(self.texts) and time.monotonic() < deadline:
            time.sleep(0.02)
        return text in "".join(self.texts)

    def all(self) -> str:
        self.ended.set()
        self._thread.join(timeout=20)
        assert not self._thread.is_alive()
        return "".join(self.texts)


def test_following_goes_over_restarts_and_tells_them(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm.runs.logs.POLL_S", 0.02)
    first = write(run, "7.r0.0.log", "old\nstep 1\nstep 2\n")
    reader = Reader(run, Wish(), lines=2)
    assert reader.waits_for("step 2\n")
    with first.open("a") as file:
        file.write("step 3\nhalf of a l")
    assert reader.waits_for("step 3\n")
    write(run, "7.r0-1.0.log", "again 1\n")
    run.append_event(Event.RESTARTED, rank=1, node="n2", reason="killed by signal 9")
    assert reader.waits_for("again 1\n") and reader.waits_for("killed by signal 9")
    with first.open("a") as file:
        file.write("ine\n")
    assert reader.waits_for("half of a line\n")
    write(run, "7.r1.0.log", "no line end")
    text = reader.all()
    assert "old" not in text and text.count("step 3") == 1
    assert "-- restarted, rank 1, node n2: killed by signal 9\n" in text
    assert text.index("== " + str(first)) < text.index("7.r0-1.0.log") < text.index("7.r1.0.log")
    assert text.endswith("no line end")


def test_following_ends_when_the_run_does(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue = tmp_path / "bin/squeue"
    write_program(squeue, "echo '7|RUNNING|None'")
    monkeypatch.setenv("PATH", search_path(squeue.parent))
    is_over = until_over(run, every_s=0.0)
    assert not is_over()
    # Between its end and its requeue, or out of reach: not over yet.
    write_program(squeue, "echo '7|COMPLETED|None'")
    run.append_event(Event.STOPPED)
    assert not is_over() and is_over()
    write_program(squeue, "echo '7|PENDING|BeginTime'")
    assert not is_over()
    run.append_event(Event.FINISHED)
    assert is_over()
