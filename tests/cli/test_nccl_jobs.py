"""`trierarch nccl test` and `report`, as a user types them. On the lab they are in tests/slurm/test_network_lab.py."""

import json
from pathlib import Path

import pytest
from harness.command import Trierarch

from contract.exit_codes import ExitCode
from contract.run_folder import Event, RunFolder

pytestmark = pytest.mark.slow


@pytest.mark.req("C10")
def test_a_test_is_a_short_job_that_does_not_come_back(trierarch: Trierarch, tmp_path: Path) -> None:
    done = trierarch("nccl", "test", "cluster=local", "--name", "first", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "--only-network-test" in done.stdout and "--requeue=never" in done.stdout
    # One rank has nobody to talk to.
    assert "--ranks-per-node=2" in done.stdout and "--network-test-s=300" in done.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["test", "optim.lr=1"], "optim.lr=1: a network test trains nothing"),
        (["test", "cluster=local", "nodes=2"], "without Slurm there is one node"),
        (["test", "cluster=local", "--baseline", "none.npz"], "none.npz: there is no such file"),
        (["test", "cluster=local", "--name", "a/b"], "--name a/b: give a name without /"),
        (["test", "cluster=local", "job.ranks_per_node=1"], "one rank has nobody to talk to"),
        (["report", "none"], "there is no run none"),
    ],
)
def test_what_is_wrong_is_one_sentence(trierarch: Trierarch, words: list[str], said: str) -> None:
    done = trierarch("nccl", *words)
    assert done.returncode == ExitCode.CONFIG and said in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_report_that_is_not_there_yet_and_one_that_never_comes(
    trierarch: Trierarch, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "runs" / "first")
    run.create()
    run.append_event(Event.SUBMITTED, job_id="1", profile="local", scheduler="local", host="x")
    done = trierarch("nccl", "report", "first")
    assert done.returncode == ExitCode.CONFIG and "has no report of a network test (yet)" in done.stderr
    run.mark_failed("the network test did not end: too few nodes")
    done = trierarch("nccl", "report", "first")
    assert done.returncode == 2 and "BROKEN: the network test did not end: too few nodes" in done.stderr
    run.failed.write_text("")
    done = trierarch("nccl", "report", "first")
    assert done.returncode == 2 and "BROKEN: the network test did not end: see runs/first/logs" in done.stderr
    # A full disk leaves the marker empty: then what a rank has said counts, or the event.
    (run.logs / "1.network.0.log").write_text("trierarch: the disk is full\n")
    done = trierarch("nccl", "report", "first")
    assert done.returncode == 2 and "did not end: the disk is full\n" in done.stderr
    run.append_event(Event.NETWORK_TESTED, verdict=None, reason="rank 0 on a cannot write")
    done = trierarch("nccl", "report", "first")
    assert done.returncode == 2 and "did not end: rank 0 on a cannot write\n" in done.stderr


@pytest.mark.req("C10", "D6")
def test_a_test_of_this_machine(trierarch: Trierarch, tmp_path: Path) -> None:
    words = ["cluster=local", "job.preflight_s=10", "--name=here", "--wait"]
    done = trierarch("nccl", "test", *words)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    folder = tmp_path / "runs" / "here" / "nccl"
    assert json.loads((folder / "verdict.json").read_text())["exit_code"] == done.returncode
    words[2:3] = ["--name=again", f"--baseline={folder / 'measurement.npz'}"]
    again = trierarch("nccl", "test", *words)
    assert again.returncode in (0, 1) and "baseline" in again.stdout
