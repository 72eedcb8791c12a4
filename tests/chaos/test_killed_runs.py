"""Ranks and launchers killed at random: the run still ends, with the weights of an undisturbed one."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from harness.command import COMMAND, wait_until
from harness.lab_runs import assert_same_result
from harness.toy import LOOP, MODEL, QUIET, REST

from contract.exit_codes import ExitCode
from contract.run_folder import RunFolder, last_json_line

STEPS = 1000
KILLS = 6


def overrides(toy_tokens: Path, root: Path, name: str) -> list[str]:
    run = [f"data.prefix={toy_tokens}", f"run.root={root}", f"run.name={name}"]
    return [*MODEL, *LOOP, *REST, *QUIET, *run, f"loop.steps={STEPS}", "checkpoint.every_steps=50"]


def train(arguments: list[str]) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*COMMAND, "train", "--ranks", "2", *arguments], env=environment)


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, by the kernel's own list."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


@pytest.mark.timeout(900)
@pytest.mark.req("C13", "A22")
def test_any_process_may_be_killed_at_any_time(toy_tokens: Path, tmp_path: Path) -> None:
    calm = train(overrides(toy_tokens, tmp_path, "calm"))
    assert calm.wait(timeout=300) == 0

    run = RunFolder(tmp_path / "stormy")
    for number in range(KILLS):
        process = train(overrides(toy_tokens, tmp_path, "stormy"))
        # Anywhere: during imports, start-up, steps, saves.
        time.sleep(random.uniform(1.0, 12.0))
        victims = descendants(process.pid)
        if victims and process.poll() is None:
            victim = random.choice(victims)
            print(f"kill {number}: {victim} at step {(last_json_line(run.metrics) or {}).get('step')}")
            os.kill(victim, signal.SIGKILL)
        code = process.wait(timeout=120)
        assert code != ExitCode.CONFIG
        wait_until("all ranks to be gone", lambda left=victims: not any(is_alive(pid) for pid in left), 60)
    last = train(overrides(toy_tokens, tmp_path, "stormy"))
    assert last.wait(timeout=300) == 0
    assert_same_result(RunFolder(tmp_path / "calm"), run, STEPS)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
