"""Ranks started by the real mpirun, the real torchrun, or nobody find themselves and each other."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import who_am_i

from contract.exit_codes import ExitCode
from slurm.launch import mpi_command

pytestmark = pytest.mark.slow

PROGRAM = [sys.executable, str(Path(who_am_i.__file__))]


def launch(
    command: list[str], timeout_s: float = 90, **variables: str
) -> tuple[list[dict[str, Any]], "subprocess.CompletedProcess[str]"]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line["rank"]), done


def mpirun(ranks: int, *more: str) -> tuple[list[str], dict[str, str]]:
    argv, variables = mpi_command(ranks, PROGRAM)
    return [argv[0], *more, *argv[1:]], variables


def assert_world(lines: list[dict[str, Any]], size: int, launcher: str) -> None:
    assert [line["rank"] for line in lines] == list(range(size))
    for line in lines:
        assert line["size"] == line["local_size"] == size
        assert (line["nodes"], line["node_rank"]) == (1, 0)
        assert line["local_rank"] == line["rank"]
        assert line["launcher"] == launcher
        assert line["total"] == size * (size - 1) / 2
    assert len({line["master"] for line in lines}) == 1


@pytest.mark.req("C2", "C4", "D3")
def test_mpirun() -> None:
    argv, variables = mpirun(4)
    lines, done = launch(argv, **variables)
    assert done.returncode == 0, done.stderr
    assert_world(lines, 4, "mpi")
    assert lines[0]["master"].startswith("127.0.0.1:"), "on one node nothing listens on the network"


@pytest.mark.req("D3")
def test_mpirun_with_hosts(tmp_path: Path) -> None:
    """-H and --hostfile as with Horovod; several real nodes are in tests/slurm."""
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=2\n")
    argv, variables = mpirun(2, "--hostfile", str(hosts))
    lines, done = launch(argv, **variables)
    assert done.returncode == 0, done.stderr
    assert_world(lines, 2, "mpi")


def test_torchrun() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    lines, done = launch([*torchrun, PROGRAM[1]])
    assert done.returncode == 0, done.stderr
    assert_world(lines, 2, "torchrun")
    assert not any(line["mpi"] for line in lines)


def test_alone_imports_no_mpi() -> None:
    lines, done = launch(PROGRAM)
    assert done.returncode == 0, done.stderr
    assert_world(lines, 1, "alone")
    assert lines[0]["mpi"] is False


def test_a_port_that_is_taken_is_said() -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        _, done = launch(PROGRAM, **variables)
    assert done.returncode == ExitCode.CONFIG
    assert done.stderr.strip().endswith(
        f"port {port} on 127.0.0.1 is taken: set MASTER_PORT to a free port, or start the ranks with torchrun, "
        "mpirun or srun, which find one"
    )


def test_a_rank_that_does_not_come_is_named() -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    variables = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    _, done = launch(PROGRAM, **variables, WHO_AM_I_TIMEOUT_S="2")
    assert done.returncode == ExitCode.PEER_FAILED
    assert "rank 1, 2 of 3 did not come within 2 s" in done.stderr


@pytest.mark.parametrize(("claimed", "code"), [("2", 0), ("3", ExitCode.CONFIG)])
def test_a_world_size_that_contradicts_mpi_is_refused(claimed: str, code: int) -> None:
    argv, variables = mpirun(2)
    _, done = launch(argv, **variables, WORLD_SIZE=claimed)
    assert done.returncode == code
    assert ("WORLD_SIZE=3 is set, but mpi started 2 ranks" in done.stderr) == (code != 0)


def test_without_an_mpi_library_the_sentence_says_what_else_there_is(tmp_path: Path) -> None:
    """mpi4py that cannot load its library, as on a machine without MPI."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py/__init__.py").write_text("class rc: pass\n")
    (tmp_path / "mpi4py/MPI.py").write_text("raise RuntimeError('cannot load MPI library')\n")
    argv, variables = mpirun(2)
    _, done = launch(argv, **variables, PYTHONPATH=str(tmp_path))
    assert done.returncode == ExitCode.CONFIG
    assert "MPI cannot be loaded (cannot load MPI library): install mpi4py and an MPI library" in done.stderr
