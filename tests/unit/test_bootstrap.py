"""Reading launchers' variables: what can be told without starting anything."""

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from contract.errors import ConfigError, UserError
from train import bootstrap


@pytest.mark.parametrize(
    ("text", "counts"),
    [("2", [2]), ("2(x3),1", [2, 2, 2, 1]), ("1,4(x2)", [1, 4, 4])],
)
def test_tasks_per_node_is_expanded(text: str, counts: list[int]) -> None:
    assert bootstrap.tasks_per_node(text) == counts


def test_tasks_per_node_that_is_no_such_thing_is_said() -> None:
    with pytest.raises(UserError, match="SLURM_STEP_TASKS_PER_NODE='two' cannot be read"):
        bootstrap.tasks_per_node("two")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[3-7,9]", "n3"),
        ("jwb[0021,0053]", "jwb0021"),
        ("a1,b[2-3]", "a1"),
        ("r[01-02]-ib", "r01-ib"),
        ("rack[2-3]n[05-09]", "rack2n05"),
    ],
)
def test_the_first_host_of_a_list_has_rank_0(nodes: str, first: str) -> None:
    assert bootstrap.first_host({"SLURM_STEP_NODELIST": nodes}) == first
    assert bootstrap.first_host({"SLURM_JOB_NODELIST": nodes}) == first


def test_a_host_file_decides_where_rank_0_is(tmp_path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("n3\nn1\n")
    environ = {"SLURM_HOSTFILE": str(hosts), "SLURM_STEP_NODELIST": "n[1,3]"}
    assert bootstrap.first_host(environ | {"SLURM_DISTRIBUTION": "arbitrary"}) == "n3"
    assert bootstrap.first_host(environ | {"SLURM_DISTRIBUTION": "block"}) == "n1"


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}, "has 4 tasks, but the trainer was started once"),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
            | {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
            "RANK=0 and WORLD_SIZE=1 are set, but the launcher says OMPI_COMM_WORLD_RANK=1",
        ),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is set, but alone started 1 rank"),
    ],
)
def test_contradictions_are_errors(environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        bootstrap.join(environ, timeout_s=5)


@pytest.mark.parametrize(
    ("roll", "sentence"),
    [
        ([("n1", "cuda", "a", ""), ("n1", "cuda", "b", ""), ("n2", "cuda", "a", "")], ""),
        ([("n1", "cpu", "", ""), ("n1", "cpu", "", "")], ""),
        ([("n1", "cuda", "a", ""), ("n1", "cuda", "a", "")], "ranks 0 and 1 on n1 share one GPU"),
        ([("n1", "cuda", "a", ""), ("n2", "cpu", "", "")], "n2 shows its ranks no GPU, other nodes do"),
        (
            [("n1", "cuda", "a", ""), ("n2", "cpu", "", "has GPUs that torch cannot use")],
            "n2 (rank 1) has GPUs",
        ),
    ],
)
def test_every_rank_has_a_device_of_its_own(roll: list[tuple[str, str, str, str]], sentence: str) -> None:
    assert bootstrap.judge_roll(roll).startswith(sentence)
    assert bool(bootstrap.judge_roll(roll)) == bool(sentence)


def test_a_stranger_on_a_candidate_port_is_passed_over() -> None:
    """Under srun the ranks look for rank 0 on some ports; another program may listen on one of them."""
    with socket.create_server(("", 0)) as stranger, socket.create_server(("", 0)) as free:
        ports = [stranger.getsockname()[1], free.getsockname()[1]]
        free.close()
        done = threading.Event()

        def hang_up() -> None:
            stranger.settimeout(0.1)
            while not done.is_set():
                with contextlib.suppress(OSError):
                    stranger.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        with ThreadPoolExecutor(2) as pool:
            ranks = [
                pool.submit(bootstrap._meet, rank, 2, ["127.0.0.1"], ports, "job", 60.0) for rank in range(2)
            ]
            stores = [rank.result(timeout=90) for rank in ranks]
        done.set()
    assert {master for _, master in stores} == {f"127.0.0.1:{ports[1]}"}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1"},
        {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    ],
)
def test_one_process_is_a_world(environ: dict[str, str]) -> None:
    assert bootstrap.join(environ, timeout_s=5).world == bootstrap.World()
