"""What a node tells of itself, and what becomes of it in a profile; the lab tests ask a real Slurm."""

from pathlib import Path

import pytest
from harness.programs import write_program
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from contract.errors import ConfigError
from slurm.command import expand_cpus
from slurm.sites.discover import add_probe, discover, share_cpus
from slurm.sites.probe import Node, parse_nvidia_smi, probe
from slurm.sites.profile import Profile
from tools import cli_cluster

# Two GPUs near one NUMA node and two near another, as on a node of HoreKa or a DGX.
SMI = "".join(f"NVIDIA A100-SXM4-40GB, 40960, 00000000:{bus}:00.0\n" for bus in ("0A", "1B", "4C", "8D"))


def file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.fixture
def node_files(tmp_path: Path) -> Path:
    """The parts of /proc and /sys of a node that are read."""
    for bus, cpus in (("0a", "0-5"), ("1b", "6-11")):
        file(tmp_path / f"sys/bus/pci/devices/0000:{bus}:00.0/local_cpulist", cpus)
        file(
            tmp_path / f"proc/driver/nvidia/gpus/0000:{bus}:00.0/information",
            "Model: \t\t NVIDIA A100\nIRQ: 3",
        )
    for adapter, state, layer in (
        ("mlx5_0", "4: ACTIVE", "InfiniBand"),
        ("mlx5_1", "1: DOWN", "InfiniBand"),
        ("mlx5_2", "4: ACTIVE", "Ethernet"),
    ):
        port = tmp_path / "sys/class/infiniband" / adapter / "ports/1"
        file(port / "state", state)
        file(port / "link_layer", layer)
    for name, kind, state in (
        ("ib0", "32", "down"),
        ("ib1", "32", "up"),
        ("eth0", "1", "up"),
        ("lo", "772", "unknown"),
    ):
        file(tmp_path / "sys/class/net" / name / "type", kind)
        file(tmp_path / "sys/class/net" / name / "operstate", state)
    return tmp_path


@pytest.mark.req("C3")
def test_a_node_is_read_from_its_files(node_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")  # no nvidia-smi
    assert probe(node_files) == Node(
        gpu_models=["NVIDIA A100", "NVIDIA A100"],
        gpu_cpus=["0-5", "6-11"],
        hcas=["mlx5_0"],
        infiniband_interfaces=["ib1"],
    )
    smi = node_files / "bin/nvidia-smi"
    write_program(smi, "echo 'NVIDIA A100-SXM4-40GB, 40960, 00000000:1B:00.0'")
    monkeypatch.setenv("PATH", f"{smi.parent}:/usr/bin:/bin")
    told = probe(node_files)
    assert (told.gpu_models, told.gpu_memory_bytes, told.gpu_cpus) == (
        ["NVIDIA A100-SXM4-40GB"],
        [40960 * 2**20],
        ["6-11"],
    )
    assert probe(node_files / "nothing") == Node(["NVIDIA A100-SXM4-40GB"], [40960 * 2**20], [""])


@pytest.mark.req("C3")
def test_what_a_node_told_is_added_to_the_profile() -> None:
    gpus = parse_nvidia_smi(SMI)
    profile = Profile(gpus_per_node=4, unverified=["GPUs: ?", "adapters: ?", "socket_interface: ?", "mpi: ?"])
    node = Node(
        [model for model, _, _ in gpus],
        [memory for _, memory, _ in gpus],
        ["0-11", "0-11", "12-23,36-47", "12-23,36-47"],
        ["mlx5_0"],
        ["ib0"],
    )
    add_probe(profile, node)
    assert (profile.gpu_model, profile.gpu_memory_gb) == ("NVIDIA A100-SXM4-40GB", 42.0)
    assert profile.gpu_cpus == ["0-5", "6-11", "12-23", "36-47"]
    assert (profile.hcas, profile.socket_interface) == (["mlx5_0"], "ib0")
    assert profile.unverified == ["mpi: ?", "adapters: take out of hcas those for storage"]


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 20)), min_size=1, max_size=4), st.integers(1, 4))
def test_gpus_share_the_cores_that_they_are_near_to(spans: list[tuple[int, int]], gpus_each: int) -> None:
    lists = [f"{first}-{first + more}" for first, more in spans]
    near = [text for text in dict.fromkeys(lists) for _ in range(gpus_each)]
    shares = [expand_cpus(text) for text in share_cpus(near)]
    assert all(shares)
    for text in dict.fromkeys(near):
        cores = expand_cpus(text)
        mine = [share for share, of in zip(shares, near, strict=True) if of == text]
        assert all(set(share) <= set(cores) for share in mine)
        if len(cores) >= gpus_each:
            taken = [core for share in mine for core in share]
            assert len(taken) == len(set(taken)) and len({len(share) for share in mine}) == 1


def test_every_field_of_a_profile_is_shown() -> None:
    shown = [key for keys in cli_cluster.SECTIONS.values() for key in keys]
    assert sorted([*shown, *cli_cluster.APART]) == sorted(Profile.__dataclass_fields__)


@pytest.mark.req("C3")
def test_profiles_are_listed_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_CONF", "TRIERARCH_LAB"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("socket.gethostname", lambda: "jwlogin23.juwels")
    monkeypatch.setenv("SBATCH_PARTITION", "p")
    trierarch = CliRunner()
    listed = trierarch.invoke(cli_cluster.app, ["list"], catch_exceptions=False).output
    assert "* juwels_booster " in listed and "\n  local " in listed
    assert "juwels_booster is taken here: this host, jwlogin23.juwels, matches jwlogin2?.juwels" in listed
    shown = trierarch.invoke(cli_cluster.app, ["show"], catch_exceptions=False).output
    for line in (
        "taken here: yes (this host",
        "  gpus_per_node     4\n",
        "  job.partition=develbooster: any number of nodes, at most 2 h (for tests)\n",
        "not verified\n  - nothing here was tried on the machine\n",
        "  - SBATCH_PARTITION=p of your shell is not used: write a setting\n",
    ):
        assert line in shown
    with pytest.raises(ConfigError, match=r"there is no such profile, did you mean karolina\?"):
        trierarch.invoke(cli_cluster.app, ["show", "carolina"], catch_exceptions=False)
    with pytest.raises(ConfigError, match=r"--account is for the job of --probe"):
        trierarch.invoke(cli_cluster.app, ["init", "--account", "x"], catch_exceptions=False)


def test_slurm_that_does_not_answer_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(
        ConfigError, match=r"^Slurm does not answer here \(scontrol: No such file or directory\)"
    ):
        discover(None, None, {"PATH": "/nonexistent"})


def test_a_profile_that_cannot_be_read_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster/mine.yaml").write_text("name: mine\ndescription: A machine\n")
    (tmp_path / "cluster/torn.yaml").write_text("{")
    monkeypatch.setattr("configs.compose.FOLDER", tmp_path)
    monkeypatch.setattr(cli_cluster, "_detected", lambda: ("mine", "its name"))
    listed = CliRunner().invoke(cli_cluster.app, ["list"], catch_exceptions=False).output
    assert "* mine  A machine\n" in listed and "torn.yaml is no profile that can be read" in listed


@pytest.mark.parametrize("name", ["my site", "ü", "../x", "9"])
def test_a_name_that_hydra_could_not_read_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm.sites.discover.discover", lambda *_: Profile(name=name))
    with pytest.raises(ConfigError, match="a profile's name has the letters a-z, digits and _ only"):
        CliRunner().invoke(cli_cluster.app, ["init", name], catch_exceptions=False)
