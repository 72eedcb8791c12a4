"""The run folder's small files survive torn writes and several writers."""

import json
import threading
from pathlib import Path

import pytest

from contract.run_folder import (
    Event,
    RunFolder,
    append_json_line,
    job_identity,
    last_json_line,
    read_json_lines,
)


def test_lines_of_several_writers_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    threads = [
        threading.Thread(
            target=lambda w=writer: [append_json_line(path, {"w": w, "n": n}) for n in range(200)]
        )
        for writer in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = list(read_json_lines(path))
    assert len(lines) == 800
    for writer in range(4):
        assert [line["n"] for line in lines if line["w"] == writer] == list(range(200))


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_json_line(path, {"step": 1})
    append_json_line(path, {"step": 2})
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert [line["step"] for line in read_json_lines(path)] == [1, 2]
    assert last_json_line(path) == {"step": 2}
    append_json_line(path, {"step": 4})
    assert [line["step"] for line in read_json_lines(path)] == [1, 2, 4], "the torn line swallows the next"
    assert last_json_line(tmp_path / "none") is None
    assert list(read_json_lines(tmp_path / "none")) == []


def test_the_last_line_is_found_without_reading_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("x" * 200_000 + "\n" + json.dumps({"step": 7}) + "\n")
    assert last_json_line(path) == {"step": 7}


def test_only_published_steps_count(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    assert run.published_steps() == []
    run.create()
    for name in ("step_10", "step_9", "step_11.tmp-1.r0", "step_x", "other"):
        (run.checkpoints / name).mkdir()
    assert run.published_steps() == [9, 10]


def test_markers_exclude_each_other(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.create()
    run.mark_failed("disk full")
    assert run.failed.read_text() == "disk full\n"
    run.mark_finished()
    assert run.finished.exists()
    assert not run.failed.exists()


@pytest.mark.parametrize(
    ("environ", "identity"),
    [
        ({}, ("local", 0)),
        ({"SUBMITIT_LOCAL_JOB_ID": "99"}, ("99", 0)),
        ({"SLURM_JOB_ID": "7", "SUBMITIT_LOCAL_JOB_ID": "99"}, ("7", 0)),
        ({"SLURM_JOB_ID": "7"}, ("7", 0)),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, ("7", 2)),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}, ("7_3", 0)),
    ],
)
def test_a_job_is_named_as_slurm_names_it(environ: dict[str, str], identity: tuple[str, int]) -> None:
    assert job_identity(environ) == identity


def test_events_tell_who_and_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    run = RunFolder(tmp_path / "run")
    run.create()
    run.append_event(Event.SAVED, step=5)
    (event,) = run.read_events()
    assert event.pop("time") > 1.7e9
    assert event == {"event": "saved", "job": "12", "restart": 1, "step": 5}
