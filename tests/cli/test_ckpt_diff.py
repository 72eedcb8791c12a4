"""`trierarch ckpt diff` as a user and a script call it."""

import json
from pathlib import Path

import pytest
import torch
from harness.checkpoints import flat, save_dcp, state
from harness.command import Trierarch
from safetensors.torch import save_file

from contract.exit_codes import ExitCode

pytestmark = pytest.mark.slow

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def pair(tmp_path: Path) -> None:
    """`a` of torch's distributed checkpoint; `b.safetensors` of which one matrix is scaled; `half` in bfloat16."""
    save_dcp(tmp_path / "a", state())
    tensors = {name: one.clone() for name, one in flat(state()).items()}
    save_file(
        {name: one.bfloat16() if name.startswith("model.") else one for name, one in tensors.items()},
        tmp_path / "half.safetensors",
    )
    tensors[Q] *= 1.5
    save_file(tensors, tmp_path / "b.safetensors")


@pytest.mark.req("C8")
def test_it_speaks_to_people_and_scripts(trierarch: Trierarch, pair: None, tmp_path: Path) -> None:
    same = trierarch("ckpt", "diff", "a", "a")
    assert (same.returncode, same.stdout, same.stderr) == (0, "all 51 tensors are equal\n", "")

    shown = trierarch("ckpt", "diff", "a", "b.safetensors", "--html", "page.html", "--png", "map.png")
    assert shown.returncode == 1 and shown.stderr == ""
    lines = shown.stdout.splitlines()
    assert lines[0] == "A  a (dcp, 51 tensors)" and lines[1].startswith("B  b.safetensors (safetensors")
    assert lines[2] == "1 of 51 tensors differ (50 equal, 1 values differ)"
    (row,) = [line.split() for line in lines if line.startswith(Q)]
    assert row[1:4] == ["values", "differ", "100%"] and row[-2:] == ["0.5", "1"]
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    assert "layer 0" in shown.stdout and f"<code>{Q}</code>" in (tmp_path / "page.html").read_text()

    facts = json.loads(trierarch("ckpt", "diff", "a", "b.safetensors", "--json").stdout)
    assert facts["exit_code"] == 1 and facts["states"]["values differ"] == 1
    (one,) = facts["differing"]
    assert (one["name"], one["role"], one["place"]) == (Q, "weights", "layer 0")
    assert one["values"]["relative_norm"] == pytest.approx(0.5)
    assert one["values"]["max_relative"] == pytest.approx(1 / 3)


@pytest.mark.req("C8")
def test_exit_codes_and_choices(trierarch: Trierarch, pair: None, tmp_path: Path) -> None:
    def code(*arguments: str) -> int:
        return trierarch("ckpt", "diff", *arguments).returncode

    assert code("a", "half.safetensors") == 1
    assert code("a", "half.safetensors", "--relative-tolerance", "0.004") == 0
    assert code("a", "half.safetensors", "--tolerance", "1e-5") == 1
    assert code("a", "half.safetensors", "--only", "exp_avg", "--only", "exp_avg_sq") == 0
    assert code("b.safetensors", "half.safetensors", "--tolerance", "5") == 0

    torch.save(state(1)["model"], tmp_path / "other.pt")
    shown = trierarch("ckpt", "diff", "other.pt", "a", "--only", "weights", "--top", "2")
    assert shown.returncode == 1 and "... 10 more tensors (--top)" in shown.stdout
    assert "12 names matched without their prefix" in shown.stdout

    file = tmp_path / "b.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    broken = trierarch("ckpt", "diff", "a", "b.safetensors")
    assert broken.returncode == 2 and "unreadable" in broken.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence", "code"),
    [
        (("a", "none"), "none does not exist", 2),
        (("a", "a", "--tolerance", "-1"), "--tolerance is -1.0: give a number from 0 on", ExitCode.CONFIG),
        (("a", "a", "--relative-tolerance", "nan"), "--relative-tolerance is nan", ExitCode.CONFIG),
        (("a", "a", "--only", "bias"), "no tensor has the role 'bias': choose among", ExitCode.CONFIG),
        (("a", "a", "--html", "no/page.html"), "no/page.html cannot be written", 1),
        (("a", "a", "--png", "no/map.png"), "no/map.png cannot be written", 1),
    ],
)
def test_what_makes_no_sense_is_refused(
    trierarch: Trierarch, tmp_path: Path, arguments: tuple[str, ...], sentence: str, code: int
) -> None:
    save_dcp(tmp_path / "a", {"model": {"x": torch.ones(2)}})
    refused = trierarch("ckpt", "diff", *arguments)
    assert refused.returncode == code and sentence in refused.stderr
    assert refused.stderr.startswith("trierarch: ") and refused.stderr.count("\n") == 1
