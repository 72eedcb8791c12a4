"""A run says at its start what is unfortunate in its layout."""

from pathlib import Path

import pytest
from harness.pool import Ranks
from harness.toy import toy_overrides, train_toy

from contract.exit_codes import ExitCode
from contract.run_folder import RunFolder


@pytest.mark.req("A5", "C5")
def test_a_layout_that_does_nothing_with_zero_is_warned_of(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path
) -> None:
    overrides = toy_overrides(toy_tokens, tmp_path, "run", "loop.steps=1", "parallel.zero=2", "parallel.tp=2")
    assert ranks(2, train_toy, overrides) == [ExitCode.FINISHED] * 2
    warnings = [one for one in RunFolder(tmp_path / "run").read_events() if one["event"] == "warning"]
    assert len(warnings) == 1
    assert "parallel.zero=2 shares nothing" in str(warnings[0]["reason"])
