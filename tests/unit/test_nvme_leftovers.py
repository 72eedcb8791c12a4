"""What a killed job leaves on a disk goes with the next start; what anybody else has there stays."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from contract.errors import NodeError
from train.offload.nvme import leftovers
from train.offload.nvme.leftovers import Identity, OwnedFolder, clear_leftovers
from train.offload.nvme.settings import NvmeSettings
from train.offload.nvme.store import NvmeStore

SWAP = """
import sys
from pathlib import Path
from train.offload.nvme.files import aligned_buffer
from train.offload.nvme.leftovers import Identity
from train.offload.nvme.settings import NvmeSettings
from train.offload.nvme.store import NvmeStore

path, run, rank = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
store = NvmeStore([path], Identity.of(run, rank, "optimizer"), NvmeSettings(), warn=lambda line: None)
slots = [store.allocate(str(index), 8 << 20) for index in range(2)]
store.open()
buffer = aligned_buffer(8 << 20)
print("swapping", flush=True)
while True:
    for handle in [store.write(slot, buffer) for slot in slots]:
        handle.wait()
"""
HOST = socket.gethostname()


@contextmanager
def swapping(path: Path, run: str, rank: int = 0) -> Iterator["subprocess.Popen[str]"]:
    """A process that writes to its store all the time; it is killed in the end."""
    command = [sys.executable, "-c", SWAP, str(path), run, str(rank)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "swapping\n"
        yield process
    finally:
        process.kill()
        process.wait(timeout=10)
        process.stdout.close()


def clear(path: Path) -> list[str]:
    said: list[str] = []
    clear_leftovers(path, HOST, said.append)
    return said


def leftover(path: Path, run: str = "runs/dead", rank: int = 0) -> Path:
    """A folder as a killed process leaves it."""
    folder = OwnedFolder(path, Identity.of(Path(run), rank, "optimizer"))
    (folder.path / "blocks.bin").write_bytes(bytes(1 << 20))
    folder.leave()
    return folder.path


def rewrite(folder: Path, **changes: object) -> None:
    file = folder / "owner.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.req("C6")
def test_a_job_killed_in_mid_write_is_cleared_away_and_a_living_one_is_not(tmp_path: Path) -> None:
    with swapping(tmp_path, "runs/living", rank=1) as living:
        with swapping(tmp_path, "runs/killed"):
            pass
        folders = {folder.name.split("-")[1]: folder for folder in tmp_path.iterdir()}
        assert set(folders) == {"living", "killed"}
        about = json.loads((folders["living"] / "owner.json").read_text())
        assert (about["run"], about["job"], about["rank"], about["host"]) == ("runs/living", "local", 1, HOST)
        assert about["pid"] == living.pid and about["boot_id"]

        said: list[str] = []
        identity = Identity.of(Path("runs/killed"), 0, "optimizer")  # the same rank comes back
        with closing(NvmeStore([tmp_path], identity, NvmeSettings(), warn=said.append)) as store:
            store.allocate("all", 1 << 20)
            store.open()
            (line,) = said
            assert line.startswith(f"freed 0.02 GB in {tmp_path} ") and "runs/killed, job " in line
            assert (folders["killed"] / "blocks.bin").stat().st_size == 1 << 20
        assert list(tmp_path.iterdir()) == [folders["living"]]
        assert living.poll() is None
        assert (folders["living"] / "blocks.bin").stat().st_size == 16 << 20


@pytest.mark.req("C6")
def test_what_is_not_ours_is_not_touched(tmp_path: Path) -> None:
    elsewhere = leftover(tmp_path, rank=1)
    rewrite(elsewhere, host="elsewhere")
    spoilt = leftover(tmp_path, rank=2)
    (spoilt / "owner.json").write_text("nonsense")
    with_more = leftover(tmp_path, rank=3)
    (with_more / "thesis.tex").touch()
    (tmp_path / "trierarch-notes").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "file").touch()
    away = tmp_path.with_name(tmp_path.name + "-away")
    leftover(tmp_path, rank=4).rename(away)
    (tmp_path / "trierarch-link").symlink_to(away)
    before = sorted(tmp_path.rglob("*"))
    assert clear(tmp_path) == []
    assert sorted(tmp_path.rglob("*")) == before and (away / "blocks.bin").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
def test_another_users_folder_is_not_touched(tmp_path: Path) -> None:
    folder = leftover(tmp_path)
    os.chown(folder / "owner.json", 65534, 65534)
    assert clear(tmp_path) == [] and (folder / "blocks.bin").exists()


def test_leftovers_of_a_killed_start_and_of_a_killed_removal_go(tmp_path: Path) -> None:
    for number, name in enumerate((".trierarch-new-abc", ".trierarch-dead-abc")):
        leftover(tmp_path, rank=number).rename(tmp_path / name)
    (tmp_path / ".trierarch-dead-def").mkdir()
    clear(tmp_path)
    assert not list(tmp_path.iterdir())


def test_whoever_meets_a_removal_waits_for_its_end(tmp_path: Path) -> None:
    """Else it would find too little room, which is there a moment later."""
    folder = tmp_path / ".trierarch-dead-abc"
    leftover(tmp_path).rename(folder)
    code = (
        "import fcntl, sys, time, shutil; file = open(sys.argv[1] + '/owner.json', 'r+');"
        "fcntl.flock(file, fcntl.LOCK_EX); print('removing', flush=True); time.sleep(0.5); shutil.rmtree(sys.argv[1])"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"removing\n"
        clear(tmp_path)
        assert not folder.exists()


def test_ranks_that_start_together_clear_each_folder_once(tmp_path: Path) -> None:
    for number in range(20):
        leftover(tmp_path, rank=number)
    code = (
        "import sys; from pathlib import Path; from train.offload.nvme.leftovers import clear_leftovers;"
        f"clear_leftovers(Path(sys.argv[1]), {HOST!r}, print); print('left', len(list(Path(sys.argv[1]).iterdir())))"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    lines = [line for process in processes for line in process.communicate(timeout=60)[0].splitlines()]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sum(line.startswith("freed") for line in lines) == 20
    assert [line for line in lines if line.startswith("left")] == ["left 0"] * 3


def test_two_living_processes_cannot_be_the_same_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "_WAIT_S", 0.3)
    with swapping(tmp_path, "runs/one") as process:
        with pytest.raises(NodeError) as refused:
            OwnedFolder(tmp_path, Identity.of(Path("runs/one"), 0, "optimizer"))
        assert f"'pid': {process.pid}" in str(refused.value) and "end that process" in str(refused.value)
        assert len(list(tmp_path.iterdir())) == 1
        # Another role, another run of this name and another rank do not get into each other's way.
        for run, rank, role in (
            ("runs/one", 0, "weights"),
            ("x/one", 0, "optimizer"),
            ("runs/one", 1, "optimizer"),
        ):
            OwnedFolder(tmp_path, Identity.of(Path(run), rank, role)).remove()


def test_a_predecessor_that_is_still_dying_is_waited_for(tmp_path: Path) -> None:
    identity = Identity.of(Path("runs/one"), 0, "optimizer")
    with swapping(tmp_path, "runs/one") as process:
        subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {process.pid}"])
        began_s = time.monotonic()
        folder = OwnedFolder(tmp_path, identity)
        assert time.monotonic() - began_s > 0.2
        assert json.loads((folder.path / "owner.json").read_text())["pid"] == os.getpid()
        folder.remove()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_a_person_has_removed_is_no_fault(tmp_path: Path) -> None:
    folder = OwnedFolder(tmp_path, Identity.of(Path("runs/one"), 0, "optimizer"))
    (folder.path / "owner.json").unlink()
    folder.path.rmdir()
    folder.remove()
    assert not list(tmp_path.iterdir())
