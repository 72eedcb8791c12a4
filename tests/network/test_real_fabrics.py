"""Measured on real networks between namespaces: a planted fault is found, an order and a hierarchy gain what is said.

Only shares are compared: the host of these tests may have anything else to do.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from harness.netns import Fabric
from harness.noise import measured_again

pytestmark = pytest.mark.slow

FAST, SLOW = 200.0, 50.0
"""Mbit/s: so slow that two cores are no bottleneck."""


def measure(folder: Path, fabric: Fabric, per_node: int = 1, **settings: Any) -> Any:
    from harness import measuring

    from tools.nccl.measure.spec import Spec

    names = [f"n{node}" for node in range(fabric.nodes)]
    spec = Spec(str(folder), nodes=names, exchange_bytes=1 << 19, pair_s=0.1, repetitions=8, **settings)
    return measuring.measure(spec, fabric.nodes, per_node, fabric=fabric)


def judge(measurement: Any) -> tuple[Any, Any]:
    """What is found in it, and what follows."""
    from tools.nccl import analyse
    from tools.nccl.route.advice import advise

    findings = analyse.run(measurement)
    return findings, advise(measurement, findings)


def shares(measurement: Any) -> Any:
    """Bandwidth of each pair of nodes as a share of the median, which is about what an adapter carries."""
    import numpy as np

    from tools.nccl.measurement import matrix

    found = matrix(measurement, range(measurement.ranks), "bandwidth")
    median = np.nanmedian(found)
    assert 0.65 < median / (FAST / 8 * 1e6) < 1.2
    return found / median


def all_reduce_s(measurement: Any, algorithm: str, size_bytes: int) -> float:
    times = {
        one.size_bytes: one.time_s
        for one in measurement.collectives
        if (one.operation, one.algorithm, one.scope) == ("all_reduce", algorithm, "world")
    }
    assert all(one.wrong == 0 for one in measurement.collectives)
    return float(times[size_bytes])


@pytest.mark.req("C10", "A5")
@measured_again
def test_a_slow_link_is_measured_and_is_the_only_fault(tmp_path: Path) -> None:
    with Fabric(6, nic_mbit=FAST, links_mbit={(1, 4): SLOW}) as fabric:
        measurement = measure(tmp_path, fabric, operations=[], budget_s=10.0)
    found = shares(measurement)
    assert SLOW / FAST * 0.7 < found[1, 4] < SLOW / FAST * 1.4
    found[1, 4] = found[4, 1] = 1.0
    assert (found[~(found != found)] > 0.5).all()  # all but the diagonal, which is no number
    findings, _ = judge(measurement)
    assert [fault.name for fault in findings.faults if fault.symptom == "is slow"] == ["link n1 - n4"]
    assert findings.verdict == "DEGRADED"


@pytest.mark.req("C10", "A5")
@measured_again
def test_a_slow_adapter_is_its_nodes_fault(tmp_path: Path) -> None:
    rates = {node: SLOW if node == 2 else FAST for node in range(6)}
    with Fabric(6, nic_mbit=rates) as fabric:
        measurement = measure(tmp_path, fabric, operations=[], budget_s=10.0)
    found = shares(measurement)
    for other in (0, 1, 3, 4, 5):
        assert SLOW / FAST * 0.7 < found[2, other] < SLOW / FAST * 1.4
    findings, _ = judge(measurement)
    slow = [fault for fault in findings.faults if fault.symptom == "is slow"]
    assert [(fault.part in ("node", "nic"), fault.nodes) for fault in slow] == [(True, ("n2",))]
    assert findings.exclude == ("n2",)


@pytest.mark.req("C10", "B6")
@pytest.mark.parametrize(
    ("nodes", "fabric"),
    [
        # For its length.
        pytest.param(6, {"leaves": [[0, 2, 4], [1, 3, 5]], "uplink_mbit": FAST / 2}, marks=pytest.mark.chaos),
        (6, {"links_mbit": {(1, 2): SLOW}}),
    ],
    ids=["nodes of two leaves in turn", "a slow link in the ring"],
)
@measured_again
def test_an_order_speeds_a_real_all_reduce_up_as_predicted(
    tmp_path: Path, nodes: int, fabric: dict[str, Any]
) -> None:
    size = (1 << 20) // 24 * 24
    with Fabric(nodes, nic_mbit=FAST, **fabric) as real:
        measurement = measure(tmp_path, real, operations=["all_reduce"], sizes=[size], budget_s=24.0)
    findings, advice = judge(measurement)
    assert len(advice.order) == nodes and measurement.about["order"] == list(advice.order)
    gain = all_reduce_s(measurement, "flat", size) / all_reduce_s(measurement, "ordered", size)
    assert gain == pytest.approx(1 + advice.gain_measured)
    # Predicted: three or four times as fast.
    assert advice.gain_predicted > 0.8 and gain > 1.5
    assert 0.6 < gain / (1 + advice.gain_predicted) < 1.7
    if "leaves" in fabric:
        assert {frozenset(group) for group in findings.groups} == {
            frozenset({"n0", "n2", "n4"}),
            frozenset({"n1", "n3", "n5"}),
        }
    else:
        assert {"n1", "n2"} not in [{advice.order[place - 1], advice.order[place]} for place in range(nodes)]


@pytest.mark.req("C10", "B6")
@measured_again
def test_by_nodes_is_faster_than_flat_where_the_model_says_so(tmp_path: Path) -> None:
    """Two nodes of two: a ring of four sends 3/2 of the buffer through each adapter, two rings of two once its size."""
    size = 1 << 20
    with Fabric(2, nic_mbit=FAST) as fabric:
        measurement = measure(
            tmp_path, fabric, per_node=2, operations=["all_reduce"], sizes=[1 << 10, size], budget_s=8.0
        )
    _, advice = judge(measurement)
    gain = all_reduce_s(measurement, "flat", size) / all_reduce_s(measurement, "hierarchical", size)
    assert 1.15 < gain < 2.2  # by the model 1.5
    assert [algorithm for begin, algorithm in advice.switches if begin <= size][-1] == "hierarchical"


@pytest.mark.chaos
@pytest.mark.req("C10", "A5")
def test_a_link_that_carries_nothing_is_told_by_both_ends_and_not_tried_again(tmp_path: Path) -> None:
    """Too slow for a single message: both ranks live, so that neither is to blame, and the rest is measured."""
    from harness.measuring import Ranks
    from harness.measuring import measure as start_again

    from tools.nccl.measure.spec import Spec
    from tools.nccl.measurement import matrix

    spec = Spec(
        str(tmp_path),
        nodes=["n0", "n1", "n2", "n3"],
        exchange_bytes=1 << 19,
        pair_s=0.05,
        operations=[],
        budget_s=8.0,
        round_timeout_s=5.0,
        roll_call_s=2.5,
    )
    with Fabric(4, nic_mbit=FAST, links_mbit={(1, 3): 0.2}) as fabric:
        ranks = Ranks(spec, 4, fabric=fabric)
        assert ranks.wait(60.0) == [76] * 4, ranks.output()
        waits = [json.loads((tmp_path / f"waited.{rank}.json").read_text()) for rank in range(4)]
        assert all(wait["silent"] == [] for wait in waits), waits
        blocked = {wait["node"]: wait["peers"] for wait in waits if wait["kind"] == "round"}
        assert blocked == {"n1": [["n3", 0]], "n3": [["n1", 0]]}
        for note in tmp_path.glob("waited.*"):
            note.unlink()  # as a supervisor does
        measurement = start_again(spec, 4, fabric=fabric)
    found = matrix(measurement, range(4), "bandwidth")
    assert found[1, 3] == 0 and sum(found[0, 1:] > 0) == 3
    findings, _ = judge(measurement)
    assert findings.verdict == "BROKEN"
    assert [fault.nodes for fault in findings.faults if fault.symptom == "does not answer"] == [("n1", "n3")]
