"""What a sweep came to: tables, CSV, JSON, pictures, and the command that shows them."""

import csv
import io
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from contract.errors import UserError
from contract.run_folder import RunFolder, append_json_line
from contract.sweep import Manifest, SweepFolder, Task
from slurm.runs.status import RunState, RunStatus
from tools.cli_sweep import app
from tools.sweep_panels import levels
from tools.sweep_plot import draw, figure_of
from tools.sweep_results import Result, Results, collect, render, to_csv, to_json
from tools.sweep_status import as_json_text
from tools.sweep_status import render as render_status


@pytest.fixture
def folder(tmp_path: Path) -> SweepFolder:
    """Four tasks: finished twice, one that blew up, one without a value; the last one waits."""
    sweep = SweepFolder(tmp_path / "sweep")
    lines: list[list[dict[str, Any]]] = [
        [{"step": 5, "eval_loss": 2.0}, {"step": 9, "loss": 1.0}, {"step": 10, "eval_loss": 2.5}],
        [{"step": 5, "eval_loss": 3.0}, {"step": 10, "eval_loss": 2.25}],
        [{"step": 5, "eval_loss": 1.0}, {"step": 6, "eval_loss": math.nan}],
        [{"step": 1, "loss": 9.0}],
        [],
    ]
    tasks = [
        Task(index, f"lr={lr}", [f"optim.lr={lr}"], {"optim.lr": lr})
        for index, lr in enumerate((0.1, 0.01, 1.0, 10.0, 1e-6))
    ]
    for task, points in zip(tasks, lines, strict=True):
        sweep.run(task).create()
        for line in points:
            append_json_line(sweep.run(task).metrics, line)
    sweep.write(Manifest("sweep", 0.0, ["optim.lr"], [], {}, tasks=tasks, waiting=[4], parallel=2))
    return sweep


STATES = {"lr=0.1": "finished", "lr=0.01": "finished", "lr=1.0": "failed", "lr=10.0": "lost"}


@pytest.mark.req("C12")
def test_the_best_comes_first_and_the_missing_last(folder: SweepFolder) -> None:
    results = collect(folder, STATES)
    assert [row.run for row in results.rows] == ["lr=0.01", "lr=0.1", "lr=1.0", "lr=10.0", "lr=1e-06"]
    first, second, spoilt = results.rows[:3]
    assert results.winner is first and (second.final, second.best, second.best_step) == (2.5, 2.0, 5)
    assert math.isnan(spoilt.final or 0.0) and spoilt.best == 1.0
    text = render(results)
    assert "eval_loss of 5 tasks (2 without a value, 1 not finished)" in text
    assert [line.split()[0] for line in text.splitlines()[2:]] == ["*", "0", "2", "3", "4"]
    assert text.splitlines()[-1].split()[2:] == ["waiting", "lr=1e-06"]
    assert [row.run for row in collect(folder, STATES, highest=True).rows][:2] == ["lr=0.1", "lr=0.01"]


@pytest.mark.req("C12")
def test_what_has_not_finished_is_not_the_winner(folder: SweepFolder) -> None:
    results = collect(folder, STATES | {"lr=0.01": "running"})
    assert results.rows[0].run == "lr=0.01"
    assert results.winner is not None and results.winner.run == "lr=0.1"


@pytest.mark.req("C12")
def test_csv_and_json_hold_every_digit(folder: SweepFolder) -> None:
    append_json_line(RunFolder(folder.path / "lr=0.1").metrics, {"step": 11, "eval_loss": 0.1 + 0.2})
    results = collect(folder, STATES)
    rows = list(csv.DictReader(io.StringIO(to_csv(results))))
    assert (rows[0]["run"], float(rows[0]["eval_loss"])) == ("lr=0.1", 0.1 + 0.2)
    assert (rows[-1]["state"], rows[-1]["eval_loss"]) == ("waiting", "")
    objects = json.loads(to_json(results))
    assert objects[0]["winner"] and objects[0]["eval_loss"] == 0.1 + 0.2
    assert objects[2]["eval_loss"] is None and objects[2]["best_eval_loss"] == 1.0


def test_a_metric_that_nobody_writes_is_refused(folder: SweepFolder) -> None:
    with pytest.raises(UserError, match="eval_los: no task of sweep has written it, did you mean eval_loss"):
        collect(folder, STATES, "eval_los")


@pytest.mark.req("C12")
def test_the_states_of_a_sweep(folder: SweepFolder) -> None:
    manifest = folder.read()
    runs = {task.run: folder.run(task) for task in manifest.tasks}
    states = {
        "lr=0.1": RunStatus(runs["lr=0.1"], RunState.finished, "7_0", step=10, steps=10, loss=1.5),
        "lr=1.0": RunStatus(runs["lr=1.0"], RunState.failed, "7_2", "it broke"),
    }
    text = render_status(manifest, states, "sweep")
    assert "5 tasks: 2 new, 1 finished, 1 failed, 1 waiting; at most 2 at a time" in text
    assert text.splitlines()[2].split() == ["0", "0.1", "finished", "7_0", "10/10", "1.5000"]
    assert text.splitlines()[4].endswith("it broke")
    told = json.loads(as_json_text(manifest, states))
    assert told["counts"]["waiting"] == 1 and told["tasks"][2]["reason"] == "it broke"


def results_of(spaces: dict[str, Sequence[Any]], loss: Callable[..., float | None]) -> Results:
    rows = []
    for index, values in enumerate(itertools.product(*spaces.values())):
        final = loss(*values)
        rows.append(
            Result(index, str(index), dict(zip(spaces, values, strict=True)), "finished", 1, final, final, 1)
        )
    rows.sort(key=lambda row: math.inf if row.final is None else row.final)
    return Results("sweep", "eval_loss", False, list(spaces), rows)


LR = (1e-4, 1e-3, 1e-2)


@pytest.mark.req("C12")
@pytest.mark.parametrize(
    ("spaces", "panels", "scale", "lines"),
    [
        ({"optim.lr": LR}, 1, "log", 3),
        ({"optim.beta2": (0.9, 0.95)}, 1, "linear", 3),
        ({"optim.lr": LR, "seed": (1, 2)}, 1, "log", 3),
        ({"optim.lr": LR, "model": ("a", "b")}, 1, "log", 5),
        ({"model": ("a", "b", "c")}, 1, "linear", 2),
        ({"seed": (1, 2, 3)}, 1, "linear", 3),
        ({"optim.lr": LR, "model": ("a", "b"), "optim.decay": ("x", "y", "z")}, 2, "log", None),
        (
            {"optim.lr": LR, "model": ("a", "b"), "optim.beta1": (0.1, 0.2), "optim.beta2": (0.3, 0.4)},
            4,
            None,
            None,
        ),
    ],
)
def test_the_picture_suits_the_keys(
    spaces: dict[str, Sequence[Any]], panels: int, scale: str | None, lines: int | None
) -> None:
    results = results_of(spaces, lambda *values: 1.0 + sum(map(len, map(str, values))) / 10)
    figure = figure_of(results)
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert len(shown) == panels
    if scale:
        assert shown[0].get_xscale() == scale
    if lines:  # points and means, and the star of the best one
        assert len(shown[0].get_lines()) == lines


@pytest.mark.req("C12")
def test_two_rows_of_numbers_make_a_heat_map_with_the_best_marked() -> None:
    results = results_of({"optim.lr": LR, "model.dim": (64, 128, 256)}, lambda lr, dim: lr * 100 + 1 / dim)
    figure = figure_of(results)
    axes = figure.axes[0]
    (image,) = axes.get_images()
    assert image.get_array().shape == (3, 3)
    (frame,) = axes.patches
    assert (round(frame.get_x() + 0.48), round(frame.get_y() + 0.48)) == (0, 2)
    assert {text.get_text() for text in axes.texts} >= {f"{1e-2 + 1 / 256:.4g}", f"{1 + 1 / 64:.4g}"}


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_a_picture_is_written(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"picture{suffix}"
    draw(results_of({"optim.lr": LR}, lambda lr: None if lr == 1e-3 else lr), path)
    assert path.stat().st_size > 1000


def test_what_cannot_be_drawn_is_one_sentence(tmp_path: Path) -> None:
    results = results_of({"optim.lr": LR}, lambda lr: lr)
    with pytest.raises(UserError, match="give a file that ends in"):
        draw(results, tmp_path / "picture.txt")
    with pytest.raises(UserError, match="cannot be written"):
        draw(results, tmp_path / "no/picture.png")
    with pytest.raises(UserError, match="1 tasks of sweep have a eval_loss, two are needed"):
        draw(results_of({"optim.lr": LR}, lambda lr: lr if lr == 1e-3 else None), tmp_path / "picture.png")


@given(
    values=st.lists(
        st.sampled_from(["llama_3m", "llama_25m", "llama_125m", "x", "7"]), unique=True, min_size=2
    )
)
def test_words_are_ordered_by_the_numbers_in_them(values: list[str]) -> None:
    results = results_of({"model": values}, lambda value: 1.0)
    order = ["7", "llama_3m", "llama_25m", "llama_125m", "x"]
    assert levels(results.rows, "model") == [one for one in order if one in values]


@pytest.mark.req("C12")
def test_the_command_shows_results_and_takes_settings_for_a_start(
    folder: SweepFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.path.parent)
    runner = CliRunner()
    shown = runner.invoke(app, ["results", "sweep", "--csv", "out.csv", "--plot", "out.png"])
    assert shown.exit_code == 0 and "eval_loss of 5 tasks" in shown.output
    assert Path("out.csv").read_text().startswith("task,run,optim.lr,state,step,eval_loss")
    assert Path("out.png").exists()
    assert "5 tasks" in runner.invoke(app, ["status", "sweep"]).output
    for words in (["optim.lrr=1,2"], ["--name", "x", "optim.lrr=1,2"], ["start", "optim.lrr=1,2"]):
        told = runner.invoke(app, words).exception
        assert isinstance(told, UserError) and "did you mean optim.lr" in str(told)
    assert "range(1,4)" in runner.invoke(app, ["--help"]).output
    assert isinstance(runner.invoke(app, ["status", "nothing"]).exception, UserError)
