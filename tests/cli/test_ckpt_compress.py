"""`trierarch ckpt compress`, `delta` and `restore` on a run that was trained here."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness.command import Trierarch
from harness.compressing import contents
from harness.toy import LOOP, MODEL, REST

from contract.errors import UserError
from contract.exit_codes import ExitCode
from contract.run_folder import RunFolder

pytestmark = pytest.mark.slow

TOY = [
    *MODEL,
    *LOOP,
    *REST,
    "run.name=toy",
    "loop.steps=12",
    "checkpoint.every_steps=4",
    "checkpoint.keep_last=3",
]
STEPS = "runs/toy/checkpoints"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, toy_tokens: Path) -> Path:
    """A run of two ranks with three steps."""
    import os

    from harness.command import COMMAND

    folder = tmp_path_factory.mktemp("trained")
    arguments = [*COMMAND, "train", "--ranks", "2", *TOY, f"data.prefix={toy_tokens}", "parallel.zero=3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(arguments, cwd=folder, env=environment, check=True, capture_output=True, timeout=200)
    return folder / "runs/toy"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "runs/toy"))


@pytest.mark.req("C9")
def test_a_run_takes_less_room_and_gets_its_files_back(
    trierarch: Trierarch, run: Path, trained: Path
) -> None:
    done = trierarch("ckpt", "delta", "runs/toy", "--chain", "1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{STEPS}/step_4: ") and "difference" not in lines[0]
    assert "as the difference to step_4" in lines[1] and "MB/s" in lines[1] and "of plain" in lines[1]
    assert "difference" not in lines[2]
    assert lines[4].split() == ["role", "before", "after", "ratio", "slices", "stored", "as"]
    roles = {line.split()[0] for line in lines[5:]}
    assert {"weights", "exp_avg", "exp_avg_sq"} <= roles

    listed = trierarch("ckpt", "ls", "runs/toy").stdout.splitlines()
    assert "stored" in listed[0]
    assert "whole  compressed 0." in listed[1] and "whole  delta of step_4, 0." in listed[2]
    shown = trierarch("ckpt", "show", f"{STEPS}/step_8").stdout
    assert "stored      delta of step_4, 0." in shown
    assert json.loads(trierarch("ckpt", "show", f"{STEPS}/step_8", "--json").stdout)["stored"].startswith(
        "delta"
    )
    assert trierarch("ckpt", "validate", *(f"{STEPS}/step_{step}" for step in (4, 8, 12))).returncode == 0

    assert trierarch("ckpt", "compress", "runs/toy").returncode == 0
    assert "delta" not in trierarch("ckpt", "ls", "runs/toy").stdout
    again = trierarch("ckpt", "compress", f"{STEPS}/step_4")
    assert again.returncode == 0 and "nothing to do" in again.stdout

    out = trierarch("ckpt", "restore", "runs/toy", "--out", "out")
    assert out.returncode == 0, out.stderr
    assert trierarch("ckpt", "restore", "runs/toy").returncode == 0
    for step in (4, 8, 12):
        name = f"step_{step}"
        before = contents(trained / "checkpoints" / name)
        assert contents(run / "checkpoints" / name) == contents(run.parents[1] / "out" / name) == before
        manifest = (trained / f"checkpoints/{name}/manifest.json").read_bytes()
        assert (run / f"checkpoints/{name}/manifest.json").read_bytes() == manifest
        assert (run.parents[1] / f"out/{name}/manifest.json").read_bytes() == manifest


@pytest.mark.req("C9")
def test_rounded_steps_say_so(trierarch: Trierarch, run: Path) -> None:
    before = contents(run)
    (run.parents[1] / "out").mkdir()
    done = trierarch("ckpt", "compress", f"{STEPS}/step_12", "--lossy", "all", "--out", "out")
    assert done.returncode == 0, done.stderr
    assert contents(run) == before
    shown = trierarch("ckpt", "show", "out/step_12").stdout
    assert "rounded     weights by up to 0.39%, exp_avg by up to " in shown
    assert ", rounded" in next(line for line in shown.splitlines() if line.startswith("stored"))
    found = trierarch("ckpt", "diff", f"{STEPS}/step_12", "out/step_12")
    assert found.returncode == 1
    assert found.stdout.startswith("B was rounded: weights by up to 0.39%, exp_avg by up to ")
    again = trierarch("ckpt", "compress", f"{STEPS}/step_12", "--lossy", "all", "--out", "out")
    assert again.returncode == ExitCode.CONFIG and "out/step_12 exists" in again.stderr


REFUSED = [
    (("compress", "nothing"), 2, "nothing does not exist: give a step or a run"),
    (
        ("compress", f"{STEPS}/step_4/.metadata"),
        ExitCode.CONFIG,
        "is no step of a run: write it as one with `trierarch ckpt convert",
    ),
    (("compress", "runs/toy", "--lossy", "moment", "--out", "x"), ExitCode.CONFIG, "did you mean moments?"),
    (("compress", "runs/toy", "--lossy", "moments"), ExitCode.CONFIG, "give --out DIR"),
    (("compress", "runs/toy", "--out", "x"), ExitCode.CONFIG, "--out does nothing without --lossy"),
    (
        ("compress", "runs/toy", "--largest-error", "0.1"),
        ExitCode.CONFIG,
        "--largest-error does nothing without --lossy",
    ),
    (
        ("compress", "runs/toy", "--lossy", "all", "--out", "x", "--largest-error", "1.5"),
        ExitCode.CONFIG,
        "must be above 0.00390625 and at most 1",
    ),
    (
        ("compress", "runs/toy", "--lossy", "all", "--out", "x", "--largest-error", "0.00390625"),
        ExitCode.CONFIG,
        "must be above 0.00390625 and at most 1",
    ),
    (
        ("compress", "runs/toy", "--lossy", "all", "--out", "no/x"),
        ExitCode.CONFIG,
        "no/x is no folder: make it first",
    ),
    (("delta", f"{STEPS}/step_4"), ExitCode.CONFIG, "is one step: give --parent STEP, of the same run"),
    (("delta", "runs/toy", "--parent", f"{STEPS}/step_4"), ExitCode.CONFIG, "--parent goes with one step"),
    (("delta", f"{STEPS}/step_4", "--parent", "runs/toy"), ExitCode.CONFIG, "is a run: give a step of it"),
    (
        ("delta", f"{STEPS}/step_4", "--parent", f"{STEPS}/step_4"),
        ExitCode.CONFIG,
        "cannot be the difference to itself",
    ),
    (("restore", "runs/toy", "--out", "no/x"), ExitCode.CONFIG, "no/x is no folder: make it first"),
]


@pytest.mark.parametrize(
    ("command", "code", "told"), REFUSED, ids=lambda one: " ".join(one) if type(one) is tuple else ""
)
def test_what_makes_no_sense_is_refused_in_a_sentence(
    trierarch: Trierarch, run: Path, command: tuple[str, ...], code: int, told: str
) -> None:
    before = contents(run)
    done = trierarch("ckpt", *command)
    assert (done.returncode, done.stdout) == (code, "")
    assert told in done.stderr and len(done.stderr.splitlines()) == 1
    assert contents(run) == before


@pytest.mark.req("C9")
def test_a_step_without_the_one_that_it_needs_tells_every_command_so(trierarch: Trierarch, run: Path) -> None:
    assert trierarch("ckpt", "delta", f"{STEPS}/step_12", "--parent", f"{STEPS}/step_4").returncode == 0
    for number in (4, 8):
        shutil.rmtree(run / f"checkpoints/step_{number}")
    told = "step_4, which it is the difference to: manifest.json is missing"
    checked = trierarch("ckpt", "validate", "runs/toy")
    assert checked.returncode == 1
    assert checked.stdout.splitlines()[1:] == [f"  error: cannot be decoded: {told}"]
    for command in (
        ("diff", "runs/toy", "runs/toy"),
        ("convert", "runs/toy", "new", "--to", "torch"),
        ("convert", "runs/toy", "new", "--to", "torch", "--force"),
    ):
        done = trierarch("ckpt", *command)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"step_12 cannot be decoded ({told}): put that step back" in done.stderr
    assert "step_12" in trierarch("ckpt", "show", "runs/toy").stdout

    done = trierarch("export", "runs/toy", "exported")
    assert done.returncode == ExitCode.CONFIG
    assert f"(step_12: {told}): look at it with `trierarch ckpt validate runs/toy`" in done.stderr


def test_what_is_no_step_of_a_run_is_named(run: Path) -> None:
    """A step by itself, or one that was set aside, in place of a run's."""
    from train.generate import newest_whole

    checkpoints = run / "checkpoints"
    (checkpoints / "step_12").rename(checkpoints / "step_12.damaged")
    for number in (4, 8):
        shutil.rmtree(checkpoints / f"step_{number}")
    for path, other in ((run, "step_12.damaged"), (checkpoints, "step_12.damaged")):
        told = f"({checkpoints / other} does not count: it is not {path}/checkpoints/step_N)"
        with pytest.raises(UserError, match=re.escape(told)):
            newest_whole(RunFolder(path))
    shutil.rmtree(checkpoints / "step_12.damaged")
    with pytest.raises(UserError, match=r"\(it has none\): train it first"):
        newest_whole(RunFolder(run))


def test_in_place_commands_import_no_torch(run: Path, tmp_path: Path) -> None:
    script = (
        "import sys\nfrom tools.cli import app\n"
        "for command in ('delta', 'compress', 'restore'):\n"
        f"    app(['ckpt', command, {str(run)!r}], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path, timeout=60)
