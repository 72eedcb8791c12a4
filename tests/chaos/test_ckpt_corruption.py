"""Damage at random places of checkpoints of every format: found, or of no consequence; never a crash."""

import json
import logging
import random
import shutil
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.checkpoints import Box, flat, load_dcp, save_dcp, save_ours, state
from safetensors.torch import save_file

from tools.ckpt.compress import Compressor
from tools.ckpt.open import open_source
from tools.ckpt.report import Depth
from tools.ckpt.validate import validate

ROUNDS = 200
CUTS: dict[str, list[Box]] = {"model.embed_tokens.weight": [((0, 0), (20, 32)), ((20, 0), (44, 32))]}
GOLDEN = Path(__file__).parents[1] / "golden"
OURS = ("ours", "compressed", "delta")
KINDS = ("flip", "cut", "zeros", "missing", "swapped", "stale")


def make(kind: str, folder: Path, seed: int) -> Path:
    """A checkpoint; another seed makes another step of the same training."""
    tree = state(seed, 7 + seed)
    if kind == "ours":
        return save_ours(folder / "step_7", tree, 7 + seed, CUTS)
    if kind in ("compressed", "delta"):
        step = save_ours(folder / f"step_{7 + seed}", tree, 7 + seed, CUTS, files=2)
        parent = save_ours(folder / "step_5", state(seed, 5), 5, CUTS, files=2)
        Compressor().compress(parent)
        done = Compressor().compress(step) if kind == "compressed" else Compressor().delta(step, parent)
        assert (done.parent is None) == (kind == "compressed")
        return step
    if kind == "dcp":
        return save_dcp(folder / "dcp", tree, CUTS, files=2)
    folder.mkdir(exist_ok=True)
    if kind == "torch":
        torch.save(tree, folder / "x.pt")
    elif kind == "safetensors":
        parts = [dict(list(flat(tree).items())[start::2]) for start in (0, 1)]
        where = {name: f"part{index}.safetensors" for index, part in enumerate(parts) for name in part}
        for index, part in enumerate(parts):
            save_file(part, folder / f"part{index}.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    else:
        with tarfile.open(GOLDEN / f"{kind.rstrip('123')}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
        if kind == "megatron":
            return folder / "iter_0000012"
        return folder / f"zero{kind[-1]}/global_step{3 - seed if kind == 'deepspeed2' else 3}"
    return folder


def spoil(chance: random.Random, kind: str, folder: Path, other: Path) -> str:
    """Damage a checkpoint; `other` is one of another step. Returns what was done."""
    needed = folder.parent if kind == "delta" else folder
    files = sorted(path for path in needed.rglob("*") if path.is_file())
    # Without hashes, a name in the directory may change into another one, and that is all that can be said.
    bare = [path for path in files if kind in ("dcp", "megatron") and path.name == ".metadata"]
    file = chance.choice([path for path in files if path not in bare])
    data = bytearray(file.read_bytes())
    damage = chance.choice(KINDS)
    at = chance.randrange(max(1, len(data)))
    stale = other / file.relative_to(folder) if file.is_relative_to(folder) else other
    if damage == "missing":
        file.unlink()
    elif damage == "swapped":
        second = chance.choice([path for path in files if path not in bare])
        content = second.read_bytes()
        second.write_bytes(data)
        file.write_bytes(content)
    elif damage == "stale" and kind in (*OURS, "deepspeed2") and stale.is_file():
        shutil.copy(stale, file)
    elif damage == "cut":
        file.write_bytes(data[:at])
    elif damage == "zeros":
        at = at // 512 * 512
        data[at : at + 4096] = bytes(len(data[at : at + 4096]))
        file.write_bytes(data)
    else:
        damage = "flip"
        data[at : at + 1] = bytes(byte ^ 1 << chance.randrange(8) for byte in data[at : at + 1])
        file.write_bytes(data)
    return f"{damage} of {file.relative_to(needed)} at {at}"


def values(folder: Path) -> dict[str, bytes]:
    path = folder / "x.pt" if (folder / "x.pt").exists() else folder
    with open_source(path) as source:
        return {
            entry.name: b"".join(window.values.tobytes() for window in source.windows(entry))
            for entry in source.entries
            if entry.dtype != "object"
        }


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def loads_right(kind: str, folder: Path) -> bool:
    """Whether the library that the format is of loads what was saved."""
    tree = state()
    if kind in ("ours", "dcp"):
        found: dict[str, Any] = load_dcp(folder, tree)
    elif kind == "torch":
        found = torch.load(folder / "x.pt")
    else:
        return True
    wanted, tensors = flat(tree), flat(found)
    return wanted.keys() == tensors.keys() and all(
        torch.equal(tensors[name], wanted[name]) for name in wanted
    )


@pytest.mark.chaos
@pytest.mark.req("C9")
@pytest.mark.parametrize(
    "kind",
    [*OURS, "dcp", "torch", "safetensors", "deepspeed1", "deepspeed2", "deepspeed3", "megatron"],
)
def test_damage_is_found_or_of_no_consequence(tmp_path: Path, kind: str, session_seed: int) -> None:
    logging.disable(logging.CRITICAL)
    chance = random.Random(f"{session_seed} {kind}")
    origin = make(kind, tmp_path / "origin", 0)
    other = make(kind, tmp_path / "other", 1)
    right = values(origin)
    seen: Counter[str] = Counter()
    for number in range(ROUNDS):
        folder = tmp_path / "spoilt" / origin.name
        shutil.rmtree(folder.parent, ignore_errors=True)
        # A step that is a difference needs the one beside it.
        shutil.copytree(*((origin.parent, folder.parent) if kind == "delta" else (origin, folder)))
        what = f"{number}: {spoil(chance, kind, folder, other)}"
        report = validate(folder / "x.pt" if kind == "torch" else folder, Depth.DEEP)
        assert "\n" not in str(report.unreadable)
        seen["damaged" if report.exit_code == 1 else "unreadable" if report.exit_code else "whole"] += 1
        if report.exit_code:
            continue
        # Each of our bytes has a hash.
        assert kind not in OURS or contents(folder) == contents(origin), what
        if kind == "safetensors":
            # It has no checksum; but what changes must be values alone.
            assert {name: len(value) for name, value in values(folder).items()} == {
                name: len(value) for name, value in right.items()
            }, what
        else:
            assert values(folder) == right, what
            assert loads_right(kind, folder), what
    logging.disable(logging.NOTSET)
    print(f"{kind}: {dict(seen)}")
