"""`trierarch ckpt convert` on a run that was trained here."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from harness.command import COMMAND, Trierarch
from harness.toy import LOOP, MODEL, REST
from safetensors.torch import load_file, save_file

from contract.exit_codes import ExitCode
from contract.run_folder import Event, RunFolder
from tools.ckpt.open import open_source

pytestmark = pytest.mark.slow

TRAIN = [
    *("train", "--ranks", "2"),
    *MODEL,
    *LOOP,
    *REST,
    *("run.name=toy", "loop.steps=6", "checkpoint.every_steps=3", "parallel.tp=2", "checkpoint.keep_last=3"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, toy_tokens: Path) -> Path:
    """A folder with a run of two ranks with two steps."""
    folder = tmp_path_factory.mktemp("trained")
    subprocess.run(
        [*COMMAND, *TRAIN, f"data.prefix={toy_tokens}"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        timeout=200,
    )
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained / "runs", tmp_path / "runs")) / "toy"


@pytest.mark.req("C8")
def test_a_run_continues_from_what_was_converted_and_back(
    trierarch: Trierarch, run: Path, tmp_path: Path, toy_tokens: Path
) -> None:
    done = trierarch("ckpt", "convert", "runs/toy/checkpoints/step_3", "plain", "--to", "safetensors")
    assert done.returncode == 0 and done.stderr == "", done
    assert (
        done.stdout.startswith("plain: ") and "from runs/toy/checkpoints/step_3 (trierarch 2)" in done.stdout
    )
    again = tmp_path / "again/toy"
    (again / "checkpoints").mkdir(parents=True)
    back = (
        "ckpt",
        "convert",
        "plain",
        "again/toy/checkpoints/step_3",
        "--to",
        "trierarch",
        "--like",
        "runs/toy",
    )
    done = trierarch(*back)
    assert done.returncode == 0 and done.stderr == "", done

    resumed = trierarch(*TRAIN, f"data.prefix={toy_tokens}", "run.root=again")
    assert resumed.returncode == 0, resumed.stderr
    assert [one["step"] for one in RunFolder(again).read_events() if one["event"] == Event.RESUMED] == [3]
    hashes = [
        json.loads((folder / "checkpoints/step_6/manifest.json").read_text())["tensors"]
        for folder in (run, again)
    ]
    assert hashes[0] == hashes[1]


def test_weights_of_a_run_become_a_model(trierarch: Trierarch, run: Path, tmp_path: Path) -> None:
    done = trierarch("ckpt", "convert", "runs/toy", "model", "--to", "hf", "--dtype", "bfloat16")
    assert done.returncode == 0 and done.stderr == "", done
    exported = trierarch("export", "runs/toy", "exported")
    assert exported.returncode == 0, exported.stderr
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "exported"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(one, theirs[name].bfloat16()) for name, one in ours.items())
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("model", "exported")]
    changed = {name for name in configs[0] if configs[0][name] != configs[1][name]}
    assert changed == {"dtype", "torch_dtype", "eos_token_id"}


def test_a_damaged_step_is_one_sentence(trierarch: Trierarch, run: Path, tmp_path: Path) -> None:
    with open_source(run) as source:
        (entry,) = [one for one in source.entries if one.name == "model.embed_tokens.weight"]
        (piece,) = [source.locate(entry, one) for one in entry.pieces if one.rank == 1]
    with piece.path.open("r+b") as file:
        file.seek(piece.offset)
        file.write(b"damage")
    refused = trierarch("ckpt", "convert", "runs/toy", "b.pt", "--to", "torch")
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1
    assert refused.stderr.startswith("trierarch: runs/toy/checkpoints/step_6 is damaged (error: ")
    assert "written by rank 1" in refused.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}
    assert trierarch("ckpt", "convert", "runs/toy", "b.pt", "--to", "torch", "--force").returncode == 0
    assert torch.load(tmp_path / "b.pt", weights_only=True)["progress"]["step"] == 6


@pytest.mark.parametrize(
    ("arguments", "sentence", "code"),
    [
        (("a.safetensors", "a.safetensors", "--to", "dcp"), "nothing is overwritten", ExitCode.CONFIG),
        (("none", "b", "--to", "dcp"), "none does not exist", 2),
    ],
)
def test_what_makes_no_sense_is_refused(
    trierarch: Trierarch, tmp_path: Path, arguments: tuple[str, ...], sentence: str, code: int
) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    refused = trierarch("ckpt", "convert", *arguments)
    assert refused.returncode == code and sentence in refused.stderr
    assert refused.stderr.startswith("trierarch: ") and refused.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.req("C9")
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_conversion_that_is_stopped_leaves_nothing(tmp_path: Path, stop: signal.Signals) -> None:
    """SIGKILL leaves it to the next one."""
    source = tmp_path / "large.safetensors"
    nbytes = 1 << 38  # holes: it would take minutes, and more room than there is
    header = json.dumps({"x": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    with source.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + nbytes)
    command = [*COMMAND, "ckpt", "convert", str(source), "target", "--to", "torch"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as running:
        deadline_s = time.monotonic() + 60
        while not (begun := list(tmp_path.glob(".target.tmp-*"))) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        running.send_signal(stop)
        code = running.wait(timeout=60)
    assert begun, "nothing was begun"
    assert code == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}[stop]
    left = [path.name for path in tmp_path.iterdir() if path != source]
    if stop is signal.SIGKILL:
        assert left == [begun[0].name]
        other = tmp_path / ".target.tmp-elsewhere-1"
        other.mkdir()
        save_file({"x": torch.ones(3)}, tmp_path / "small.safetensors")
        subprocess.run(
            [*COMMAND, "ckpt", "convert", "small.safetensors", "target", "--to", "torch"],
            cwd=tmp_path,
            check=True,
            timeout=60,
        )
        assert not begun[0].exists() and other.exists() and (tmp_path / "target").is_file()
    else:
        assert left == []
