"""The network test's ranks: contents are checked, times are there, nobody waits for ever, and a restart goes on."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from harness.measuring import Ranks as LiveRanks
    from harness.pool import Ranks

pytestmark = pytest.mark.slow

LEFT = 76
ROUND_S, CALL_S = 3.0, 2.5
BOUND_S = ROUND_S + CALL_S + 20.0
"""What a loaded machine may take for it."""


def spec_for(folder: Path, nodes: int | list[str], **more: Any) -> Any:
    from tools.nccl.measure.spec import Spec

    settings = {
        "nodes": [f"n{number}" for number in range(nodes)] if isinstance(nodes, int) else nodes,
        "budget_s": 4.0,
        "sizes": [1 << 10, 1 << 16],
        "exchange_bytes": 1 << 14,
        "pair_s": 0.02,
    }
    return Spec(str(folder), **(settings | more))


@pytest.mark.req("C10")
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_pattern_shows_every_changed_element(name: str) -> None:
    import torch

    from tools.nccl.measure.pattern import EXACT, Added, Moved, count_wrong, fill

    dtype, cpu = getattr(torch, name), torch.device("cpu")
    tables = [Moved(dtype, cpu).table(rank, block) for rank, block in ((0, 0), (1, 0), (0, 1), (200, 3))]
    for count, first in ((1, 0), (250, 5), (251, 0), (1000, 333)):
        buffer = torch.empty(count, dtype=dtype)
        fill(buffer, tables[3], first)
        assert int(count_wrong(buffer, tables[3], first)) == 0
        for other in tables[:3]:
            assert int(count_wrong(buffer, other, first)) > 0.9 * count
        for place in {0, count // 2, count - 1}:
            changed = buffer.clone()
            changed[place] += 1
            assert int(count_wrong(changed, tables[3], first)) == 1
            changed[place] = math.nan
            assert int(count_wrong(changed, tables[3], first)) == 1
    for ranks in (1, 2, 3, 7, 64, 251, 1000, 4096):
        added = Added(ranks, dtype, cpu)
        total = sum(added.table(rank).double() for rank in range(ranks))
        assert torch.equal(total, added.sum.double()) and added.sum.max() <= EXACT[dtype]
        # What lacks one rank's part, or has it twice, shows.
        assert all(added.table(rank).count_nonzero() for rank in range(min(ranks, 10)))


@pytest.mark.req("C10")
@pytest.mark.parametrize("size", [4, 3])
def test_every_operation_is_right_and_an_error_is_counted(ranks: "Ranks", size: int) -> None:
    def work() -> None:
        import torch
        import torch.distributed as dist

        from tools.nccl.measure.operations import KINDS, Ring

        rank = dist.get_rank()
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            ring = Ring(None, rank, size, torch.device("cpu"), dtype)
            for name, (build, ways) in KINDS.items():
                for in_place in ways:
                    for size_bytes in (1, 4000):
                        operation = build(ring, size_bytes, in_place)
                        for _ in range(2):
                            operation.prepare()
                            if name == "broadcast" and rank == 0:
                                continue  # it has what it sends
                            elements = ring.share(size_bytes) * size
                            got = elements // size if name == "reduce_scatter" else elements
                            # Nothing is right by chance, or left over from before.
                            assert size_bytes == 1 or int(operation.count_wrong()) > 0.4 * got, (
                                name,
                                in_place,
                            )
                        operation.prepare()
                        operation.run()
                        assert int(operation.count_wrong()) == 0, (name, in_place, dtype, size_bytes)

    ranks(size, work)


@pytest.mark.req("C10")
def test_a_sum_that_lacks_a_rank_is_wrong_everywhere(ranks: "Ranks") -> None:
    def work() -> int:
        import torch
        import torch.distributed as dist

        from tools.nccl.measure.operations import Ring, all_reduce

        def lose_one(tensor: torch.Tensor) -> None:
            if dist.get_rank() == 2:
                tensor[::2] = 0
            dist.all_reduce(tensor)

        ring = Ring(None, dist.get_rank(), 4, torch.device("cpu"), torch.float32)
        operation = all_reduce(ring, 4 * 600, True, lose_one)
        operation.prepare()
        operation.run()
        return int(operation.count_wrong())

    # Of 300 elements a third had been 0 anyway.
    assert ranks(4, work) == [200] * 4


@pytest.mark.req("C10", "A5")
def test_everything_is_measured_on_two_nodes_of_two(tmp_path: Path) -> None:
    from harness.measuring import measure

    from tools.nccl.busbw import busbw

    spec = spec_for(tmp_path, 2, budget_s=6.0, dtype="bfloat16", silent={"n9": "it was off"})
    found = measure(spec, 2, 2)
    assert (found.nodes, found.gpus_per_node, found.backend) == (["n0", "n1"], 2, "gloo")
    assert found.silent == {"n9": "it was off"}
    pairs = {
        (min(a, b), max(a, b)) for a, b in zip(found.exchanges.first, found.exchanges.second, strict=True)
    }
    assert pairs == {(0, 1), (2, 3), (0, 2), (1, 3)}
    assert (found.exchanges.bandwidth > 0).all() and (found.exchanges.latency_s > 0).all()
    assert (found.exchanges.slowest <= found.exchanges.bandwidth).all()
    assert found.exchanges.wrong.sum() == 0
    assert found.about["exchange_bytes"] == 1 << 14 and "GLOO_SOCKET_IFNAME" in found.about["variables"]

    kinds = {(one.operation, one.algorithm, one.scope, one.in_place) for one in found.collectives}
    assert kinds == {
        *(("all_reduce", "flat", scope, True) for scope in ("world", "n0", "n1")),
        ("all_reduce", "hierarchical", "world", True),
        *((name, "flat", "world", way) for name in ("all_gather", "reduce_scatter") for way in (True, False)),
        ("all_to_all", "flat", "world", False),
        ("broadcast", "flat", "world", True),
        ("sendrecv", "flat", "world", False),
    }
    for one in found.collectives:
        assert one.size_bytes in (1 << 10, 1 << 16) and one.wrong == 0
        assert (one.ranks, one.nodes) == ((4, 2) if one.scope == "world" else (2, 1))
        assert 0 < one.time_s <= one.p90_s <= one.p99_s
        assert one.busbw == busbw(one.operation, one.ranks, one.size_bytes, one.time_s)
    lines = [json.loads(line) for line in (tmp_path / "progress.json").read_text().splitlines()]
    assert [lines[0]["phase"], lines[-1]["phase"]] == ["start", "end"]
    assert {line["phase"] for line in lines} >= {"exchanges", "collectives"}
    assert not (tmp_path / "partial.npz").exists()


@pytest.mark.req("C10")
def test_connections_may_be_given_up_on_the_way(tmp_path: Path) -> None:
    from harness.measuring import measure

    found = measure(spec_for(tmp_path, 4, operations=[], renew_rounds=1, skip=[[2, 1]]), 4)
    rows = zip(found.exchanges.first, found.exchanges.second, found.exchanges.bandwidth, strict=True)
    silent = {(int(a), int(b)) for a, b, bandwidth in rows if bandwidth == 0}
    assert silent == {(1, 2)}


@pytest.mark.req("C10")
def test_what_the_time_does_not_allow_is_told(tmp_path: Path) -> None:
    from harness.measuring import measure

    sizes = [1 << power for power in range(10, 25)]
    spec = spec_for(tmp_path, 2, budget_s=0.5, operations=["broadcast"], sizes=sizes, exchanges=False)
    found = measure(spec, 2)
    assert 1 <= len(found.collectives) < len(sizes)
    last = found.collectives[-1].size_bytes
    assert any(
        line.startswith(f"broadcast in place: nothing above {last:,} bytes") for line in found.unmeasured
    )


def _start(tmp_path: Path, nodes: int, **more: Any) -> "LiveRanks":
    from harness.command import wait_until
    from harness.measuring import Ranks

    spec = spec_for(tmp_path, nodes, budget_s=60.0, round_timeout_s=ROUND_S, roll_call_s=CALL_S, **more)
    ranks = Ranks(spec, nodes)
    progress = tmp_path / "progress.json"
    wait_until("the collectives", lambda: progress.exists() and '"collectives"' in progress.read_text())
    return ranks


@pytest.mark.req("C10", "A5")
@pytest.mark.parametrize(
    ("how", "victim"),
    [
        (signal.SIGSTOP, 2),
        (signal.SIGKILL, 0),
        pytest.param(signal.SIGSTOP, 0, marks=pytest.mark.chaos),
        pytest.param(signal.SIGKILL, 2, marks=pytest.mark.chaos),
    ],
)
def test_a_rank_that_is_gone_or_stuck_is_named(tmp_path: Path, how: signal.Signals, victim: int) -> None:
    ranks = _start(tmp_path, 3, operations=["all_reduce"])
    os.kill(ranks.pid(victim), how)
    began = time.monotonic()
    codes = ranks.wait(BOUND_S, but=(victim,))
    assert time.monotonic() - began < BOUND_S
    others = [rank for rank in range(3) if rank != victim]
    assert [codes[rank] for rank in others] == [LEFT] * 2, ranks.output()
    for rank in others:
        wait = json.loads((tmp_path / f"waited.{rank}.json").read_text())
        assert (wait["rank"], wait["node"], wait["gpu"]) == (rank, f"n{rank}", 0)
        assert (wait["silent"], wait["silent_nodes"]) == ([victim], [f"n{victim}"]), ranks.output()
    assert not (tmp_path / f"waited.{victim}.json").exists()
    assert f"gone or stuck: rank {victim} on n{victim}" in ranks.output()
    # Nothing is to be left out because of it.
    assert not list(tmp_path.glob("hung*.json"))


@pytest.mark.req("C10")
def test_a_rank_that_was_stopped_for_a_while_says_so_itself(tmp_path: Path) -> None:
    ranks = _start(tmp_path, 2, operations=["all_reduce"])
    os.kill(ranks.pid(1), signal.SIGSTOP)
    assert ranks.wait_for(0, BOUND_S) == LEFT
    os.kill(ranks.pid(1), signal.SIGCONT)
    assert ranks.wait(BOUND_S) == [LEFT, LEFT], ranks.output()
    waits = [json.loads((tmp_path / f"waited.{rank}.json").read_text()) for rank in range(2)]
    assert [wait["silent"] for wait in waits] == [[1], [1]]
    assert "this process itself was stopped" in waits[1]["reason"]
    assert not list(tmp_path.glob("hung*.json"))


@pytest.mark.req("C10")
def test_a_stopped_rank_knows_it_in_whichever_thread_wakes_first(tmp_path: Path) -> None:
    program = """
import sys, time
from pathlib import Path
from tools.nccl.measure import watch
watch.POLL_S, watch.SUSPENDED_S = 30.0, 0.3  # the thread that looks does not wake here
one = watch.Watch(Path(sys.argv[1]), 1, 2, lambda rank: (f"n{rank}", 0), roll_call_s=0.1)
one.start(None)
one.step("round", "round 1 of exchanges", 60)
time.sleep(1)
one.give_up("rank 0 is gone")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, tmp_path], timeout=60, capture_output=True, text=True
    )
    assert ended.returncode == LEFT, ended.stderr
    note = json.loads((tmp_path / "waited.1.json").read_text())
    assert note["silent"] == [1] and "this process itself was stopped" in note["reason"]


def _of_pair(measurement: Any, pair: tuple[int, int], value: str) -> set[float]:
    exchanges = measurement.exchanges
    rows = zip(exchanges.first, exchanges.second, getattr(exchanges, value), strict=True)
    found = {float(number) for first, second, number in rows if {int(first), int(second)} == set(pair)}
    assert found
    return found


@pytest.mark.req("C10", "A5")
def test_a_restart_without_a_node_keeps_what_was_measured(tmp_path: Path) -> None:
    from harness.measuring import measure

    from tools.nccl.measurement import Measurement

    ranks = _start(tmp_path, 3, operations=["all_reduce"])
    os.kill(ranks.pid(1), signal.SIGKILL)
    assert ranks.wait(BOUND_S) == [LEFT, -signal.SIGKILL, LEFT]
    before = Measurement.load(tmp_path / "partial.npz")
    assert len(before.exchanges) >= 3
    spec = spec_for(tmp_path, ["n0", "n2"], operations=[], silent={"n1": "it was killed"})
    after = measure(spec, 2)
    assert after.nodes == ["n0", "n2"] and after.silent == {"n1": "it was killed"}
    # The very same values, whatever was measured beside them.
    for value in ("latency_s", "bandwidth"):
        assert _of_pair(before, (0, 2), value) & _of_pair(after, (0, 1), value)
    assert not list(tmp_path.glob("waited.*")) and not (tmp_path / "hung.json").exists()


@pytest.mark.req("C10")
def test_a_restart_does_not_try_again_what_hung_though_all_lived(tmp_path: Path) -> None:
    from harness.measuring import measure

    from tools.nccl.measure.waits import Wait

    for rank, peer in ((0, 2), (2, 0)):
        hung = Wait(
            rank, f"n{rank}", 0, "round", "round 1 of exchanges", "no answer", 4.0, [[f"n{peer}", 0]], [], []
        )
        hung.write(tmp_path, "hung")
    Wait(1, "n1", 0, "collective", "all_gather, 1,024 bytes", "no answer", 4.0, [], [], []).write(
        tmp_path, "hung"
    )
    found = measure(spec_for(tmp_path, 3, operations=["all_gather"], sizes=[1024]), 3)
    rows = list(zip(found.exchanges.first, found.exchanges.second, found.exchanges.bandwidth, strict=True))
    assert {(int(a), int(b)) for a, b, bandwidth in rows if bandwidth == 0} == {(0, 2)}
    assert any(bandwidth > 0 for _, _, bandwidth in rows)
    assert [one.in_place for one in found.collectives] == [True]
    assert "all_gather, 1,024 bytes: no answer within 4 s though all ranks lived" in found.unmeasured


@pytest.mark.req("C10")
def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    from harness.command import wait_until
    from harness.disks import fill, small_disk
    from harness.measuring import Ranks

    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        folder, log = disk / "nccl", tmp_path / "output"
        folder.mkdir()
        (folder / "output").symlink_to(log)
        ranks = Ranks(spec_for(folder, 2, budget_s=1.0, operations=["all_reduce"]), 2)
        wait_until("the start", lambda: (folder / "progress.json").exists())
        fill(disk)
        assert ranks.wait_for(0, BOUND_S) == 1
        ranks.kill()
        assert not list(folder.glob(".measurement*")), log.read_text()
    said = [line for line in log.read_text().splitlines() if "cannot be written" in line]
    assert said == [
        f"trierarch: {folder} cannot be written (No space left on device): free some space there, or give "
        "a folder that can be written"
    ]


@pytest.mark.req("C10")
def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    from harness.measuring import Ranks

    ranks = Ranks(spec_for(tmp_path, 3, start_timeout_s=4.0), 3, missing=(1,))
    codes = ranks.wait(BOUND_S)
    assert (codes[0], codes[2]) == (LEFT, LEFT), ranks.output()
    wait = json.loads((tmp_path / "waited.2.json").read_text())
    assert (wait["kind"], wait["silent"], wait["silent_nodes"]) == ("start", [1], ["n1"])


@pytest.mark.req("C10")
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"operations": ["all_reduse"]}, "operations: all_reduse is unknown, did you mean all_reduce"),
        ({"dtype": "int4"}, "dtype: int4 is unknown"),
        ({"sizes": [4, 2]}, "sizes=.* ascending"),
        ({"budget_s": 0}, "budget_s=0 must be more than 0"),
        ({"rounds": 3}, "rounds is unknown"),
    ],
)
def test_a_wrong_spec_is_refused(change: dict[str, Any], sentence: str) -> None:
    from contract.errors import ConfigError
    from tools.nccl.measure.spec import Spec

    with pytest.raises(ConfigError, match=sentence):
        Spec.of({"folder": "here", **change}, "spec.json")


@pytest.mark.req("C10")
def test_the_command_says_what_is_wrong_with_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tools.nccl.measure.__main__ import main as measure_main

    assert measure_main([]) == 78
    assert measure_main([str(tmp_path / "none.json")]) == 78
    told = capsys.readouterr().err.splitlines()
    assert "usage:" in told[0] and "none.json holds no measurement to make" in told[1]
