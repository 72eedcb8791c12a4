"""The `trierarch` command, run as a user runs it."""

import os
import subprocess
from pathlib import Path

import pytest
from harness.command import COMMAND, Trierarch


@pytest.fixture
def trierarch(tmp_path: Path) -> Trierarch:
    """`trierarch("status", ...)` in an empty folder: the finished process, output as text."""

    def run(*arguments: str, timeout_s: float = 120, **variables: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*COMMAND, *arguments],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    return run
