"""`validate` finds what is wrong and names it; no bytes crash it, and none make it run code."""

import json
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.checkpoints import (
    CUTS,
    MODEL,
    Hostile,
    flat,
    hexed,
    load_dcp,
    save_dcp,
    save_ours,
    seal,
    state,
    write_manifest,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tools.ckpt.findings import Severity
from tools.ckpt.report import Depth, Report
from tools.ckpt.validate import validate
from train.model.config import ModelConfig, parameter_shapes

DATA_FILE = "__0_0.distcp"


def shapes_of(model: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return parameter_shapes(ModelConfig(**model))


def check(path: Path, depth: Depth = Depth.FULL) -> Report:
    return validate(path, depth, shapes_of)


def texts(report: Report) -> str:
    return "\n".join(map(str, report.errors)) or str(report.unreadable)


def flip(path: Path, at: int, mask: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= mask
    path.write_bytes(data)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_ours(tmp_path_factory.mktemp("whole") / "step_7", state(), 7, CUTS)


@pytest.fixture
def step(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "step_7"))


@pytest.mark.req("C9")
@pytest.mark.parametrize("depth", Depth)
def test_a_whole_step_is_whole(whole: Path, depth: Depth) -> None:
    report = check(whole, depth)
    assert report.exit_code == 0 and report.errors == []
    assert not [one for one in report.findings if one.severity is not Severity.NOTE], report.findings
    assert report.verdict == ("complete, bytes not looked at" if depth is Depth.QUICK else "whole")
    assert (report.read_bytes > 0) == (depth is not Depth.QUICK)


def where_it_lies(step: Path, name: str, part: int) -> int:
    """Offset of the first value of a part of a tensor."""
    from tools.ckpt.open import open_source

    with open_source(step) as source:
        entry = next(one for one in source.entries if one.name == name)
        return source.locate(entry, entry.pieces[part]).offset


@pytest.mark.req("C9")
def test_a_flipped_bit_is_named(step: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    offset = where_it_lies(step, name, 1)
    flip(step / DATA_FILE, offset + 9)
    assert check(step, Depth.QUICK).exit_code == 0
    (found,) = check(step).errors
    assert (found.tensor, found.file, found.offset, found.rank) == (name, DATA_FILE, offset, 0)
    assert "its part at [0, 10] of shape [48, 22] does not have the hash" in found.text


@pytest.mark.req("C9")
def test_every_byte_of_a_file_of_slices_counts(step: Path, session_seed: int) -> None:
    """Also those that are no values: headers and padding of archives."""
    chance = random.Random(session_seed)
    path = step / DATA_FILE
    data = path.read_bytes()
    begin = where_it_lies(step, "model.embed_tokens.weight", 0)
    places = [0, begin - 1, begin + 20 * 32 * 4, len(data) - 1, *chance.sample(range(len(data)), 20)]
    for at in places:
        flip(path, at, 1 << chance.randrange(8))
        assert check(step).exit_code == 1, at
        path.write_bytes(data)
    flip(path, begin - 1)
    (found,) = check(step).errors
    assert (found.file, found.offset, found.tensor) == (DATA_FILE, 0, None)
    assert f"its bytes beside values, between 0 and {len(data)}, do not have the hash" in found.text
    path.write_bytes(data)
    digests = json.loads((step / "digests/rank_0.json").read_text())
    (step / "digests/rank_0.json").write_text(json.dumps({"slices": digests["slices"]}))
    write_manifest(step, flat(state()), 7)
    flip(path, begin - 1)
    assert check(step).exit_code == 0, "there was no such hash at first"


def test_without_hashes_the_checksum_finds_it(tmp_path: Path) -> None:
    save_dcp(tmp_path / "d", state(), CUTS)
    offset = where_it_lies(tmp_path / "d", "model.embed_tokens.weight", 0)
    flip(tmp_path / "d" / DATA_FILE, offset + 100)
    (found,) = check(tmp_path / "d").errors
    assert "CRC-32" in found.text and found.tensor == "model.embed_tokens.weight"


def test_turned_tensors_are_checked_in_the_order_of_the_file(tmp_path: Path) -> None:
    save_dcp(tmp_path / "d", {"turned": torch.randn(5, 7).T})
    assert check(tmp_path / "d", Depth.DEEP).exit_code == 0
    flip(tmp_path / "d" / DATA_FILE, where_it_lies(tmp_path / "d", "turned", 0) + 3)
    assert "CRC-32" in texts(check(tmp_path / "d"))


Damage = Callable[[Path], object]


def _write(folder: Path, **fields: Any) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | fields))


def _other_manifest(folder: Path, **fields: Any) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    seal(folder, manifest | fields)


def _swap(step: Path) -> None:
    """The data of another step, of the same size."""
    other = save_ours(step.parent / "other", state(seed=1), 7, CUTS)
    (step / DATA_FILE).write_bytes((other / DATA_FILE).read_bytes())


def _without_slice(step: Path) -> None:
    path = step / "digests/rank_0.json"
    slices = json.loads(path.read_text())["slices"]
    path.write_text(json.dumps({"slices": slices[1:]}))
    write_manifest(step, flat(state()), 7)


def _zeros(step: Path) -> None:
    offset = where_it_lies(step, "model.embed_tokens.weight", 1)
    data = bytearray((step / DATA_FILE).read_bytes())
    data[offset : offset + 4096] = bytes(4096)
    (step / DATA_FILE).write_bytes(data)


def _wrong_global(step: Path) -> None:
    tensors = json.loads((step / "manifest.json").read_text())["tensors"]
    tensors["model.norm.weight"]["xxh3"] = hexed(torch.ones(3))
    _other_manifest(step, tensors=tensors)


@pytest.mark.req("C9")
@pytest.mark.parametrize(
    ("damage", "said", "quick"),
    [
        (lambda step: (step / DATA_FILE).unlink(), "is missing (tensor ", True),
        (lambda step: (step / "digests/rank_0.json").unlink(), "cannot be read", True),
        (lambda step: (step / ".metadata").unlink(), "has no .metadata", True),
        (lambda step: (step / "manifest.json").unlink(), "is missing: without it", True),
        (lambda step: (step / "manifest.json").write_text("{"), "manifest.json of", True),
        (lambda step: (step / ".metadata").write_bytes(b""), ".metadata of", True),
        (lambda step: shutil.copy(step / DATA_FILE, step / "__9_0.distcp"), "left from another save", True),
        (lambda step: (step / "core.77").write_text("x"), "is not of this step", True),
        (lambda step: step.rename(step.with_name("step_8")), "mixes steps: manifest.json says 7", True),
        (lambda step: _other_manifest(step, step=9), "mixes steps", True),
        (lambda step: _other_manifest(step, digests={}), "has no hash", True),
        (lambda step: _write(step, layout={"dp_shard": 3}), "does not have the hash that it was saved", True),
        (lambda step: _write(step, xxh2="0"), "has the field 'xxh2', which is not known", True),
        (lambda step: _other_manifest(step, tensors={}), "is not in manifest.json", True),
        (lambda step: _other_manifest(step, tensors=None), "manifest.json", True),
        (lambda step: _other_manifest(step, format=3), "reads up to 2", True),
        (lambda step: _other_manifest(step, metadata="00"), "does not have the hash", True),
        (lambda step: _other_manifest(step, model=MODEL | {"dim": 30}), "the model wants", True),
        (lambda step: flip(step / "digests/rank_0.json", 40), "rank_0.json", True),
        (_without_slice, "has no hash", True),
        (_swap, "does not have the hash", False),
        (_zeros, "does not have the hash", False),
        (_wrong_global, "hash of the whole tensor", False),
    ],
)
def test_damage_is_found(step: Path, damage: Damage, said: str, quick: bool) -> None:
    damage(step)
    path = next(path for path in step.parent.glob("step_*"))
    report = check(path)
    assert report.exit_code > 0 and said in texts(report), texts(report)
    assert bool(check(path, Depth.QUICK).exit_code) == quick


def test_format_1_has_checksums_and_says_so(step: Path) -> None:
    shutil.rmtree(step / "digests")
    write_manifest(step, {}, 7, format=1, metadata=None)
    report = check(step)
    assert (report.exit_code, report.format) == (0, "trierarch 1")
    assert "is of format 1: no hashes" in "\n".join(map(str, report.findings))
    flip(step / DATA_FILE, where_it_lies(step, "model.norm.weight", 0))
    assert "CRC-32" in texts(check(step))


def test_a_cut_file_is_said_once(step: Path) -> None:
    data = (step / DATA_FILE).read_bytes()
    (step / DATA_FILE).write_bytes(data[: len(data) // 2])
    (found,) = check(step, Depth.DEEP).errors
    assert found.file == DATA_FILE and found.offset == len(data) // 2 and found.tensor is not None
    assert f"has {len(data) // 2} bytes, tensors want {len(data)}" in found.text


def _deep(tree: dict[str, Any], tmp_path: Path, at: int = 7) -> Report:
    return check(save_ours(tmp_path / f"step_{at}", tree, at), Depth.DEEP)


def _change(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    tree = state()
    *folders, last = name.split("/")
    inner = tree
    for folder in folders:
        inner = inner[folder]
    inner[last] = value(inner[last])
    return tree


def _nan(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().index_fill(0, torch.tensor([3]), float("nan")).reshape(tensor.shape)


def _hole(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor[:1], torch.zeros(64, 32), tensor[1:]])[:64] if len(tensor) == 64 else tensor


@pytest.mark.req("C9")
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("model/norm.weight", _nan, "1 of its 32 values are NaN (tensor model.norm.weight)"),
        ("optimizer/norm.weight/exp_avg", lambda one: one / 0, "32 of its 32 values are infinite"),
        ("model/layers.0.mlp.up_proj.weight", torch.zeros_like, "all its values are zero"),
        ("optimizer/norm.weight/exp_avg", lambda one: one[:5], "has the shape [5], its parameter [32]"),
        ("model/norm.weight", lambda one: one[:5], "has the shape [5], the model wants [32]"),
    ],
)
def test_values_and_shapes_that_cannot_be(
    tmp_path: Path, name: str, value: Callable[[torch.Tensor], torch.Tensor], said: str
) -> None:
    report = _deep(_change(name, value), tmp_path)
    assert said in texts(report)


def test_a_page_of_zeros_is_found_without_hashes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.randn(64, 256), "pruned": torch.randn(64, 256).relu_().sub_(2).relu_()}, path)
    assert check(path, Depth.DEEP).exit_code == 0
    data = bytearray(path.read_bytes())
    data[8192:12288] = bytes(4096)
    path.write_bytes(data)
    (found,) = check(path, Depth.DEEP).errors
    assert "1 pages of 4096 bytes" in found.text and found.offset == 8192


def test_zero_moments_and_biases_are_no_damage(tmp_path: Path) -> None:
    tree = state(step=0)
    for moments in tree["optimizer"].values():
        moments["exp_avg"].zero_()
        moments["exp_avg_sq"].zero_()
    report = _deep(tree, tmp_path, 0)
    assert report.exit_code == 0 and report.findings == []
    never = _change("optimizer/norm.weight/exp_avg_sq", torch.zeros_like)
    report = _deep(never, tmp_path)
    assert report.exit_code == 0 and [one.severity for one in report.findings] == [Severity.WARNING]


@pytest.mark.parametrize("where", ["model", "optimizer"])
def test_moments_and_parameters_come_together(tmp_path: Path, where: str) -> None:
    tree = state()
    del tree[where]["norm.weight"]
    said = {
        "model": "belongs to the parameter norm.weight, which",
        "optimizer": "other parameters have theirs",
    }
    assert said[where] in texts(_deep(tree, tmp_path))


def test_tied_weights_must_be_equal(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    config.tie_word_embeddings = True
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path)
    assert check(tmp_path, Depth.DEEP).exit_code == 0
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, path)
    assert "differs from model.embed_tokens.weight" in texts(check(tmp_path, Depth.DEEP))


def test_sharded_safetensors_against_their_index(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "a", max_shard_size="4KB")
    report = check(tmp_path / "a", Depth.DEEP)
    assert report.exit_code == 0 and report.format == "huggingface" and report.tensors == 21
    shards = sorted((tmp_path / "a").glob("*.safetensors"))
    assert len(shards) > 2
    shards[1].rename(tmp_path / "away")
    assert f"is missing (file {shards[1].name})" in texts(check(tmp_path / "a"))
    shutil.copy(shards[0], shards[1])
    assert "the index says" in texts(check(tmp_path / "a"))
    (tmp_path / "away").rename(shards[1])
    save_file({"more": torch.ones(3)}, tmp_path / "a/extra.safetensors")
    assert "belongs to no index" in texts(check(tmp_path / "a"))


def test_a_hostile_pickle_never_runs(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    hostile = Hostile(mark)
    torch.save({"a": torch.ones(3), "b": hostile}, tmp_path / "x.pt")
    save_dcp(tmp_path / "d", {"a": torch.ones(3), "b": hostile})
    for path in ("x.pt", "d"):
        for depth in Depth:
            report = check(tmp_path / path, depth)
            assert not mark.exists()
            if depth is not Depth.QUICK:
                assert "asks for posix.system" in "\n".join(map(str, report.findings))
    import pickle

    (tmp_path / "d/.metadata").write_bytes(pickle.dumps(hostile))
    assert check(tmp_path / "d", Depth.DEEP).exit_code == 2
    (tmp_path / "y.pt").write_bytes(pickle.dumps(hostile))
    assert check(tmp_path / "y.pt", Depth.DEEP).exit_code == 2
    assert not mark.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.load(tmp_path / "x.pt", weights_only=False)
    assert mark.exists()  # what torch itself does


@st.composite
def damages(draw: st.DrawFn) -> tuple[str, float, int]:
    """(kind, place as a fraction of the file, which bit or how many bytes)."""
    kind = draw(st.sampled_from(["flip", "flip", "flip", "cut", "zeros", "grow"]))
    return kind, draw(st.floats(0, 1, exclude_max=True)), draw(st.integers(0, 4096))


def spoil(path: Path, damage: tuple[str, float, int]) -> bool:
    """Damage a file; returns whether it is another now."""
    kind, place, amount = damage
    before = path.read_bytes()
    at = int(place * len(before))
    data = bytearray(before)
    if kind == "flip":
        data[at] ^= 1 << amount % 8
    elif kind == "cut":
        del data[at:]
    elif kind == "zeros":
        data[at : at + amount] = bytes(len(data[at : at + amount]))
    else:
        data += bytes(1 + amount)
    path.write_bytes(data)
    return bytes(data) != before


SMALL = {
    "a": torch.arange(12.0).reshape(3, 4),
    "b": {"exp": torch.ones(5, dtype=torch.bfloat16)},
    "n": torch.tensor(3),
}


def _same(found: dict[str, Any]) -> bool:
    tensors, wanted = flat(found), flat(SMALL)
    return tensors.keys() == wanted.keys() and all(
        torch.equal(tensors[name], wanted[name]) for name in wanted
    )


@pytest.mark.req("C9")
@settings(max_examples=150)
@given(damage=damages(), data=st.data())
def test_no_damage_of_a_distributed_checkpoint_is_called_whole(
    tmp_path_factory: pytest.TempPathFactory, damage: tuple[str, float, int], data: st.DataObject
) -> None:
    """Any byte of any file: a finding or one sentence; and what is called whole, torch loads with its values."""
    base = tmp_path_factory.getbasetemp()
    for kind in ("dcp", "ours"):
        origin = base / f"origin-{kind}"
        if not origin.exists():
            save = save_dcp if kind == "dcp" else save_ours
            save(origin, SMALL)
        folder = base / f"spoilt-{kind}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(origin, folder)
        files = sorted(path.relative_to(origin) for path in origin.rglob("*") if path.is_file())
        name = data.draw(st.sampled_from(files))
        if not spoil(folder / name, damage):
            continue
        report = validate(folder, Depth.DEEP)
        assert "\n" not in str(report.unreadable)
        assert all("\n" not in str(finding) for finding in report.findings)
        # Names of tensors in a bare `.metadata` have no checksum.
        if report.exit_code == 0 and (kind, str(name)) != ("dcp", ".metadata"):
            assert _same(load_dcp(folder, SMALL)), (kind, name)


@pytest.mark.req("C9")
@settings(max_examples=200)
@given(damage=damages())
def test_no_damage_of_a_torch_file_is_called_whole(
    tmp_path_factory: pytest.TempPathFactory, damage: tuple[str, float, int]
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.pt"
    torch.save(SMALL, path)
    if spoil(path, damage):
        report = validate(path, Depth.DEEP)
        if report.exit_code == 0:
            assert _same(torch.load(path))


@settings(max_examples=200)
@given(damage=damages())
def test_no_damage_crashes_the_reader_of_safetensors(
    tmp_path_factory: pytest.TempPathFactory, damage: tuple[str, float, int]
) -> None:
    """It has no checksum: that it was read the way that safetensors reads it is all there is to want."""
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    save_file(flat(SMALL), path)
    if spoil(path, damage):
        report = validate(path, Depth.FULL)
        if report.exit_code == 0:
            load_file(path)


@settings(max_examples=300)
@given(junk=st.binary(max_size=200), suffix=st.sampled_from([".pt", ".safetensors", ".metadata"]))
def test_junk_is_refused_in_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes, suffix: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "junk" / (suffix if suffix == ".metadata" else f"x{suffix}")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(junk)
    report = validate(path.parent if suffix == ".metadata" else path, Depth.DEEP)
    path.unlink()
    assert report.exit_code == 2 or (suffix == ".safetensors" and report.tensors == 0)
    assert "\n" not in str(report.unreadable)


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ({"a": [0, 8], "b": [4, 12]}, "overlaps a (tensor b, file x.safetensors, byte "),
        ({"a": [0, 8], "b": [12, 20]}, "4 bytes before it belong to no tensor"),
        ({"a": [0, 8], "b": [8, 16]}, "4 bytes at its end belong to no tensor"),
        ({"a": [0, 8], "b": [8, 12]}, "has 4 bytes for F32 of shape [2]"),
        ({"a": [0, 8], "b": [12, 30]}, "has 18 bytes"),
    ],
)
def test_safetensors_that_do_not_fill_their_file(
    tmp_path: Path, offsets: dict[str, list[int]], said: str
) -> None:
    header = {name: {"dtype": "F32", "shape": [2], "data_offsets": span} for name, span in offsets.items()}
    text = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(20))
    assert said in texts(check(tmp_path / "x.safetensors", Depth.QUICK))
