"""Readers give every tensor its values, however it was cut and whatever format it is in."""

import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.checkpoints import Box, flat, in_all_types, save_dcp, save_ours, state
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from tools.ckpt.dtypes import not_finite, zeros
from tools.ckpt.findings import DamageError, UnreadableError
from tools.ckpt.open import open_source
from tools.ckpt.pickles import read_pickle
from tools.ckpt.pieces import Entry, Piece
from tools.ckpt.source import Source
from tools.ckpt.structure import structure


def values_of(source: Source, entry: Entry, limit: int | None = None) -> bytes:
    return b"".join(window.values.tobytes() for window in source.windows(entry, limit))


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def mixed() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(13, 7, generator=generator)
    return {
        **in_all_types(matrix),
        "matrix": matrix,
        "scalar": torch.tensor(5),
        "flag": torch.tensor([True, False]),
        "cube": torch.randn(3, 4, 5, generator=generator),
        "empty": torch.empty(0, 3),
        "turned": torch.randn(6, 4, generator=generator).T,
    }


CUTS: dict[str, list[Box]] = {
    "matrix": [((0, 0), (5, 7)), ((5, 0), (8, 3)), ((5, 3), (8, 4))],
    "cube": [((0, 0, 0), (3, 1, 5)), ((0, 1, 0), (3, 3, 2)), ((0, 1, 2), (3, 3, 3))],
}


@pytest.mark.parametrize("limit", [None, 1, 5, 11])
def test_each_reader_gives_the_values(tmp_path: Path, limit: int | None) -> None:
    tensors = mixed()
    torch.save({"deep": [{"own": tensors}]}, tmp_path / "a.pt")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "b.safetensors")
    save_dcp(tmp_path / "c", tensors)
    save_dcp(tmp_path / "d", tensors, CUTS, files=3)
    for name, prefix in (("a.pt", "deep.0.own."), ("b.safetensors", ""), ("c", ""), ("d", "")):
        with open_source(tmp_path / name) as source:
            assert not [one for one in source.problems() if one.severity != "note"], name
            entries = {entry.name.removeprefix(prefix): entry for entry in source.entries}
            assert entries.keys() == tensors.keys()
            for key, tensor in tensors.items():
                assert entries[key].dtype == str(tensor.dtype)[6:]
                assert entries[key].shape == tuple(tensor.shape)
                assert values_of(source, entries[key], limit) == raw(tensor), (name, key, limit)


def test_rows_are_those_of_the_tensor(tmp_path: Path) -> None:
    tensors = mixed()
    save_dcp(tmp_path / "d", tensors, CUTS)
    with open_source(tmp_path / "d") as source:
        entries = {entry.name: entry for entry in source.entries}
        for name in ("matrix", "cube", "turned"):
            rows = source.rows(entries[name], 1, 3)
            assert np.array_equal(rows, tensors[name][1:3].numpy()), name
        assert source.rows(entries["scalar"], 0, 1) == 5


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and boxes that make it up: cut again and again along any dim."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5))):
        start, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, size[axis]))
        for low, count in ((0, at), (at, size[axis] - at)):
            moved = tuple(a + low * (k == axis) for k, a in enumerate(start))
            boxes.append((moved, tuple(count if k == axis else n for k, n in enumerate(size))))
    return shape, [box for box in boxes if 0 not in box[1]]


@given(cut=cut_tensors(), limit=st.none() | st.integers(1, 50), flat_cut=st.integers(0, 40), data=st.data())
def test_any_cut_reads_as_the_whole(
    tmp_path_factory: pytest.TempPathFactory,
    cut: tuple[tuple[int, ...], list[Box]],
    limit: int | None,
    flat_cut: int,
    data: st.DataObject,
) -> None:
    """Boxes and ranges, in windows of any size; every byte of a piece is shown once, in its order."""
    shape, boxes = cut
    values = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    path = tmp_path_factory.getbasetemp() / "pieces.bin"
    content = b""
    boxed, ranged = [], []
    for start, size in boxes:
        part = values[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))].tobytes()
        boxed.append(Piece(path, len(content), len(part), start, size))
        content += part
    at = min(flat_cut, values.size)
    for low, high in ((0, at), (at, values.size)):
        part = values.reshape(-1)[low:high].tobytes()
        ranged.append(Piece(path, len(content), len(part), (low,), (high - low,), flat=True))
        content += part
    path.write_bytes(content)
    for pieces in (boxed, ranged):
        entry = Entry("t", "weights", "int32", shape, tuple(data.draw(st.permutations(pieces))))
        with Source(path, "test", [entry], None) as source:
            assert structure(source) == []
            seen: dict[Piece, bytes] = {}

            def tap(piece: Piece, shown: Any, offset: int, seen: dict[Piece, bytes] = seen) -> None:
                assert offset == piece.offset + len(seen.get(piece, b""))
                seen[piece] = seen.get(piece, b"") + shown.tobytes()

            read = b"".join(window.values.tobytes() for window in source.windows(entry, limit, tap))
            assert read == values.tobytes()
            for piece in pieces:
                assert seen.get(piece, b"") == content[piece.offset : piece.offset + piece.nbytes]


@given(cut=cut_tensors(), data=st.data())
def test_a_part_twice_and_a_part_less_are_found(
    cut: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = cut
    chosen = data.draw(st.sampled_from(boxes))
    for changed in ([*boxes, chosen], [box for box in boxes if box is not chosen]):
        pieces = tuple(Piece(Path(__file__), 0, 0, start, size) for start, size in changed)
        found = structure(
            Source(Path(__file__), "test", [Entry("t", "weights", "int32", shape, pieces)], None)
        )
        assert len(found) == 1 and "parts" in found[0].text, (changed, found)


def test_a_run_is_its_newest_step(tmp_path: Path) -> None:
    for step in (5, 20):
        save_ours(tmp_path / f"run/checkpoints/step_{step}", state(step=step), step)
    with open_source(tmp_path / "run") as source:
        assert (source.step, source.format, source.layout["zero"]) == (20, "trierarch 2", 1)
        assert source.path.name == "step_20"


def test_tied_tensors_and_views_of_torch_save(tmp_path: Path) -> None:
    matrix = torch.randn(6, 4)
    torch.save({"a": matrix, "b": matrix, "c": matrix[2:4], "d": matrix.T, "step": 3}, tmp_path / "x.pt")
    with open_source(tmp_path / "x.pt") as source:
        entries = {entry.name: entry for entry in source.entries}
        assert source.step == 3
        assert {name: entry.tied_to for name, entry in entries.items()} == {
            "a": None,
            "b": "a",
            "c": None,
            "d": None,
        }
        for name, tensor in (("c", matrix[2:4]), ("d", matrix.T)):
            assert values_of(source, entries[name]) == raw(tensor)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    torch.save({"a": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("none", "text.txt", "empty", "empty.pt", "run", "old.pt"):
        with pytest.raises(UnreadableError) as raised:
            open_source(tmp_path / name)
        assert str(tmp_path / name) in str(raised.value) and "\n" not in str(raised.value)
        assert raised.value.exit_code == 2


@settings(max_examples=20)
@given(
    dtype=st.sampled_from(
        ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"]
    ),
    seed=st.integers(0, 2**31),
)
def test_bits_say_what_torch_says(dtype: str, seed: int) -> None:
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    width = torch.empty(0, dtype=kind).element_size()
    bits = torch.randint(0, 256, (300 * width,), generator=generator, dtype=torch.uint8)
    if dtype == "float8_e4m3fnuz":
        bits[0] = 0x80
    tensor = bits.view(kind)
    as_float = tensor.float()
    held = bits.numpy().view({1: np.uint8, 2: np.uint16, 4: np.float32}[width])
    if dtype == "float16":
        held = held.view(np.float16)
    assert not_finite(dtype, held) == (int(as_float.isnan().sum()), int(as_float.isinf().sum()))
    assert zeros(dtype, held) == int((as_float == 0).sum())


def test_flat_is_what_the_reader_says(tmp_path: Path) -> None:
    """The names of our trainer's tree are those of the files."""
    save_ours(tmp_path / "step_7", state())
    with open_source(tmp_path / "step_7") as source:
        assert {entry.name for entry in source.entries} == flat(state()).keys()
        assert {entry.role for entry in source.entries} == {
            "weights",
            "exp_avg",
            "exp_avg_sq",
            "step counts",
            "data position",
            "rng",
        }


class Foreign:
    """An object of a library that is not here when the file is looked at."""

    def __init__(self) -> None:
        self.inner = {"w": torch.arange(3.0)}


def test_objects_of_other_libraries_are_opened_and_told(tmp_path: Path) -> None:
    torch.save({"a": Foreign(), "seen": {1, 2}}, tmp_path / "x.pt")
    with open_source(tmp_path / "x.pt") as source:
        (entry,) = source.entries
        assert entry.name == "a.inner.w" and values_of(source, entry) == raw(torch.arange(3.0))
        (found,) = source.problems()
        assert found.severity == "warning" and "Foreign" in found.text


def test_a_pickle_that_refers_to_itself_is_refused(tmp_path: Path) -> None:
    circle: list[Any] = []
    circle.append(circle)
    many: Any = [1]
    for _ in range(40):
        many = [many, many]
    for tree in (circle, many):
        torch.save(tree, tmp_path / "x.pt")
        with pytest.raises(UnreadableError, match="refers to itself"):
            open_source(tmp_path / "x.pt")


def test_a_part_twice_in_place_of_another_is_an_overlap() -> None:
    for flat_pieces in (False, True):
        piece = Piece(Path(__file__), 0, 0, (0,), (2,), flat=flat_pieces)
        entry = Entry("t", "weights", "int32", (4,), (piece, piece))
        (found,) = structure(Source(Path(__file__), "test", [entry], None))
        assert "overlap, at [0] and [0]" in found.text and found.tensor == "t"


def test_elements_without_bytes_are_not_made_up(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(8))
    entry = Entry("t", "weights", "int32", (4,), (Piece(path, 0, 8, (0,), (2,)),))
    with Source(path, "test", [entry], None) as source, pytest.raises(DamageError, match="tensor t"):
        values_of(source, entry)


def test_a_pickle_with_a_cut_frame_is_refused() -> None:
    data = pickle.dumps({"name": "value"}, protocol=4)
    assert read_pickle(data)[0] == {"name": "value"}
    with pytest.raises(ValueError, match="ends too early"):
        read_pickle(data[:3] + struct.pack("<Q", len(data)) + data[11:])
