"""`trierarch plan`, and `parallel=auto` of the other commands."""

import json
import math
import re
from pathlib import Path

import pytest
from harness.command import Trierarch

from configs.compose import load
from contract.exit_codes import ExitCode
from tools.plan.constants import FILE
from tools.plan.gpu import USABLE
from train.config import TrainConfig, load_config
from train.layout.check import lay_out

pytestmark = pytest.mark.slow

SITE = ["cluster=juwels_booster", "nodes=2", "job.account=p"]
RUN = ["model=llama_1b", "data.sequence_length=2048", "loop.global_batch_size=64"]
ASK = [*RUN, *SITE]


@pytest.mark.req("A24", "B1", "A25")
def test_a_plan_can_be_pasted(trierarch: Trierarch) -> None:
    shown = trierarch("plan", *ASK, "train.tokens=1e10", "--top", "3")
    assert shown.returncode == 0, shown.stderr
    assert "llama_1b, 1.10 G parameters, on 2 x 4 a100_40 (800 Gb/s between nodes)" in shown.stdout
    for part in (
        "tokens/s/GPU",
        "why the others are slower",
        "memory of a GPU",
        "goodput",
        "kWh, an estimate",
    ):
        assert part in shown.stdout
    (settings,) = re.findall(r"^write\n +(.*)$", shown.stdout, re.MULTILINE)
    config = load_config([*RUN, *settings.split()])
    lay_out(config, 8, 4, on_gpus=True)

    tree = json.loads(trierarch("plan", *ASK, "train.tokens=1e10", "--top", "3", "--json").stdout)
    first, *others = tree["plans"]
    assert first["overrides"] == settings.split()
    assert math.prod(first["degrees"].values()) == 8
    assert [one["step_s"] for one in tree["plans"]] == sorted(one["step_s"] for one in tree["plans"])
    assert len(tree["why"]) == len(others) == 2
    assert first["memory_bytes"]["device"] <= first["memory_bytes"]["capacity"] == 40 * 2**30 * USABLE
    assert first["totals"]["steps"] == math.ceil(1e10 / tree["tokens_per_step"])
    # Setting the layout that was found gives the same plan.
    again = json.loads(trierarch("plan", *ASK, *settings.split(), "--top", "1", "--json").stdout)
    assert again["plans"][0]["step_s"] == first["step_s"]
    assert again["plans"][0]["degrees"] == first["degrees"]


@pytest.mark.req("A24")
def test_explanations_scaling_and_a_picture(trierarch: Trierarch, tmp_path: Path) -> None:
    fixed = ["parallel.tp=2", "parallel.pp=2", "parallel.micro_batch_size=1"]
    shown = trierarch(
        "plan", *ASK, *fixed, "--top", "1", "--explain", "--what-if", "nodes=4,2", "--png", "plan.png"
    )
    assert shown.returncode == 0, shown.stderr
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    # A walk through the arithmetic: numbers that anyone can check.
    flops = re.search(r"of a GPU in a step = ([\d.e+]+) x ([\d,]+) / (\d+) = ([\d.e+]+)", shown.stdout)
    assert flops is not None
    each, tokens, gpus, result = (float(text.replace(",", "")) for text in flops.groups())
    assert tokens == 64 * 2048 and gpus == 8
    assert math.isclose(each * tokens / gpus, result, rel_tol=1e-3)
    for source in (
        "Narayanan et al. 2021",
        "Rajbhandari et al. 2020",
        "Korthikanti et al. 2022",
        "Daly 2006",
    ):
        assert source in shown.stdout
    weak = shown.stdout.partition("weak scaling")[2]
    assert re.search(r"^ +2 +64 ", weak, re.MULTILINE) and re.search(r"^ +4 +128 ", weak, re.MULTILINE)
    # The number that was planned for is its own measure.
    assert re.search(r"^ +2 +64 .* 100\.0 %", weak, re.MULTILINE)


@pytest.mark.req("A24", "C5")
def test_submit_with_the_best_plan(trierarch: Trierarch, tmp_path: Path) -> None:
    ask = [*RUN, "cluster=local", "cluster.gpu=a100_40", "cluster.gpus_per_node=2", "parallel=auto"]
    drawn = trierarch("layout", *ask)
    assert drawn.returncode == 0, drawn.stderr
    line = drawn.stderr.strip().splitlines()[-1]
    assert re.match(r"parallel=auto: .*MFU .* of 40 GiB; the next best, .*: \+", line), line
    script = trierarch("submit", *ASK, "parallel=auto", "parallel.zero=1", "--dry-run", SLURM_CONF="")
    if script.returncode == 0:
        assert "#SBATCH --nodes=2" in script.stdout
        assert "ZeRO 1" in script.stderr and "parallel=auto" not in script.stdout
    else:
        assert "sbatch" in script.stderr  # there is no Slurm on this machine


@pytest.mark.req("A24", "C5")
def test_a_run_has_the_layout_that_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is written into the run's folder has no `auto`, so that a resubmission changes nothing."""
    from tools.cli_plan import with_plan

    monkeypatch.chdir(tmp_path)
    asked = [*ASK, "parallel=auto", "parallel.zero=3", "train.tokens=1e9", "cluster.nic_gbit=100"]
    found = with_plan(asked)
    assert found[: len(ASK)] == ASK
    assert not {"parallel=auto", "train.tokens=1e9", "cluster.nic_gbit=100"} & set(found)
    assert sum(one.startswith("parallel.zero=") for one in found) == 1
    assert capsys.readouterr().err.startswith("parallel=auto: ")
    from configs.compose import to_yaml

    config = load_config([one for one in found if not one.startswith(("cluster", "nodes", "job"))])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load(tmp_path / "config.yaml", TrainConfig).parallel == config.parallel
    assert with_plan(RUN) is RUN


@pytest.mark.req("B10", "D8")
def test_a_recipes_layout_stays_unless_it_is_freed(trierarch: Trierarch) -> None:
    ask = ["plan", "recipe=deepseek_7b_4x8", "cluster=azure_ndv4", "--top", "1", "--json"]
    kept = json.loads(trierarch(*ask).stdout)["plans"][0]
    assert kept["degrees"]["tp"] == 4
    free = json.loads(trierarch(*ask, "parallel=auto").stdout)["plans"][0]
    assert free["step_s"] <= kept["step_s"]
    assert free["overrides"] != kept["overrides"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", *RUN, "cluster=local"], "names no GPU: give cluster.gpu=CLASS"),
        (["plan", *RUN, "cluster=a100_ib"], "does not say which A100"),
        (["plan", *ASK, "parallel=best"], "set keys in it, or give parallel=auto"),
        (["plan", *ASK, "parallel.tp=3"], "no layout works on 8 GPUs with parallel.tp=3"),
        (["plan", "model=gpt3_175b", *SITE], "no layout fits 8 GPUs of 40 GiB"),
        (["plan", *ASK, "--what-if", "gpus=8"], "give numbers of nodes, like nodes=8,16,32"),
        (["plan", *ASK, "job.ranks_per_node=8"], "juwels_booster has 4 GPUs a node, ask for at most 4"),
        (["plan", *ASK, "goals.pue=0.3"], "must be at least 1"),
        (["plan", *ASK, "goals.tokens=1"], "goals.tokens: there is no such key"),
        (["plan", *ASK, "--png", "plan.txt"], "ends in .png"),
        (["plan", *ASK, "--png", "none/plan.png"], "none is no folder that you can write to"),
        (["plan", "model=llama_125m", *SITE], "model.vocab_size=null"),
        (["train", "parallel=auto"], "give parallel=auto to `trierarch submit`"),
        (["submit", *ASK, "cluster.gpu=h100", "--dry-run"], "changes no job"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(
    trierarch: Trierarch, arguments: list[str], words: str
) -> None:
    shown = trierarch(*arguments)
    assert shown.returncode == ExitCode.CONFIG, shown
    assert words in shown.stderr
    assert "Traceback" not in shown.stderr
    assert len(shown.stderr.strip().splitlines()) == 1


def test_notes_say_what_is_assumed(trierarch: Trierarch) -> None:
    small = trierarch(
        "plan", "model=llama_1b", "cluster=jean_zay", "nodes=2", "parallel.tp=1", "parallel.pp=1"
    )
    assert "the default for a small first run: give yours" in small.stdout
    assert "does not say what its network is" in small.stdout
    shape = ["parallel.tp=1", "parallel.pp=1", "parallel.cp=1", "parallel.zero=1"]
    old = ["cluster=slurm", "cluster.gpu=v100", "cluster.gpus_per_node=2", "nodes=1", *shape]
    assert "no units for bfloat16" in trierarch("plan", *RUN, *old).stdout
    assert "no units for" not in trierarch("plan", *RUN, *old, "precision=fp16").stdout
    eight = trierarch("plan", *RUN, *SITE, *shape, "precision.float8=true")
    assert "a100_40 has no units for float8" in eight.stdout, eight.stderr


def test_predictions_of_rows(trierarch: Trierarch, tmp_path: Path) -> None:
    from tools.plan.rows import PUBLISHED, read_rows

    rows = read_rows(PUBLISHED)[:20]
    (tmp_path / "rows.json").write_text(json.dumps({"rows": rows}))
    shown = trierarch("plan", "predict", "--rows", "rows.json", "--out", "out.json")
    assert shown.returncode == 0, shown.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert [one["id"] for one in found] == [row["id"] for row in rows]


@pytest.mark.slow
@pytest.mark.req("A24")
def test_constants_of_one_s_own_are_planned_with(trierarch: Trierarch, tmp_path: Path) -> None:
    slower = json.loads(FILE.read_text())
    slower["constants"]["matmul"] /= 2
    (tmp_path / "mine.json").write_text(json.dumps(slower))
    fixed = [*ASK, "parallel.tp=1", "parallel.pp=1", "parallel.cp=1", "--json", "--top", "1"]
    times = []
    for more in ([], [f"goals.constants={tmp_path / 'mine.json'}"]):
        done = trierarch("plan", *fixed, *more)
        assert done.returncode == 0, done.stderr
        times.append(json.loads(done.stdout)["plans"][0]["step_s"])
    assert 1.3 * times[0] < times[1] < 2 * times[0]
    refused = trierarch("plan", *fixed, f"goals.constants={tmp_path / 'none.json'}")
    assert refused.returncode == ExitCode.CONFIG and "none.json holds no constants" in refused.stderr
