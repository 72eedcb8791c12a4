"""Two checkpoints are compared tensor by tensor: against torch in float64, and with each kind of change put in."""

import math
import tracemalloc
from collections.abc import Callable, Mapping
from colorsys import hls_to_rgb
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.checkpoints import flat, save_dcp, save_ours, state
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from contract.errors import ConfigError
from tools.ckpt import values as of_bits
from tools.ckpt.diff import diff
from tools.ckpt.diff_html import write_html
from tools.ckpt.diff_names import bare_name, place_of
from tools.ckpt.diff_png import EQUAL, write_png
from tools.ckpt.diff_result import Comparison, Diff, State
from tools.ckpt.diff_tally import EXACT, Meter, Tally, Tolerance
from tools.ckpt.diff_text import percent, shade, text
from tools.ckpt.dtypes import BITS, Bits
from tools.ckpt.findings import UnreadableError
from tools.ckpt.pieces import Entry
from tools.ckpt.roles import role_of
from tools.ckpt.values import Scratch

pytestmark = [pytest.mark.req("C8"), pytest.mark.slow]

Q = "model.layers.0.self_attn.q_proj.weight"
FLOATS = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]
SMALL = [one for one in FLOATS if one.itemsize <= 2]


def bits(tensor: Tensor) -> Bits:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(raw).view(BITS[named(tensor.dtype)])


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def widened(dtype: str, values: Bits) -> Bits:
    return of_bits.widened(dtype, values, np.empty(values.size), Scratch(values.size))


def distances(dtype: str, a: Bits, b: Bits) -> Bits:
    return of_bits.distances(dtype, a, b, Scratch(a.size))


def all_codes(dtype: torch.dtype) -> Tensor:
    """Every value that a type of 8 or 16 bits has."""
    count = 1 << (8 * dtype.itemsize)
    codes = np.arange(count, dtype=f"uint{8 * dtype.itemsize}")
    return torch.from_numpy(codes.view(f"int{8 * dtype.itemsize}")).view(dtype)


def meter(a: Tensor, b: Tensor, tolerance: Tolerance = EXACT) -> Tally:
    tally = Tally()
    Meter(named(a.dtype), named(b.dtype), tolerance, tally).add(bits(a), bits(b))
    return tally


def found(result: Diff, name: str) -> Comparison:
    (one,) = [one for one in result.comparisons if name in (one.entry.name, one.b and one.b.name)]
    return one


def states(result: Diff) -> dict[str, str]:
    """Names in A (in B where A has none) of what differs."""
    return {one.entry.name: one.state.value for one in result.differing}


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_every_code_has_its_value(dtype: torch.dtype) -> None:
    codes = all_codes(dtype)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        values = widened(named(dtype), bits(codes))
    np.testing.assert_array_equal(values, codes.to(torch.float64).numpy())


def test_scales_without_a_sign_have_their_values() -> None:
    codes = all_codes(torch.float8_e8m0fnu)
    values = widened("float8_e8m0fnu", bits(codes))
    np.testing.assert_array_equal(values, codes.to(torch.float32).to(torch.float64).numpy())
    steps = distances("float8_e8m0fnu", bits(codes)[:-1], bits(codes)[1:])
    assert set(steps.tolist()) == {1}


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_ulps_are_places_among_all_values(dtype: torch.dtype) -> None:
    codes = all_codes(dtype)
    codes = codes[torch.isfinite(codes.to(torch.float32))]
    values = codes.to(torch.float64).numpy()
    places = np.searchsorted(np.unique(values), values)
    order = np.random.default_rng(0).permutation(len(values))
    steps = distances(named(dtype), bits(codes), bits(codes)[order])
    np.testing.assert_array_equal(steps, np.abs(places - places[order]))


@given(
    start=st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**99), max_value=2.0**99),
    count=st.integers(0, 40),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_ulps_are_steps_to_the_next_value(start: float, count: int, dtype: type) -> None:
    first = value = dtype(start)
    for _ in range(count):
        value = np.nextafter(value, dtype(np.inf))
    a, b = np.array([first]), np.array([value])
    assert distances(a.dtype.name, a, b)[0] == distances(a.dtype.name, b, a)[0] == count


def test_ulps_reach_across_the_whole_type() -> None:
    for dtype in (np.float32, np.float64):
        top = np.array([np.finfo(dtype).max], dtype)
        steps = int(distances(top.dtype.name, -top, top)[0])
        assert steps == 2 * int(top.view(f"uint{top.itemsize * 8}")[0])
    zero = np.zeros(1, np.float32)
    assert distances("float32", zero, -zero)[0] == 0
    ends = np.array([-(2**63)]), np.array([2**63 - 1])
    assert int(distances("int64", *ends)[0]) == 2**64 - 1


def numbers(dtype: torch.dtype) -> st.SearchStrategy[list[float]]:
    """Lists of values that a type has, special ones among them."""
    special = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0])
    return st.lists(st.one_of(st.floats(-300, 300, width=32), special), max_size=20)


@settings(deadline=None)
@given(st.data())
def test_measures_are_those_of_torch_in_float64(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(FLOATS))
    other = data.draw(st.sampled_from([dtype, dtype, torch.float32]))
    one = data.draw(numbers(dtype))
    near = st.sampled_from([0.0, 1e-3, 1.0, math.nan, math.inf])
    two = [value + data.draw(near) for value in one]
    a, b = torch.tensor(one, dtype=torch.float64).to(dtype), torch.tensor(two, dtype=torch.float64).to(other)
    limits = Tolerance(data.draw(st.sampled_from([0.0, 0.5])), data.draw(st.sampled_from([0.0, 0.01])))
    x, y = a.to(torch.float64), b.to(torch.float64)

    same = x == y
    nan = x.isnan() | y.isnan()
    if dtype == other:
        raw = [torch.from_numpy(bits(side).view(f"int{8 * dtype.itemsize}").copy()) for side in (a, b)]
        same |= nan & (raw[0] == raw[1])
    else:
        same |= x.isnan() & y.isnan()
    finite = x.isfinite() & y.isfinite()
    tally = meter(a, b, limits)
    assert tally.elements == len(one) and tally.compared == int(finite.sum())
    assert tally.nan == int((nan & ~same).sum())
    assert tally.infinite == int((~finite & ~nan & ~same).sum())
    assert tally.changed == int((~same).sum())

    x, y = x[finite], y[finite]
    apart, larger = (x - y).abs(), torch.maximum(x.abs(), y.abs())
    relative = torch.where(larger > 0, apart / larger, 0.0)
    outside = (apart > limits.absolute) & (relative > limits.relative)
    assert tally.beyond == tally.nan + tally.infinite + int(outside.sum())
    facts = tally.facts()
    wanted = {
        "max_absolute": apart.amax() if len(x) else 0,
        "mean_absolute": apart.mean() if len(x) else 0,
        "max_relative": relative.amax() if len(x) else 0,
        "mean_relative": relative.mean() if len(x) else 0,
        "norm_a": x.norm(),
        "norm_b": y.norm(),
        "norm_of_difference": (x - y).norm(),
    }
    for name, value in wanted.items():
        assert facts[name] == pytest.approx(float(value), rel=1e-12, abs=1e-300), name
    if len(x) and x.norm() > 0 and y.norm() > 0:
        assert tally.cosine == pytest.approx(float(torch.dot(x, y) / x.norm() / y.norm()), abs=1e-12)
    else:
        assert tally.cosine is None
    assert (tally.ulp_max is None) == (dtype != other or len(x) == 0)


def test_integers_truths_and_complex_numbers_are_measured() -> None:
    large = torch.tensor([2**62, -(2**63), 5])
    tally = meter(large, large + torch.tensor([1, 0, -2]))
    assert (tally.changed, tally.absolute_max, tally.ulp_max) == (2, 2.0, 2)
    tally = meter(torch.tensor([0, 255], dtype=torch.uint8), torch.tensor([255, 255], dtype=torch.uint8))
    assert (tally.changed, tally.absolute_max) == (1, 255.0)
    tally = meter(torch.tensor([True, False, True]), torch.tensor([True, True, True]))
    assert (tally.changed, tally.absolute_max) == (1, 1.0)
    tally = meter(torch.tensor([1 + 2j, 3j]), torch.tensor([1 + 2j, 4j]))
    assert (tally.elements, tally.changed, tally.absolute_max) == (4, 1, 1.0)
    tally = meter(torch.tensor([3]), torch.tensor([3.5]))
    assert (tally.changed, tally.absolute_max, tally.ulp_max) == (1, 0.5, None)


@pytest.mark.parametrize(
    ("value", "limits", "within"),
    [
        (1.25, Tolerance(absolute=0.25), True),
        (1.25, Tolerance(absolute=np.nextafter(0.25, 0)), False),
        (1.25, Tolerance(relative=0.2), True),
        (1.25, Tolerance(relative=np.nextafter(0.2, 0)), False),
        (1.25, Tolerance(absolute=0.25, relative=1e-9), True),
        (math.nan, Tolerance(absolute=1e30, relative=2.0), False),
        (math.inf, Tolerance(absolute=1e30, relative=2.0), False),
    ],
)
def test_a_tolerance_holds_to_the_last_bit(
    tmp_path: Path, value: float, limits: Tolerance, within: bool
) -> None:
    save_file({"a": torch.tensor([1.0, 7.0])}, tmp_path / "a.safetensors")
    save_file({"a": torch.tensor([value, 7.0])}, tmp_path / "b.safetensors")
    result = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", limits)
    assert result.exit_code == int(not within)
    assert found(result, "a").state is (State.WITHIN if within else State.VALUES)


CUT = {
    Q: [((0, 0), (11, 32)), ((11, 0), (21, 20)), ((11, 20), (21, 12))],
    "model.embed_tokens.weight": [((0, 0), (64, 16)), ((0, 16), (64, 16))],
    "model.layers.0.mlp.up_proj.weight": [((0, 0), (20, 32)), ((20, 0), (28, 32))],
}
FORMATS: dict[str, Callable[[Path, dict[str, Any]], Any]] = {
    "ours": lambda path, tree: save_ours(path, tree),
    "ours cut": lambda path, tree: save_ours(path, tree, cuts=CUT),
    "dcp": lambda path, tree: save_dcp(path, tree),
    "safetensors": lambda path, tree: save_file(flat(tree), path.with_suffix(".safetensors")),
    "torch": lambda path, tree: torch.save(tree, path.with_suffix(".pt")),
}


def saved(folder: Path, kind: str, tree: dict[str, Any]) -> Path:
    """Save in a format; returns its path."""
    FORMATS[kind](folder / kind, tree)
    (path,) = [one for one in folder.iterdir() if one.name in (kind, f"{kind}.pt", f"{kind}.safetensors")]
    return path


def test_formats_and_layouts_do_not_matter(tmp_path: Path) -> None:
    tree, other = state(), state()
    other["model"][Q.removeprefix("model.")][31, 5] += 0.5
    other["optimizer"]["norm.weight"]["exp_avg"][3] = math.nan
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    a = {kind: saved(tmp_path / "a", kind, tree) for kind in FORMATS}
    b = {kind: saved(tmp_path / "b", kind, other) for kind in FORMATS}
    for number, one in enumerate(FORMATS):
        same = diff(a["ours cut"], a[one])
        assert same.exit_code == 0 and same.count(State.EQUAL) == len(flat(tree)), one
        for two in [*FORMATS][number:]:
            result = diff(a[one], b[two])
            assert result.exit_code == 1
            assert states(result) == {
                Q: "values differ",
                "optimizer.norm.weight.exp_avg": "values differ",
            }, (one, two)
            tally = found(result, Q).tally
            assert tally is not None and tally.changed == 1 and tally.elements == 32 * 32
            assert tally.absolute_max == pytest.approx(0.5, abs=1e-6)
            assert result.differing[0].tally is not None and result.differing[0].tally.nan == 1


CHANGES: list[tuple[str, Callable[[dict[str, Tensor]], Any], str, str]] = [
    ("added", lambda one: one.update(new=torch.ones(3)), "new", "added"),
    ("removed", lambda one: one.pop(Q), Q, "removed"),
    ("one element", lambda one: one[Q][7].sub_(1e-7), Q, "values differ"),
    ("type", lambda one: one.update({Q: one[Q].double()}), Q, "other type"),
    ("type and values", lambda one: one.update({Q: one[Q].bfloat16()}), Q, "other type"),
    ("to complex", lambda one: one.update({Q: one[Q].to(torch.complex64)}), Q, "other type"),
    ("shape", lambda one: one.update({Q: one[Q].reshape(16, 64)}), Q, "other shape"),
    ("renamed", lambda one: one.update(other=one.pop(Q)), Q, "renamed"),
    ("a scalar", lambda one: one["progress.step"].add_(1), "progress.step", "values differ"),
    ("a truth", lambda one: one["flag"].logical_not_(), "flag", "values differ"),
    ("an empty one's shape", lambda one: one.update(empty=torch.empty(3, 0)), "empty", "other shape"),
    ("an empty one gone", lambda one: one.pop("empty"), "empty", "removed"),
    ("a scalar gone", lambda one: one.pop("progress.step"), "progress.step", "removed"),
]


@pytest.mark.parametrize(
    ("change", "name", "state"), [one[1:] for one in CHANGES], ids=lambda one: str(one)[:20]
)
def test_each_kind_of_change_is_found_and_nothing_else(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], Any], name: str, state: str
) -> None:
    a, b = (everything() for _ in range(2))
    change(b)
    save_file(a, tmp_path / "a.safetensors")
    torch.save(b, tmp_path / "b.pt")
    result = diff(tmp_path / "a.safetensors", tmp_path / "b.pt")
    assert states(result) == {name: state} and result.exit_code == 1
    assert name in text(result, 10) and state in text(result, 10)
    if state in ("added", "removed"):
        turned = diff(tmp_path / "b.pt", tmp_path / "a.safetensors")
        assert states(turned) == {name: {"added": "removed", "removed": "added"}[state]}


def everything() -> dict[str, Tensor]:
    tensors = flat(state())
    return {**tensors, "flag": torch.tensor([True, False]), "empty": torch.empty(0, 3)}


@pytest.mark.parametrize("limits", [Tolerance(absolute=0.25), Tolerance(relative=0.2)])
def test_elements_at_the_limit_pass_beside_those_beyond(limits: Tolerance) -> None:
    assert meter(torch.ones(3), torch.tensor([1.0, 1.25, 3.0]), limits).beyond == 1


def test_with_a_tolerance_the_type_may_differ(tmp_path: Path) -> None:
    a = everything()
    b = {name: one.bfloat16() if one.dtype == torch.float32 else one for name, one in a.items()}
    save_file(a, tmp_path / "a.safetensors")
    save_file(b, tmp_path / "b.safetensors")
    paths = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    assert diff(*paths).exit_code == 1
    assert diff(*paths, Tolerance(relative=2**-8)).exit_code == 0
    assert diff(*paths, Tolerance(relative=2**-10)).exit_code == 1


def test_the_last_element_of_a_large_tensor_counts(tmp_path: Path) -> None:
    a = torch.randn(700_001, generator=torch.Generator().manual_seed(0))
    b = a.clone()
    b[-1] += 1
    save_file({"a": a, "odd": torch.zeros(5, dtype=torch.int8)}, tmp_path / "a.safetensors")
    save_file({"a": b, "odd": torch.tensor([0, 0, 0, 0, 1], dtype=torch.int8)}, tmp_path / "b.safetensors")
    result = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    tally = found(result, "a").tally
    assert tally is not None and (tally.elements, tally.changed) == (700_001, 1)
    assert math.sqrt(tally.squares_a) == pytest.approx(float(a.double().norm()), rel=1e-12)
    assert found(result, "odd").state is State.VALUES


def test_threads_and_the_order_of_tensors_change_nothing(tmp_path: Path) -> None:
    save_dcp(tmp_path / "a", state(0), CUT)
    save_dcp(tmp_path / "b", state(1))
    results = [diff(tmp_path / "a", tmp_path / "b", threads=count) for count in (1, 4)]
    assert results[0].facts() == results[1].facts()
    told: list[int] = []

    def begin(total: int) -> Callable[[int], None]:
        told.append(-total)
        return told.append

    watched = diff(tmp_path / "a", tmp_path / "b", begin=begin)
    assert sum(told) == 0 and watched.read_bytes == -told[0] > 0


@pytest.mark.parametrize("threads", [1, 2])
def test_memory_does_not_grow_with_tensors(tmp_path: Path, threads: int) -> None:
    values = torch.randn(8_000_000)
    save_file({"a": values, "b": values.clone()}, tmp_path / "a.safetensors")
    save_file({"a": values + 1, "b": values}, tmp_path / "b.safetensors")
    del values
    tracemalloc.start()
    try:
        result = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", threads=threads)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert states(result) == {"a": "values differ"}
    assert peak < 8e6 * threads, "a tensor has 32 MB"


def test_saved_hashes_spare_the_reading(tmp_path: Path) -> None:
    save_ours(tmp_path / "a", state())
    save_ours(tmp_path / "b", state(), cuts=CUT)
    same = diff(tmp_path / "a", tmp_path / "b")
    assert same.exit_code == 0 and same.read_bytes == 0
    assert diff(tmp_path / "a", tmp_path / "b", deep=True).read_bytes > 0

    file = max((tmp_path / "b").glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    value = state()["model"]["norm.weight"].numpy().tobytes()
    data[data.index(value)] ^= 1
    file.write_bytes(data)
    assert diff(tmp_path / "a", tmp_path / "b").exit_code == 0
    assert states(diff(tmp_path / "a", tmp_path / "b", deep=True)) == {"model.norm.weight": "values differ"}


@pytest.mark.parametrize("kinds", [("safetensors", "torch"), ("ours", "dcp"), ("ours cut", "ours")])
def test_renamed_tensors_are_found_by_content(tmp_path: Path, kinds: tuple[str, str]) -> None:
    old, new = state(), state()
    moved = ("layers.0.mlp.up_proj.weight", "layers.0.mlp.gate_proj.weight")
    new["model"]["ffn.up"] = new["model"].pop(moved[0])
    new["model"]["ffn.gate"] = new["model"].pop(moved[1])
    new["model"]["ffn.gate"][0, 0] += 1
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    result = diff(saved(tmp_path / "a", kinds[0], old), saved(tmp_path / "b", kinds[1], new))
    assert states(result) == {
        f"model.{moved[0]}": "renamed",
        f"model.{moved[1]}": "removed",
        "model.ffn.gate": "added",
    }
    one = found(result, f"model.{moved[0]}")
    assert one.b is not None and one.b.name == "model.ffn.up"
    assert "-> model.ffn.up" in text(result, 10)


def test_renamed_tensors_with_saved_hashes_are_not_read(tmp_path: Path) -> None:
    new = state()
    new["model"]["final"] = new["model"].pop("norm.weight")
    save_ours(tmp_path / "a", state())
    save_ours(tmp_path / "b", new)
    for path in tmp_path.glob("*/*.distcp"):
        path.unlink()
    assert states(diff(tmp_path / "a", tmp_path / "b")) == {"model.norm.weight": "renamed"}


def test_what_is_renamed_has_one_partner_of_its_role(tmp_path: Path) -> None:
    same = torch.arange(6.0)
    a = {"x": same, "y": same.clone(), "z.exp_avg": same.clone(), "void": torch.empty(0)}
    save_file(a, tmp_path / "a.safetensors")
    save_file(
        {"p": same, "lr_scheduler.q": same.clone(), "empty": torch.empty(0)}, tmp_path / "b.safetensors"
    )
    result = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert sorted(states(result).values()) == [*["added"] * 2, *["removed"] * 3, "renamed"]
    assert states(result)["void"] == "removed" and states(result)["empty"] == "added"
    assert states(result)["x"] == "renamed"


@pytest.mark.parametrize(
    ("name", "bare"),
    [
        ("model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("module.model.layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("model._orig_mod.layers.0._fsdp_wrapped_module.a", "layers.0.a"),
        ("optimizer.norm.weight.exp_avg", "optimizer.norm.weight.exp_avg"),
        ("optim.state.model.norm.weight.exp_avg", "optimizer.norm.weight.exp_avg"),
        ("optimizer.state.exp_avg.module.norm.weight", "optimizer.norm.weight.exp_avg"),
        ("model", "model"),
    ],
)
def test_names_without_what_libraries_add(name: str, bare: str) -> None:
    assert bare_name(Entry(name, role_of(name, "float32"), "float32", (), ())) == bare


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.12.self_attn.q_proj.weight", "layer 12"),
        ("transformer.h.3.attn.weight", "layer 3"),
        ("optimizer.layers.0.mlp.up_proj.weight.exp_avg_sq", "layer 0"),
        ("model.embed_tokens.weight", "embed_tokens"),
        ("optimizer.embed_tokens.weight.step", "embed_tokens"),
        ("optim.state.exp_avg.model.norm.weight", "norm"),
        ("progress.step", ""),
        ("rng.rank_0.torch", ""),
    ],
)
def test_places_of_tensors(name: str, place: str) -> None:
    assert place_of(Entry(name, role_of(name, "float32"), "float32", (), ())) == place


def test_prefixes_are_stripped_only_where_that_is_clear(tmp_path: Path) -> None:
    a, b = torch.ones(3), torch.zeros(3)
    save_file({"model.x": a, "model.y": a.clone(), "module.y": b}, tmp_path / "a.safetensors")
    save_file({"x": a, "y": a.clone()}, tmp_path / "b.safetensors")
    result = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert result.by_bare_name == 1 and found(result, "x").state is State.EQUAL
    assert states(result) == {"model.y": "renamed", "module.y": "removed"}
    assert "1 names matched without their prefix" in text(result, 5)


def test_a_second_name_of_a_tied_weight_is_not_missing(tmp_path: Path) -> None:
    weight = torch.randn(4, 3)
    torch.save({"model": {"embed": weight, "head": weight}}, tmp_path / "a.pt")
    save_file({"embed": weight}, tmp_path / "b.safetensors")
    assert diff(tmp_path / "a.pt", tmp_path / "b.safetensors").exit_code == 0
    assert diff(tmp_path / "b.safetensors", tmp_path / "a.pt").exit_code == 0


def test_plain_values_beside_tensors(tmp_path: Path) -> None:
    def tree(**changes: object) -> Mapping[str, Any]:
        plain = {"lr": 0.1, "best": math.nan, "epoch": 3, "on": True, **changes}
        return {"w": torch.ones(2), "lr_scheduler": plain}

    torch.save(tree(), tmp_path / "a.pt")
    torch.save(tree(), tmp_path / "b.pt")
    assert diff(tmp_path / "a.pt", tmp_path / "b.pt").exit_code == 0
    torch.save(tree(lr=0.11, epoch=4, on=1), tmp_path / "b.pt")
    result = diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert result.exit_code == 1 and not result.differing
    assert {one.name: (one.a, one.b) for one in result.plain} == {
        "lr_scheduler.lr": (0.1, 0.11),
        "lr_scheduler.epoch": (3, 4),
        "lr_scheduler.on": (True, 1),
    }
    assert "lr_scheduler.epoch  3     4\n" in text(result, 5)
    near = diff(tmp_path / "a.pt", tmp_path / "b.pt", Tolerance(relative=0.1))
    assert {one.name for one in near.plain} == {"lr_scheduler.epoch", "lr_scheduler.on"}
    assert not diff(tmp_path / "a.pt", tmp_path / "b.pt", only=["weights"]).plain


def test_only_some_roles(tmp_path: Path) -> None:
    save_dcp(tmp_path / "a", state())
    save_file(flat(state()["model"]), tmp_path / "b.safetensors")
    assert diff(tmp_path / "a", tmp_path / "b.safetensors").exit_code == 1
    result = diff(tmp_path / "a", tmp_path / "b.safetensors", only=["weights"])
    assert result.exit_code == 0 and result.by_bare_name == len(state()["model"])
    with pytest.raises(ConfigError, match=r"'weight'.*exp_avg.*weights"):
        diff(tmp_path / "a", tmp_path / "b.safetensors", only=["weight"])


def test_pickled_objects_are_compared_by_their_bytes(tmp_path: Path) -> None:
    for name, value in (("a", 1), ("b", 2), ("c", 1)):
        save_dcp(tmp_path / name, {"w": torch.ones(2), "extra": {"value": value}})
    assert diff(tmp_path / "a", tmp_path / "c").exit_code == 0
    result = diff(tmp_path / "a", tmp_path / "b")
    assert states(result) == {"extra.value": "values differ"} and result.differing[0].tally is None


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4), "z": torch.ones(400)}, tmp_path / "a.safetensors")
    torch.save({"a": torch.ones(4), "z": torch.ones(400)}, tmp_path / "b.pt")
    assert diff(tmp_path / "a.safetensors", tmp_path / "b.pt").exit_code == 0
    file = tmp_path / "a.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    result = diff(file, tmp_path / "b.pt")
    assert result.exit_code == 2 and states(result) == {"z": "unreadable"}
    assert "error: A ends too early (" in text(result, 5)
    assert "error: B ends too early (" in text(diff(tmp_path / "b.pt", file), 5)
    with pytest.raises(UnreadableError):
        diff(file, tmp_path / "none")


def test_names_do_nothing_to_a_terminal_and_json_stays_json(tmp_path: Path) -> None:
    torch.save({"\x1b[2J": torch.ones(2), "loss": math.nan}, tmp_path / "a.pt")
    torch.save({"\x1b[2J": torch.zeros(2), "loss": 1.0}, tmp_path / "b.pt")
    result = diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert "\x1b" not in text(result, 5) and "?[2J" in text(result, 5)
    assert result.facts()["plain_values"] == [{"name": "loss", "a": "nan", "b": 1.0}]


def test_values_whose_squares_are_too_large(tmp_path: Path) -> None:
    save_file({"a": torch.tensor([1e200, 1.0], dtype=torch.float64)}, tmp_path / "a.safetensors")
    save_file({"a": torch.tensor([2.0, 1.0]).double()}, tmp_path / "b.safetensors")
    (one,) = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors").differing
    assert one.tally is not None and (one.distance, one.tally.cosine) == (math.inf, None)
    assert (one.tally.changed, one.tally.absolute_max, one.tally.infinite) == (1, 1e200, 0)


def test_groups_sum_up_their_tensors(tmp_path: Path) -> None:
    a = {
        "model.layers.0.x": torch.zeros(4),
        "model.layers.1.x": torch.ones(6),
        "model.norm.weight": torch.ones(2),
        "optimizer.layers.1.x.exp_avg": torch.ones(6),
    }
    b = {name: one.clone() for name, one in a.items()}
    b["model.layers.0.x"][0] = 2.0
    b["model.layers.1.x"][:2] = 1.5
    b["optimizer.layers.1.x.exp_avg"][0] = math.inf
    save_file(a, tmp_path / "a.safetensors")
    save_file(b, tmp_path / "b.safetensors")
    result = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    weights = result.by_role()["weights"].facts()
    assert (weights["tensors"], weights["differing"], weights["elements"]) == (3, 2, 12)
    assert weights["changed_fraction"] == 3 / 12 and weights["max_absolute"] == 2.0
    assert weights["mean_absolute"] == pytest.approx(3 / 12)
    assert weights["norm_of_difference"] == pytest.approx(math.sqrt(4.5))
    assert weights["max_ulp"] == 1 << 30 and weights["max_relative"] == 1.0, "from 0 to 2"
    assert weights["largest_relative_norm"] is None, "that of layer 0 was zero"
    assert list(result.by_place()) == ["layer 0", "layer 1", "norm"]
    grid = result.grid()
    assert grid["layer 1", "weights"].distance == pytest.approx(math.sqrt(0.5 / 6))
    assert grid["layer 1", "exp_avg"].distance == math.inf and grid["norm", "weights"].distance == 0
    facts = result.facts(top=1)
    assert len(facts["differing"]) == 1 and facts["exit_code"] == 1
    assert facts["grid"][1]["place"] == "layer 1"


def test_the_page_shows_each_layer_and_escapes_names(tmp_path: Path) -> None:
    a = {f"model.layers.{n}.x": torch.ones(3) for n in (10, 2)} | {"model.<b>.x": torch.ones(3)}
    b = {name: one * (2 if "10" in name else 1) for name, one in a.items() if "<" not in name}
    save_file(a, tmp_path / "a.safetensors")
    save_file(b, tmp_path / "b.safetensors")
    result = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    write_html(result, tmp_path / "page.html", top=1)
    page = (tmp_path / "page.html").read_text()
    assert page.index("<th>layer 2</th>") < page.index("<th>layer 10</th>")
    assert 'class="equal"' in page and "hsl(12 90% 52.0%)" in page and "and 1 more" in page
    assert "<b>" not in page and "&lt;b&gt;" in page
    assert "2 of 3 tensors differ" in page


def test_the_image_has_a_square_for_each_layer_and_role(tmp_path: Path) -> None:
    from PIL import Image

    names = ["model.layers.0.x", "model.layers.1.x", "model.$a$.x"]
    save_file({name: torch.ones(3) for name in names}, tmp_path / "a.safetensors")
    save_file({names[0]: torch.ones(3), names[1]: torch.zeros(3)}, tmp_path / "b.safetensors")
    for other, present in (("a", {EQUAL}), ("b", {EQUAL, hls_to_rgb(12 / 360, 0.52, 0.9)})):
        found = diff(tmp_path / "a.safetensors", tmp_path / f"{other}.safetensors")
        write_png(found, tmp_path / "map.image")
        with Image.open(tmp_path / "map.image") as image:
            assert image.format == "PNG"
            pixels = image.convert("RGB")
            counts = pixels.getcolors(maxcolors=1 << 24)
        assert counts is not None
        many = {shade for count, shade in counts if 40 * count > image.width * image.height}
        wanted = {tuple(int(255 * part) for part in shade) for shade in present}
        assert many - {(255, 255, 255)} == wanted


def test_shades_and_shares_never_hide_a_difference() -> None:
    assert shade(0.0) == 0 and shade(1e-30) > 0 and shade(math.inf) == shade(1.0) == 1
    assert shade(1e-6) < shade(1e-3)
    assert [percent(one) for one in (0.0, 1e-9, 0.5, 1 - 1e-9, 1.0)] == [
        "0%",
        "<0.01%",
        "50.00%",
        ">99.99%",
        "100%",
    ]
