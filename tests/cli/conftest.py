"""The `trierarch` command, run as a user runs it."""

import os
import subprocess
from pathlib import Path

import pytest
from harness.command import COMMAND, Trierarch
from harness.toy import write_toy_text


@pytest.fixture(scope="session")
def toy_tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files of made-up words, byte by byte."""
    folder = tmp_path_factory.mktemp("toy")
    prefix = folder / "toy"
    text = write_toy_text(folder / "text")
    command = [*COMMAND, "data", "prepare", str(text), "--prefix", str(prefix)]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    return prefix


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
