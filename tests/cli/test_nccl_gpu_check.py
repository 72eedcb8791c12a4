"""The network test's checks for GPUs, with CPUs in their place: they must be ready when there are some."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "gpu" / "nccl_check.py"


def run_script(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.chaos
@pytest.mark.req("C10")
def test_the_script_for_gpus_runs(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    done = run_script("--device", "cpu", "--budget", "4", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all checks passed\n")
    figures = json.loads(out.read_text())
    assert figures.keys() == {"ranks", "contents", "exchanges", "all-reduce", "frozen"}
    assert figures["frozen"]["named"] == "[[1]]"


@pytest.mark.req("C10")
def test_the_script_says_that_there_is_no_gpu() -> None:
    done = run_script()
    assert (done.returncode, done.stdout.count("\n")) == (2, 1) and done.stdout.startswith(
        "there is no GPU that torch can use here"
    )
