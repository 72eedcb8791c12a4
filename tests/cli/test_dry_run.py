"""`trierarch train --dry-run`, as a user runs it."""

import json
import re
import subprocess

import pytest
from harness.command import Trierarch
from typer.testing import CliRunner

from contract.errors import ConfigError
from contract.exit_codes import ExitCode
from tools.cli import app

pytestmark = pytest.mark.slow

MODEL = [
    *("model.dim=1024", "model.layers=8", "model.heads=16", "model.ffn_dim=4096", "model.vocab_size=8192"),
    *("data.sequence_length=512", "parallel.micro_batch_size=1", "loop.global_batch_size=null"),
    "parallel.gradient_accumulation_steps=4",
]


@pytest.mark.req("B1", "A10")
def test_a_rank_of_4096_is_built_in_one_process(trierarch: Trierarch) -> None:
    layout = ["parallel.tp=8", "parallel.pp=4", "parallel.zero=2", "parallel.dp_replicate=16"]
    size = ["--nodes", "512", "--ranks-per-node", "8", "--rank", "4095"]
    done = trierarch("train", "--dry-run", "--json", *size, *MODEL, *layout, timeout_s=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["coordinates"] == {"pp": 3, "dp_replicate": 15, "dp_shard": 7, "cp": 0, "tp": 7}
    built, reckoned = found["built"], found["reckoned"]
    assert built["parameters_bytes"] == 4 * found["parameters"] > 0
    assert found["layers"], "the last stage has some, beside the head"
    for name, value in reckoned.items():
        assert value == pytest.approx(built[name], rel=0.1), name


def test_a_table_for_a_person(trierarch: Trierarch) -> None:
    done = trierarch("train", "--dry-run", "--ranks", "2", *MODEL, "parallel.zero=3", timeout_s=240)
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2 (dp_shard 2)" in done.stdout
    assert "layers 0-7 keep everything" in done.stdout
    built, where = done.stdout.split("by formula, on a GPU, with what single layers need for a while:\n")
    assert re.match(r"[MG]B of rank 0 +device +host\nparameters", where) and "under way" in where
    rows = {line.split("  ")[0].strip(): line.split()[-3:] for line in built.splitlines()[4:]}
    assert rows.keys() == {
        *("parameters", "gradients", "optimizer state", "gradients added up"),
        *("gathered parameters", "activations", "in all"),
    }
    assert rows["parameters"][0] == rows["parameters"][1]
    assert done.stderr == ""


def refusal(done: "subprocess.CompletedProcess[str]") -> str:
    assert done.returncode == ExitCode.CONFIG and done.stdout == "", (done.returncode, done.stdout)
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.req("B1")
def test_what_training_refuses_is_refused(trierarch: Trierarch) -> None:
    dry = ("train", "--dry-run", *MODEL)
    assert "does not divide 6 ranks" in refusal(trierarch(*dry, "--ranks", "6", "parallel.tp=4"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dry-run"], "give --ranks, or --nodes"),
        (["--dry-run", "--ranks", "2", "--nodes", "1"], "--nodes goes with --ranks-per-node"),
        (["--dry-run", "--ranks", "2", "--rank", "2"], "choose 0 to 1"),
        (["--dry-run", "--ranks", "0"], "--ranks 0: give at least 1"),
        (["--dry-run", "--ranks", "1", "--cfg", "job"], "give one of the two"),
        (["--dry-run", "--ranks", "1", "job.nodes=2"], "use it with `trierarch submit`"),
        (["--rank", "1"], "--rank does nothing without --dry-run"),
        (["--json"], "--json does nothing without --dry-run"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["train", *options, *MODEL])
    assert isinstance(done.exception, ConfigError)
    assert words in str(done.exception)
