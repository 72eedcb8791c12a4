"""`trierarch ckpt` on a run that was trained here, and on files of others."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from harness.command import Trierarch
from harness.toy import LOOP, MODEL, REST
from safetensors.torch import save_file

from contract.exit_codes import ExitCode

pytestmark = pytest.mark.slow

TOY = [
    *MODEL,
    *LOOP,
    *REST,
    "run.name=toy",
    "loop.steps=10",
    "checkpoint.every_steps=5",
    "checkpoint.keep_last=3",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, toy_tokens: Path) -> Path:
    """A run of two ranks with two steps."""
    import os
    import subprocess

    from harness.command import COMMAND

    folder = tmp_path_factory.mktemp("trained")
    arguments = [*COMMAND, "train", "--ranks", "2", *TOY, f"data.prefix={toy_tokens}", "parallel.tp=2"]
    subprocess.run(
        arguments,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        timeout=200,
    )
    return folder / "runs/toy"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "runs/toy"))


@pytest.mark.req("C9")
def test_ls_and_show_tell_what_there_is(trierarch: Trierarch, run: Path) -> None:
    listed = trierarch("ckpt", "ls", "runs/toy")
    assert listed.returncode == 0, listed.stderr
    head, *rows = listed.stdout.splitlines()
    assert head.split()[:6] == ["step", "age", "size", "format", "layout", "state"]
    assert [row.split()[0] for row in rows] == ["5", "10"]
    assert all(" trierarch " in row and "tp 2" in row for row in rows), rows
    steps = json.loads(trierarch("ckpt", "ls", "runs/toy", "--json").stdout)
    assert [one["step"] for one in steps] == [5, 10] and {one["state"] for one in steps} <= {
        "whole",
        "not verified",
    }

    shown = trierarch("ckpt", "show", "runs/toy", "--tensors")
    assert shown.returncode == 0 and shown.stderr == ""
    assert "step 10, samples " in shown.stdout and "tp 2" in shown.stdout
    assert "model.layers.0.self_attn.q_proj.weight" in shown.stdout
    facts = json.loads(trierarch("ckpt", "show", "runs/toy/checkpoints/step_5", "--json").stdout)
    assert facts["step"] == facts["position"]["step"] == 5
    weights = next(one for one in facts["roles"] if one["role"] == "weights")
    assert weights["elements"] == facts["parameters"] > 0 and facts["findings"] == []


@pytest.mark.req("C9")
def test_validate_speaks_to_people_and_scripts(trierarch: Trierarch, run: Path, tmp_path: Path) -> None:
    steps = [f"runs/toy/checkpoints/step_{step}" for step in (5, 10)]
    for depth in ((), ("--quick",), ("--deep",)):
        done = trierarch("ckpt", "validate", *steps, *depth)
        assert done.returncode == 0 and done.stderr == "", done
        assert not [line for line in done.stdout.splitlines() if "error" in line or "warning" in line]
    file = tmp_path / steps[1] / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 600] = bytes(600)
    file.write_bytes(data)
    newest = trierarch("ckpt", "validate", "--newest", "runs/toy")
    assert (newest.returncode, newest.stdout.strip()) == (0, steps[0])
    assert "damaged" in newest.stderr and "written by rank 1" in newest.stderr

    both = trierarch("ckpt", "validate", *steps)
    assert both.returncode == 1
    assert f"{steps[1]}: damaged" in both.stdout and "file __1_0.distcp, byte " in both.stdout
    reports = json.loads(trierarch("ckpt", "validate", "runs/toy", "none", "--json").stdout)
    assert [one["exit_code"] for one in reports] == [1, 2]
    assert reports[0]["findings"][0]["rank"] == 1

    shutil.rmtree(tmp_path / steps[0])
    none = trierarch("ckpt", "validate", "--newest", "runs/toy")
    assert (
        none.returncode == 1 and none.stdout == "" and "no checkpoint of run runs/toy is whole" in none.stderr
    )
    listed = trierarch("ckpt", "ls", "runs/toy")
    assert listed.returncode == 0
    file.unlink()
    assert "damaged" in trierarch("ckpt", "ls", "runs/toy").stdout


def test_files_of_others(trierarch: Trierarch, tmp_path: Path) -> None:
    tied = torch.randn(4, 5)
    torch.save({"model": {"a": tied, "b": tied}, "step": 12}, tmp_path / "x.pt")
    save_file({"a": torch.randn(3, 4).bfloat16()}, tmp_path / "y.safetensors")
    shown = trierarch("ckpt", "show", "x.pt")
    assert "model.b = model.a" in shown.stdout and "step        12" in shown.stdout
    assert "bfloat16" in trierarch("ckpt", "show", "y.safetensors", "--tensors").stdout
    done = trierarch("ckpt", "validate", "x.pt", "y.safetensors")
    assert done.returncode == 0
    assert "x.pt: whole" in done.stdout and "y.safetensors: complete, nothing to check" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence", "code"),
    [
        (("validate",), "nothing to validate: give a path", ExitCode.CONFIG),
        (("validate", "x", "--quick", "--deep"), "give one of the two", ExitCode.CONFIG),
        (("validate", "x", "--newest", "y"), "leave out the paths", ExitCode.CONFIG),
        (("validate", "--newest", "y"), "y is no run folder", 2),
        (("show", "x"), "x does not exist", 2),
        (("ls", "x"), "x is no run folder", 2),
    ],
)
def test_what_makes_no_sense_is_refused(
    trierarch: Trierarch, arguments: tuple[str, ...], sentence: str, code: int
) -> None:
    refused = trierarch("ckpt", *arguments)
    assert refused.returncode == code and sentence in refused.stderr
    assert refused.stderr.startswith("trierarch: ") and refused.stderr.count("\n") == 1
