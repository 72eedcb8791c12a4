"""Where the fast tier of a run lies on a node."""

import os
from pathlib import Path
from unittest import mock

import pytest
from harness.disks import mounted

from contract.errors import ConfigError
from contract.run_folder import RunFolder
from train.checkpoint.fast_folder import check_room, fast_folder, no_gain
from train.config import load_config

GB = 10**9


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "runs/run")
    run.create()
    return run


def test_runs_that_share_a_node_have_folders_of_their_own(tmp_path: Path, run: RunFolder) -> None:
    other = RunFolder(tmp_path / "other/run")
    own = fast_folder(str(tmp_path), run)
    assert own.parent == tmp_path and own.is_dir() and own.stat().st_mode & 0o777 == 0o700
    assert own == fast_folder(str(tmp_path), run) != fast_folder(str(tmp_path), other)
    assert list(own.iterdir()) == []


def test_variables_stand_for_what_they_are_on_the_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: RunFolder
) -> None:
    (tmp_path / "job").mkdir()
    monkeypatch.setenv("LOCAL_SCRATCH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fast_folder("$LOCAL_SCRATCH/job", run).parent == tmp_path / "job"
    assert fast_folder("~/job", run).parent == tmp_path / "job"
    monkeypatch.delenv("LOCAL_SCRATCH")
    with pytest.raises(
        ConfigError, match=r"checkpoint.fast_path=\$LOCAL_SCRATCH/job: LOCAL_SCRATCH is not set on"
    ):
        fast_folder("$LOCAL_SCRATCH/job", run)
    monkeypatch.setenv("LOCAL_SCRATCH", "scratch")
    with pytest.raises(ConfigError, match=r"fast_path=\$LOCAL_SCRATCH \(scratch\): give an absolute path"):
        fast_folder("$LOCAL_SCRATCH", run)


def test_what_cannot_be_used_is_refused(tmp_path: Path, run: RunFolder) -> None:
    with pytest.raises(ConfigError, match=r"fast_path=/no/where: there is no such folder on "):
        fast_folder("/no/where", run)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="there is no such folder"):
        fast_folder(str(tmp_path / "file"), run)
    with pytest.raises(ConfigError, match=r"/proc/trierarch-run-\w+ cannot be written on "):
        fast_folder("/proc", run)
    with (
        mounted(tmp_path / "readonly", "-t", "tmpfs", "-o", "ro", "none"),
        pytest.raises(ConfigError, match=r"cannot be written on .* \(Read-only file system\)"),
    ):
        fast_folder(str(tmp_path / "readonly"), run)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_somebody_elses_folder_is_refused(tmp_path: Path, run: RunFolder) -> None:
    """In a folder of all users anybody may have made what has our name."""
    folder = fast_folder(str(tmp_path), run)
    os.chown(folder, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to somebody else"):
        fast_folder(str(tmp_path), run)
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="belongs to somebody else"):
        fast_folder(str(tmp_path), run)


def test_the_disk_of_the_run_folder_gains_nothing(tmp_path: Path, run: RunFolder) -> None:
    same = no_gain(fast_folder(str(tmp_path), run), run)
    assert same is not None and "are on the same file system" in same
    with mounted(tmp_path / "disk", "-t", "tmpfs", "none") as disk:
        assert no_gain(fast_folder(str(disk), run), run) is None


def test_two_steps_must_fit(tmp_path: Path, run: RunFolder) -> None:
    """What is kept from the last start counts as free: it goes before there is a third."""
    folder = fast_folder(str(tmp_path), run)
    (folder / "step_1.abc").mkdir()
    with (folder / "step_1.abc/file").open("wb") as file:
        file.truncate(GB)
    with mock.patch("shutil.disk_usage") as usage:
        usage.return_value.free = GB
        assert check_room(folder, GB, known=True) is None
        usage.return_value.free = GB - 10
        with pytest.raises(
            ConfigError, match=r"fast_path has 2 GB free in .*, and two steps take 2 GB there"
        ):
            check_room(folder, GB, known=True)
        said = check_room(folder, 3 * GB, known=False)
        assert said is not None and "two steps take 6 GB there" in said


def test_a_path_of_no_node_is_refused_before_anything_starts() -> None:
    for path in ("scratch", ""):
        with pytest.raises(
            ConfigError, match=rf"checkpoint.fast_path={path} is not absolute: give the folder of"
        ):
            load_config([f"checkpoint.fast_path={path}"])
    # As it is on the node, not where it is submitted.
    assert load_config(["checkpoint.fast_path=$NOWHERE/x"]).checkpoint.fast_path == "$NOWHERE/x"
