"""What is left on the disk when checkpoints are kept by several rules."""

from pathlib import Path

import pytest
from harness.pool import Ranks
from harness.toy import toy_overrides, train_toy

from contract.exit_codes import ExitCode
from contract.run_folder import Event, RunFolder, read_json_lines
from train.checkpoint.manifest import read_manifest

pytestmark = pytest.mark.slow


@pytest.mark.req("C9")
def test_the_last_the_regular_and_the_best_stay(ranks: Ranks, toy_tokens: Path, tmp_path: Path) -> None:
    """What a killed removal has left goes too; an evaluation counts from the next save on."""
    settings = [
        "checkpoint.every_steps=1",
        "checkpoint.keep_last=1",
        "checkpoint.keep_every_steps=5",
        "checkpoint.keep_best=1",
        "loop.eval_every_steps=2",
        "loop.eval_batches=1",
    ]
    overrides = toy_overrides(toy_tokens, tmp_path, "run", *settings)
    assert ranks(2, train_toy, [*overrides, "loop.steps=6"]) == [ExitCode.FINISHED] * 2
    run = RunFolder(tmp_path / "run")
    losses = {line["step"]: line["eval_loss"] for line in read_json_lines(run.metrics) if "eval_loss" in line}
    assert losses.keys() == {2, 4, 6}
    assert run.published_steps() == sorted({min((2, 4), key=lambda step: losses[step]), 5, 6})
    (run.checkpoints / "step_3.removed").mkdir()
    assert ranks(1, train_toy, [*overrides, "loop.steps=7"]) == [ExitCode.FINISHED]
    assert run.published_steps() == sorted({min((2, 4, 6), key=lambda step: losses[step]), 5, 7})
    assert {path.name for path in run.checkpoints.iterdir()} == {
        f"step_{step}" for step in run.published_steps()
    }


@pytest.mark.req("C9")
def test_a_disk_budget_is_kept_and_told(ranks: Ranks, toy_tokens: Path, tmp_path: Path) -> None:
    settings = ["checkpoint.every_steps=1", "checkpoint.keep_last=0", "loop.eval_batches=0", "loop.steps=5"]
    overrides = toy_overrides(toy_tokens, tmp_path, "run", *settings)
    ranks(1, train_toy, overrides)
    size_gb = read_manifest(tmp_path / "run/checkpoints/step_5").bytes / 1e9
    for budget_gb, left in ((3.5 * size_gb, [3, 4, 5]), (0.5 * size_gb, [5])):
        name = f"budget{len(left)}"
        more = [f"run.name={name}", f"checkpoint.disk_budget_gb={budget_gb:.9f}"]
        ranks(1, train_toy, [*overrides, *more])
        run = RunFolder(tmp_path / name)
        assert run.published_steps() == left
        said = [event["reason"] for event in run.read_events() if event["event"] == Event.WARNING]
        assert len(said) == (len(left) == 1)
        assert all("more than checkpoint.disk_budget_gb" in reason for reason in said)
