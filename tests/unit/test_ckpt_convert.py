"""Whatever form a checkpoint is written in, it is read by the form's own library and has the same bits."""

import json
import math
import os
import resource
import tarfile
import tracemalloc
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness.checkpoints import MODEL, Box, flat, in_all_types, load_dcp, save_dcp, save_ours, seal, state
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from contract.errors import ConfigError, SaveError, UserError
from tools.ckpt import write_archive as archive_module
from tools.ckpt.convert import Form, Wish, convert
from tools.ckpt.convert_dtype import TARGETS, RangeError, converted
from tools.ckpt.convert_hf import HfModel
from tools.ckpt.convert_place import draft
from tools.ckpt.convert_read import DamagedSourceError, tensors_of
from tools.ckpt.dtypes import BITS
from tools.ckpt.findings import UnreadableError
from tools.ckpt.open import open_source
from tools.ckpt.validate import validate
from tools.ckpt.write_dcp import write_dcp
from tools.ckpt.write_safetensors import write_safetensors
from tools.ckpt.write_torch import paths_of
from tools.cli_ckpt import app
from tools.cli_ckpt_convert import hf_of_manifest

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "golden"
PLAIN = (Form.TRIERARCH, Form.DCP, Form.SAFETENSORS, Form.TORCH)
CUTS: dict[str, list[Box]] = {
    "model.embed_tokens.weight": [((0, 0), (40, 32)), ((40, 0), (24, 8)), ((40, 8), (24, 24))],
    "extra.cube": [((0, 0, 0), (3, 1, 5)), ((0, 1, 0), (3, 3, 5))],
}


def no_model(model: dict[str, Any]) -> HfModel:
    raise UserError("not asked for")


def run(source: Path, target: Path, form: Form, **wish: Any) -> Path:
    convert(source, target, Wish(form, **wish), no_model)
    return target


def tree() -> dict[str, Any]:
    """A state of training, and tensors of all types."""
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(13, 7, generator=generator)
    extra = {
        **in_all_types(matrix, torch.uint16, torch.complex64),
        "flag": torch.tensor([True, False, True]),
        "cube": torch.randn(3, 4, 5, generator=generator),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(5),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
    }
    return {**state(), "extra": extra}


def raw(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    values = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype), tuple(tensor.shape), values


def all_raw(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: raw(tensor) for name, tensor in flat(tensors).items()}


def loaded(path: Path, form: Form, like: dict[str, Any]) -> dict[str, Any]:
    """Read with the library of the form."""
    if form is Form.TORCH:
        found: dict[str, Any] = torch.load(path, weights_only=True)
        mapped = torch.load(path, weights_only=True, mmap=True)
        assert all_raw(mapped) == all_raw(found)
        return found
    if form is Form.SAFETENSORS:
        found = {}
        for file in path.glob("*.safetensors"):
            found |= load_file(file)
        return found
    return load_dcp(path, like)


def write(folder: Path, form: Form, tensors: dict[str, Any]) -> Path:
    """Write with the library of the form."""
    if form is Form.TRIERARCH:
        return save_ours(folder, tensors, cuts=CUTS)
    if form is Form.DCP:
        return save_dcp(folder, tensors, CUTS, files=2)
    if form is Form.TORCH:
        torch.save(tensors, folder)
        return folder
    folder.mkdir()
    save_file({name: one.contiguous() for name, one in flat(tensors).items()}, folder / "a.safetensors")
    return folder


@pytest.mark.req("C8")
@pytest.mark.parametrize("form", PLAIN)
@pytest.mark.parametrize("own", PLAIN)
def test_each_form_becomes_each_other_bit_for_bit(tmp_path: Path, own: Form, form: Form) -> None:
    """From files of the real libraries, read by the real libraries, and back."""
    tensors = tree()
    source = write(tmp_path / "a", own, tensors)
    made = run(source, tmp_path / "b", form)
    assert all_raw(loaded(made, form, tensors)) == all_raw(tensors)
    assert validate(made).exit_code == 0, validate(made).facts()
    back = run(made, tmp_path / "c", own)
    assert all_raw(loaded(back, own, tensors)) == all_raw(tensors)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "c"}


@pytest.mark.req("C8")
def test_a_step_that_went_through_others_has_the_hashes_of_the_first(tmp_path: Path) -> None:
    path = first = save_ours(tmp_path / "step_7", state(), cuts=CUTS)
    for number, form in enumerate((Form.TORCH, Form.DCP, Form.SAFETENSORS)):
        path = run(path, tmp_path / str(number), form)
    last = tmp_path / "last/step_7"
    last.parent.mkdir()
    run(path, last, Form.TRIERARCH, like=first)
    manifests = [json.loads((step / "manifest.json").read_text()) for step in (first, last)]
    for name in ("step", "model", "data", "tensors"):
        assert manifests[0][name] == manifests[1][name], name
    assert validate(last).exit_code == 0


def test_a_state_of_training_becomes_a_tree_that_modules_take(tmp_path: Path) -> None:
    made = run(save_ours(tmp_path / "a", state()), tmp_path / "a.pt", Form.TORCH)
    found = torch.load(made, weights_only=True)
    assert found.keys() == {"model", "optimizer", "progress", "rng"}
    assert found["model"].keys() == state()["model"].keys()
    assert found["optimizer"]["norm.weight"].keys() == {"step", "exp_avg", "exp_avg_sq"}
    weights = run(tmp_path / "a", tmp_path / "b.pt", Form.TORCH, weights_only=True)
    assert torch.load(weights, weights_only=True).keys() == {f"model.{name}" for name in found["model"]}
    assert paths_of(["optimizer.a", "optimizer.a.b"])["optimizer.a.b"] == ("optimizer.a.b",)

    plain: dict[str, Any] = {}
    made = run(tmp_path / "a", tmp_path / "c", Form.DCP)
    dcp.state_dict_loader._load_state_dict(
        plain,
        storage_reader=dcp.FileSystemReader(made),
        planner=dcp.default_planner._EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    assert all_raw(plain) == all_raw(found) and plain.keys() == found.keys()


def test_tied_tensors_stay_tied(tmp_path: Path) -> None:
    tied = torch.randn(4, 5)
    torch.save({"a": tied, "b": tied, "c": tied.T}, tmp_path / "a.pt")
    for dtype in (None, "bfloat16"):
        made = run(tmp_path / "a.pt", tmp_path / f"{dtype}.pt", Form.TORCH, dtype=dtype)
        found = torch.load(made, weights_only=True)
        assert found["a"].data_ptr() == found["b"].data_ptr() != found["c"].data_ptr()
        assert torch.equal(found["c"], tied.T.to(found["c"].dtype))


def test_files_and_slices_are_of_bounded_size(tmp_path: Path) -> None:
    tensors = tree()
    with open_source(save_ours(tmp_path / "a", tensors)) as source:
        chosen = tensors_of(source, False, None, False)
        write_dcp(tmp_path / "b", chosen, file_bytes=40_000, slice_bytes=1000)
        write_safetensors(tmp_path / "c", chosen, file_bytes=9000)
    sizes = [path.stat().st_size for path in (tmp_path / "b").glob("*.distcp")]
    assert len(sizes) > 3 and max(sizes) <= 40_000
    assert all_raw(load_dcp(tmp_path / "b", tensors)) == all_raw(tensors)
    with open_source(tmp_path / "b") as source:
        pieces = [piece for entry in source.entries for piece in entry.pieces]
        assert max(math.prod(piece.shape) * 4 for piece in pieces if len(piece.shape) > 1) <= 1000
    files = list((tmp_path / "c").glob("*.safetensors"))
    index = json.loads((tmp_path / "c/model.safetensors.index.json").read_text())
    assert len(files) > 3 and set(index["weight_map"].values()) == {path.name for path in files}
    assert all_raw(loaded(tmp_path / "c", Form.SAFETENSORS, {})) == all_raw(tensors)
    for folder in ("b", "c"):
        assert validate(tmp_path / folder).exit_code == 0


def test_members_beyond_4_gb_have_fields_that_torch_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_module, "_LARGE_BYTES", 0)
    tensors = tree()
    made = run(save_ours(tmp_path / "a", tensors), tmp_path / "b", Form.TORCH)
    assert all_raw(loaded(made, Form.TORCH, {})) == all_raw(tensors)
    assert validate(made).exit_code == 0


def test_what_is_mapped_lies_where_its_type_may_be_used(tmp_path: Path) -> None:
    source = save_ours(tmp_path / "a", tree())
    for form, alignment in ((Form.TORCH, 64), (Form.SAFETENSORS, None), (Form.DCP, None)):
        with open_source(run(source, tmp_path / form, form)) as found:
            for entry in found.entries:
                piece = found.locate(entry, entry.pieces[0])
                if form is not Form.DCP:  # a slice begins wherever the one before it ends
                    assert piece.offset % (alignment or BITS[entry.dtype].itemsize) == 0, (form, entry.name)


@pytest.mark.req("C8")
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_the_model(tmp_path: Path, tied: bool) -> None:
    from transformers import LlamaForCausalLM

    from train.model.config import ModelConfig
    from train.model.llama import build

    config = ModelConfig(**MODEL, tie_embeddings=tied)
    model = build(config, seed=3, device=torch.device("cpu"))
    save_ours(tmp_path / "a", {"model": model.state_dict(), "rng": {"rank_0": {"torch": torch.ones(9)}}})
    manifest = json.loads((tmp_path / "a/manifest.json").read_text())
    manifest["model"] = {**MODEL, "tie_embeddings": tied}
    seal(tmp_path / "a", manifest)
    convert(tmp_path / "a", tmp_path / "b", Wish(Form.HF), hf_of_manifest)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "b")
    assert theirs.dtype == torch.float32
    tokens = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens), atol=1e-5, rtol=1e-5)
    # A model that is one already keeps its config.
    convert(tmp_path / "b", tmp_path / "c", Wish(Form.HF, dtype="bfloat16"), no_model)
    assert LlamaForCausalLM.from_pretrained(tmp_path / "c").dtype == torch.bfloat16
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in "bc"]
    assert {name for name in configs[0] if configs[0][name] != configs[1][name]} == {"dtype", "torch_dtype"}


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    save_file({"model.a.weight": torch.ones(3)}, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match="does not say which model"):
        convert(tmp_path / "a.safetensors", tmp_path / "b", Wish(Form.HF), hf_of_manifest)
    ours = save_ours(tmp_path / "ours", state())
    with pytest.raises(UserError, match=r"has no model\.embed_tokens\.weight"):
        convert(tmp_path / "a.safetensors", tmp_path / "b", Wish(Form.HF, like=ours), hf_of_manifest)
    model = state()["model"]
    for change, sentence in (
        ({"norm.weight": torch.ones(5)}, r"norm\.weight .* is \[5\], and \[32\]"),
        ({"more.weight": torch.ones(5)}, r"more\.weight which"),
    ):
        save_dcp(tmp_path / sentence[:4], {"model": {**model, **change}})
        with pytest.raises(UserError, match=sentence):
            convert(tmp_path / sentence[:4], tmp_path / "b", Wish(Form.HF, like=ours), hf_of_manifest)
    assert not (tmp_path / "b").exists()


def bits(tensor: Tensor) -> Any:
    return tensor.contiguous().view(torch.uint8).numpy().view(BITS[str(tensor.dtype)[6:]])


@pytest.mark.parametrize("wanted", TARGETS)
@pytest.mark.parametrize("own", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_types_are_converted_as_torch_does(own: str, wanted: str) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (1 << 15,), generator=generator, dtype=torch.uint8)
    values = codes.view(getattr(torch, own))
    if own == "float64":  # torch rounds twice, see the next test
        values = torch.randn(5000, generator=generator).double()
    theirs = values.to(getattr(torch, wanted))
    fits = ~(theirs.double().isinf() & values.double().isfinite())
    ours = converted(bits(values[fits]), own, wanted)
    same = (ours == bits(theirs[fits])) | theirs[fits].isnan().numpy()
    assert same.all()
    nan = np.isnan(torch.from_numpy(ours.copy()).view(getattr(torch, wanted)).float().numpy())
    assert (nan == values[fits].isnan().numpy()).all()
    if not fits.all():
        with pytest.raises(RangeError, match=f"{int((~fits).sum())} finite values are beyond"):
            converted(bits(values), own, wanted)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=64), min_size=1))
def test_a_double_is_rounded_once(values: list[float]) -> None:
    near_half = [1 + 2**-8 + 2**-40, 1 + 2**-8 - 2**-40, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8 - 2**-40]
    doubles = np.array([one for one in values if abs(one) < 3e38] + near_half)
    made = torch.from_numpy(converted(doubles, "float64", "bfloat16").copy()).view(torch.bfloat16)
    for double, one in zip(doubles.tolist(), made, strict=True):
        code = int(one.view(torch.uint16))
        own = abs(Fraction(double) - Fraction(float(one)))
        for neighbour in {code - 1, code + 1} - {0x7FFF, -1, 0x7F80, 0xFF80}:
            other = torch.tensor(neighbour, dtype=torch.uint16).view(torch.bfloat16)
            apart = abs(Fraction(double) - Fraction(float(other)))
            assert own < apart or (own == apart and code % 2 == 0)


@pytest.mark.parametrize("form", PLAIN)
def test_weights_and_moments_change_their_type(tmp_path: Path, form: Form) -> None:
    tensors = state()
    source = save_ours(tmp_path / "a", tensors, cuts=CUTS)
    found = flat(loaded(run(source, tmp_path / "b", form, dtype="bfloat16"), form, tensors_in(tensors)))
    for name, tensor in flat(tensors).items():
        changes = name.startswith("model.") or name.endswith(("exp_avg", "exp_avg_sq"))
        assert raw(found[name]) == raw(tensor.bfloat16() if changes else tensor), name
    only = run(source, tmp_path / "c", form, dtype="float16", weights_only=True)
    with open_source(only) as opened:
        assert {entry.name for entry in opened.entries} == {f"model.{name}" for name in tensors["model"]}
        assert {entry.dtype for entry in opened.entries} == {"float16"}
    assert validate(tmp_path / "b").exit_code == 0


def tensors_in(tree: dict[str, Any]) -> dict[str, Any]:
    """`state` as it is after a conversion to bfloat16."""
    model = {name: one.bfloat16() for name, one in tree["model"].items()}
    moments = {
        name: {kind: one if kind == "step" else one.bfloat16() for kind, one in kinds.items()}
        for name, kinds in tree["optimizer"].items()
    }
    return {**tree, "model": model, "optimizer": moments}


def test_values_that_a_type_does_not_have_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.tensor([1.0, 1e30])}, tmp_path / "a.safetensors")
    with pytest.raises(
        UserError, match="1 finite values are beyond the range of float16: give another --dtype"
    ):
        run(tmp_path / "a.safetensors", tmp_path / "b", Form.TORCH, dtype="float16")
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.req("C9")
@pytest.mark.parametrize("own", [Form.TRIERARCH, Form.DCP, Form.TORCH])
def test_a_damaged_source_is_refused(tmp_path: Path, own: Form) -> None:
    tensors = tree()
    source = write(tmp_path / "a", own, tensors)
    with open_source(source) as opened:
        (entry,) = [one for one in opened.entries if one.name == "optimizer.norm.weight.exp_avg"]
        piece = opened.locate(entry, entry.pieces[0])
    with piece.path.open("r+b") as file:
        file.seek(piece.offset + 5)
        byte = file.read(1)[0]
        file.seek(piece.offset + 5)
        file.write(bytes([byte ^ 16]))
    for form in PLAIN:
        with pytest.raises(
            DamagedSourceError, match=r"is damaged .*optimizer\.norm\.weight\.exp_avg.*--force"
        ):
            run(source, tmp_path / "b", form)
    run(source, tmp_path / "w", Form.SAFETENSORS, weights_only=True)  # what is not asked for is not read
    made = run(source, tmp_path / "b", Form.SAFETENSORS, force=True)
    wanted = bytearray(raw(tensors["optimizer"]["norm.weight"]["exp_avg"])[2])
    wanted[5] ^= 16
    assert raw(load_file(made / "model.safetensors")[entry.name])[2] == wanted
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "w"}


@pytest.mark.req("C8")
@pytest.mark.parametrize("archive", ["deepspeed", "megatron"])
def test_files_of_other_trainers_are_merged(tmp_path: Path, archive: str) -> None:
    with tarfile.open(GOLDEN / f"{archive}.tar.gz") as files:
        files.extractall(tmp_path / "all", filter="data")
    sources = sorted(path for path in (tmp_path / "all").iterdir() if path.is_dir())
    assert sources
    for number, source in enumerate(sources):
        with open_source(source) as opened:
            wanted = {
                entry.name: b"".join(window.values.tobytes() for window in opened.windows(entry))
                for entry in opened.entries
                if entry.dtype != "object"
            }
        for form in (Form.TORCH, Form.SAFETENSORS):
            made = run(source, tmp_path / f"{number}.{form}", form)
            with open_source(made) as opened:
                found = {entry.name: opened.rows(entry, 0, (*entry.shape, 1)[0]) for entry in opened.entries}
            assert {name: values.tobytes() for name, values in found.items()} == wanted
        torch.load(tmp_path / f"{number}.torch", weights_only=True)


def test_damage_of_a_storage_that_tensors_share_is_found(tmp_path: Path) -> None:
    whole = torch.arange(100.0)
    torch.save({"a": whole[:30], "b": whole[40:]}, tmp_path / "a.pt")
    assert raw(torch.load(run(tmp_path / "a.pt", tmp_path / "b.pt", Form.TORCH))["b"]) == raw(whole[40:])
    data = bytearray((tmp_path / "a.pt").read_bytes())
    data[data.index(whole[50:60].numpy().tobytes())] ^= 1
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(DamagedSourceError, match="CRC-32"):
        run(tmp_path / "a.pt", tmp_path / "c.pt", Form.TORCH)


def test_a_source_with_missing_bytes_is_refused_whoever_insists(tmp_path: Path) -> None:
    source = save_dcp(tmp_path / "a", state(), CUTS, files=2)
    file = sorted(source.glob("*.distcp"))[0]
    os.truncate(file, file.stat().st_size // 2)
    for force in (False, True):
        with pytest.raises(DamagedSourceError):
            run(source, tmp_path / "b", Form.TORCH, force=force)
    (source / ".metadata").unlink()
    with pytest.raises(UnreadableError):
        run(source, tmp_path / "b", Form.TORCH)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    source = save_ours(tmp_path / "a", state())
    (tmp_path / "b").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for target, sentence in (
        ("b", "exists"),
        ("a", "exists"),
        ("link", "exists"),
        ("none/b", "make it first"),
        ("a/b", "lies in the checkpoint"),
        ("step_8", "would hold step 7"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            run(source, tmp_path / target, Form.TRIERARCH)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "link"}
    with pytest.raises(ConfigError, match="exists"), draft(tmp_path / "c") as temporary:
        temporary.write_text("mine")
        (tmp_path / "c").write_text("another's")
    assert (tmp_path / "c").read_text() == "another's"
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "c", "link"}


@pytest.mark.parametrize("form", PLAIN)
def test_a_full_disk_is_a_sentence_and_leaves_nothing(tmp_path: Path, form: Form) -> None:
    source = save_ours(tmp_path / "a", state())
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limit[1]))
    try:
        with pytest.raises(SaveError, match=r"could not be written .*: nothing was kept"):
            run(source, tmp_path / "b", form)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("form", PLAIN)
def test_memory_is_bounded(tmp_path: Path, form: Form) -> None:
    save_file({f"{number}": torch.randn(2 << 20) for number in range(4)}, tmp_path / "a.safetensors")
    run(tmp_path / "a.safetensors", tmp_path / "warm", form)
    tracemalloc.start()
    try:
        run(tmp_path / "a.safetensors", tmp_path / "b", form)
        run(tmp_path / "a.safetensors", tmp_path / "c", form, dtype="bfloat16")
        assert tracemalloc.get_traced_memory()[1] < 12e6  # of 34 MB, in tensors of 8 MB
    finally:
        tracemalloc.stop()


def test_what_is_left_out_is_told(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3), "step": 12, "name": "x"}, tmp_path / "a.pt")
    done = convert(tmp_path / "a.pt", tmp_path / "b", Wish(Form.TRIERARCH), no_model)
    assert done.notes[0] == "left out: 2 values that are no tensors (step, name, ...)"
    assert "no run can continue from it" in done.notes[1]
    assert json.loads((tmp_path / "b/manifest.json").read_text())["step"] == 12
    save_dcp(tmp_path / "c", {"a": torch.ones(3), "object": {1, 2}})
    done = convert(tmp_path / "c", tmp_path / "d", Wish(Form.DCP), no_model)
    assert done.notes == ["left out: 1 objects that are no tensors (object, ...)"]
    with pytest.raises(UserError, match="holds no tensors"):
        torch.save({"step": 12}, tmp_path / "e.pt")
        run(tmp_path / "e.pt", tmp_path / "f", Form.DCP)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--to", "hdf5"), "--to hdf5: there is no such form"),
        (("--to", "safetensor"), "did you mean safetensors"),
        (("--to", "dcp", "--dtype", "int8"), "--dtype int8: weights cannot be converted to it"),
        (("--to", "dcp", "--only", "moments"), "only `weights` can be chosen"),
        (("--to", "dcp", "--like", "c"), "--like does nothing with --to dcp"),
    ],
)
def test_a_wish_that_makes_no_sense_is_refused(
    tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    paths = (str(tmp_path / "a.safetensors"), str(tmp_path / "b"))
    with pytest.raises(ConfigError, match=sentence):
        app(["convert", *paths, *arguments], standalone_mode=False)
    assert not (tmp_path / "b").exists()
