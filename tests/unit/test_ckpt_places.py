"""A step of ours may say where the values of its slices lie: faster to read, and not one byte less is checked."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from harness.checkpoints import (
    CUTS,
    Hostile,
    flat,
    load_dcp,
    save_ours,
    state,
    values_in,
    write_manifest,
)

from tools.ckpt import torch_zip
from tools.ckpt.findings import Severity
from tools.ckpt.open import open_source
from tools.ckpt.report import Depth, Report
from tools.ckpt.source import Source
from tools.ckpt.validate import validate
from tools.ckpt.write_ours import told_by, write_ours

NAME = "model.layers.0.mlp.up_proj.weight"
FILE = "__0_0.distcp"
LISTED = "digests/rank_0.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_ours(tmp_path_factory.mktemp("whole") / "step_7", state(), 7, CUTS)


@pytest.fixture
def step(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "step_7"))


def texts(report: Report) -> list[str]:
    return [str(one) for one in report.errors]


def tell(step: Path, change: Callable[[dict[str, Any]], object], rest: bool = True) -> None:
    """Have the step say something else of one slice, under hashes that are right."""
    told = json.loads((step / LISTED).read_text())
    (one,) = [one for one in told["slices"] if one["tensor"] == NAME and one["start"] == [0, 10]]
    change(one)
    (step / LISTED).write_text(json.dumps(told if rest else {"slices": told["slices"]}))
    write_manifest(step, flat(state()), 7)


def opened_archives(path: Path) -> int:
    with mock.patch.object(torch_zip, "TorchArchive", side_effect=torch_zip.TorchArchive) as archives:
        assert validate(path, threads=1).exit_code == 0
    return archives.call_count


def slices_in(path: Path) -> int:
    with open_source(path) as source:
        return sum(len(entry.pieces) for entry in source.entries)


@pytest.mark.req("C9")
def test_archives_are_looked_into_where_places_are_not_told(whole: Path, tmp_path: Path) -> None:
    # `_steps` reads one of them before it is known what the step says.
    assert opened_archives(whole) <= 1
    old = save_ours(tmp_path / "step_7", state(), 7, CUTS, places=False)
    assert opened_archives(old) >= slices_in(old)


@pytest.mark.req("C9")
@pytest.mark.parametrize("depth", [Depth.FULL, Depth.DEEP])
def test_a_wrong_place_is_damage(step: Path, depth: Depth) -> None:
    tell(step, lambda one: one.update(offset=one["offset"] - 4))
    said = texts(validate(step, depth))
    assert any(
        f"its part at [0, 10] of shape [48, 22] does not have the hash (xxh3-128) that it was saved with (tensor {NAME}"
        in one
        for one in said
    ), said
    assert validate(step, Depth.QUICK).exit_code == 0


@pytest.mark.req("C9")
@pytest.mark.parametrize("place", [-1, 0, 1 << 70, "64", 1.5, True, [1]])
def test_a_place_outside_of_the_archive_is_told_at_once(step: Path, place: object) -> None:
    tell(step, lambda one: one.update(offset=place))
    (said,) = texts(validate(step, Depth.QUICK))
    assert (
        f"its part at [0, 10] is said to begin at {place!r:.40}, which is not in its archive (tensor {NAME}"
        in said
    )
    assert validate(step).exit_code == 1


@pytest.mark.req("C9")
def test_a_place_without_a_hash_of_what_lies_around_does_not_count(step: Path) -> None:
    tell(step, lambda one: one.update(offset=one["offset"] - 4), rest=False)
    assert validate(step).exit_code == 0 and opened_archives(step) >= slices_in(step)


@pytest.mark.req("C9")
def test_an_archive_that_torch_would_not_read_is_named(step: Path) -> None:
    """Its values are whole, and found."""
    data = bytearray((step / FILE).read_bytes())
    file, begin, size = values_in(step)[NAME, (0, 10)]
    # The directory follows the values.
    at = data.index(b"PK\x01\x02", begin + size)
    data[at] ^= 1
    (step / FILE).write_bytes(data)
    (found,) = validate(step).errors
    assert (found.tensor, found.file, found.rank) == (NAME, file, 0)
    assert "is no whole archive of torch.save" in found.text


@pytest.mark.req("C9")
def test_threads_change_nothing(step: Path) -> None:
    data = bytearray((step / FILE).read_bytes())
    for at in range(1000, len(data), len(data) // 9):
        data[at] ^= 1
    (step / FILE).write_bytes(data)
    told: list[int] = []

    def begin(total: int) -> Callable[[int], None]:
        told.append(-total)
        return told.append

    with mock.patch("tools.ckpt.threads.BATCH_BYTES", 1):
        reports = [validate(step, Depth.DEEP, begin=begin, threads=count) for count in (1, 4)]
    assert texts(reports[0]) == texts(reports[1]) and reports[0].exit_code == 1
    assert reports[0].read_bytes == reports[1].read_bytes and sum(told) == 0


def test_what_goes_wrong_in_a_thread_is_not_lost(whole: Path) -> None:
    with (
        mock.patch("tools.ckpt.threads.BATCH_BYTES", 1),
        mock.patch.object(Source, "windows", side_effect=MemoryError("none is left")),
        pytest.raises(MemoryError, match="none is left"),
    ):
        validate(whole, threads=3)


@pytest.mark.req("C9")
def test_a_directory_is_no_more_trusted_for_having_its_hash(step: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    content = pickle.loads((step / ".metadata").read_bytes())
    content.planner_data = Hostile(mark)
    for hostile in (content, Hostile(mark)):
        (step / ".metadata").write_bytes(pickle.dumps(hostile))
        write_manifest(step, flat(state()), 7)
        report = validate(step, Depth.DEEP)
        assert report.exit_code > 0 and (report.unreadable or "asks for posix.system" in texts(report)[0])
    assert not mark.exists()


def test_what_is_converted_says_places_too(whole: Path, tmp_path: Path) -> None:
    from tools.ckpt.convert_read import tensors_of

    with open_source(whole) as source:
        write_ours(tmp_path / "step_7", tensors_of(source, False, None, False), told_by(source, source))
    assert opened_archives(tmp_path / "step_7") <= 1
    found = flat(load_dcp(tmp_path / "step_7", state()))
    assert all(found[name].equal(tensor) for name, tensor in flat(state()).items())
    assert not [one for one in validate(tmp_path / "step_7").findings if one.severity is Severity.ERROR]
