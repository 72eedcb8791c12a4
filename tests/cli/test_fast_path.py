"""`checkpoint.fast_path`, as a user gives it."""

from pathlib import Path

import pytest
from harness.command import Trierarch
from harness.toy import LOOP, MODEL, REST

from contract.exit_codes import ExitCode
from contract.run_folder import Event, RunFolder

pytestmark = pytest.mark.slow

TOY = [*MODEL, *LOOP, *REST, "run.name=toy", "loop.steps=2", "loop.eval_batches=0"]


@pytest.mark.req("A22", "D3")
@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("scratch", "checkpoint.fast_path=scratch is not absolute: give the folder of a disk of each node"),
        ("$NO_SCRATCH/x", "checkpoint.fast_path=$NO_SCRATCH/x: NO_SCRATCH is not set on "),
    ],
)
def test_a_folder_that_no_node_has_is_an_error_in_the_configuration(
    trierarch: Trierarch, toy_tokens: Path, path: str, sentence: str
) -> None:
    done = trierarch("train", *TOY, f"data.prefix={toy_tokens}", f"checkpoint.fast_path={path}")
    assert done.returncode == ExitCode.CONFIG
    assert sentence in done.stderr and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.req("A22")
def test_a_variable_is_that_of_the_node(trierarch: Trierarch, tmp_path: Path, toy_tokens: Path) -> None:
    (tmp_path / "disk").mkdir()
    settings = [*TOY, f"data.prefix={toy_tokens}", "checkpoint.fast_path=$LOCAL_SCRATCH/disk"]
    done = trierarch("train", "--ranks", "2", *settings, LOCAL_SCRATCH=str(tmp_path))
    assert done.returncode == ExitCode.FINISHED, done.stderr
    assert "note: checkpoint.fast_path gains nothing: " in done.stdout
    run = RunFolder(tmp_path / "runs/toy")
    assert "fast_path: $LOCAL_SCRATCH/disk" in run.config.read_text()
    assert [event["step"] for event in run.read_events() if event["event"] == Event.SAVED_LOCALLY] == [2]
    assert run.published_steps() == [2] and list((tmp_path / "disk").glob("*/*")) == []
