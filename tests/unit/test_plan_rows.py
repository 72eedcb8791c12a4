"""Published rows as cases, and how near predictions come to them."""

import copy
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness.disks import fill, small_disk

from configs.compose import to_yaml
from contract.errors import ConfigError
from slurm.settings import load_submit
from tools.plan.calibrate import (
    Measured,
    accuracy,
    calibrate,
    choice,
    fit,
    left_out,
    measured_of,
    predicted,
    step_time_of,
)
from tools.plan.case import Attention, Case, Number, Recompute
from tools.plan.constants import Constants, constants, priors
from tools.plan.predict import predict_rows, write
from tools.plan.rows import PUBLISHED, case_of, is_complete, network_of, read_rows
from tools.plan.runs import measured_run
from tools.plan.step import predict_step
from train.config import load_config

ROWS = read_rows(PUBLISHED)
RUNS = measured_of(ROWS)


@pytest.mark.req("A24")
def test_most_published_rows_become_cases_with_all_their_gpus() -> None:
    complete = [row for row in ROWS if is_complete(row)]
    assert len(complete) > 0.9 * len(ROWS)
    for row in complete:
        case = case_of(row)
        assert case.layout.ranks == row["hardware"]["n_gpus"], row["id"]
        if row["layout"]["global_batch"] and row["layout"]["micro_batch"]:
            assert case.samples == pytest.approx(row["layout"]["global_batch"], rel=0.07), row["id"]
        # Rows print rounded sizes, some count tables of positions or no embedding.
        if row["model"]["params"] and row["model"]["params"] > 1e9 and row["split"] != "context":
            assert case.model.parameters == pytest.approx(row["model"]["params"], rel=0.3), row["id"]


def test_a_prediction_knows_nothing_of_what_was_measured() -> None:
    rows = [row for row in ROWS if is_complete(row)][::7]
    hidden = []
    for row in copy.deepcopy(rows):
        kept = {name: row[name] for name in ("id", "model", "hardware", "layout", "precision")}
        kept["model"].pop("name", None)
        hidden.append(kept)
    assert predict_rows(hidden) == predict_rows(rows)
    shuffled = [row | {"id": "x"} for row in rows]
    for one, other in zip(predict_rows(shuffled), predict_rows(rows), strict=True):
        assert one | {"id": ""} == other | {"id": ""}


@pytest.mark.parametrize(
    ("text", "gpus", "gbit"),
    [
        ("8x HDR InfiniBand 200 Gb/s per node (Selene DGX A100 SuperPOD, fat-tree)", 8, 1600),
        ("NVLink3/NVSwitch 600 GB/s intra-node; 8x HDR InfiniBand 200 Gb/s per node", 8, 1600),
        ("8x A100-80GB SXM NVLink per node; 4 Omni-Path links per node (100 Gb/s class each)", 8, 400),
        ("A100-SXM4-80GB; 4x100 Gb/s RoCE per node", 8, 400),
        ("RoCE 1600 Gb/s node-node (8x200)", 8, 1600),
        ("8xH100 (96GB HBM2e 2.4TB/s, 500W limit) NVLink; 400 Gb/s RDMA per GPU", 8, 3200),
        ("NVLink; 400 Gb/s CX-7 RDMA per GPU", 4, 1600),
        ("800 Gb/s inter-node", 8, 800),
        ("Azure NDm A100 v4: 8x A100-80GB, 8x 200 Gb/s HDR InfiniBand per VM", 8, 1600),
        ("RoCE RDMA between 4 nodes (speed not stated); NVLink in node", 8, None),
        ("DGX-H100", 8, None),
        ("", 8, None),
    ],
)
def test_a_network_is_read_from_its_description(text: str, gpus: int, gbit: float | None) -> None:
    assert network_of(text, gpus) == (None if gbit is None else gbit * 1e9 / 8)


def _row(**parts: Any) -> dict[str, Any]:
    row = copy.deepcopy(next(row for row in ROWS if row["id"] == "meg21t1-007"))
    for section, values in parts.items():
        row[section] = row[section] | values if isinstance(values, dict) else values
    return row


def test_what_a_row_leaves_open_is_taken_as_usual() -> None:
    case = case_of(_row())
    assert case.layout.schedule == "interleaved_1f1b" and case.layout.recompute is Recompute.full
    assert case.attention is Attention.square and case.number is Number.fp16
    assert case_of(_row(precision="bf16")).attention is Attention.flash
    assert case_of(_row(layout={"recompute": "selective"})).layout.recompute is Recompute.attention
    assert case_of(_row(layout={"dp": None})).layout.dp == 24
    assert case_of(_row(layout={"micro_batch": None, "grad_accum": 48})).layout.micro_batch == 2
    assert case_of(_row(hardware={"interconnect": None})).machine.network_known is False
    assert case_of(_row(precision="FP8 (TransformerEngine)")).number is Number.fp8
    assert case_of(_row(layout={"schedule": "ZB-2p"})).layout.schedule == "zb_2p"


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ({"model": {"layers": None}}, "is missing"),
        ({"layout": {"micro_batch": None, "global_batch": None, "grad_accum": None}}, "is missing"),
        ({"hardware": {"n_gpus": None, "gpu": "A100"}, "layout": {"dp": None}}, "is missing"),
        ({"hardware": {"gpu": "MI300X"}}, "gpu=mi300x"),
    ],
)
def test_a_row_that_says_too_little_is_told(part: dict[str, Any], sentence: str) -> None:
    (found,) = predict_rows([_row(**part)])
    assert sentence in found["problem"] and found["iteration_time_s"] is None and found["oom"] is None


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ({"model": {"layers": "24"}}, "model.layers='24': must be a whole number from 1 to 10,000"),
        ({"model": {"layers": 10**12}}, "model.layers=1000000000000: must be"),
        ({"model": {"layers": -1}}, "model.layers=-1: must be"),
        ({"model": {"hidden": math.nan}}, "model.hidden=nan: must be"),
        ({"model": {"ffn": math.inf}}, "model.ffn=inf: must be a number"),
        ({"model": {"heads": 10**6}}, "are more than model.hidden"),
        ({"model": {"heads": 8, "kv_heads": 16}}, "are more than model.heads=8"),
        ({"model": {"gated_mlp": "yes"}}, "must be true, false or null"),
        ({"model": {"moe": True}}, "mixtures of experts are not predicted"),
        ({"model": 3}, "model=3: must be there"),
        ({"hardware": None}, "hardware=None: must be there"),
        ({"hardware": {"gpu": 100}}, "hardware.gpu=100: must be a text"),
        ({"hardware": {"gpu_mem_gb": 0}}, "hardware.gpu_mem_gb=0: must be"),
        ({"layout": []}, r"layout=[]: must be there"),
        ({"layout": {"tp": 1.5}}, "layout.tp=1.5: must be"),
        ({"layout": {"pp": True}}, "layout.pp=True: must be"),
        ({"layout": {"vpp": 100}}, "are more stages than there are layers"),
        ({"layout": {"zero_stage": 4}}, "layout.zero_stage=4: must be a whole number from 0 to 3"),
        ({"layout": {"offload": {}}}, "layout.offload={}: must be a text"),
        ({"precision": 16}, "precision=16: must be a text"),
    ],
)
def test_a_row_that_makes_no_sense_is_told_and_the_others_are_predicted(
    part: dict[str, Any], sentence: str
) -> None:
    found, other = predict_rows([_row(**part), _row()])
    assert sentence in found["problem"] and found["iteration_time_s"] is None
    assert other["iteration_time_s"] > 0 and "problem" not in other


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ({"measured": 3}, "measured and derived must be sections"),
        ({"measured": {"iteration_time_s": "x"}}, "iteration_time_s='x': must be seconds"),
        ({"measured": {"iteration_time_s": -3.0}}, "iteration_time_s=-3.0: must be seconds"),
        ({"measured": {"iteration_time_s": math.nan}}, "iteration_time_s=nan: must be seconds"),
        ({"source": None}, "source.name is missing"),
        ({"model": None}, "model=None: must be there"),
    ],
)
def test_a_row_that_makes_no_sense_calibrates_nothing(part: dict[str, Any], sentence: str) -> None:
    assert len(measured_of([_row()])) == 1
    with pytest.raises(ConfigError, match=sentence):
        measured_of([_row(**part)])


def test_degrees_that_are_not_those_of_the_machine_are_told() -> None:
    (found,) = predict_rows([_row(hardware={"n_gpus": 7})])
    assert "hardware.n_gpus=7: the degrees are believed" in found["problem"] and found["iteration_time_s"] > 0


def test_files_that_are_no_rows_are_refused(tmp_path: Path) -> None:
    for text in ("{", "[1]", '{"rows": [{}]}', '{"other": []}'):
        (tmp_path / "rows.json").write_text(text)
        with pytest.raises(ConfigError, match="cannot be read as published runs"):
            read_rows(tmp_path / "rows.json")
    write(tmp_path / "out.json", [{"id": "a", "oom": False}, {"id": "b", "oom": True}])
    assert [one["id"] for one in json.loads((tmp_path / "out.json").read_text())] == ["a", "b"]
    with pytest.raises(ConfigError, match="cannot be written"):
        write(tmp_path / "none" / "out.json", [])


def test_accuracy_and_choice_against_counting_by_hand() -> None:
    case = RUNS[0].case
    runs = [
        Measured("a", case, 10.0, "s", "g"),
        Measured("b", case, 11.0, "s", "g"),
        Measured("c", case, 14.0, "s", "g"),
        Measured("d", case, 1.0, "t"),
    ]
    times = {"a": 11.5, "b": 11.0, "c": 12.0, "d": 1.05}
    found = accuracy(runs, times)
    assert found.median == pytest.approx((0.05 + 1 / 7) / 2) and found.within[0.1] == 0.5
    assert found.within[0.15] == 1.0 and found.bias == pytest.approx(0.025)
    chosen = choice(runs, times)
    assert chosen.groups == 1 and chosen.regret == pytest.approx(0.1)
    assert chosen.random_regret == pytest.approx((10 + 11 + 14) / 3 / 10 - 1)
    assert chosen.rank_correlation == pytest.approx(0.5)
    # One layout measured twice is one choice.
    assert choice(runs, times | {"a": 11.0}).regret == pytest.approx(0.05)


@pytest.mark.slow
@pytest.mark.req("A24")
def test_the_fit_finds_the_constants_that_made_the_times() -> None:
    made = replace(Constants(), matmul=0.74, link=0.72, attention=0.36, straggler=0.012)
    random.seed(3)
    print("seed 3")
    runs = [
        Measured(run.id, run.case, predict_step(run.case, made).total_s, str(number % 8))
        for number, run in enumerate(random.sample(RUNS, 60))
    ]
    found = fit(runs)
    for name in ("matmul", "attention"):
        assert getattr(found, name) == pytest.approx(getattr(made, name), abs=priors()[name].sigma / 2)
    assert accuracy(runs, predicted(runs, found)).median < 0.01
    with pytest.raises(ConfigError, match="no runs"):
        fit([])


@pytest.mark.slow
@pytest.mark.req("A24", "A23")
def test_predictions_come_near_published_runs_of_sources_that_were_left_out() -> None:
    """The aims of the planner, on what others measured."""
    across = left_out(RUNS)
    found, chosen = accuracy(RUNS, across), choice(RUNS, across)
    assert len(RUNS) == 145 and len({run.source for run in RUNS}) == 4
    assert found.median <= 0.08 and found.within[0.15] >= 0.8, found
    assert chosen.groups >= 10 and chosen.regret <= min(0.02, chosen.random_regret / 3), chosen
    assert chosen.rank_correlation >= 0.7, chosen


def test_the_file_of_constants_fits_what_it_says_it_was_fitted_to() -> None:
    told = json.loads((PUBLISHED.with_name("constants.json")).read_text())["about"]
    found = accuracy(RUNS, predicted(RUNS, constants()))
    assert told["rows"] and sum(told["rows"].values()) == len(RUNS)
    assert found.median == pytest.approx(told["median_error"], abs=1e-3)
    assert found.within[0.15] == pytest.approx(told["within_15_percent"], abs=1e-3)


@pytest.mark.req("A24")
@pytest.mark.parametrize(
    ("tier", "split", "median", "share"),
    [("B", "calibrate", 0.06, 0.9), ("B", "other_gpu", 0.1, 0.75), ("B", "context", 0.15, 0.5)],
)
def test_rows_that_nothing_was_fitted_to(tier: str, split: str, median: float, share: float) -> None:
    runs = measured_of(ROWS, (tier,), split)
    found = accuracy(runs, predicted(runs, constants()))
    assert len(runs) > 50 and found.median <= median and found.within[0.15] >= share, found


def test_step_times_are_none_where_memory_ran_out() -> None:
    row = _row()
    assert step_time_of(row) == pytest.approx(24.8435)
    assert step_time_of(row | {"measured": row["measured"] | {"oom": True}}) is None
    assert isinstance(case_of(row), Case)


def _own_run(folder: Path, settings: list[str], where: list[str], steps_s: list[float]) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(load_config(settings)))
    (folder / "submit.yaml").write_text(to_yaml(load_submit(where, {})))
    lines = [
        json.dumps({"step": number, "loss": 1.0, "step_time_s": one}) for number, one in enumerate(steps_s)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


WHERE = ["cluster=juwels_booster", "job.nodes=2", "cluster.account=me"]
SETTINGS = ["model=llama_1b", "model.vocab_size=32000", "parallel.tp=2", "loop.global_batch_size=64"]


@pytest.mark.req("A24")
def test_a_run_of_one_s_own_calibrates(tmp_path: Path) -> None:
    first = measured_run(_own_run(tmp_path / "a", SETTINGS, WHERE, [9.0, 4.0, *[1.0, 1.1, 0.9, 1.0, 1.2]]))
    assert first.step_s == 1.0 and first.case.layout.tp == 2 and first.case.layout.dp == 4
    assert first.case.machine.gpu.name == "a100_40" and first.case.machine.nodes == 2
    # A machine on which all takes a third longer than predicted.
    step_s = predict_step(first.case).total_s * 4 / 3
    second = measured_run(_own_run(tmp_path / "b", SETTINGS, WHERE, [step_s] * 9))
    told = calibrate(PUBLISHED, [second], tmp_path / "mine.json")
    assert told["rows"] == {"run b": 1}
    mine = constants(tmp_path / "mine.json")
    assert predict_step(first.case).total_s < predict_step(first.case, mine).total_s <= step_s
    with pytest.raises(ConfigError, match="cannot be written"):
        calibrate(PUBLISHED, [second], tmp_path / "none" / "mine.json")


def test_runs_that_measured_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 3 step times after the first 2"):
        measured_run(_own_run(tmp_path / "a", SETTINGS, WHERE, [1.0] * 5))
    (tmp_path / "a" / "submit.yaml").unlink()
    with pytest.raises(ConfigError, match="was not submitted to a cluster"):
        measured_run(tmp_path / "a")


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        write(disk / "out.json", [{"id": "before"}])
        fill(disk)
        with pytest.raises(ConfigError, match=r"out\.json cannot be written: No space left on device"):
            write(disk / "out.json", [{"id": "x" * 100_000}])
        assert json.loads((disk / "out.json").read_text()) == [{"id": "before"}]
        assert [one.name for one in disk.iterdir() if one.name.startswith(".")] == []
