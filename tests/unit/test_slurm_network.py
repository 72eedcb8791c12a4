"""The network test of a job, seen from its supervisor: who is left out, in which order, and what is told."""

import json
from pathlib import Path
from typing import Any

import pytest
from harness.disks import fill, mounted, small_disk
from harness.programs import write_program
from harness.supervised import World

from contract.errors import ConfigError, UserError
from contract.network_test import SPEC, NetworkVerdict, blamed, last_words
from contract.run_folder import Event, RunFolder
from slurm.render import render
from slurm.settings import load_submit
from slurm.supervise.health import Wishes
from slurm.supervise.network import why_not_written
from slurm.supervise.nodes import Node, arranged, place_tasks

pytestmark = pytest.mark.slow

OK = {"verdict": "OK", "exit_code": 0}
SLOW_B = {"verdict": "DEGRADED", "exit_code": 1, "exclude": {"b": "its adapter is slow"}}


def outcome(world: World) -> dict[str, Any]:
    (event,) = world.events(Event.NETWORK_TESTED)
    return event


@pytest.mark.req("B6", "C10")
def test_ranks_are_placed_in_the_order_that_suits_the_network(world: World) -> None:
    world.nodes += [Node("c")]
    world.plan["network"] = [{**OK, "order": ["c", "a", "b"]}]
    assert world.supervise(count=3, network_test_s=30) == 0
    assert world.starts_on(0) == ["c", "a", "b"]
    assert outcome(world)["verdict"] == "OK" and outcome(world)["order"] == ["c", "a", "b"]
    spec = json.loads((world.run.nccl / SPEC).read_text())
    assert spec["nodes"] == ["a", "b", "c"] and spec["silent"] == {} and 0 < spec["budget_s"] <= 30


@pytest.mark.req("B6", "C10")
def test_a_slow_node_is_left_out_where_a_spare_can_take_its_place(world: World) -> None:
    world.nodes += [Node("c")]
    world.plan["network"] = [SLOW_B]
    assert world.supervise(network_test_s=30) == 0
    assert world.starts_on(0) == ["a", "c"]
    (failed,) = world.events(Event.NODE_FAILED)
    assert (failed["node"], failed["reason"]) == ("b", "its adapter is slow")


def test_a_slow_node_is_better_than_none(world: World) -> None:
    world.plan["network"] = [SLOW_B]
    assert world.supervise(network_test_s=30) == 0
    assert world.starts_on(0) == ["a", "b"] and not world.events(Event.NODE_FAILED)
    assert outcome(world)["exclude"] == ["b"]


@pytest.mark.req("C10", "A22")
def test_a_node_that_does_not_answer_is_named_and_the_rest_is_measured(world: World) -> None:
    world.nodes += [Node("c")]
    world.plan["network"] = [{"silent": ["b"], "code": 76}, OK]
    assert world.supervise(network_test_s=60) == 0
    assert world.starts_on(0) == ["a", "c"]
    (failed,) = world.events(Event.NODE_FAILED)
    assert (
        failed["node"] == "b"
        and "did not answer in the network test (round 3: no answer)" in failed["reason"]
    )
    spec = json.loads((world.run.nccl / SPEC).read_text())
    assert spec["nodes"] == ["a", "c"] and list(spec["silent"]) == ["b"]


@pytest.mark.req("C10", "A22")
def test_a_node_that_is_dead_from_the_start_is_named_and_the_rest_is_measured(world: World) -> None:
    world.nodes += [Node("c"), Node("d")]
    world.node("b", broken=9)
    world.node("d", problems=["it has no GPU"])
    world.plan["network"] = [OK]
    agents = world.prepare(4, network_test_s=30, health=Wishes())
    tested = agents.only_test_network(world.begin, lambda: False)
    agents.close()
    spec = json.loads((world.run.nccl / SPEC).read_text())
    assert spec["nodes"] == ["a", "c"] and spec["silent"].keys() == {"b", "d"} == tested.silent.keys()
    assert "it has no GPU" in spec["silent"]["d"] and tested.verdict is not None


def test_what_an_earlier_test_has_left_does_not_pass_for_todays(world: World) -> None:
    world.run.nccl.mkdir()
    for name in ("partial.npz", "plan.json", "hung.json"):
        (world.run.nccl / name).touch()
    world.plan["network"] = [{"silent": ["b"], "code": 76}, {"code": 1}, OK]
    world.nodes += [Node("c")]
    agents = world.prepare(3, network_test_s=60)
    tested = agents.only_test_network(world.begin, lambda: False)
    agents.close()
    assert {path.name for path in world.run.nccl.iterdir()} == {SPEC, "verdict.json"}
    assert tested.verdict is not None and json.loads((world.run.nccl / SPEC).read_text())["resume"]


def test_a_test_that_is_asked_to_stop_says_so(world: World) -> None:
    world.plan["network"] = [{"code": 1}]
    agents = world.prepare(network_test_s=60)
    asked: list[int] = []

    def should_stop() -> bool:
        asked.append(1)
        return (world.run.path / "told.jsonl").exists()

    tested = agents.only_test_network(world.begin, should_stop)
    agents.close()
    assert tested.verdict is None and tested.reason == "the job was asked to stop"


def test_a_test_that_fails_keeps_nobody_from_training(world: World) -> None:
    world.plan["network"] = [{"code": 1}] * 4
    assert world.supervise(network_test_s=60) == 0
    assert world.starts_on(0) == ["a", "b"]
    assert outcome(world)["verdict"] is None and "ended with code 1" in outcome(world)["reason"]


@pytest.mark.req("C10")
@pytest.mark.parametrize("code", [1, 78])
def test_what_a_rank_says_of_its_end_is_passed_on_and_not_tried_again(world: World, code: int) -> None:
    world.plan["network"] = [
        {"code": code, "says": "warning\ntrierarch: the disk is full: free some space\n"},
        OK,
    ]
    assert world.supervise(network_test_s=60) == 0
    assert world.starts_on(0) == ["a", "b"]
    assert outcome(world)["verdict"] is None and outcome(world)["exclude"] == []
    assert outcome(world)["reason"].endswith(": the disk is full: free some space")
    assert f"code {code}: " in outcome(world)["reason"] or f"[{code}]: " in outcome(world)["reason"]


def test_what_was_said_in_an_earlier_try_is_not_taken_for_todays(world: World) -> None:
    log = world.run.logs / "42.network.0.log"
    log.write_text("trierarch: the disk is full: free some space\n")
    world.plan["network"] = [{"code": 1, "says": "oh\n"}, OK]
    assert world.supervise(network_test_s=60) == 0
    assert outcome(world)["verdict"] == "OK"


def test_last_words(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_words(log) == ""
    log.write_text("trierarch: rank 3 cannot be bound\nhello\n")
    end = log.stat().st_size
    assert last_words(log) == "rank 3 cannot be bound" and last_words(log, end) == ""
    with log.open("a") as file:
        file.write("x" * 200_000 + "\ntrierarch: first\ntrierarch: last one\nwarning\n")
    assert last_words(log) == last_words(log, end) == "last one"
    with log.open("a") as file:
        file.write("Traceback (most recent call last):\n  boom\n")
    assert last_words(log) == ""


@pytest.mark.req("C10")
def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        assert why_not_written(disk) == "" and not (disk / ".trial").exists()
        fill(disk)
        assert why_not_written(disk).startswith(
            f"{disk} cannot be written (No space left on device): free some"
        )
    with mounted(tmp_path / "fixed", "-t", "tmpfs", "-o", "ro", "tmpfs") as folder:
        assert "(Read-only file system)" in why_not_written(folder)
    assert "(No such file or directory)" in why_not_written(tmp_path / "none")


def test_the_network_is_tested_once_in_a_job(world: World) -> None:
    world.plan["network"] = [OK]
    world.fault(3, "kill")
    assert world.supervise(network_test_s=30) == 0
    assert len(world.events(Event.RESTARTED)) == 1 and len(world.events(Event.NETWORK_TESTED)) == 1


def test_only_what_most_ranks_have_missed_is_blamed(tmp_path: Path) -> None:
    for rank, silent in enumerate((["b"], ["b", "c"], ["b"], None)):
        note = {"what": "round 1", "reason": "no answer", "silent_nodes": silent}
        (tmp_path / f"waited.{rank}.json").write_text(json.dumps(note))
    (tmp_path / "waited.9.json").write_text("{")
    assert list(blamed(tmp_path)) == ["b"]
    assert blamed(tmp_path / "none") == {}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"verdict": "OK", "exit_code": 0, "summary": "", "exclude": []}']
)
def test_what_is_no_verdict_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "verdict.json").write_text(text)
    with pytest.raises(UserError, match="is no verdict"):
        NetworkVerdict.load(tmp_path / "verdict.json")
    with pytest.raises(UserError, match="did not end"):
        NetworkVerdict.load(tmp_path / "none.json")


@pytest.mark.req("B6")
def test_nodes_are_arranged_by_a_hostfile(tmp_path: Path) -> None:
    file = tmp_path / "hostfile"
    file.write_text("c\nc\na*2\nx\n")
    assert arranged(["a", "b", "c"], file) == ["c", "a", "b"]
    assert arranged(["b", "a"], None) == ["b", "a"]
    added = place_tasks(["c", "a"], 2, tmp_path / "logs" / "1.hostfile")
    assert Path(added["SLURM_HOSTFILE"]).read_text() == "c\nc\na\na\n"
    assert added["SLURM_DISTRIBUTION"] == "arbitrary"
    with pytest.raises(UserError, match=r"job\.node_order=.* cannot be read"):
        arranged(["a"], tmp_path / "none")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["job.preflight_s=60"], "job.preflight_s has no effect without a preflight"),
        (["job.preflight_baseline=x.npz"], "job.preflight_baseline has no effect without a preflight"),
        (
            ["preflight=nccl", "job.preflight_s=300", "job.time_limit=00:06:00"],
            "leave nothing of the time limit",
        ),
        (["preflight=nccl", "job.preflight_s=1"], "job.preflight_s=1: must not be below 10"),
        (["preflight=nccl", "job.preflight_baseline=x.npz"], "there is no such file"),
        (["preflight=nccl", "job.launch=step"], "agents do it"),
        (["job.node_order=/no/such"], "there is no such file"),
        (["nodes=2", "job.nodes=3"], "set the same key"),
        (["preflight=maybe"], "preflight"),
    ],
)
def test_settings_of_a_test_that_do_nothing_are_refused(
    tmp_path: Path, settings: list[str], words: str
) -> None:
    write_program(tmp_path / "sbatch", "exit 1")
    with pytest.raises(ConfigError) as caught:
        load_submit(
            ["cluster=slurm", *settings],
            {"PATH": str(tmp_path)},
        )
    assert words in str(caught.value)


def test_the_script_says_what_is_tested(tmp_path: Path) -> None:
    write_program(tmp_path / "sbatch", "exit 1")
    order, baseline = tmp_path / "hostfile", tmp_path / "earlier.npz"
    for file in (order, baseline):
        file.touch()
    given = [f"job.node_order={order}", f"job.preflight_baseline={baseline}", "job.preflight_s=90"]
    settings = load_submit(["cluster=slurm", "nodes=4", "preflight=nccl", *given], {"PATH": str(tmp_path)})
    script = render(RunFolder(tmp_path / "run"), settings)
    assert settings.job.nodes == 4 and f"--node-order={order}" in script
    assert f"--network-test-s=90 --network-baseline={baseline}" in script
    assert "--only-network-test" not in script
    assert "--only-network-test" in render(RunFolder(tmp_path / "run"), settings, only_network_test=True)
