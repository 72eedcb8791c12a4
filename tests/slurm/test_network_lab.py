"""The network test as a Slurm job, by itself and before a training; ranks placed in an order of nodes."""

import json
import signal
import subprocess
from pathlib import Path

import pytest
from harness.command import COMMAND, wait_until
from harness.lab_runs import Runs, events, node_of, ranks

from contract.network_test import BROKEN_CODE, MEASUREMENT, VERDICT, NetworkVerdict
from contract.run_folder import Event, RunFolder
from slurm.lab import processes
from slurm.runs.status import RunState, status
from tools.nccl.measurement import Measurement


def trierarch(runs: Runs, folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, *words],
        cwd=folder,
        env=runs.lab.environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


@pytest.mark.req("C10", "A5", "B6")
def test_a_network_test_is_a_job_that_leaves_a_report(runs: Runs, tmp_path: Path) -> None:
    where = ["cluster=lab", "nodes=3", "job.ranks_per_node=2", "job.preflight_s=12"]
    done = trierarch(runs, tmp_path, "nccl", "test", "--name=first", "--wait", *where)
    # Nobody planted a fault; on a machine as busy as this one something may be slow.
    assert done.returncode in (0, 1), done.stdout + done.stderr + runs_log(tmp_path / "runs/first")
    run = RunFolder(tmp_path / "runs" / "first")
    measurement = Measurement.load(run.nccl / MEASUREMENT)
    assert (len(measurement.nodes), measurement.gpus_per_node, measurement.backend) == (3, 2, "gloo")
    pairs = set(zip(measurement.exchanges.first.tolist(), measurement.exchanges.second.tolist(), strict=True))
    # In each node, and on each rail between nodes.
    assert {tuple(sorted(pair)) for pair in pairs} == {
        *((0, 1), (2, 3), (4, 5)),
        *((0, 2), (0, 4), (2, 4)),
        *((1, 3), (1, 5), (3, 5)),
    }
    assert {one.algorithm for one in measurement.collectives if one.operation == "all_reduce"} >= {
        "flat",
        "hierarchical",
    }
    assert sum(one.wrong for one in measurement.collectives) == 0 and not measurement.silent
    verdict = NetworkVerdict.load(run.nccl / VERDICT)
    assert verdict.exit_code == done.returncode and verdict.verdict in done.stdout
    for name in (
        "report.html",
        "report.txt",
        "hostfile",
        "rankfile",
        "plan.json",
        "cluster.yaml",
        "bandwidth.png",
    ):
        assert (run.nccl / name).stat().st_size > 0, name
    (seen,) = status(run.path)
    assert seen.state is RunState.finished
    again = trierarch(runs, tmp_path, "nccl", "report", "first")
    assert again.returncode == done.returncode
    assert again.stdout.partition("files:")[0] in done.stdout
    analysed = trierarch(runs, tmp_path, "nccl", "analyse", str(run.nccl / MEASUREMENT), "--json")
    assert json.loads(analysed.stdout)["verdict"] == verdict.verdict


@pytest.mark.chaos
@pytest.mark.req("C10", "A22")
def test_a_node_that_freezes_in_a_network_test_is_named_and_the_others_are_measured(
    runs: Runs, tmp_path: Path
) -> None:
    where = ["cluster=lab", "nodes=3", "job.ranks_per_node=2", "job.preflight_s=120"]
    words = [*COMMAND, "nccl", "test", "--name=frozen", "--wait", *where]
    run = RunFolder(tmp_path / "runs" / "frozen")
    with subprocess.Popen(
        words, cwd=tmp_path, env=runs.lab.environment, stdout=subprocess.PIPE, text=True
    ) as test:
        wait_until("exchanges", lambda: "exchanges" in _progress(run), timeout_s=90)
        asleep = runs.lab.processes_on("n2")
        processes.send(asleep, signal.SIGSTOP)
        try:
            said, _ = test.communicate(timeout=280)
        finally:
            processes.send(asleep, signal.SIGCONT)
    assert test.returncode == BROKEN_CODE, said + runs_log(run.path)
    measurement = Measurement.load(run.nccl / MEASUREMENT)
    assert list(measurement.silent) == ["n2"] and measurement.nodes == ["n1", "n3"]
    assert "n2" in NetworkVerdict.load(run.nccl / VERDICT).exclude
    assert [event["node"] for event in events(run, Event.NODE_FAILED)] == ["n2"]


@pytest.mark.req("C10", "B6")
def test_a_training_tests_its_network_first_and_reduces_as_that_says(runs: Runs) -> None:
    more = [
        "preflight=nccl",
        "job.preflight_s=12",
        "comm.allreduce=auto",
        "loop.steps=20",
        "optim.warmup_steps=2",
    ]
    done = runs.submit("preflight", *more)
    assert done.returncode == 0, done.stderr
    runs.wait_for("preflight", RunState.finished, timeout_s=150)
    run = runs.folder("preflight")
    (tested,) = events(run, Event.NETWORK_TESTED)
    (started,) = events(run, Event.STARTED)
    assert tested["verdict"] in ("OK", "DEGRADED") and tested["time"] < started["time"]
    assert (run.nccl / "plan.json").exists() and (run.nccl / "report.html").exists()


@pytest.mark.req("B6", "C10")
@pytest.mark.parametrize("launch", ["agents", "step"])
def test_ranks_are_placed_in_a_given_order_of_nodes(runs: Runs, tmp_path: Path, launch: str) -> None:
    order = tmp_path / "hostfile"
    order.write_text("n3\nn3\nn1\nn1\n")
    health = ["job.health_check=false"] if launch == "agents" else []
    wanted = [f"job.node_order={order}", f"job.launch={launch}", "job.sbatch_lines=['--nodelist=n[1,3]']"]
    run = runs.start(f"ordered-{launch}", *wanted, *health)
    runs.wait_for_step(run, 1)
    assert {rank: node_of(pid) for rank, pid in ranks(run).items()} == {0: "n3", 1: "n3", 2: "n1", 3: "n1"}
    runs.lab.run("scancel", runs.job(run.name))


def _progress(run: RunFolder) -> str:
    file = run.nccl / "progress.json"
    return file.read_text() if file.exists() else ""


def runs_log(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted((folder / "logs").glob("*.log")))
