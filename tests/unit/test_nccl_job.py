"""The report that rank 0 of a network test writes, with what NCCL has written down on the nodes."""

import shutil
from pathlib import Path

import pytest

import configs.compose
from slurm.settings import SubmitConfig
from slurm.sites.profile import Profile
from tools.nccl.conclude import conclude
from tools.nccl.job import write_report
from tools.nccl.measure.spec import Spec
from tools.nccl.measurement import Measurement
from tools.nccl.simulate.fabric import fat_tree
from tools.nccl.simulate.prober import Simulator

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder `nccl` in which ranks have measured a healthy fabric."""
    folder = tmp_path / "run" / "nccl"
    folder.mkdir(parents=True)
    Simulator(fat_tree(4, 4, 4, "switch", 2), seed=1).measure(budget_s=60.0, seed=1).save(
        folder / "measurement.npz"
    )
    return folder


@pytest.mark.req("C10", "B11")
def test_settings_follow_from_what_nccl_has_found_on_the_nodes(folder: Path) -> None:
    for node in range(3):
        text = (
            (GOLDEN / "nccl_topo_faults.xml")
            .read_text()
            .replace("<system ", f'<system host_hash="0x{node}" ', 1)
        )
        (folder / f"topo.{node}.xml").write_text(text)
        shutil.copy(GOLDEN / "nccl_log.txt", folder / f"nccl.{node}.log")
    profile = configs.compose.fill(SubmitConfig, ["cluster=a100_ib"])
    (folder.parent / "submit.yaml").write_text(configs.compose.to_yaml(profile))
    write_report(Spec(str(folder)))
    written = configs.compose.fill(SubmitConfig, [f"cluster={folder / 'cluster.yaml'}"]).cluster
    assert isinstance(written, Profile) and written.hcas and written.gpu_model == "NVIDIA A100"
    assert len(list(folder.glob("topo.*.xml"))) == 1 and not list(folder.glob("nccl.*.log"))
    assert (folder / "nccl.log").read_text().count("NCCL version") >= 3


@pytest.mark.parametrize("name", ["topo.0.xml", "nccl.0.log"])
def test_what_nccl_has_left_in_pieces_costs_no_report(folder: Path, name: str) -> None:
    (folder / name).write_text("<system")
    write_report(Spec(str(folder)))
    assert "what NCCL has written down was not read" in (folder / "report.txt").read_text()
    assert (folder / "verdict.json").exists()


@pytest.mark.req("A5", "C10")
def test_groups_are_compared_with_what_slurm_told_on_the_nodes(folder: Path) -> None:
    measurement = Measurement.load(folder / "measurement.npz")
    pattern = "switch.switch.node"
    measurement.about["slurm_topology"] = {
        name: [f"s0.s{1 + place % 2}.{name}", pattern] for place, name in enumerate(measurement.nodes)
    }
    findings, _ = conclude(measurement)
    assert any("Slurm" in note for note in findings.notes)
    measurement.about["slurm_topology"] = {name: [name, "node"] for name in measurement.nodes}
    findings, _ = conclude(measurement)
    assert not any("Slurm" in note for note in findings.notes)
