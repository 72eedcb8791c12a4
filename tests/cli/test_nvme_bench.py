"""`trierarch nvme-bench` measures, chooses, and leaves nothing but the settings."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from harness.command import COMMAND, Trierarch, wait_until
from harness.disks import mounted

from contract.exit_codes import ExitCode
from tools.cli_nvme import parse_bytes
from train.offload.nvme.measure import Figure, best
from train.offload.nvme.settings import NvmeSettings

QUICK = ("--size", "128MiB", "--seconds", "0.01")


@pytest.mark.req("C6")
def test_a_bench_measures_and_leaves_settings(trierarch: Trierarch, tmp_path: Path) -> None:
    (tmp_path / "nvme.json").write_text('{"limit_s": 77}')
    shown = trierarch("nvme-bench", str(tmp_path), *QUICK)
    assert shown.returncode == 0, shown.stderr
    head, *rows = shown.stdout.splitlines()
    assert head.split() == ["GB/s", "block", "threads", "read", "write", "mixed"]
    figures = [row.split() for row in rows if " MiB " in row or " KiB " in row]
    assert len(figures[:15]) == 15 and all(float(speed) > 0 for row in figures[:15] for speed in row[3:6])
    (chosen,) = [row for row in figures if row[-1] == "best"]
    settings = NvmeSettings.load(tmp_path)
    unit = {"KiB": 1 << 10, "MiB": 1 << 20}[chosen[1]]
    assert (settings.block_bytes, settings.threads) == (int(chosen[0]) * unit, int(chosen[2]))
    assert settings.limit_s == 77 and settings.measured["mixed_bytes_per_s"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["nvme.json"]


def test_json_of_two_paths_with_settings_elsewhere(trierarch: Trierarch, tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        path.mkdir()
    where = ("--write-settings", "tuned.json", "--json", "--size", "256MiB", "--seconds", "0.01")
    shown = trierarch("nvme-bench", *map(str, paths), *where)
    assert shown.returncode == 0, shown.stderr
    facts = json.loads(shown.stdout)
    assert len(facts["figures"]) == 15 and facts["best"] in facts["figures"]
    assert facts["settings"] == "tuned.json"
    assert NvmeSettings.load(tmp_path / "tuned.json").threads == facts["best"]["threads"]
    assert not list(paths[0].iterdir()) and not list(paths[1].iterdir())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("none",), "the NVMe path none does not exist here"),
        ((".", "."), "the NVMe paths name a folder twice"),
        ((".", "--size", "1MB"), "--size of 1,000,000 bytes is too small: give at least 135MB"),
        ((".", "--size", "2 bytes"), "--size 2 bytes: give a number and a unit"),
        ((".", "--size", "900TB"), "and a rank wants 900,000.00 GB there: make room"),
        ((".", "--seconds", "0"), "--seconds 0: give more than 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    trierarch: Trierarch, tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    refused = trierarch("nvme-bench", *arguments)
    assert refused.returncode in (ExitCode.CONFIG, 1)
    assert refused.stderr.startswith("trierarch: ") and sentence in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_full_and_a_read_only_disk_are_refused(trierarch: Trierarch, tmp_path: Path) -> None:
    with mounted(tmp_path / "full", "-t", "tmpfs", "-o", "size=160m", "none") as path:
        (path / "data").write_bytes(bytes(100 << 20))
        refused = trierarch("nvme-bench", str(path), *QUICK)
        assert refused.returncode == 1 and "MB free and a rank wants 0.13 GB there" in refused.stderr
        assert [file.name for file in path.iterdir()] == ["data"]
    with mounted(tmp_path / "ro", "-t", "tmpfs", "-o", "ro", "none") as path:
        refused = trierarch("nvme-bench", str(path), *QUICK)
        assert refused.returncode == 1 and f"the NVMe path {path} cannot be written to" in refused.stderr


def test_ctrl_c_removes_the_files(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "nvme-bench", str(tmp_path), "--size", "128MiB", "--seconds", "30"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "dumb"},
    )
    try:
        wait_until("its file", lambda: bool(list(tmp_path.glob("trierarch-*/blocks.bin"))))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode != 0 and b"Traceback" not in errors
    assert not list(tmp_path.iterdir())


def test_the_best_takes_least_of_those_as_good() -> None:
    def figure(block_bytes: int, threads: int, mixed: float) -> Figure:
        return Figure(block_bytes, threads, read=1.0, write=1.0, mixed=mixed)

    fastest = figure(16 << 20, 8, 3.0)
    as_good = figure(4 << 20, 2, 2.9)
    smaller = figure(1 << 20, 2, 2.86)
    slower = figure(256 << 10, 1, 2.8)
    assert best([fastest, slower, as_good, smaller]) is smaller
    assert best([slower]) is slower


def test_sizes_are_read_with_their_units() -> None:
    assert [parse_bytes(text) for text in ("7", "2GB", "1.5 GiB", "3KiB")] == [7, 2 * 10**9, 3 << 29, 3 << 10]
