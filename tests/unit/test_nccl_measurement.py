"""The one form of a measurement: written and read again; a matrix is symmetric, with the last value of a pair."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import UserError
from tools.nccl.busbw import FACTORS, busbw
from tools.nccl.measurement import Collective, Exchange, Exchanges, Measurement, matrix

RANKS = 6
PAIRS = st.tuples(st.integers(0, RANKS - 1), st.integers(0, RANKS - 1)).filter(
    lambda pair: pair[0] != pair[1]
)


@given(st.lists(PAIRS, max_size=30), st.permutations(range(RANKS)))
def test_a_matrix_has_the_last_value_of_each_pair(pairs: list[tuple[int, int]], ranks: list[int]) -> None:
    exchanges = [
        Exchange(*pair, latency_s=1e-6, bandwidth=1.0 + place, slowest=1.0)
        for place, pair in enumerate(pairs)
    ]
    measurement = Measurement(["a", "b", "c"], 2, "simulated", Exchanges.of(exchanges))
    chosen = ranks[:4]
    found = matrix(measurement, chosen, "bandwidth")
    last = {frozenset(pair): 1.0 + place for place, pair in enumerate(pairs)}
    for row, one in enumerate(chosen):
        for column, other in enumerate(chosen):
            expected = last.get(frozenset((one, other)), np.nan) if one != other else np.nan
            assert np.array_equal(found[row, column], expected, equal_nan=True)


def test_a_measurement_is_read_as_it_was_written(tmp_path: Path) -> None:
    exchange = Exchange(0, 3, 2e-6, 1e9, float("nan"), round=4, wrong=1)
    collective = Collective("all_reduce", 4, 2, 1024, 1e-3, 2e-3, 3e-3, 1.0, 1.5, algorithm="ordered")
    written = Measurement(
        ["a", "b"], 2, "gloo", Exchanges.of([exchange]), [collective], {"c": "gone"}, ["a half"], {"job": "7"}
    )
    written.save(tmp_path / "measurement.npz")
    read = Measurement.load(tmp_path / "measurement.npz")
    for name in ("nodes", "gpus_per_node", "backend", "collectives", "silent", "unmeasured", "about"):
        assert getattr(read, name) == getattr(written, name)
    for name, values in vars(written.exchanges).items():
        assert np.array_equal(getattr(read.exchanges, name), values, equal_nan=values.dtype == np.float64), (
            name
        )
    assert [path.name for path in tmp_path.iterdir()] == ["measurement.npz"]


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "text", "other archive", "other format"])
def test_what_is_no_measurement_is_one_sentence(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "measurement.npz"
    Measurement(["a"], 2, "gloo").save(path)
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "other archive":
        np.savez(path, x=np.zeros(3))
    elif damage == "other format":
        with np.load(path) as stored:
            columns = dict(stored)
        columns["header"] = np.array(str(columns["header"]).replace('"format": 1', '"format": 99'))
        np.savez(path, **columns)
    else:
        path.write_bytes({"empty": b"", "cut": whole[:-40], "text": b"# nccl-tests"}[damage])
    with pytest.raises(UserError) as caught:
        Measurement.load(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"nodes": ["a", "b\nc"]}, "is no name of a node"),
        ({"silent": {"a b": "gone"}}, "is no name of a node"),
        ({"nodes": ["a"]}, "has other ranks"),
        (
            {
                "exchanges": replace(
                    Exchanges.of([Exchange(0, 1, 1e-6, 1e9, 1e9)]), wrong=np.zeros(2, np.int32)
                )
            },
            "length",
        ),
        ({"collectives": [Collective("all_reduce", 0, 0, 8, 1.0, 1.0, 1.0, 8.0, 8.0)]}, "no ranks"),
    ],
)
def test_what_no_measurement_can_hold_is_refused(tmp_path: Path, wrong: dict[str, Any], said: str) -> None:
    whole = Measurement(["a", "b"], 1, "gloo", Exchanges.of([Exchange(0, 1, 1e-6, 1e9, 1e9)]))
    replace(whole, **wrong).save(tmp_path / "measurement.npz")
    with pytest.raises(UserError, match=said):
        Measurement.load(tmp_path / "measurement.npz")


@pytest.mark.req("C10")
def test_bus_bandwidths_are_those_of_published_tables() -> None:
    """Rows of all_reduce_perf on 8 A100 (stas00/ml-engineering, network/README.md): size, us, algbw, busbw in GB/s."""
    for size, time_us, alg, bus in ((1 << 30, 8203.9, 130.88, 229.05), (1 << 26, 684.6, 98.02, 171.54)):
        assert size / (time_us * 1e-6) == pytest.approx(alg * 1e9, rel=1e-3)
        assert busbw("all_reduce", 8, size, time_us * 1e-6) == pytest.approx(bus * 1e9, rel=1e-3)
    # nccl-tests' doc/PERFORMANCE.md: the factors of the other operations on n ranks.
    assert {name: float(factor(4)) for name, factor in FACTORS.items()} == {
        "all_reduce": 1.5,
        "all_gather": 0.75,
        "reduce_scatter": 0.75,
        "all_to_all": 0.75,
        "broadcast": 1.0,
        "reduce": 1.0,
        "sendrecv": 1.0,
    }
    assert busbw("all_reduce", 1, 1024, 1.0) == 0 and busbw("broadcast", 4, 1024, 0.0) == 0
