"""The checks for a GPU, with a CPU in its place: they must be ready when there is one, which shows the rest."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "gpu" / "offload_check.py"


@pytest.mark.slow
@pytest.mark.req("C6", "C7", "B4")
def test_the_script_for_a_gpu_runs(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--device", "cpu", "--out", out],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all checks passed\n")
    figures = json.loads(out.read_text())
    assert figures.keys() == {"pinned", "overlap", "numbers", "memory", "types"}
    assert set(figures["numbers"].values()) == {0.0}
