"""Ranks, launchers and nodes killed at random: the run still ends, with the weights of an undisturbed one."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from harness.command import COMMAND, wait_until
from harness.slurm_lab import SlurmLab
from harness.toy import LOOP, MODEL, QUIET, REST
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from contract.exit_codes import ExitCode
from contract.run_folder import Event, RunFolder, last_json_line, read_json_lines
from slurm.status import RunState, status

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


def assert_same_result(one: RunFolder, other: RunFolder, folder: Path) -> None:
    trees = []
    for run in (one, other):
        assert run.finished.exists()
        steps = [line["step"] for line in read_json_lines(run.metrics) if "loss" in line]
        assert steps == list(range(1, STEPS + 1))
        dcp_to_torch_save(run.checkpoints / f"step_{STEPS}", folder / "weights.pt")
        trees.append(torch.load(folder / "weights.pt", weights_only=True)["model"])
    for name, tensor in trees[0].items():
        assert torch.equal(tensor, trees[1][name]), name


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
    assert_same_result(RunFolder(tmp_path / "calm"), run, tmp_path)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.timeout(900)
@pytest.mark.req("C13", "A21", "A22")
def test_a_node_that_loses_its_power_does_not_cost_the_run(
    lab: SlurmLab, toy_tokens: Path, tmp_path: Path
) -> None:
    def submit(name: str) -> RunFolder:
        job = ["cluster=lab", "job.nodes=2", "job.ranks_per_node=1", "job.cpus_per_rank=1"]
        command = [*COMMAND, "submit", *overrides(toy_tokens, tmp_path, name), *job]
        subprocess.run(command, env=lab.environment, check=True, timeout=60)
        return RunFolder(tmp_path / name)

    def finished(run: RunFolder) -> bool:
        (one,) = status(run.path)
        assert one.state not in (RunState.failed, RunState.lost), one
        return one.state == RunState.finished

    calm = submit("calm")
    wait_until("the calm run to finish", lambda: finished(calm), 300)
    stormy = submit("stormy")
    wait_until("a checkpoint", lambda: len(stormy.published_steps()) > 0, 120)
    job = next(str(line["job_id"]) for line in stormy.read_events() if line["event"] == Event.SUBMITTED)
    node = lab.run("scontrol", "show", "hostnames", lab.job(job)["NodeList"]).split()[-1]
    lab.cluster.crash(node)
    wait_until("the stormy run to finish", lambda: finished(stormy), 300)
    assert len([line for line in stormy.read_events() if line["event"] == Event.RESUMED]) >= 1
    assert_same_result(calm, stormy, tmp_path)
