"""The supervisor's arithmetic: who trains, who is excluded, when to stop, which cores, whose network is bad."""

import math
import os
import random
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness.programs import write_program
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import ConfigError, UserError
from contract.run_folder import Event, RunFolder, append_json_line
from slurm.supervise import deadline
from slurm.supervise.deadline import Deadline, Left, lead_s
from slurm.supervise.exclude import affordable, excluded_nodes
from slurm.supervise.health import find_unreachable
from slurm.supervise.nodes import Node, allocation, choose, down
from slurm.supervise.placement import parse_rank_cpus, place, share_out

suspicions = st.lists(st.integers(0, 3), max_size=12)


# --- nodes


@given(suspicions, st.integers(1, 8))
def test_the_least_suspicious_train_in_the_order_of_the_job(values: list[int], count: int) -> None:
    nodes = [Node(f"n{index}", suspicion=value) for index, value in enumerate(values)]
    chosen = choose(nodes, count)
    if len(nodes) < count:
        assert chosen is None
        return
    assert chosen is not None and len(chosen) == count
    assert chosen == [node for node in nodes if node in chosen]
    left = [node.suspicion for node in nodes if node not in chosen]
    assert max(node.suspicion for node in chosen) <= min(left, default=9)
    if not any(values):
        assert chosen == nodes[:count]


def test_a_host_file_gives_the_order_of_ranks(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("n3\nn3\nn1\nn1\n\n")
    assert allocation({"SLURM_HOSTFILE": str(file), "SLURM_JOB_NODELIST": "n[1,3]"}) == ["n3", "n1"]
    file.write_text("n3*4\nn1*4\n")
    assert allocation({"SLURM_HOSTFILE": str(file)}) == ["n3", "n1"]
    with pytest.raises(UserError, match="cannot be read"):
        allocation({"SLURM_HOSTFILE": str(tmp_path / "none")})
    assert len(allocation({})) == 1


# --- excluded nodes


def failed(node: str, when: float) -> dict[str, Any]:
    return {"event": "node_failed", "node": node, "time": when}


def test_failed_nodes_are_forgotten_after_a_while() -> None:
    events = [failed("n1", 100), failed("n2", 500), {"event": "restarted", "node": "n3", "time": 900}]
    events += [{"event": "node_failed", "time": 900}, failed("n1", 700)]
    assert excluded_nodes(events, now=1000, for_s=600) == ["n1", "n2"]
    assert excluded_nodes(events, now=1000, for_s=400) == ["n1"]
    assert excluded_nodes(events, now=2000, for_s=400) == []


names = st.lists(st.sampled_from([f"n{number}" for number in range(8)]), unique=True)


@given(names, names, st.integers(1, 8))
def test_exclusion_leaves_enough_nodes_and_no_fewer_than_it_must(
    excluded: list[str], usable: list[str], needed: int
) -> None:
    kept = affordable(excluded, usable, needed)
    assert kept == [node for node in excluded if node in kept]
    left = len(set(usable) - set(kept))
    assert left >= min(needed, len(usable))
    dropped = [node for node in excluded if node not in kept]
    # Each one that is dropped is needed, and failed before those that are kept.
    assert not dropped or left <= needed
    in_use = [node for node in excluded if node in usable]
    assert [node for node in in_use if node in kept] == in_use[: len(in_use) - len(dropped)]


# --- the time limit


seconds = st.floats(0, 1e5)


@given(seconds | st.none(), seconds | st.none(), seconds, st.floats(60, 1e6))
def test_there_is_time_for_three_saves_and_never_more_than_half_goes_to_it(
    save_s: float | None, step_s: float | None, margin_s: float, limit_s: float
) -> None:
    lead = lead_s(save_s, step_s, margin_s, limit_s)
    assert lead <= limit_s / 2
    if save_s is not None and step_s is not None:
        assert lead == pytest.approx(min(3 * save_s + 2 * step_s + margin_s, limit_s / 2))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


def test_two_minutes_are_half_training() -> None:
    assert lead_s(None, None, 60.0, 120.0) == 60.0


@pytest.mark.req("C13")
def test_a_stop_is_due_when_saving_takes_the_rest_of_the_time(run: RunFolder) -> None:
    run.append_event(Event.SAVED, step=1, seconds=100)
    run.append_event(Event.SAVED, step=2, seconds=20)
    append_json_line(run.metrics, {"step": 2, "step_time_s": 5})
    # 3 x 100 + 2 x 5 + 30
    assert Deadline(run, 30, lambda: Left(339, 1000)).is_due()
    assert not Deadline(run, 30, lambda: Left(400, 1000)).is_due()
    assert not Deadline(run, 30, lambda: None).is_due()


def test_slurm_is_asked_again_before_a_job_that_was_extended_is_stopped(run: RunFolder) -> None:
    answers = [Left(300, 1000), Left(10_000, 20_000), Left(9_000, 20_000)]
    asked: list[Left] = []

    def question() -> Left:
        asked.append(answers[len(asked)])
        return asked[-1]

    watch = Deadline(run, 600, question)
    assert not watch.is_due() and len(asked) == 2
    assert not watch.is_due() and len(asked) == 2


def test_a_job_without_a_limit_is_never_due_and_slurm_is_left_alone(run: RunFolder) -> None:
    asked: list[float] = []
    begin = time.monotonic()
    watch = Deadline(run, 600, lambda: asked.append(time.monotonic()) or Left(math.inf, math.inf))
    for passed_s in range(0, 300, 5):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(deadline.time, "monotonic", partial(float, begin + passed_s))
            assert not watch.is_due()
    assert len(asked) == 2


def test_a_time_limit_is_watched_though_the_run_folder_cannot_be_read(run: RunFolder) -> None:
    run.events.mkdir()
    assert Deadline(run, 30, lambda: Left(100, 1000)).is_due()
    assert not Deadline(run, 30, lambda: Left(400, 1000)).is_due()


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("1:40|5:00", Left(100, 300)),
        ("1-00:00:00|2-00:00:00", Left(86400, 172800)),
        ("UNLIMITED|UNLIMITED", Left(math.inf, math.inf)),
        ("INVALID|1:00", None),
        ("0:00|1:00", Left(0, 60)),
        ("", None),
    ],
)
def test_what_squeue_says_is_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, expected: Left | None
) -> None:
    write_program(tmp_path / "squeue", f'[ "$*" = "--noheader --jobs 40_3 --format=%L|%l" ] && echo "{said}"')
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "3"}
    monkeypatch.setenv("PATH", environ["PATH"])
    assert deadline.ask_slurm(environ) == expected


def test_the_environment_tells_the_end_where_slurm_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_program(tmp_path / "squeue", "exit 1")
    now = int(time.time())
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    monkeypatch.setenv("PATH", environ["PATH"])
    assert deadline.ask_slurm(environ) is None
    left = deadline.ask_slurm(
        environ | {"SLURM_JOB_START_TIME": str(now - 100), "SLURM_JOB_END_TIME": str(now + 200)}
    )
    assert left is not None and left.limit_s == 300 and 190 < left.left_s <= 200


# --- cores


def core(cpu: int) -> tuple[int, ...]:
    """Eight cores on two NUMA nodes, with two threads each: 0-7, and again 8-15."""
    return (cpu % 8 // 4, cpu % 8)


@given(st.sets(st.integers(0, 15)), st.integers(1, 9))
def test_cores_are_shared_out_evenly_and_whole(cpus: set[int], ranks: int) -> None:
    shares = share_out(sorted(cpus), ranks, core)
    cores = {core(cpu) for cpu in cpus}
    if len(cores) < ranks:
        assert shares is None
        return
    assert shares is not None and len(shares) == ranks
    assert sorted(cpu for share in shares for cpu in share) == sorted(cpus)
    held = [{core(cpu) for cpu in share} for share in shares]
    assert sum(len(share) for share in held) == len(cores), "no core belongs to two ranks"
    assert max(map(len, held)) - min(map(len, held)) <= 1


def test_threads_of_a_core_and_cores_of_a_numa_node_stay_together() -> None:
    assert share_out(range(16), 4, core) == [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]


def test_a_map_is_used_where_it_fits_and_complained_of_where_not() -> None:
    assert place([[0, 1], [2, 3, 99]], [0, 1, 2, 3], 2, core) == ([[0, 1], [2, 3]], "")
    places, complaint = place([[0, 1], [99]], [0, 1, 2, 3], 2, core)
    assert places == [[0, 1], [2, 3]] and "(4 from 0 to 3)" in complaint
    assert place(None, [0, 1], 2, core) == ([[0], [1]], "")
    places, complaint = place(None, [0], 2, core)
    assert places is None and complaint


@pytest.mark.parametrize("text", ["", "[]", "[1]", '[["a"]]', "{}", "[[0.5]]", "even"])
def test_a_wrong_map_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--rank-cpus="):
        parse_rank_cpus(text)


def test_maps_are_read() -> None:
    assert parse_rank_cpus("[[0, 1], [2]]") == [[0, 1], [2]]
    assert parse_rank_cpus("numa") is None


# --- the all-reduce that fails


@given(st.integers(0, 24), st.sets(st.integers(0, 23)), st.randoms(use_true_random=False))
def test_halving_finds_the_nodes_that_nobody_reaches(size: int, sick: set[int], rng: random.Random) -> None:
    nodes = [Node(f"n{index}") for index in range(size)]
    bad = [node for index, node in enumerate(nodes) if index in sick]

    def works(group: Sequence[Node]) -> bool:
        return not any(node in bad for node in group)

    found = find_unreachable(nodes, works, limit=10_000)
    if size - len(bad) >= 2:
        assert found == bad
    elif size >= 2 and bad:
        assert found == nodes  # no two work together: nobody to trust
    else:
        assert found == []


def test_one_bad_node_of_many_is_found_in_few_tests() -> None:
    nodes = [Node(f"n{index}") for index in range(512)]
    tests = 0

    def works(group: Sequence[Node]) -> bool:
        nonlocal tests
        tests += 1
        return nodes[300] not in group

    assert find_unreachable(nodes, works) == [nodes[300]]
    assert tests <= 22


def test_slurm_is_asked_once_which_nodes_are_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(
        tmp_path / "sinfo", f"echo \"$@\" >> {tmp_path}/asked; printf 'a idle\\nb down*\\nc mixed\\n'"
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert down(["a", "b"]) == set()
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert down([]) == set() and not (tmp_path / "asked").exists()
    assert down(["a", "b", "c"]) == {"b"}
    assert "--nodes=a,b,c" in (tmp_path / "asked").read_text()
