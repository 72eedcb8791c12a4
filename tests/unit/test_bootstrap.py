"""Reading launchers' variables: what can be told without starting anything."""

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
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is set, but alone started 1 rank"),
    ],
)
def test_contradictions_are_errors(environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        bootstrap.join(environ, timeout_s=5)


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
