"""The shipped figures of machine classes: what they hold, and where nothing is expected."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.nccl import adapters, reference
from tools.nccl.busbw import FACTORS
from tools.nccl.measurement import Measurement
from tools.nccl.reference import choose, classes

pytestmark = pytest.mark.req("C10")

A100 = "NVIDIA A100-SXM4-80GB"
GIB = 1 << 30


def test_every_figure_is_possible_and_has_a_source() -> None:
    """Above all: none is above what the adapters carry, as a tree over two nodes shows it."""
    for one in classes():
        assert one.points and one.gpus_per_node in (1, 8)
        for point in one.points:
            assert point.operation in FACTORS and point.source and point.size_bytes >= 256 << 20
            assert 1e9 < point.busbw < 1e12 and point.least_nodes <= (point.most_nodes or 10**6)
            limit = one.adapters_bandwidth
            assert (limit is None) == (point.most_nodes == 1)
            assert limit is None or point.busbw <= limit, (one.name, point)


@pytest.mark.parametrize(
    ("operation", "nodes", "size_bytes", "expected"),
    [
        ("all_reduce", 1, 4 * GIB, 233.88e9),
        ("all_reduce", 1, 3 * GIB, 231.41e9),  # that of 2 GiB
        ("all_reduce", 1, 64 << 20, None),  # small messages: nothing is said
        ("all_reduce", 2, 4 * GIB, 188.18e9),
        ("all_reduce", 128, GIB, 192e9),
        ("all_gather", 2, GIB, 177.05e9),
        ("all_gather", 128, GIB, None),
        ("reduce", 2, GIB, None),
    ],
)
def test_eight_a100_with_eight_adapters(
    operation: str, nodes: int, size_bytes: int, expected: float | None
) -> None:
    found = choose(A100, 8, 8, 200)
    assert found is not None and found.name == "8 x A100, 8 x 200 Gbit/s"
    assert found.expected(operation, nodes, 8, size_bytes) == (
        None if expected is None else pytest.approx(expected)
    )
    assert found.expected(operation, nodes, 4, size_bytes) is None


def test_without_the_adapters_only_the_inside_of_a_node_is_known() -> None:
    for gbit in (None, 56):
        found = choose(A100, 8, 8, gbit)
        assert found is not None
        assert found.expected("all_reduce", 1, 8, GIB) == pytest.approx(229.04e9)
        assert found.expected("all_reduce", 4, 8, GIB) is None
    half = choose(A100, 8, 4, 200)
    assert half is not None and half.expected("all_reduce", 4, 8, GIB) == pytest.approx(86e9)


def test_where_nothing_fits_nothing_is_expected() -> None:
    assert choose(None, 8) is None and choose("NVIDIA L4", 8, 8, 200) is None
    assert choose(A100, 4, 4, 200) is None  # published for eight a node only
    about = {"gpu_model": A100, "nics_per_node": 8, "nic_gbit": 200}
    assert reference.of(Measurement(["a"], 8, "gloo", about=about)) is None
    assert reference.of(Measurement(["a"], 8, "nccl")) is None
    assert reference.of(Measurement(["a"], 8, "nccl", about={"device": A100})) is not None
    found = reference.of(Measurement(["a", "b"], 8, "nccl-tests", about=about))
    assert found is not None and found.expected("all_reduce", 2, 8, GIB) == pytest.approx(183.82e9)


def test_the_adapters_of_a_node(tmp_path: Path) -> None:
    def port(name: str, rate: str, state: str = "4: ACTIVE") -> None:
        folder = tmp_path / name / "ports/1"
        folder.mkdir(parents=True)
        (folder / "rate").write_text(f"{rate}\n")
        (folder / "state").write_text(f"{state}\n")

    assert adapters.here(tmp_path, {}) == {}
    for number in range(4):
        port(f"mlx5_{number}", "200 Gb/sec (4X HDR)")
    port("mlx5_4", "100 Gb/sec (2X HDR)")
    port("mlx5_5", "200 Gb/sec (4X HDR)", "1: DOWN")
    (tmp_path / "broken/ports/1").mkdir(parents=True)
    assert adapters.here(tmp_path, {}) == {"nics_per_node": 4, "nic_gbit": 200.0}
    assert adapters.here(tmp_path, {"NCCL_IB_HCA": "=mlx5_0,mlx5_2:1"}) == {
        "nics_per_node": 2,
        "nic_gbit": 200.0,
    }
    assert adapters.here(tmp_path, {"NCCL_IB_HCA": "mlx5"})["nics_per_node"] == 4


@given(st.sampled_from(sorted(FACTORS)), st.integers(1, 10_000), st.integers(1, 16), st.integers(0, 1 << 40))
def test_a_larger_message_is_never_expected_to_be_slower(
    operation: str, nodes: int, gpus: int, size_bytes: int
) -> None:
    for one in classes():
        small, large = (one.expected(operation, nodes, gpus, size) for size in (size_bytes, 2 * size_bytes))
        assert small is None or (large is not None and large >= small)
