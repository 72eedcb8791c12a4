"""The report: what it says of a machine, and that each of its files does what it is for."""

import base64
import inspect
import io
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from configs import compose
from contract.allreduce_plan import AllReducePlan
from contract.errors import ConfigError, UserError
from contract.network_test import NetworkVerdict
from slurm.settings import SubmitConfig
from slurm.sites.profile import Profile
from tools.nccl import report
from tools.nccl.busbw import busbw
from tools.nccl.findings import Fault, Findings, Level, Part, Symptom, Verdict
from tools.nccl.measurement import Collective, Exchange, Exchanges, Measurement
from tools.nccl.parsers import log, topo_xml
from tools.nccl.parsers.remark import Remark
from tools.nccl.report import matrices, png
from tools.nccl.report import settings as report_settings
from tools.nccl.report.content import Content, range_of_sizes, size, speed
from tools.nccl.report.hostlist import compress
from tools.nccl.report.settings import Evidence, Setting, apply, cluster_yaml, suggest
from tools.nccl.route.advice import Advice

pytestmark = pytest.mark.req("C10")

GOLDEN = Path(__file__).parents[1] / "golden"


def measured(nodes: int = 6, gpus: int = 2, *, slow: Sequence[int] = ()) -> Measurement:
    """All pairs of one rail each, and of the GPUs of each node; the nodes of `slow` have half the bandwidth."""
    names = [f"jwb{10 + i:04}" for i in range(nodes)]
    pairs = [(a * gpus + r, b * gpus + r) for a in range(nodes) for b in range(a) for r in range(gpus)]
    pairs += [(n * gpus + a, n * gpus + b) for n in range(nodes) for a in range(gpus) for b in range(a)]
    exchanges = []
    for number, (a, b) in enumerate(pairs):
        inside = a // gpus == b // gpus
        bandwidth = 200e9 if inside else 20e9 / (2 if {a // gpus, b // gpus} & set(slow) else 1)
        exchanges.append(Exchange(a, b, 2e-6 if inside else 5e-6, bandwidth, bandwidth * 0.9, number))
    collectives = [
        Collective(
            "all_reduce", nodes * gpus, nodes, nbytes, time_s, time_s * 1.1, float("nan"), nbytes / time_s,
            busbw("all_reduce", nodes * gpus, nbytes, time_s), algorithm=algorithm,
        )
        for nbytes in (1 << 10, 1 << 20, 1 << 30)
        for algorithm, time_s in (("flat", 2e-5 + nbytes / 10e9), ("hierarchical", 4e-5 + nbytes / 12e9))
    ]  # fmt: skip
    return Measurement(
        names, gpus, "nccl", Exchanges.of(exchanges), collectives,
        unmeasured=["rounds 7 to 9: the time was up"], about={"cluster": "juwels_booster", "date": "2026-02-03"},
    )  # fmt: skip


def found(measurement: Measurement, *faults: Fault, groups: int = 1) -> Findings:
    names, each = measurement.nodes, -(-len(measurement.nodes) // groups)
    verdict = Verdict.degraded if faults else Verdict.ok
    level = Level("between", 15, 20e9, 1e8, 5e-6, float("nan"))
    parts = tuple(tuple(names[i : i + each]) for i in range(0, len(names), each))
    return Findings(verdict, faults, (level,), parts, ("compared with nothing",))


NODE = Fault(
    Part.node, Symptom.slow, ("jwb0012",), "its 5 pairs reach 10.0 GB/s, others 20.0", share=0.5, confidence=0.99,
    excludes=("jwb0012",),
)  # fmt: skip
LINK = Fault(
    Part.link, Symptom.flaky, ("jwb0010", "jwb0013"), "3 of 9 repetitions", share=0.3, confidence=0.8
)


def advice(measurement: Measurement) -> Advice:
    """An order without the slow node, and a switch of algorithms."""
    order = tuple(reversed([name for name in measurement.nodes if name != "jwb0012"]))
    switches = ((0, "tree"), (1 << 20, "hierarchical"))
    return Advice(
        order, "a large all-reduce should be 21% faster in this order", 0.21, 0.19, switches, {6: switches},
        ("tp up to 2, in a node",), ("jwb0010 - jwb0013 over jwb0011: bandwidth 9 GB/s instead of 3",),
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of six nodes, one of them slow."""
    folder = tmp_path_factory.mktemp("report")
    measurement = measured(slow=[2])
    findings = found(measurement, NODE, LINK, groups=2)
    remarks = [
        ("job.log", Remark("TCP sockets carry the data", Verdict.degraded, ("jwb0010", "jwb0011"), "why?"))
    ]
    files = report.write(folder, measurement, findings, advice(measurement), remarks=remarks)
    assert {one.name for one in files} == {one.name for one in folder.iterdir()}
    return folder


def test_the_verdict_stands_first_and_the_guilty_with_their_evidence(folder: Path) -> None:
    text = (folder / "report.txt").read_text()
    assert text.startswith("DEGRADED: node jwb0012 is slow, and 1 more\n6 nodes of 2 GPUs (nccl)\n")
    for line in (
        r"node jwb0012 +is slow +50% +99%  its 5 pairs reach 10.0 GB/s",
        r"link jwb0010 - jwb0013 +works only sometimes +30% +80%  3 of 9 repetitions",
        r"""leave out: +'job.exclude="jwb0012"' \(exclude.txt\)""",
        r"node order: +a large all-reduce should be 21% faster in this order: job\.node_order=\.\.\./hostfile",
        r"all-reduce: +tree below 1 MiB, hierarchical from 1 MiB \(measured up to 1 GiB, above that by a\s+model\)",
        r"mesh: +tp up to 2, in a node",
        r"relay: +jwb0010 - jwb0013 over jwb0011",
        r" 1 KiB +20.1 us .* tree",
        r" 1 GiB +107.39 ms +10.00 GB/s +18.3 GB/s +22.0 GB/s +hierarchical",
        r"nodes near each other, 2 groups: jwb\[0010-0012\]; jwb\[0013-0015\]",
        r"! TCP sockets carry the data \[jwb\[0010-0011\]\] -> why\?",
        r"- rounds 7 to 9: the time was up",
    ):
        assert re.search(line, text), line
    assert max(map(len, text.splitlines())) <= 110


def test_files_for_the_next_job(folder: Path) -> None:
    assert (folder / "exclude.txt").read_text() == "jwb0012\n"
    order = ["jwb0015", "jwb0014", "jwb0013", "jwb0011", "jwb0010"]
    assert (folder / "hostfile").read_text().split() == [name for name in order for _ in range(2)]
    ranks = (folder / "rankfile").read_text().splitlines()
    assert ranks[:3] == ["rank 0=jwb0015 slot=0", "rank 1=jwb0015 slot=1", "rank 2=jwb0014 slot=0"]
    assert len(ranks) == 10
    plan = AllReducePlan.load(folder / "plan.json")
    assert plan.ranks_per_node == 2
    assert (plan.choose(6, 1), plan.choose(6, 1 << 20)) == ("tree", "hierarchical")
    verdict = NetworkVerdict.load(folder / "verdict.json")  # as the supervisor reads it
    assert (verdict.verdict, verdict.exit_code) == ("DEGRADED", 1)
    assert list(verdict.exclude) == ["jwb0012"] and verdict.order == order
    facts = json.loads(
        (folder / "verdict.json").read_text(), parse_constant=pytest.fail
    )  # no NaN: it is real JSON
    assert facts["gain_predicted"] == 0.21 and facts["faults"][0]["name"] == "node jwb0012"
    assert facts["allreduce"][-1]["suits"] == "hierarchical"


def test_without_an_order_the_given_one_is_kept_and_the_slow_node_left_out(tmp_path: Path) -> None:
    measurement = measured(slow=[2])
    report.write(tmp_path, measurement, found(measurement, NODE), Advice())
    names = [name for name in measurement.nodes if name != "jwb0012"]
    assert (tmp_path / "hostfile").read_text().split()[::2] == names
    assert NetworkVerdict.load(tmp_path / "verdict.json").order == []


@pytest.mark.parametrize("turned", [False, True])
def test_in_place_is_what_is_shown(turned: bool) -> None:
    measurement = measured()
    other = [replace(one, in_place=False, busbw=1.0) for one in measurement.collectives]
    both = [*other, *measurement.collectives]
    measurement.collectives = both[::-1] if turned else both
    content = Content(measurement, found(measurement), Advice())
    assert all(row.measured["flat"].in_place for row in content.all_reduce())


class _Page(HTMLParser):
    """Counts tags, and keeps what would be loaded from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_no_other_file(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    page = _Page(text)
    assert len(page.sources) == 3 and len(text) < 400_000
    pictures = [Image.open(io.BytesIO(base64.b64decode(one.partition("base64,")[2]))) for one in page.sources]
    assert all(one.format == "PNG" and one.width > 400 for one in pictures)
    assert "http" not in text and "node jwb0012" in text and "1 GiB" in text
    values = [float(value) for value in re.findall(r'data-value="([^"]*)"', text)]
    assert 1 << 30 in values and not any(np.isnan(values))


def test_what_files_say_cannot_become_a_script(tmp_path: Path) -> None:
    measurement = measured()
    measurement.nodes[0] = "<script>alert(1)</script>"
    fault = replace(NODE, nodes=(measurement.nodes[0],), evidence="<b>")
    report.write(
        tmp_path, measurement, found(measurement, fault), Advice(), remarks=[("<i>", Remark("<u>x</u>"))]
    )
    text = (tmp_path / "report.html").read_text()
    assert all(one not in text for one in ("<script>alert", "<b>", "<i>", "<u>"))
    _Page(text)


def test_a_healthy_machine_leaves_no_files_of_an_earlier_report(folder: Path, tmp_path: Path) -> None:
    measurement = measured(slow=[2])
    report.write(tmp_path, measurement, found(measurement, NODE), advice(measurement))
    measurement = replace(measured(), exchanges=Exchanges.of([]), collectives=[])
    report.write(tmp_path, measurement, found(measurement), Advice())
    names = {one.name for one in tmp_path.iterdir()}
    assert names == {"hostfile", "rankfile", "verdict.json", "cluster.yaml", "report.txt", "report.html"}
    assert (tmp_path / "report.txt").read_text().startswith("OK: nothing was measured on 6 nodes")
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        report.write(blocked / "report", measurement, found(measurement), Advice())


def _pixels(path: Path) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
    return np.asarray(Image.open(path).convert("RGB")).astype(np.int64)


@pytest.mark.slow
def test_pictures_show_what_is_slow_and_who_did_not_answer(tmp_path: Path) -> None:
    def black(measurement: Measurement, *faults: Fault) -> tuple[int, int]:
        png.write(tmp_path, measurement, found(measurement, *faults))
        pixels = _pixels(tmp_path / "bandwidth.png")
        middle = pixels[150:700, 150:750].reshape(-1, 3)  # inside the matrix: no text
        mark = np.abs(pixels.reshape(-1, 3) - [214, 39, 40]).sum(axis=1) < 12
        return int((middle.sum(axis=1) == 0).sum()), int(mark.sum())

    healthy, slow = measured(8), measured(8, slow=[3])
    assert black(healthy) == (0, 0) and black(slow) == (0, 0)
    silent = measured(8)
    silent.exchanges.bandwidth[:2] = 0
    fault = replace(NODE, nodes=("jwb0013",))
    assert black(silent)[0] > 1000 and black(slow, fault)[1] > 20 and black(slow, LINK)[1] > 100


def test_a_bad_pair_survives_in_the_picture_of_thousands_of_nodes() -> None:
    values = np.full((2500, 2500), 20e9)
    values[1234, 77] = 1e9
    shown, block = matrices.in_blocks(values, keep_low=True)
    assert block == 3 and shown.shape == (834, 834) and shown[1234 // 3, 77 // 3] == 1e9
    assert (shown == 1e9).sum() == 1 and not np.isnan(shown).any()
    values = np.full((2000, 28), 5e-6)
    values[1999, 27] = 1e-3
    shown, block = matrices.in_blocks(values, keep_low=False)
    assert shown.shape == (1000, 28) and shown[999, 27] == 1e-3


def test_matrices_are_in_the_order_of_groups_and_by_the_slowest_rail() -> None:
    measurement = measured(4, 2)
    names = measurement.nodes
    findings = replace(found(measurement), groups=((names[0], names[2]), (names[3], names[1])))
    measurement.exchanges.bandwidth[measurement.exchanges.first % 2 == 1] *= 0.5
    outside, inside = matrices.between(measurement, findings), matrices.inside(measurement, findings)
    assert outside is not None and inside is not None
    assert outside.nodes == (names[0], names[2], names[3], names[1]) and outside.bounds == (2,)
    assert np.nanmax(outside.bandwidth) == 10e9 and sorted(outside.rails) == [0, 1]
    assert np.isnan(np.diagonal(outside.bandwidth)).all() and np.isnan(outside.bandwidth).sum() == 4
    assert inside.pairs == ((0, 1),) and inside.bandwidth.shape == (4, 1)
    assert matrices.between(replace(measurement, exchanges=Exchanges.of([])), findings) is None


def test_a_pair_that_was_tested_again_counts_as_it_was_last() -> None:
    measurement = measured(2, 1)
    again = Exchange(0, 1, 5e-6, 3e9, 3e9, 99)
    measurement.exchanges = measurement.exchanges + Exchanges.of([again])
    outside = matrices.between(measurement, found(measurement))
    assert outside is not None and outside.bandwidth[0, 1] == 3e9


LOG = """\
a:1:1 [0] NCCL INFO Bootstrap : Using {0}:10.0.0.1<0>
b:1:1 [0] NCCL INFO Bootstrap : Using ib0:10.0.0.2<0>
c:1:1 [0] NCCL INFO Bootstrap : Using ib0:10.0.0.3<0>
{1}
"""


def _settings(interface: str, *lines: str, topology: str | None = None) -> dict[str, Setting]:
    text = LOG.format(interface, "\n".join(f"a:1:1 [0] NCCL INFO {line}" for line in lines))
    topologies = [topo_xml.parse_file(GOLDEN / topology)] if topology else []
    return {one.key: one for one in suggest(measured(), Evidence([log.parse(text, "x")], topologies))}


def test_settings_have_a_reason_or_are_not_there() -> None:
    assert _settings("ib0", topology="nccl_topo.xml") == {}
    assert suggest(measured(), Evidence()) == []
    assert _settings("ib0", topology="nccl_topo_faults.xml")["hcas"].value == [
        "mlx5_0:1",
        "mlx5_1:1",
        "mlx5_3:1",
    ]
    chosen = _settings("eth0")["socket_interface"]
    assert chosen.value == "ib0" and "eth0 on 1" in chosen.reason
    assert "unset NCCL_P2P_DISABLE" in _settings("ib0", "NCCL_P2P_DISABLE set by environment to 1.")
    sharp = "NET/IB : Using [0]mlx5_0:1/IB/SHARP [RO]; OOB ib0:10.0.0.1<0>"
    assert _settings("ib0", sharp)["NCCL_COLLNET_ENABLE"].value == "1"
    assert _settings("ib0", sharp, "NCCL_COLLNET_ENABLE set by environment to 0.") == {}
    far = "NET/IB : GPU Direct RDMA Disabled for GPU 2[2] / HCA 0 (distance 3 >= 2)"
    assert "distance 3 >= 2" in _settings("ib0", far)["NCCL_NET_GDR_LEVEL"].reason
    about = {"variables": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "0", "NCCL_DEBUG": "WARN"}}
    assert [one.key for one in suggest(replace(measured(), about=about), Evidence())] == [
        "unset NCCL_P2P_DISABLE"
    ]
    disabled = "NCCL_IB_DISABLE set by environment to 1."
    assert _settings("ib0", disabled) == {} and "unset NCCL_IB_DISABLE" in _settings("ib0", sharp, disabled)


def test_a_job_can_be_submitted_with_the_settings(tmp_path: Path) -> None:
    base = compose.load(compose.FOLDER / "cluster/azure_ndv4.yaml", Profile)
    settings = [
        Setting("hcas", ["mlx5_ib0:1"], "the others\nare slower"),
        Setting("NCCL_COLLNET_ENABLE", "1", "SHARP was seen"),
        Setting("unset NCCL_IGNORE_CPU_AFFINITY", None, "it was set to 1"),
        Setting("NCCL_ODD", "1e3", "no number, a string"),
    ]
    text = cluster_yaml(base, settings, "a test")
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    read = compose.fill(SubmitConfig, [f"cluster={path}", "cluster.partition=other"]).cluster
    assert read == replace(apply(base, settings), partition="other")
    assert read.env["NCCL_ODD"] == "1e3" and "NCCL_IGNORE_CPU_AFFINITY" not in read.env
    assert (
        read.hcas == ["mlx5_ib0:1"]
        and read.unset == ["NCCL_IGNORE_CPU_AFFINITY"]
        and read.name == "azure_ndv4"
    )
    lines = text.splitlines()
    assert lines[lines.index('  NCCL_COLLNET_ENABLE: "1"') - 1] == "  # SHARP was seen"
    assert lines[lines.index('hcas: ["mlx5_ib0:1"]') - 1] == "# the others are slower"


@pytest.mark.parametrize("name", compose.choices("cluster"))
def test_every_profile_comes_back_unchanged_without_settings(name: str, tmp_path: Path) -> None:
    base = compose.load(compose.FOLDER / f"cluster/{name}.yaml", Profile)
    path = tmp_path / "c.yaml"
    path.write_text(cluster_yaml(base, [], "a test"))
    assert compose.fill(SubmitConfig, [f"cluster={path}"]).cluster == base
    assert "Nothing to change" in path.read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "the file cannot be read"),
        ("- a", "no keys of a cluster"),
        ("", "no keys|partition"),
        ("a: [", "while parsing"),
        ("nam: x", "nam"),
        ("gpus_per_node: many", "gpus_per_node"),
    ],
)
def test_a_profile_of_the_users_that_is_wrong(text: str | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text)
    if text == "":
        assert compose.fill(SubmitConfig, [f"cluster={path}"]).cluster == Profile()
        return
    with pytest.raises(ConfigError, match=words):
        compose.fill(SubmitConfig, [f"cluster={path}"])


@given(st.lists(st.from_regex(r"[a-c]{1,2}[0-9]{0,4}(-ib)?", fullmatch=True), max_size=20))
def test_compressed_names_expand_to_the_same(names: list[str]) -> None:
    assert sorted(_expand(compress(names))) == sorted(set(names))


def _expand(text: str) -> list[str]:
    """Read Slurm's short form, as `scontrol show hostnames` does."""
    names = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        found = re.fullmatch(r"(.*)\[(.*)\](.*)", part)
        if found is None:
            names.append(part)
            continue
        for piece in found[2].split(","):
            first, _, last = piece.partition("-")
            for number in range(int(first), int(last or first) + 1):
                names.append(f"{found[1]}{number:0{len(first) if first[0] == '0' else 0}}{found[3]}")
    return names


def test_short_forms() -> None:
    assert compress(["n3", "n1", "n2", "n7", "x"]) == "n[1-3,7],x"
    assert compress(["n08", "n09", "n10", "n11"]) == "n[08-11]"
    assert compress(["lrdn0007"]) == "lrdn0007" and compress([]) == ""
    assert compress(["a1-ib", "a2-ib"]) == "a[1-2]-ib"


def test_figures_for_people() -> None:
    for backend, gpus, words in (("gloo", 2, "2 processes"), ("gloo", 1, "1 process"), ("nccl", 8, "8 GPUs")):
        one = Measurement(["a"], gpus, backend)
        assert Content(one, found(one), Advice()).what == f"1 node of {words} ({backend})"
    assert [size(n) for n in (64 << 20, 1 << 10, 1000, 3 << 30)] == ["64 MiB", "1 KiB", "1.00 kB", "3 GiB"]
    assert [speed(x) for x in (187.26e9, 2.5e9, 4e6, float("nan"))] == [
        "187.3 GB/s",
        "2.50 GB/s",
        "4 MB/s",
        "",
    ]
    assert range_of_sizes([(0, "ring")]) == ["ring at all sizes"]
    assert range_of_sizes([(0, "tree"), (1 << 20, "ring")]) == ["tree below 1 MiB", "ring from 1 MiB"]


def test_a_report_of_logs_alone_says_nothing_of_orders() -> None:
    remark = Remark("IB carries the data", Verdict.broken)
    nothing = Findings(Verdict.broken, (), (), ())
    text = report.text(Content(Measurement(["a"], 1, "nccl"), nothing, Advice(), (("x.log", remark),)))
    assert text == "BROKEN: IB carries the data\n1 node of 1 GPU (nccl)\n\nx.log:\n! IB carries the data\n"


def test_what_keeps_nodes_out_can_be_typed_as_it_stands_there() -> None:
    measurement = measured(4)
    names = measurement.nodes
    fault = replace(NODE, nodes=(names[0],), excludes=(names[0], names[1], names[3]))
    content = report.contents(measurement, found(measurement, fault), Advice())
    (typed,) = shlex.split(content.exclude_setting)
    assert content.exclude_setting in report.text(content)
    assert compose.fill(SubmitConfig, [typed]).job.exclude == "jwb[0010-0011,0013]"
    hostile = replace(content, findings=found(measurement, replace(fault, excludes=("'$(true)\"",))))
    (typed,) = shlex.split(hostile.exclude_setting)
    assert compose.fill(SubmitConfig, [typed]).job.exclude == "'$(true)\""


def test_without_figures_no_health_is_claimed() -> None:
    nothing = Measurement(
        ["a", "b"], 1, "gloo", Exchanges.of([Exchange(0, 1, float("nan"), float("nan"), float("nan"))])
    )
    content = report.contents(nothing, Findings(Verdict.ok, (), (), ()), Advice())
    assert content.summary == "nothing was measured on 2 nodes of 1 process (gloo)"


def test_the_document_names_the_settings_that_are_never_proposed() -> None:
    text = (Path(__file__).parents[2] / "docs" / "network.md").read_text()
    never = text.partition("## Settings that are never proposed")[2].partition("\n## ")[0]
    source = inspect.getsource(report_settings)
    for name in re.findall(r"^- `(NCCL_\w+)`", never, re.MULTILINE):
        assert name not in source, name
    assert {"NCCL_CROSS_NIC", "NCCL_ALGO"} == set(re.findall(r"^- `(NCCL_\w+)`", never, re.MULTILINE))
    # And what is proposed is named there too.
    for name in re.findall(r'Setting\("(NCCL_\w+)"', source):
        assert name in never, name
