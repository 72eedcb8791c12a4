"""`trierarch nccl analyse` as a user and a script call it."""

import json
from pathlib import Path

import pytest
from harness.command import Trierarch
from typer.testing import CliRunner

from contract.errors import UserError
from contract.exit_codes import ExitCode
from tools.cli_nccl import app
from tools.nccl.measurement import Exchange, Exchanges, Measurement

pytestmark = [pytest.mark.req("C10"), pytest.mark.slow]

GOLDEN = Path(__file__).parents[1] / "golden"


def file(name: str) -> str:
    return str(GOLDEN / name)


def measurement(slow: int | None = None, scale: float = 1.0) -> Measurement:
    """Twelve nodes of one GPU; all pairs, one node at 40 % of its speed."""
    pairs = [(a, b) for a in range(12) for b in range(a + 1, 12)]
    bandwidths = [
        20e9 * scale * (0.4 if slow in pair else 1.0) * (1 + 0.002 * (hash(pair) % 7)) for pair in pairs
    ]
    exchanges = [
        Exchange(a, b, 5e-6, value, value, number)
        for number, ((a, b), value) in enumerate(zip(pairs, bandwidths, strict=True))
    ]
    return Measurement([f"n{i}" for i in range(12)], 1, "nccl", Exchanges.of([*exchanges, *exchanges]))


def test_it_names_the_slow_node_and_writes_a_report(trierarch: Trierarch, tmp_path: Path) -> None:
    measurement(slow=4).save(tmp_path / "bad.npz")
    done = trierarch("nccl", "analyse", "bad.npz", "--out", "report")
    assert done.returncode == 1 and done.stderr == ""
    assert done.stdout.startswith("DEGRADED: ") and "n4" in done.stdout.splitlines()[0]
    assert (tmp_path / "report/exclude.txt").read_text() == "n4\n"
    assert (tmp_path / "report/report.html").stat().st_size > 10_000
    assert (tmp_path / "report/report.txt").read_text() in done.stdout
    facts = json.loads(trierarch("nccl", "analyse", "bad.npz", "--json").stdout)
    assert facts["exit_code"] == 1 and list(facts["exclude"]) == ["n4"]
    assert facts == json.loads((tmp_path / "report/verdict.json").read_text())


def test_a_baseline_shows_what_is_slower_alike(trierarch: Trierarch, tmp_path: Path) -> None:
    measurement().save(tmp_path / "good.npz")
    measurement(scale=0.7).save(tmp_path / "later.npz")
    good = trierarch("nccl", "analyse", "good.npz")
    assert good.returncode == 0 and good.stdout.startswith("OK: no fault was found on 12 nodes of 1 GPU")
    assert trierarch("nccl", "analyse", "later.npz").returncode == 0
    compared = trierarch("nccl", "analyse", "later.npz", "--baseline", "good.npz")
    assert compared.returncode == 1 and "70%" in compared.stdout


def test_outputs_of_other_tools(trierarch: Trierarch) -> None:
    fine = trierarch(
        "nccl", "analyse", file("nccl_tests_two_nodes.txt"), file("nccl_topo.xml"), file("nccl_graph.xml")
    )
    assert fine.returncode == 0 and fine.stderr == ""
    assert "2 nodes of 8 GPUs (nccl-tests)" in fine.stdout and "ring: 4 channels" in fine.stdout
    alone = trierarch("nccl", "analyse", file("nccl_log.txt"))
    assert alone.returncode == 2 and "8 connections over InfiniBand from GPU memory" in alone.stdout
    faults = trierarch("nccl", "analyse", file("nccl_topo_faults.xml"), "--json")
    facts = json.loads(faults.stdout)
    assert faults.returncode == 1 and facts["verdict"] == "DEGRADED"
    assert [one["key"] for one in facts["settings"]] == ["hcas"]
    old = trierarch("nccl", "analyse", file("nccl_tests_old.txt"), "--operation", "all_reduce")
    assert old.returncode == 0 and "1 node of 4 GPUs" in old.stdout


def test_a_test_that_shows_nothing_is_no_pass(trierarch: Trierarch, tmp_path: Path) -> None:
    text = (GOLDEN / "nccl_tests_two_nodes.txt").read_text()
    (tmp_path / "zero.txt").write_text(text.replace("128.31", "0"))
    done = trierarch("nccl", "analyse", "zero.txt")
    assert done.returncode == 2 and "average bus bandwidth is 0, which is a failure" in done.stdout


NOTHING = float("nan")
EMPTY = {
    "no exchanges": Measurement(["a", "b"], 4, "nccl"),
    "one node": Measurement(["a"], 4, "nccl"),
    "no figures": Measurement(
        ["a", "b"], 1, "nccl", Exchanges.of([Exchange(0, 1, NOTHING, NOTHING, NOTHING)] * 3)
    ),
    "one rank": Measurement(["a"], 1, "nccl"),
    "no nodes": Measurement([], 4, "nccl"),
    "with itself": Measurement(["a", "b"], 1, "nccl", Exchanges.of([Exchange(0, 0, 1e-6, 1e9, 1e9)])),
}


@pytest.mark.parametrize("kind", EMPTY)
def test_a_measurement_of_nothing_is_no_pass(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    EMPTY[kind].save(Path("empty.npz"))
    words = ["analyse", "empty.npz", "--out", "report"]
    if kind in ("one rank", "no nodes", "with itself"):
        result = CliRunner().invoke(app, words)
        assert isinstance(result.exception, UserError) and result.exception.exit_code == ExitCode.CONFIG
        assert str(result.exception).startswith("empty.npz") and not Path("report").exists()
        return
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and result.stdout.startswith("BROKEN: nothing was measured on ")
    assert json.loads(Path("report/verdict.json").read_text())["exit_code"] == 2
    # With a log beside it too, and as something to compare with it is an error.
    assert CliRunner().invoke(app, ["analyse", "empty.npz", file("nccl_topo.xml")]).exit_code == 2
    measurement().save(Path("good.npz"))
    result = CliRunner().invoke(app, ["analyse", "good.npz", "--baseline", "empty.npz"])
    assert isinstance(result.exception, UserError) and "has no figures to compare with" in str(
        result.exception
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.npz"], "none.npz cannot be read"),
        ([str(Path(__file__))], "is none of the files that are known"),
        ([file("nccl_log.txt"), "--baseline", file("nccl_topo.xml")], "no figures to compare with"),
        ([file("nccl_log.txt"), "--topology", "none.txt"], "--topology has nothing to be compared with"),
        ([file("nccl_tests_old.txt"), "--operation", "sum"], "no such operation"),
    ],
)
def test_bad_input_is_one_sentence(trierarch: Trierarch, arguments: list[str], words: str) -> None:
    done = trierarch("nccl", "analyse", *arguments)
    assert done.returncode == ExitCode.CONFIG and done.stdout == ""
    assert done.stderr.startswith("trierarch: ") and words in done.stderr and done.stderr.count("\n") == 1
