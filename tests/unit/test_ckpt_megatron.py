"""Megatron's `torch_dist`; see `harness.megatron_files`."""

import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from tools.ckpt.open import open_source
from tools.ckpt.report import Depth
from tools.ckpt.validate import validate

pytestmark = pytest.mark.slow

FILES = Path(__file__).parents[1] / "golden/megatron.tar.gz"
STEP = "iter_0000012"


@pytest.fixture
def step(tmp_path: Path) -> Path:
    with tarfile.open(FILES) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / STEP


@pytest.mark.req("C9")
def test_it_is_whole_and_has_its_values(step: Path) -> None:
    for depth in Depth:
        report = validate(step, depth)
        assert (report.exit_code, report.findings) == (0, [])
        assert (report.format, report.step) == ("megatron torch_dist", 12)
    with open_source(step) as source:
        entries = {entry.name: entry for entry in source.entries}
        whole = np.arange(48, dtype=np.float32).reshape(8, 6)
        weight = entries["decoder.layers.w"]
        assert len(weight.pieces) == 2 and np.array_equal(source.rows(weight, 0, 8), whole)
        moment = entries["optimizer.state.exp_avg.decoder.layers.w"]
        assert np.array_equal(source.rows(moment, 0, 8), whole / np.float32(7))
        roles = {name: entry.role for name, entry in entries.items()}
        assert roles == {weight.name: "weights", moment.name: "exp_avg", "rng_state/shard_0_1": "rng"}
        assert source.facts["values"]["args.tensor_model_parallel_size"] == 1


def test_damage_is_found(step: Path) -> None:
    def said(path: Path = step) -> str:
        return "\n".join(map(str, validate(path).errors))

    common = (step / "common.pt").read_bytes()
    (step / "common.pt").unlink()
    assert "is missing (file common.pt)" in said()
    (step / "common.pt").write_bytes(common)
    for path in sorted(step.glob("*.distcp")):
        data = path.read_bytes()
        path.write_bytes(data.replace(np.float32(9).tobytes(), np.float32(8).tobytes()))
    assert "CRC-32" in said()
    shutil.move(step, step.with_name("iter_0000013"))
    assert "mixes steps" in said(step.with_name("iter_0000013"))
