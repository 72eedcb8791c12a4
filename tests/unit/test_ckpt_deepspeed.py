"""DeepSpeed's folders give what its own converter gives; see `harness.deepspeed_files`."""

import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.ckpt.open import open_source
from tools.ckpt.report import Depth
from tools.ckpt.validate import validate

pytestmark = pytest.mark.slow

FILES = Path(__file__).parents[1] / "golden/deepspeed.tar.gz"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    with tarfile.open(FILES) as archive:
        archive.extractall(folder, filter="data")
    return folder


def values(path: Path) -> dict[str, bytes]:
    with open_source(path) as source:
        return {
            entry.name: b"".join(window.values.tobytes() for window in source.windows(entry, 4))
            for entry in source.entries
        }


@pytest.mark.req("C9")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_partitions_make_what_deepspeed_makes_of_them(saved: Path, stage: int) -> None:
    folder = saved / f"zero{stage}"
    for depth in Depth:
        report = validate(folder, depth)
        assert report.exit_code == 0 and report.findings == []
    assert (report.format, report.step) == (f"deepspeed zero {stage}", 3)
    found = values(folder)
    states = saved / f"universal{stage}/global_step3/zero"
    names = [path.name for path in states.iterdir() if path.is_dir()]
    assert len(names) == 5
    for name in names:
        for kind in ("fp32", "exp_avg", "exp_avg_sq"):
            held = torch.load(states / name / f"{kind}.pt")
            tensor = held["param"] if isinstance(held, dict) else held
            full = f"model.{name}" if (stage, kind) == (3, "fp32") else f"optimizer.{name}.{kind}"
            assert found[full] == tensor.detach().numpy().tobytes(), full
    assert len(found) == 15 + 5 * (stage < 3)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_universal_folders_hold_the_same(saved: Path, stage: int) -> None:
    report = validate(saved / f"universal{stage}", Depth.DEEP)
    assert (report.exit_code, report.format, report.step) == (0, "deepspeed universal", 3)
    whole = {
        name: value for name, value in values(saved / f"universal{stage}").items() if ".step" not in name
    }
    assert whole == values(saved / f"zero{stage}")


def optimizer_file(folder: Path, rank: int) -> Path:
    (path,) = folder.glob(f"*zero_pp_rank_{rank}_*optim_states.pt")
    return path


@pytest.mark.req("C9")
def test_damage_is_named(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved / "zero2/global_step3", tmp_path / "global_step3"))
    file = optimizer_file(folder, 1)
    shutil.copy(optimizer_file(saved / "zero2/global_step2", 1), file)
    (found,) = validate(folder).errors
    assert "mixes steps: Adam has made 2 here and 3" in found.text and found.rank == 1
    file.unlink()
    said = "\n".join(map(str, validate(folder).errors))
    assert "the optimizer's file of this rank is missing (written by rank 1)" in said
    assert "parts are missing (tensor optimizer.b.weight.fp32)" in said
    file.write_bytes(optimizer_file(folder, 0).read_bytes()[:1000])
    (found, *_) = validate(folder).errors
    assert "cannot be read: is no whole archive" in found.text and (found.file, found.rank) == (file.name, 1)
    shutil.copy(optimizer_file(folder, 0), file)
    assert f"was written as {optimizer_file(folder, 0).name}" in "\n".join(map(str, validate(folder).errors))
    folder.rename(tmp_path / "global_step9")
    assert "mixes steps" in "\n".join(map(str, validate(tmp_path / "global_step9").errors))


@settings(max_examples=60)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans(), data=st.data())
def test_no_damage_changes_a_value_unseen(
    saved: Path, place: float, bit: int, cut: bool, data: st.DataObject
) -> None:
    folder = saved / "zero1"
    file = data.draw(st.sampled_from(sorted(folder.rglob("*.pt"))))
    before, right = file.read_bytes(), values(folder)
    spoilt = bytearray(before)
    spoilt[int(place * len(before))] ^= 1 << bit
    file.write_bytes(before[: int(place * len(before))] if cut else spoilt)
    try:
        report = validate(folder, Depth.DEEP)
        assert "\n" not in str(report.unreadable)
        if report.exit_code == 0:
            assert values(folder) == right
    finally:
        file.write_bytes(before)
