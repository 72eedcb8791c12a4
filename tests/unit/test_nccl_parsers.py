"""Files of nccl-tests and of NCCL, as they come out of jobs: whole, cut off, mixed with other output, and hostile."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contract.errors import UserError
from tools.nccl.busbw import busbw
from tools.nccl.findings import Verdict
from tools.nccl.measurement import Measurement
from tools.nccl.parsers import graph_xml, log, log_words, nccl_tests_json, nccl_tests_text, topo_xml
from tools.nccl.parsers.any_file import gather, read_measurement
from tools.nccl.parsers.nccl_tests import Benchmark, to_measurement
from tools.nccl.parsers.remark import Remark
from tools.nccl.parsers.topo_xml import Distance

pytestmark = pytest.mark.req("C10")

GOLDEN = Path(__file__).parents[1] / "golden"
NEW = (GOLDEN / "nccl_tests_two_nodes.txt").read_text()
OLD = (GOLDEN / "nccl_tests_old.txt").read_text()
LOG = (GOLDEN / "nccl_log.txt").read_text()
HEAD = "# size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong"
ROW = "1073741824     268435456   float   sum      -1  10828.1   99.16  185.93      0  10611.6  101.19  189.72      0"


def one(text: str, operation: str | None = None) -> Benchmark:
    (test,) = nccl_tests_text.parse(text, "a log", operation)
    return test


def verdicts(remarks: list[Remark]) -> Verdict:
    return max((one.verdict for one in remarks), key=lambda one: one.exit_code, default=Verdict.ok)


def told(remarks: list[Remark], *words: str) -> Remark:
    """The one remark that has all the words."""
    (found,) = [one for one in remarks if all(word in f"{one.text} {one.todo}" for word in words)]
    return found


def test_a_new_output_of_two_nodes() -> None:
    test = one(NEW)
    assert (test.program, test.version, test.ranks, test.hosts) == (
        "all_reduce",
        "2.17.6",
        16,
        ["ga01", "ga02"],
    )
    assert test.average_busbw == pytest.approx(128.31e9) and test.out_of_bounds == 0 and test.remarks() == []
    rows = test.collectives()
    assert len(rows) == 28 and [row.in_place for row in rows[:2]] == [False, True]
    last = rows[-1]
    assert (last.size_bytes, last.nodes, last.wrong) == (8 << 30, 2, 0)
    assert (last.time_s, last.algbw, last.busbw) == pytest.approx((84467.2e-6, 101.70e9, 190.68e9))
    for row in rows:  # the columns are what they are taken for: nccl-tests' own formula holds between them
        assert row.busbw == pytest.approx(busbw("all_reduce", 16, row.size_bytes, row.time_s), rel=2e-3)
    measurement = to_measurement([test])
    assert (measurement.nodes, measurement.gpus_per_node) == (["ga01", "ga02"], 8)
    assert measurement.about == {"gpu_model": "NVIDIA A100-SXM4-80GB"}


def test_an_old_output_names_no_program() -> None:
    test = one(OLD)
    assert (test.program, test.guessed, test.ranks) == ("all_reduce", True, 4)
    assert len(test.rows) == 12 and test.rows[0].wrong == 0  # the column `error`, 2e-07: rounding
    assert "by its figures it is all_reduce" in test.remarks()[0].text
    assert one(OLD.replace("2e-07", "3e+01")).rows[0].wrong == 1
    assert one(OLD.replace("2e-07", "  nan")).rows[0].wrong == 1


def test_rows_that_other_output_interrupts() -> None:
    """mpirun's tags, carriage returns, NCCL's messages in the middle of two rows, right behind their last word."""
    plain, mixed = one(NEW), one((GOLDEN / "nccl_tests_interleaved.txt").read_bytes().decode())
    assert str(mixed.rows) == str(plain.rows) and mixed.devices == plain.devices
    labelled = "\n".join(f"0: {line}" for line in NEW.splitlines())
    assert str(one(labelled).rows) == str(plain.rows)
    assert str(one(NEW.replace("\n", "\r")).rows) == str(plain.rows)
    coloured = NEW.replace("float", "\x1b[1mfloat\x1b[0m")
    assert str(one(coloured).rows) == str(plain.rows)


def test_a_row_that_is_interrupted_twice() -> None:
    message = "n12:55:66 [3] NCCL INFO Channel 00/0 : 3[3] -> 4[4] via P2P/IPC"
    words = ROW.split()
    broken = (
        f"{HEAD}\n" + " ".join(words[:5]) + message + "\n" + " ".join(words[5:9]) + message + "\n" + message
    )
    test = one(f"{broken}\n" + " ".join(words[9:]) + "\n# Avg bus bandwidth    : 187.8\n", "all_reduce")
    whole = one(f"{HEAD}\n{ROW}\n# Avg bus bandwidth    : 187.8\n", "all_reduce")
    assert str(test.rows) == str(whole.rows)


@pytest.mark.parametrize(
    ("head", "row", "expected"),
    [
        (  # without redop and root
            "#       size         count    type     time   algbw   busbw  error     time   algbw   busbw  error",
            "     1048576        262144   float    47.38   22.13   11.06  0e+00    46.84   22.39   11.19  0e+00",
            (47.38e-6, 11.06e9, 0),
        ),
        (  # bytes, N and op, and a time for each in-place and out-of-place
            "#  bytes             N    type      op     time  algbw  busbw      res     time  algbw  busbw      res",
            " 1048576        262144   float     sum    0.100  10.49  19.66    4e-06    0.101  10.38  19.47    4e-06",
            (0.1e-6, 19.66e9, 0),
        ),
        (  # statistics of single iterations and a time stamp
            f"{HEAD.split(' time')[0]} time algbw busbw #wrong i_min i_max i_p99 i_cv% time algbw busbw #wrong "
            "i_min i_max i_p99 i_cv% timestamp",
            "1048576 262144 float sum -1 47.38 22.13 11.06 3 40.1 60.2 59.9 8.1 46.84 22.39 11.19 0 40.0 60.1 58.8 8.0 "
            "2026-02-03 04:05:06",
            (47.38e-6, 11.06e9, 3),
        ),
        (  # the time of the processor
            HEAD.replace(" time", "cputime"),
            "1048576 262144 float sum -1 47.38 22.13 11.06 0 46.84 22.39 11.19 0",
            (47.38e-6, 11.06e9, 0),
        ),
        (HEAD, "1048576 262144 float sum -1 47.38 22.13 11.06 N/A 46.84 22.39 11.19 N/A", (47.38e-6, 11.06e9, None)),
        ("", "1048576 262144 float sum -1 47.38 22.13 11.06 0 46.84 22.39 11.19 0", (47.38e-6, 11.06e9, 0)),
    ],
)  # fmt: skip
def test_tables_of_many_versions(head: str, row: str, expected: tuple[float, float, int | None]) -> None:
    test = one(f"{head}\n{row}\n", "all_gather")
    assert [half.in_place for half in test.rows] == [False, True]
    first = test.rows[0]
    assert (first.size_bytes, first.time_s, first.busbw) == pytest.approx((1 << 20, expected[0], expected[1]))
    assert first.wrong == expected[2]
    if "i_p99" in head:
        assert [half.p99_s for half in test.rows] == pytest.approx([59.9e-6, 58.8e-6])


def test_several_tests_in_one_log() -> None:
    gather_ = NEW.replace("all_reduce_perf", "all_gather_perf").replace("     sum", "    none")
    tests = nccl_tests_text.parse(
        f"+ mpirun ./all_reduce_perf -b 1M\n{NEW}\n+ mpirun ./x\n{gather_}{NEW}", "a log"
    )
    assert [test.program for test in tests] == ["all_reduce", "all_gather", "all_reduce"]
    assert [len(test.rows) for test in tests] == [28, 28, 28]
    assert len(to_measurement(tests).collectives) == 84
    new, old = nccl_tests_text.parse(f"{NEW.replace('all_reduce', 'sendrecv')}{OLD}", "a log")
    assert (new.program, old.program, old.guessed) == ("sendrecv", "all_reduce", True)
    # The command's line in front of an old output is its name; the next one has none again.
    first, second = nccl_tests_text.parse(
        f"$ mpirun -np 4 ./build/reduce_scatter_perf -g 4\n{OLD}{OLD}", "a log"
    )
    assert (first.program, first.guessed) == ("reduce_scatter", False)
    assert (second.program, second.guessed) == ("all_reduce", True)


def test_an_operation_without_a_bandwidth_of_its_own_is_left_out_and_said() -> None:
    measurement = to_measurement([one(NEW.replace("all_reduce_perf", "scatter_perf"))])
    assert measurement.collectives == [] and "scatter is left out" in measurement.unmeasured[0]
    unknown = one(f"{HEAD}\n{ROW.replace('sum', 'none')}\n")
    assert unknown.program is None and "--operation" in to_measurement([unknown]).unmeasured[0]
    assert one(f"{HEAD}\n{ROW}\n", "all_reduce").ranks == 16  # by busbw / algbw
    with pytest.raises(UserError, match="nccl-tests have no such operation"):
        one(NEW, "all_reduces")


def test_an_output_that_is_cut_off() -> None:
    lines = NEW.splitlines()
    start, last = "\n".join(lines[:35]), lines[35]
    # Nothing of the last row, one number, one half, both.
    for end, rows in ((0, 20), (60, 20), (86, 21), (120, 22)):
        test = one(f"{start}\n{last[:end]}")
        assert (len(test.rows), test.average_busbw) == (rows, None), end
        assert verdicts(test.remarks()) is Verdict.degraded


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("128.31", "0"), "average bus bandwidth is 0, which is a failure"),
        (("Out of bounds values : 0 OK", "Out of bounds values : 12 FAILED"), "12 values were wrong"),
        (
            ("# Avg bus", "ga01: Test NCCL failure common.cu:958 'unhandled system error'\n# Avg bus"),
            "unhandled system error",
        ),
    ],
)  # fmt: skip
def test_what_is_a_failure(change: tuple[str, str], words: str) -> None:
    remark = told(one(NEW.replace(*change)).remarks(), words)
    assert remark.verdict is Verdict.broken


def test_one_rank_has_tested_nothing() -> None:
    lines = NEW.splitlines()
    alone = "\n".join([*lines[:6], *lines[21:24], "1048576 262144 float sum -1 5 200 0 0 5 200 0 0",
                       "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 0"])  # fmt: skip
    test = one(alone)
    assert test.ranks == 1 and test.collectives() == []
    assert told(test.remarks(), "one rank has no partner").verdict is Verdict.broken


def test_json() -> None:
    text = (GOLDEN / "nccl_tests.json").read_text()
    assert nccl_tests_json.is_output(text)
    (test,) = nccl_tests_json.parse(text, "a file")
    assert (test.program, test.ranks, test.hosts, test.average_busbw) == ("all_reduce", 8, ["ga03"], 219.1e9)
    last = test.collectives()[-1]
    assert (last.size_bytes, last.in_place) == (1 << 30, True) and last.busbw == pytest.approx(232.475953e9)
    assert test.remarks() == []
    tree = json.loads(text)
    tree["results"][0]["in_place"]["nwrong"] = 7.0
    tree["results"][1]["out_of_place"] = None
    tree["errors"] = ["remote process exited"]
    (test,) = nccl_tests_json.parse(json.dumps(tree), "a file")
    assert len(test.rows) == 3 and verdicts(test.remarks()) is Verdict.broken
    with pytest.raises(UserError, match="no whole JSON file"):
        nccl_tests_json.parse(text[: len(text) // 2], "a file")


def test_a_node_of_four_gpus() -> None:
    node = topo_xml.parse_file(GOLDEN / "nccl_topo.xml")
    assert len(node.gpus) == len(node.nets) == node.cpus == 4
    pairs = [node.nvlinks(a, b) for a in node.gpus for b in node.gpus if a is not b]
    assert pairs == [4] * 12 and node.missing_nvlinks() == []
    assert {net.speed for net in node.nets} == {25e9}
    distances = [[node.distance(gpu, net) for net in node.nets] for gpu in node.gpus]
    assert distances == [[Distance.pix if i == k else Distance.sys for k in range(4)] for i in range(4)]
    assert [[net.name for net in node.near(gpu)] for gpu in node.gpus] == [[f"mlx5_{i}"] for i in range(4)]
    assert verdicts(node.remarks()) is Verdict.ok


def test_a_node_with_faults() -> None:
    remarks = topo_xml.parse_file(GOLDEN / "nccl_topo_faults.xml").remarks()
    assert told(remarks, "GPUs 1 and 2 have no NVLinks, other pairs have 4").verdict is Verdict.degraded
    assert told(remarks, "mlx5_2 runs at 100 Gbit/s, others at 200").verdict is Verdict.degraded
    assert len([one for one in remarks if one.verdict is Verdict.degraded]) == 2


def _switched(lost: int = 0) -> str:
    """A node of 4 GPUs and 3 NVSwitches, of which GPU 1 has lost some links."""

    def gpu(number: int) -> str:
        counts = [4, 4, 4 - (lost if number == 1 else 0)]
        links = "".join(
            f'<nvlink target="0000:c{i}:00.0" count="{n}" tclass="0x068000"/>' for i, n in enumerate(counts)
        )
        inside = f'<gpu dev="{number}" rank="{number}">{links}</gpu>'
        return f'<pci busid="0000:0{number}:00.0" class="0x030200">{inside}</pci>'

    bridge = '<pci busid="0000:aa:00.0" class="0x060400"><pci busid="0000:ab:00.0" class="0x060400">'
    nic = '<nic><net name="mlx5_0" dev="0" speed="200000" port="1" gdr="0"/></nic>'
    inside = f"{bridge}{gpu(0)}</pci>{gpu(1)}<pci busid='0000:ac:00.0' class='0x020700'>{nic}</pci></pci>"
    return (
        f'<system version="1"><cpu numaid="0">{inside}{gpu(2)}</cpu><cpu numaid="1">{gpu(3)}</cpu></system>'
    )


def test_a_node_with_switches() -> None:
    node = topo_xml.parse(_switched(), "a file")
    assert node.nvlinks(node.gpus[0], node.gpus[1]) == 12 and node.missing_nvlinks() == []
    (net,) = node.nets
    assert [node.distance(gpu, net) for gpu in node.gpus] == ["PXB", "PIX", "PHB", "SYS"]
    assert verdicts(node.remarks()) is Verdict.ok
    broken = topo_xml.parse(_switched(lost=2), "a file")
    assert told(broken.remarks(), "GPU 1 has 10 NVLinks, others have 12").verdict is Verdict.degraded


def test_a_cube_of_eight_gpus_is_uneven_by_construction() -> None:
    """Pairs with one link, two and none; a lost one is still found."""
    links = [
        (0, 1, 1),
        (0, 2, 1),
        (0, 3, 2),
        (0, 4, 2),
        (1, 2, 2),
        (1, 3, 1),
        (1, 5, 2),
        (2, 3, 2),
        (2, 6, 1),
        (3, 7, 1),
    ]
    links += [(4, 5, 1), (4, 6, 1), (4, 7, 2), (5, 6, 2), (5, 7, 1), (6, 7, 2)]

    def text(without: tuple[int, int]) -> str:
        gpus = []
        for number in range(8):
            mine = [(a, b, n) for a, b, n in links if number in (a, b) and (a, b) != without]
            targets = "".join(
                f'<nvlink target="0000:0{a + b - number}:00.0" count="{n}" tclass="0x030200"/>'
                for a, b, n in mine
            )
            gpus.append(f'<pci busid="0000:0{number}:00.0"><gpu dev="{number}">{targets}</gpu></pci>')
        return f'<system version="1"><cpu numaid="0">{"".join(gpus)}</cpu></system>'

    assert topo_xml.parse(text((9, 9)), "a file").missing_nvlinks() == []
    missing = topo_xml.parse(text((0, 3)), "a file").missing_nvlinks()
    assert [(a.number, b.number, count) for a, b, count, _ in missing] == [(0, 3, 0)]


def test_graphs() -> None:
    graphs = graph_xml.parse_file(GOLDEN / "nccl_graph.xml")
    ring, tree, collnet = graphs
    assert (ring.kind, tree.kind, collnet.kind) == ("ring", "tree", "CollNet") and collnet.channels == ()
    assert ring.channels[1].gpus == (1, 2, 3, 0) and ring.channels[1].nets == (1, 1)
    remarks = graph_xml.remarks(graphs)
    assert told(remarks, "ring: 4 channels, 80 GB/s expected in the node over NVL", "adapters 0, 1, 2, 3")
    assert verdicts(remarks) is Verdict.ok
    slow = (GOLDEN / "nccl_graph.xml").read_text().replace('"NVL"', '"SYS"').replace('"PIX"', '"SYS"')
    assert (
        len([one for one in graph_xml.remarks(graph_xml.parse(slow, "x")) if one.verdict is Verdict.degraded])
        == 2
    )


BOMB = (
    '<?xml version="1.0"?><!DOCTYPE system [<!ENTITY a "xxxx"><!ENTITY b "&a;&a;">]>'
    '<system version="1"><cpu numaid="&b;"/></system>'
)


@pytest.mark.parametrize("parse", [topo_xml.parse, graph_xml.parse])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "declares XML entities"),
        ("<system version='1'><cpu>", "no whole XML file"),
        ("", "no whole XML file"),
        ("<other/>", "the root <other>"),
        ("<system/><graphs/>", "no whole XML file"),
        ("<" + "a" * 60_000_000, "too large"),
    ],
)
def test_xml_that_is_not_read(parse: Callable[[str, str], object], text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse(text, "the file")


def test_xml_as_deep_as_it_likes() -> None:
    deep = "<pci>" * 20_000 + "<gpu dev='3'/>" + "</pci>" * 20_000
    node = topo_xml.parse(
        f"\ufeff<?xml version='1.0' encoding='no-such'?><system><cpu>{deep}</cpu></system>", "x"
    )
    assert [gpu.number for gpu in node.gpus] == [3]


def test_a_log_where_one_host_fell_back_to_sockets() -> None:
    read = log.parse(LOG, "a log")
    assert (read.version, read.ranks, sorted(read.hosts)) == ("2.21.5+cuda12.4", 6, ["jb01", "jb02", "jb03"])
    assert read.rings == {0: tuple(range(6)), 1: tuple(range(6))}
    assert read.hosts["jb01"].adapters == {"mlx5_0:1": "IB", "mlx5_1:1": "IB"}
    assert read.transports == {"NET/IB/GDRDMA": 8, "P2P/IPC": 6, "NET/Socket": 4}
    remarks = log_words.remarks(read)
    assert told(remarks, "IB carries the data").hosts == ("jb01", "jb02")
    fallen = told(remarks, "TCP sockets carry the data between nodes", "No device found")
    assert fallen.hosts == ("jb03",) and fallen.verdict is Verdict.degraded
    assert told(remarks, "4 connections over TCP sockets", "while others use InfiniBand").hosts == ("jb03",)
    assert told(remarks, "set from outside: NCCL_SOCKET_IFNAME=ib0")
    refused = told(remarks, "Connection refused, of 10.2.0.13")
    assert refused.hosts == ("jb02",) and "NCCL_SOCKET_IFNAME" in refused.todo


def test_only_the_hosts_that_differ_are_blamed() -> None:
    kinds = {"a": "IB", "b": "IB", "c": "RoCE"}
    text = "".join(_line(host, f"NET/IB : Using [0]mlx5_0:1/{kind} [RO]") for host, kind in kinds.items())
    bad = [one for one in log_words.remarks(log.parse(text, "a log")) if one.verdict is not Verdict.ok]
    assert [one.hosts for one in bad] == [("c",)]


def _line(host: str, text: str, level: str = "INFO") -> str:
    where = "transport/net.cc:77 " if level == "WARN" else ""
    return f"{host}:10:20 [0] {where}NCCL {level} {text}\n"


@pytest.mark.parametrize(
    ("lines", "words", "verdict"),
    [
        (
            [("a", "NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB ib0:10.0.0.1<0>"), ("a", "Using network IB"),
             ("a", "NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'"),
             ("a", "Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0")],
            ("GPUDirect RDMA is off", "nvidia_peermem"), Verdict.degraded,
        ),
        (
            [("a", "Using network IB"), ("a", "Channel 00 : 0[1000] -> 1[1000] [send] via NET/IB/0"),
             ("a", "NET/IB : GPU Direct RDMA Disabled for GPU 2[2] / HCA 0 (distance 3 >= 2)")],
            ("GPUDirect RDMA is off", "NCCL_NET_GDR_LEVEL"), Verdict.degraded,
        ),
        (
            [("a", "Using network Socket"), ("a", "NCCL_IB_DISABLE set by environment to 1.")],
            ("NCCL_IB_DISABLE=1 is set", "unset it"), Verdict.degraded,
        ),
        (
            [("a", "NET/IB : Using [0]mlx5_0:1/IB/SHARP [RO]; OOB ib0:10.0.0.1<0>"), ("a", "Using network IBext")],
            ("reductions (SHARP), which are not used", "NCCL_COLLNET_ENABLE=1"), Verdict.ok,
        ),
        (
            [("a", "NET/Plugin: Loaded collnet plugin SHARP (v6)"), ("a", "3 coll channels, 2 collnet channels")],
            ("done in the network",), Verdict.ok,
        ),
        (
            [("a", "Ring 00 : 0[1000] -> 1[2000] via direct shared memory"),
             ("a", "Channel 00 : 0[0] -> 1[1] via SHM/direct/direct")],
            ("no GPU reaches another one directly",), Verdict.degraded,
        ),
        (
            [("a", "NCCL version 2.21.5+cuda12.4"), ("b", "NCCL version 2.18.1+cuda12.1")],
            ("NCCL versions: 2.18.1+cuda12.1",), Verdict.broken,
        ),
        (
            [("a", "NCCL_ALGO set by environment to Ring."), ("b", "NCCL_ALGO set by environment to Tree.")],
            ("NCCL_ALGO differs: Ring on a; Tree on b",), Verdict.degraded,
        ),
        (
            [("a", "NET/IB : Using [0]mlx5_0:1/IB; OOB x:1<0>"), ("b", "NET/IB : Using [0]mlx5_0:1/IB; OOB x:1<0>"),
             ("c", "NET/IB : Using [0]mlx5_0:1/RoCE; OOB x:1<0>")],
            ("adapters: mlx5_0:1 (RoCE)",), Verdict.degraded,
        ),
    ],
)  # fmt: skip
def test_what_a_log_tells(lines: list[tuple[str, str]], words: tuple[str, ...], verdict: Verdict) -> None:
    read = log.parse("".join(_line(*line) for line in lines), "a log")
    assert told(log_words.remarks(read), *words).verdict is verdict


@pytest.mark.parametrize(
    ("warning", "todo"),
    [
        ("Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory", "ulimit -l"),
        ("Call to ibv_create_qp failed with error Unknown error -12", "ulimit -l"),
        ("NET/IB : Got completion from peer 10.2.0.9<54862> with status=12 opcode=0 vendor err 129", "lost packets"),
        ("Call to connect returned Connection timed out", "could not be reached"),
        ("Error: failed to extend /dev/shm/nccl-WU88OE to 9637892 bytes, error: No space left on device", "/dev/shm"),
        ("Cuda failure 'out of memory'", "memory is full"),
        ("Cuda failure 'unspecified launch failure'", "Xid"),
        ("Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000", "two ranks chose one GPU"),
        ("Bootstrap : no socket interface found", "NCCL_SOCKET_IFNAME"),
        ("socketProgress: Connection closed by remote peer n7<45712>", "another rank ended first"),
    ],
)  # fmt: skip
def test_warnings_say_what_to_do(warning: str, todo: str) -> None:
    text = "".join(
        _line(host, warning.replace("10.2.0.9", f"10.2.0.{i}"), "WARN") for i, host in enumerate("abbb")
    )
    (remark,) = [one for one in log_words.remarks(log.parse(text, "a log")) if one.verdict is Verdict.broken]
    assert todo in remark.todo and remark.text.endswith("(4 times)")


def test_harmless_warnings_break_nothing() -> None:
    text = _line("a", "Call to connect returned Connection refused, retrying", "WARN")
    text += _line(
        "a", "NUMA auto balancing enabled which can lead to variability in the NCCL performance!", "WARN"
    )
    assert verdicts(log_words.remarks(log.parse(text, "a log"))) is Verdict.ok


def test_a_log_of_many_hosts_is_said_in_a_few_lines() -> None:
    text = "".join(
        _line(f"n{node:04}", line)
        for node in range(500)
        for line in (
            "Using network IB",
            "Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA",
            "Connected all rings",
        )
    )
    remarks = log_words.remarks(log.parse(text, "a log"))
    assert len(remarks) == 3 and all(one.hosts == () for one in remarks)


def test_a_mix_of_files(tmp_path: Path) -> None:
    names = (
        "nccl_tests_two_nodes.txt",
        "nccl_log.txt",
        "nccl_topo_faults.xml",
        "nccl_graph.xml",
        "nccl_tests.json",
    )
    found = gather([GOLDEN / name for name in names])
    assert found.has_figures and len(found.logs) == len(found.topologies) == 1
    assert found.measurement.nodes == ["ga01", "ga02", "ga03"] and len(found.measurement.collectives) == 32
    assert found.measurement.about["nic_gbit"] == 200 and found.verdict is Verdict.broken
    mixed = gather([GOLDEN / "nccl_tests_interleaved.txt"])  # a log and a table in one
    assert len(mixed.logs) == 1 and len(mixed.measurement.collectives) == 28
    saved = tmp_path / "measurement.npz"
    Measurement(["x"], 2, "gloo").save(saved)
    assert len(gather([saved, GOLDEN / names[0]]).measurement.collectives) == 28
    with pytest.raises(UserError, match="2 measurements were given"):
        gather([saved, saved])
    with pytest.raises(UserError, match="no figures to compare with"):
        read_measurement(GOLDEN / "nccl_log.txt")
    assert not gather([GOLDEN / "nccl_log.txt"]).has_figures


@pytest.mark.parametrize(
    "content", [b"", b"hello\n", b"\x00\xff\xfe" * 100, b"PK\x03\x04broken", b"{}", b"<a/>", b"[1]"]
)
def test_files_that_are_none_of_them(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(UserError, match="file"):
        gather([path])
    with pytest.raises(UserError, match="cannot be read"):
        gather([tmp_path / "none"])
    with pytest.raises(UserError):
        gather([tmp_path])


SAMPLES = [path.read_text() for path in sorted(GOLDEN.glob("nccl_*.*"))]
PIECES = st.sampled_from(
    [*'<>{}"[-\r\n\x00\xb2', "NCCL INFO ", " NCCL WARN ", "a:1:2 [0] NCCL INFO Channel 00/2 : 0 1", "[1,0]<stdout>:",
     "nan", "1e400", "9" * 30, "float", "time algbw busbw", "# size count type", "via NET/", '"results":[', "null",
     'count="-5"', "0x", "Rank 7 Pid 1 on "]
)  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """A real file of which parts are missing, doubled, or replaced by something else."""
    text = draw(st.sampled_from(SAMPLES))
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 300)))
        other = draw(st.one_of(PIECES, st.text(max_size=8), st.just(text[start:end] * 2)))
        text = text[:start] + other + text[end:]
    return text


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(text=st.one_of(damaged(), st.text(max_size=200)))
def test_no_input_crashes_a_parser(text: str, tmp_path: Path) -> None:
    """Each either reads a file, and all that follows from it can be said, or says what is wrong in one sentence."""
    path = tmp_path / "file"
    path.write_text(text, errors="replace")
    try:
        found = gather([path])
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert all(isinstance(remark.text, str) for _, remark in found.remarks)
        found.measurement.save(tmp_path / "measurement.npz")
        assert len(Measurement.load(tmp_path / "measurement.npz").collectives) == len(
            found.measurement.collectives
        )
    for parse in (nccl_tests_text.parse, nccl_tests_json.parse, topo_xml.parse, graph_xml.parse, log.parse):
        try:
            parse(text, "the file")
        except UserError:
            continue
