"""Hashes of slices and of whole tensors, from one reading of the files."""

import json
import shutil
import struct
import subprocess
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.checkpoints import write_step
from hypothesis import given
from hypothesis import strategies as st

from train.checkpoint import verify
from train.checkpoint.compress.files import StepFiles
from train.checkpoint.digests import Digest, digest, read_digests
from train.checkpoint.errors import DamagedError
from train.checkpoint.manifest import METADATA, Manifest, read_manifest
from train.checkpoint.reader import SafeReader, damage, load_tree
from train.checkpoint.slices import Slice, slices
from train.checkpoint.stored import Stored, as_bytes, packed
from train.checkpoint.verify import ReadBack, deal, hash_tensor, mismatch, read_back

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]


class Laid(Slice):
    """A slice whose bytes lie in a file as they are."""

    def position(self) -> int:
        return self.offset


@st.composite
def cuttings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[slice, ...]]]:
    """A shape, and boxes that make it up: cut in two again and again."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    boxes = [tuple(slice(0, size) for size in shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        edge = draw(st.integers(box[dim].start, box[dim].stop))
        for part in (slice(box[dim].start, edge), slice(edge, box[dim].stop)):
            boxes.append((*box[:dim], part, *box[dim + 1 :]))
    return shape, draw(st.permutations(boxes))


@pytest.mark.req("C8")
@given(cutting=cuttings(), dtype=st.sampled_from(DTYPES), window=st.integers(1, 64))
def test_a_whole_tensor_has_one_hash_however_it_was_cut(
    tmp_path_factory: pytest.TempPathFactory,
    cutting: tuple[tuple[int, ...], list[tuple[slice, ...]]],
    dtype: torch.dtype,
    window: int,
) -> None:
    shape, boxes = cutting
    tensor = torch.arange(np.prod(shape)).reshape(shape).to(dtype)
    path = tmp_path_factory.mktemp("cut") / "__0_0.distcp"
    files = StepFiles(path.parent)
    parts, expected, offset = [], [], 0
    with path.open("wb") as file:
        for box in boxes:
            data = as_bytes(packed(tensor[box])).tobytes()
            start = tuple(one.start for one in box)
            size = tuple(one.stop - one.start for one in box)
            parts.append(Laid("t", start, size, dtype, path.name, offset, len(data), files))
            expected.append(digest(data))
            offset += file.write(data)
    with pytest.MonkeyPatch.context() as patch, closing(files):
        patch.setattr(verify, "WINDOW_BYTES", window)
        whole, own = hash_tensor(shape, parts, [part.offset for part in parts])
    assert whole == digest(as_bytes(tensor))
    assert own == expected


def test_a_tensor_that_is_not_all_there_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(bytes(40))
    half = Laid("t", (0,), (10,), torch.float32, path.name, 0, 40, StepFiles(tmp_path))
    with pytest.raises(DamagedError, match="t has 10 values instead of 20"):
        hash_tensor((20,), [half], [0])
    cut = Laid("t", (0,), (20,), torch.float32, path.name, 0, 80, StepFiles(tmp_path))
    with pytest.raises(DamagedError, match=r"__0_0.distcp ends after 40 bytes"):
        hash_tensor((20,), [cut], [0])


@pytest.mark.req("C8")
def test_what_is_hashed_is_what_lies_in_the_file(tmp_path: Path) -> None:
    """Also where memory is in another order, is shared with more, or is brought from elsewhere."""
    base = torch.randn(6, 8)
    tree = {
        "transposed": base.t(),
        "part": base[2:4, 1:5],
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "short": torch.randn(5).bfloat16(),
        "elsewhere": torch.empty(3, 2, device="meta"),
    }
    brought = torch.arange(6.0).view(3, 2)
    write_step(tmp_path, tree, {("elsewhere",): Stored(0, lambda: brought)})
    tree["elsewhere"] = brought
    metadata = SafeReader(tmp_path).read_metadata()
    found = ReadBack()
    read_back(tmp_path, metadata, tree, found)
    written = read_digests(tmp_path / "digests/rank_0.json", None)
    assert mismatch({0: written}, found.slices) is None
    for name, tensor in tree.items():
        assert found.tensors[name]["xxh3"] == digest(as_bytes(tensor.contiguous())), name
        assert found.tensors[name]["shape"] == list(tensor.shape)
        (one,) = slices(StepFiles(tmp_path), metadata, name)
        data = np.empty(one.nbytes, np.uint8)
        one.read_into(one.position(), data)
        assert data.tobytes() == as_bytes(tensor.contiguous()).tobytes(), name
    assert found.tensors["short"]["dtype"] == "bfloat16"


def test_what_reads_back_otherwise_is_named() -> None:
    one, other = Digest("a", (0,), (4,), "11"), Digest("a", (4,), (4,), "22")
    assert mismatch({0: [one], 3: [other]}, [other, one]) is None
    changed = Digest("a", (4,), (4,), "23")
    problem = mismatch({0: [one], 3: [other]}, [one, changed])
    assert problem == "the slice of a at [4], which rank 3 wrote, does not read back as it was written"
    assert mismatch({0: [one], 3: [other]}, [one]) == "the slice of a at [4] is missing"
    assert mismatch({0: [one]}, [one, other]) == "the slice of a at [4] is not what any rank has written"


def test_tensors_are_dealt_once_and_evenly(tmp_path: Path) -> None:
    tree = {f"t{number}": torch.zeros(100_000 + 1000 * number) for number in range(10)}
    write_step(tmp_path, tree, {})
    shares = deal(SafeReader(tmp_path).read_metadata(), 3)
    assert sorted(name for share in shares for name in share) == sorted(tree)
    assert {len(share) for share in shares} == {3, 4}


def finished(folder: Path) -> Manifest:
    write_step(folder, {"t": torch.ones(3)}, {})
    found = ReadBack()
    read_back(folder, SafeReader(folder).read_metadata(), ["t"], found)
    manifest = Manifest(4, 1, {}, {}, tensors=found.tensors)
    manifest.write(folder)
    return manifest


@pytest.mark.req("C8")
@pytest.mark.parametrize("name", [".metadata", "digests/rank_0.json"])
def test_a_small_file_that_has_changed_is_found(tmp_path: Path, name: str) -> None:
    manifest = finished(tmp_path)
    assert read_manifest(tmp_path) == manifest and manifest.verified
    data = bytearray((tmp_path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"{name} is not what was written"):
        read_manifest(tmp_path)


@pytest.mark.req("C8")
def test_a_manifest_that_says_something_else_is_found(tmp_path: Path) -> None:
    finished(tmp_path)
    path = tmp_path / "manifest.json"
    text = path.read_text()
    path.write_text(json.dumps(json.loads(text)))
    assert read_manifest(tmp_path).step == 4, "how it is laid out does not matter"
    path.write_text(text.replace('"world_size": 1', '"world_size": 3'))
    with pytest.raises(
        ValueError, match=r"manifest.json cannot be read \(its content is not what was written"
    ):
        read_manifest(tmp_path)
    path.write_text(json.dumps({name: value for name, value in json.loads(text).items() if name != "xxh3"}))
    assert read_manifest(tmp_path).xxh3 is None


def test_formats_that_can_be_read_are_told(tmp_path: Path) -> None:
    fields = asdict(finished(tmp_path)) | {"xxh3": None}
    (tmp_path / "manifest.json").write_text(json.dumps(fields | {"format": 3, "later": 1}))
    with pytest.raises(ValueError, match="its format is 3, this version reads 1 and 2"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps(fields | {"digests": {}}))
    with pytest.raises(ValueError, match="it has no hashes"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps(fields | {"began": "today"}))
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        read_manifest(tmp_path)
    known = ("step", "world_size", "model", "data", "files")
    (tmp_path / "manifest.json").write_text(
        json.dumps({name: fields[name] for name in known} | {"format": 1})
    )
    assert not read_manifest(tmp_path).verified


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of a few tensors."""
    folder = tmp_path_factory.mktemp("sound") / "step_4"
    generator = torch.Generator().manual_seed(5)
    write_step(folder, {name: torch.randn(7, 9, generator=generator) for name in ("a", "b", "c")}, {})
    found = ReadBack()
    read_back(folder, SafeReader(folder).read_metadata(), ["a", "b", "c"], found)
    Manifest(4, 1, {"dim": 7}, {"documents": "x"}, tensors=found.tensors).write(folder)
    return folder


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """What a run takes from a step; `ValueError` or `DamagedError` where it refuses it."""
    problem = damage(folder)
    if problem is not None:
        raise ValueError(problem)
    tree = {name: torch.full((7, 9), torch.nan) for name in ("a", "b", "c")}
    load_tree(tree, SafeReader(folder, read_manifest(folder)))
    return tree


FILES = [".metadata", "__0_0.distcp", "digests/rank_0.json", "manifest.json"]


@pytest.mark.req("C8", "A22")
@given(name=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), harm=st.integers(-2, 7))
def test_damage_is_refused_or_does_no_harm(
    sound: Path, tmp_path_factory: pytest.TempPathFactory, name: str, place: float, harm: int
) -> None:
    """One flipped bit, a file cut off, a page of zeros: what is loaded is what was saved, or nothing is."""
    expected = loaded(sound)
    folder = tmp_path_factory.mktemp("harmed") / "step_4"
    shutil.copytree(sound, folder)
    data = bytearray((folder / name).read_bytes())
    where = int(place * len(data))
    if harm == -2:
        del data[where:]
    elif harm == -1:
        data[where : where + 512] = bytes(len(data[where : where + 512]))
    else:
        data[where] ^= 1 << harm
    (folder / name).write_bytes(data)
    try:
        found = loaded(folder)
    except (ValueError, DamagedError):
        return
    finally:
        shutil.rmtree(folder.parent)
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


def test_metadata_without_a_hash_takes_no_more_memory_than_there_is_data(tmp_path: Path) -> None:
    """A damaged byte may name the place 4,294,967,000 of a table: 32 GiB."""
    place = struct.pack("<I", 0xFFFFFF00)
    (tmp_path / METADATA).write_bytes(b"\x80\x04Nr" + place + b".")
    (tmp_path / "manifest.json").write_text(
        json.dumps({"format": 1, "step": 1, "world_size": 1, "model": {}, "data": {}})
    )
    script = (
        "import resource, sys; from pathlib import Path\n"
        "from train.checkpoint.reader import damage\n"
        "resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))\n"
        "print(damage(Path(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "holds a NoneType" in done.stdout, done
