"""Where the values of slices lie is written down when a step is saved, and is only believed as far as hashes go."""

import dataclasses
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness.checkpoints import write_step

from train.checkpoint import slices as slices_module
from train.checkpoint.compress.files import StepFiles
from train.checkpoint.digests import Digest, read_digests
from train.checkpoint.errors import DamagedError, UnfitError
from train.checkpoint.manifest import Manifest, read_manifest
from train.checkpoint.reader import SafeReader, load_tree
from train.checkpoint.slices import slices
from train.checkpoint.verify import ReadBack, mismatch, read_back

SHAPES = {"a": (7, 9), "b": (300, 5), "c": ()}
LISTED = "digests/rank_0.json"


def saved() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def read_all(folder: Path) -> ReadBack:
    found = ReadBack()
    read_back(folder, SafeReader(folder).read_metadata(), SHAPES, found, ["rank_0.json"])
    return found


def seal(folder: Path) -> None:
    Manifest(4, 1, {}, {}, tensors={name: {} for name in SHAPES}).write(folder)


def tell(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Have the step say something else of each of its slices."""
    told = json.loads((folder / LISTED).read_text())
    for one in told["slices"]:
        change(one)
    (folder / LISTED).write_text(json.dumps(told))
    seal(folder)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    folder = tmp_path / "step_4"
    write_step(folder, saved())
    seal(folder)
    return folder


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    tree = {name: torch.full(shape, torch.nan) for name, shape in SHAPES.items()}
    with closing(SafeReader(folder, read_manifest(folder))) as reader:
        load_tree(tree, reader)
    return tree


def is_right(tree: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tree[name], tensor) for name, tensor in saved().items())


@pytest.mark.req("C8")
def test_places_are_those_that_the_archives_say(step: Path) -> None:
    metadata = SafeReader(step).read_metadata()
    listed = {one.tensor: one.offset for one in read_digests(step / LISTED, None)}
    with closing(StepFiles(step)) as files:
        for name in SHAPES:
            (piece,) = slices(files, metadata, name)
            assert listed[name] == piece.position()
    # So archives need not be looked into.
    with mock.patch.object(slices_module, "_values_in", side_effect=AssertionError("an archive was opened")):
        assert is_right(loaded(step))
        assert mismatch({0: read_digests(step / LISTED, None)}, read_all(step).slices) is None


@pytest.mark.req("C8")
def test_a_step_that_says_no_places_is_loaded(step: Path) -> None:
    tell(step, lambda one: one.pop("offset"))
    assert is_right(loaded(step))
    assert mismatch({0: read_digests(step / LISTED, None)}, read_all(step).slices) is None


@pytest.mark.req("C8", "A22")
def test_a_wrong_place_is_damage(step: Path) -> None:
    tell(step, lambda one: one.update(offset=one["offset"] + 64 * (one["tensor"] == "b")))
    with pytest.raises(DamagedError, match=r"the slice of b at \[0, 0\], which rank 0 wrote to __0_0.distcp"):
        loaded(step)
    found = ReadBack()
    read_back(step, SafeReader(step).read_metadata(), SHAPES, found)
    problem = mismatch({0: read_digests(step / LISTED, None)}, found.slices)
    assert problem == "the slice of b at [0, 0], which rank 0 wrote, does not read back as it was written"


@pytest.mark.req("C8", "A22")
@pytest.mark.parametrize("place", [-64, 1 << 70, "12", 1.5, 1 << 40])
def test_a_place_that_is_none_is_damage(step: Path, place: object) -> None:
    tell(step, lambda one: one.update(offset=place))
    with pytest.raises(DamagedError):
        loaded(step)
    with pytest.raises((DamagedError, ValueError)):
        read_all(step)


@pytest.mark.req("C8", "A22")
def test_bytes_beside_values_are_read_back_too(step: Path) -> None:
    read_all(step)
    first = min(one.offset or 0 for one in read_digests(step / LISTED, None))
    data = bytearray((step / "__0_0.distcp").read_bytes())
    data[first - 1] ^= 1
    (step / "__0_0.distcp").write_bytes(data)
    with pytest.raises(DamagedError, match=r"__0_0.distcp does not read back as it was written, beside its"):
        read_all(step)


def test_what_a_step_does_not_have_is_told(step: Path) -> None:
    with closing(SafeReader(step, read_manifest(step))) as reader:
        with pytest.raises(UnfitError, match="it has no z"):
            load_tree({"z": torch.zeros(3)}, reader)
        with pytest.raises(UnfitError, match=r"b has the shape \[300, 5\] there, and \[5, 300\] here"):
            load_tree({"b": torch.zeros(5, 300)}, reader)


def test_values_go_where_memory_is_of_another_kind(step: Path) -> None:
    """Another type, another order."""
    tree = {"a": torch.zeros(7, 9, dtype=torch.float64), "b": torch.zeros(5, 300).t()}
    with closing(SafeReader(step, read_manifest(step))) as reader:
        load_tree(tree, reader)
    assert torch.equal(tree["a"], saved()["a"].double()) and torch.equal(tree["b"], saved()["b"])


def test_equal_slices_may_lie_anywhere() -> None:
    one = Digest("a", (0,), (4,), "11", 64)
    assert one == dataclasses.replace(one, offset=None)
