"""`trierarch doctor`, run as a user runs it."""

import json
from pathlib import Path
from typing import Any

import pytest
from harness.command import Trierarch

from contract.exit_codes import ExitCode

pytestmark = pytest.mark.slow

FITS = (
    *("model=llama_1b", "data.sequence_length=2048", "micro_batch_size=1", "gradient_accumulation_steps=4"),
    *("cluster=juwels_booster", "job.account=x", "nodes=2"),
)
"""For a machine that no test runs on: nothing is said of this host."""


def ask(trierarch: Trierarch, *arguments: str, **variables: str) -> tuple[int, dict[str, Any]]:
    done = trierarch("doctor", *arguments, "--json", **variables)
    assert done.stderr == "", done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.req("B12", "A24")
def test_exit_codes(trierarch: Trierarch) -> None:
    """0: notes at most. 1: warnings. 78: errors, as where `submit` refuses."""
    code, tree = ask(trierarch, *FITS)
    assert code == tree["exit_code"] == 0, tree["findings"]
    assert {one["severity"] for one in tree["findings"]} <= {"note"}
    code, tree = ask(trierarch, *FITS, "optim.warmup_steps=0")
    assert code == tree["exit_code"] == 1
    assert [one["where"] for one in tree["findings"] if one["severity"] == "warning"] == [
        "optim.warmup_steps"
    ]
    code, tree = ask(trierarch, *FITS, "optim.warmup_steps=0", "micro_batch_size=64")
    assert code == tree["exit_code"] == ExitCode.CONFIG
    assert [one["severity"] for one in tree["findings"]][:2] == ["error", "warning"]


def test_all_that_is_wrong_is_told_at_once(trierarch: Trierarch) -> None:
    wrong = ("optim.lr=-1", "modle=llama_1b", "checkpoint.every_steps=x", "oops", "cluster=juwels")
    done = trierarch("doctor", "nodes=2", *wrong)
    assert done.returncode == ExitCode.CONFIG and "Traceback" not in done.stderr
    for word in ("optim.lr=-1", "did you mean model?", "checkpoint.every_steps", "'oops'", "juwels_booster"):
        assert word in done.stdout, word
    # What `submit` says first is among it.
    submit = trierarch("submit", "--dry-run", "optim.lr=-1", "cluster=local")
    assert submit.stderr.strip().removeprefix("trierarch: ") in done.stdout


def test_the_text_names_findings_remedies_and_what_was_not_checked(trierarch: Trierarch) -> None:
    done = trierarch("doctor", *FITS, "parallel.tp=2", "parallel.pp=4", "gradient_accumulation_steps=4")
    lines = done.stdout.splitlines()
    (said,) = [index for index, line in enumerate(lines) if line.startswith("warning:")]
    assert "idle for 43%" in lines[said]  # (4 - 1) / (4 + 4 - 1)
    assert lines[said + 1].split()[0] == "fix:"
    assert "not checked here" in done.stdout and "quota" in done.stdout
    assert lines[-1].endswith("exit code 1")


def test_this_machine(trierarch: Trierarch, tmp_path: Path, toy_tokens: Path) -> None:
    asked = ("recipe=first_run", "cluster=local", f"data.prefix={toy_tokens}")
    code, tree = ask(trierarch, *asked)
    assert code == 0, tree["findings"]
    checked = {one["check"] for one in tree["checks"] if one["checked"]}
    assert {"clock of the file server", "room for checkpoints", "packages", "torch", "open files"} <= checked
    assert list(tmp_path.iterdir()) == []  # it leaves nothing
    code, tree = ask(trierarch, "recipe=first_run", "cluster=local")
    assert code == ExitCode.CONFIG
    assert [one["where"] for one in tree["findings"]] == ["data.prefix"]


def test_the_best_plan_is_looked_at(trierarch: Trierarch) -> None:
    machine = ("cluster=juwels_booster", "job.account=x", "loop.global_batch_size=64", "parallel=auto")
    done = trierarch("doctor", "model=llama_1b", "data.sequence_length=2048", "nodes=2", *machine, "--json")
    assert done.returncode == 0 and "parallel=auto" in done.stderr
    checks = {one["check"]: one for one in json.loads(done.stdout)["checks"]}
    assert checks["memory of the GPUs"]["checked"]
    none = trierarch("doctor", "model=gpt3_175b", "nodes=1", *machine, "--json")
    assert none.returncode == ExitCode.CONFIG
    found = json.loads(none.stdout)
    assert "no layout fits" in found["findings"][0]["what"]
    assert next(one for one in found["checks"] if one["check"] == "warm-up")["checked"]


def test_settings_are_those_of_submit(trierarch: Trierarch) -> None:
    assert trierarch("doctor", "preflight=none", "tensor_parallel_size=2", *FITS).returncode == 0
    help_text = trierarch("doctor", "--help").stdout
    assert "78" in help_text and "--json" in help_text
