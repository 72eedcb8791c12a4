"""Runs and sweeps by the names that users give."""

from pathlib import Path

import pytest

from contract.errors import UserError
from contract.sweep import Manifest, SweepFolder, Task
from slurm.runs.find import address, find_runs, resolve, resolve_run, resolve_runs, title


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """runs/first-run, runs/docs, the sweep runs/lr of two tasks, and folders that are none of these."""
    monkeypatch.chdir(tmp_path)
    for name in ("first-run", "docs", "lr/lr=1", "lr/lr=2"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
    (tmp_path / "runs/lr/sweep.json").touch()
    (tmp_path / "runs/lr/logs").mkdir()
    (tmp_path / "runs/none").mkdir()
    (tmp_path / "docs").mkdir()
    return tmp_path


def test_a_run_is_meant_by_its_name_or_its_path(home: Path) -> None:
    for name in ("first-run", "runs/first-run", str(home / "runs/first-run")):
        assert resolve_run(name).path.resolve() == home / "runs/first-run"
    # A folder of the same name beside `runs` is no run.
    assert resolve_run("docs").path == Path("runs/docs")
    assert resolve_run("lr/lr=2").path == Path("runs/lr/lr=2")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("frist-run", "there is no run frist-run, did you mean first-run?"),
        ("runs/fist-run", "there is no run runs/fist-run, did you mean first-run?"),
        ("lr/lr=3", "there is no run lr/lr=3, did you mean lr="),
        ("zzz", "valid names are: docs, first-run, lr"),
        ("lr", "is a sweep and this command takes one run: name one, for example runs/lr/lr=1"),
        ("runs", "is a folder of runs and this command takes one run"),
        ("runs/none", "runs/none is no run folder"),
    ],
)
def test_what_is_no_run_is_said_with_what_there_is(home: Path, name: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        resolve_run(name)
    assert sentence in str(error.value)


def test_without_any_run_the_sentence_asks_for_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no run x and no other one in runs"):
        resolve("x")
    assert find_runs(Path("runs")) == []


def test_a_sweeps_name_stands_for_its_tasks_and_each_run_comes_once(home: Path) -> None:
    found = resolve_runs(["lr", "runs/lr/lr=2", "first-run"])
    assert [one.path for one in found] == ["runs/lr/lr=1", "runs/lr/lr=2", "runs/first-run"]
    assert [one.sweep for one in found[:2]] == [str(home / "runs/lr")] * 2 and found[2].sweep is None
    assert len(find_runs(Path("runs"))) == 4
    (task,) = find_runs(Path("runs/lr/lr=1"))
    assert task.sweep == str(home / "runs/lr")


def test_a_run_is_called_so_that_the_command_line_takes_it_back(home: Path) -> None:
    (home / "runs/a b").mkdir()
    assert address(Path("runs/first-run")) == address(home / "runs/first-run") == "first-run"
    assert address(Path("runs/lr/lr=2")) == "lr/lr=2" == title(home / "runs/lr/lr=2")
    assert address(Path("runs/a b")) == "'a b'" and title(Path("runs/a b")) == "a b"
    assert address(home / "docs") == str(home / "docs")


def test_a_task_is_meant_by_its_number_too(home: Path) -> None:
    tasks = [Task(index, f"lr={index + 1}", [], {}) for index in range(2)]
    SweepFolder(home / "runs/lr").write(Manifest("lr", 0.0, ["lr"], [], {}, tasks=tasks))
    for name in ("lr/1", "runs/lr/1", str(home / "runs/lr/1")):
        assert resolve_run(name).path.resolve() == home / "runs/lr/lr=2"
    with pytest.raises(UserError, match="there is no run lr/2"):
        resolve("lr/2")


def test_a_link_to_itself_hides_no_run(home: Path) -> None:
    (home / "runs/loop").symlink_to("loop")
    assert len(find_runs(Path("runs"))) == 4
