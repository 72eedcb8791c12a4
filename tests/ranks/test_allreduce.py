"""comm.allreduce: gradients are the same however they travel, and each bucket goes the way that its size asks for."""

import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_same_course, bare_course, course_of
from harness.pool import Ranks
from harness.toy import toy_overrides, train_toy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from contract.allreduce_plan import AllReducePlan
from contract.errors import ConfigError, UserError
from contract.run_folder import Event, RunFolder
from train.comm.check import find_plan
from train.comm.hierarchical import HierarchicalAllReduce
from train.config import load_config
from train.layout.check import lay_out
from train.layout.notes import notes

pytestmark = pytest.mark.slow

PER_NODE = 2
# A gradient near zero is noise, which Adam with a tiny eps turns into whole steps.
COMMON = ["precision=fp32", "optim.decay=constant", "optim.lr=3e-3", "optim.eps=1e-5"]


def add_up(sizes: list[int]) -> None:
    """Compare with the sum that each rank works out for itself."""
    ranks = dist.get_world_size()
    by_node = init_device_mesh("cpu", (ranks // PER_NODE, PER_NODE), mesh_dim_names=("between", "inside"))
    reduce = HierarchicalAllReduce(by_node["inside"].get_group(), by_node["between"].get_group())
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for size in sizes:
            each = [
                torch.randint(-8, 9, (size,), generator=torch.Generator().manual_seed(r))
                for r in range(ranks)
            ]
            tensor = each[dist.get_rank()].to(dtype)
            reduce(tensor)
            assert torch.equal(tensor, sum(each, torch.zeros(())).to(dtype)), (dtype, size)


@pytest.mark.req("A5", "B6")
@pytest.mark.parametrize("size", [2, 4, 6, 8])
def test_the_three_steps_add_up_tensors_of_any_size(ranks: Ranks, size: int) -> None:
    ranks(size, add_up, [0, 1, 2, 3, 7, 64, 1001])


def train_on_nodes(overrides: list[str]) -> dict[str, Any]:
    """Train as ranks of two-rank nodes; what was reduced by each way: {way and size of the group: calls}."""
    size = dist.get_world_size()
    calls: Counter[str] = Counter()
    plain, scatter = dist.all_reduce, dist.reduce_scatter_single

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.numel() > 64:  # not the loss, the norm and the like
            group = kwargs.get("group")
            calls[f"all_reduce over {size if group is None else group.size()}"] += 1
        return plain(tensor, *args, **kwargs)

    def reduce_scatter(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls[f"reduce_scatter over {kwargs['group'].size()}"] += 1
        return scatter(output, *args, **kwargs)

    with (
        mock.patch.object(dist, "all_reduce", all_reduce),
        mock.patch.object(dist, "reduce_scatter_single", reduce_scatter),
    ):
        train_toy(overrides, ranks_per_node=PER_NODE)
    return dict(calls)


@pytest.mark.req("A5", "B6")
@pytest.mark.parametrize(
    "more",
    [
        "",
        pytest.param("precision=bf16", marks=pytest.mark.chaos),
        "parallel.cp=2 parallel.micro_batch_size=2",
        "parallel.micro_batch_size=1",
    ],
)
def test_a_hierarchical_run_trains_as_one_process(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path, more: str
) -> None:
    common = [*COMMON, "loop.steps=10", *more.split()]
    overrides = toy_overrides(toy_tokens, tmp_path, "run", *common, "comm.allreduce=hierarchical")
    found = ranks(4, train_on_nodes, overrides, timeout_s=120)
    assert found[0]["reduce_scatter over 2"] > 0 and found[0]["all_reduce over 2"] > 0
    assert "all_reduce over 4" not in found[0]
    if "bf16" in more:
        flat = toy_overrides(toy_tokens, tmp_path, "flat", *common)
        ranks(4, train_on_nodes, flat, timeout_s=120)
        ours, theirs = (course_of(RunFolder(tmp_path / name), tmp_path) for name in ("run", "flat"))
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-3)
        return
    assert_same_course(course_of(RunFolder(tmp_path / "run"), tmp_path), bare_course(overrides))


def write_plan(path: Path, *points: tuple[int, str], nodes: int = 2, ranks_per_node: int = PER_NODE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    AllReducePlan(ranks_per_node, {nodes: points}).save(path)


@pytest.mark.req("B6")
@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(0, "ring")], set()),
        ([(0, "ring"), (10**9, "hierarchical")], {"all_reduce over 4"}),
        ([(0, "tree"), (64, "hierarchical")], {"reduce_scatter over 2", "all_reduce over 2"}),
    ],
)
def test_auto_goes_by_the_plan_of_the_machine(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path, points: list[tuple[int, str]], expected: set[str]
) -> None:
    overrides = toy_overrides(toy_tokens, tmp_path, "run", *COMMON, "loop.steps=3", "comm.allreduce=auto")
    # As a preflight of the run leaves it.
    write_plan(tmp_path / "run" / "nccl" / "plan.json", *points)
    calls = ranks(4, train_on_nodes, overrides)[0]
    assert {name for name in calls if name != "all_reduce over 4" or expected} == expected
    assert_same_course(course_of(RunFolder(tmp_path / "run"), tmp_path), bare_course(overrides))


@pytest.mark.req("B6")
def test_what_an_allreduce_cannot_do_is_refused(tmp_path: Path) -> None:
    def refusal(ranks: int, *more: str) -> str:
        config = load_config(toy_overrides(tmp_path / "text", tmp_path, "run", *more))
        with pytest.raises(UserError) as caught:
            lay_out(config, ranks, PER_NODE)
            find_plan(config, PER_NODE)
        return str(caught.value)

    hierarchical = "comm.allreduce=hierarchical"
    assert "there is one node" in refusal(2, hierarchical)
    assert "no two ranks average" in refusal(2, hierarchical, "parallel.tp=2")
    assert "parallel.zero=1 parallel.dp_replicate=2" in refusal(4, hierarchical, "parallel.zero=3")
    assert "parallel.dp_replicate" in refusal(4, hierarchical, "parallel.tp=2")
    assert "job.preflight=nccl" in refusal(4, "comm.allreduce=auto")
    assert "cannot be read" in refusal(4, "comm.allreduce=auto", f"comm.plan={tmp_path}/none.json")
    # A network test that fails keeps nobody from training.
    tested = load_config(toy_overrides(tmp_path / "text", tmp_path, "tested", "comm.allreduce=auto"))
    tested.run_folder.create()
    tested.run_folder.append_event(Event.NETWORK_TESTED, verdict=None)
    assert find_plan(tested, PER_NODE) is None
    with pytest.raises(UserError, match="cannot be read"):  # before anything is queued
        none = ["comm.allreduce=auto", f"comm.plan={tmp_path}/none.json"]
        lay_out(load_config(toy_overrides(tmp_path / "text", tmp_path, "run", *none)), 4, PER_NODE)
    write_plan(tmp_path / "other.json", (0, "ring"), ranks_per_node=8)
    assert "measured with 8 ranks a node" in refusal(
        4, "comm.allreduce=auto", f"comm.plan={tmp_path}/other.json"
    )
    with pytest.raises(ConfigError, match=r"comm\.plan=.* does nothing"):
        load_config([f"comm.plan={tmp_path}/other.json"])


def test_auto_says_where_it_has_nothing_to_choose(tmp_path: Path) -> None:
    config = load_config(["comm.allreduce=auto", "parallel.micro_batch_size=4", "parallel.zero=3"])
    (note,) = [note for note in notes(config, lay_out(config, 4, PER_NODE), PER_NODE) if "auto" in note]
    assert "parallel.dp_replicate=2 reduces inside nodes first" in note
    config = load_config(["comm.allreduce=auto", "parallel.micro_batch_size=4"])
    assert not [note for note in notes(config, lay_out(config, 4, PER_NODE), PER_NODE) if "auto" in note]


@given(st.integers(1, 64), st.integers(0, 2**40))
@settings(deadline=None)
def test_a_plan_answers_for_the_nearest_number_of_nodes(nodes: int, size: int) -> None:
    plan = AllReducePlan(8, {4: [(0, "ring"), (1000, "hierarchical")], 16: [(0, "tree")]})
    expected = "tree" if nodes > 8 else "hierarchical" if size >= 1000 else "ring"
    assert plan.choose(nodes, size) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": 2}',
        '{"format": 1, "ranks_per_node": 8, "switches": {}}',
        '{"format": 1, "ranks_per_node": 8, "switches": {"2": [[1, "ring"]]}}',
        '{"format": 1, "ranks_per_node": 8, "switches": {"2": [[0, "star"]]}}',
        '{"format": 1, "ranks_per_node": 8, "switches": {"2": 3}}',
    ],
)
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(UserError, match=r"plan\.json is no plan of"):
        AllReducePlan.load(tmp_path / "plan.json")


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    plan = AllReducePlan(8, {2: ((0, "ring"),), 4: ((0, "tree"), (4096, "hierarchical"))})
    plan.save(tmp_path / "plan.json")
    assert AllReducePlan.load(tmp_path / "plan.json") == plan
    assert json.loads((tmp_path / "plan.json").read_text())["format"] == 1
