"""Reading launchers' variables: what can be told without starting anything."""

import contextlib
import errno
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from contract.errors import ConfigError, NodeError, PeerError, UserError
from train import bootstrap, roll_call
from train.bootstrap import Joined, World
from train.launch import _unwritable, _who_trains


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


def test_an_agent_is_believed_before_its_own_step() -> None:
    """The agent is the only task of its step on this node, and may have been started by an MPI-capable srun."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        ranks = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
        nodes = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2"}
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        agent = {"TRIERARCH_AGENT": "1", "TRIERARCH_LISTENER": str(listener.detach())}
    step = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    joined = bootstrap.join(
        {**ranks, **nodes, **master, **agent, **step, "PMI_RANK": "0", "PMI_SIZE": "1"}, 5
    )
    assert joined.world == bootstrap.World(
        size=8, local_size=4, nodes=2, launcher="agent", master=f"127.0.0.1:{port}"
    )
    joined.store.set("key", "value")
    assert joined.store.get("key") == b"value"


@pytest.mark.parametrize(
    ("world", "sentence"),
    [
        (bootstrap.World(), "1 rank"),
        (bootstrap.World(size=4, launcher="mpi"), "4 ranks started by mpirun"),
        (bootstrap.World(size=4, launcher="slurm"), "4 ranks started by srun"),
        (bootstrap.World(size=4, launcher="torchrun"), "4 ranks started by torchrun"),
        (bootstrap.World(size=1, launcher="agent"), "1 rank started by an agent"),
        (
            bootstrap.World(size=4, nodes=2, launcher="agent"),
            "4 ranks started by an agent on each of 2 nodes",
        ),
    ],
)
def test_who_trains_is_said_in_words(world: bootstrap.World, sentence: str) -> None:
    assert _who_trains(world) == sentence


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 78), (errno.EACCES, 78), (errno.ESTALE, 1)])
def test_a_file_system_that_fails_over_is_tried_again(number: int, code: int) -> None:
    error = _unwritable(Path("/runs/x"), OSError(number, "no"))
    assert error.exit_code == code and "/runs/x cannot be written (no)" in str(error)


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
    assert roll_call.judge_roll(roll).startswith(sentence)
    assert bool(roll_call.judge_roll(roll)) == bool(sentence)


BROKEN, WELL = ("n2", "cuda", "", "shows 1 GPUs to more than 1 ranks"), ("n1", "cuda", "a", "")


@pytest.mark.parametrize(
    ("roll", "before", "unfit"),
    [
        ([WELL, BROKEN], False, {1}),
        ([WELL, ("n2", "cpu", "", "")], False, {1}),
        ([BROKEN, BROKEN], False, set()),
        ([("n2", "cuda", "a", ""), BROKEN], False, set()),
        ([("n2", "cuda", "a", ""), BROKEN], True, {1}),
        ([WELL, ("n2", "cuda", "a", ""), ("n2", "cuda", "a", "")], False, {2}),
        ([("n2", "cuda", "a", ""), ("n2", "cuda", "a", "")], False, set()),
        ([WELL, ("n1", "cuda", "b", "")], True, set()),
    ],
)
def test_what_one_node_lacks_is_its_own_fault(
    roll: list[tuple[str, str, str, str]], before: bool, unfit: set[int]
) -> None:
    assert roll_call.unfit_ranks(roll, before) == unfit


def test_a_node_without_its_gpu_leaves_as_a_crash_and_its_peers_as_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The supervisor blames the rank that crashes, and tries again without its node."""
    store = dist.HashStore()
    monkeypatch.setattr(roll_call.socket, "gethostname", lambda: "n1")
    store.set("here/1", json.dumps(["n2", "cpu", "", "has GPUs that torch cannot use"]))
    with pytest.raises(PeerError, match="n2"):
        joined = Joined(World(rank=0, size=2), store)
        roll_call._roll_call(joined, torch.device("cpu"), "", 5.0)
    with pytest.raises(NodeError) as caught:
        joined = Joined(World(rank=1, size=2), store)
        monkeypatch.setattr(roll_call.socket, "gethostname", lambda: "n2")
        roll_call._roll_call(joined, torch.device("cpu"), "has GPUs that torch cannot use", 5.0)
    assert caught.value.exit_code == 1


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
