"""The checks of `trierarch doctor`: where each speaks, where it is silent, and that its remedies help."""

import dataclasses
import functools
import itertools
import json
import math
import os
import re
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import configs.compose
from tools.doctor.asked import Asked, read
from tools.doctor.checks import memory, pipeline, saving
from tools.doctor.facts import Facts, place
from tools.doctor.finding import (
    CHECKS,
    Finding,
    NotCheckedError,
    Outcome,
    Severity,
    error,
    note,
    warning,
)
from tools.doctor.host import Host, Limits, Place
from tools.doctor.run import as_tree, examine, exit_code, found, render, to_json
from tools.doctor.slurm_says import SlurmSays
from tools.doctor.software import Software
from tools.plan.gpu import USABLE
from train.config import load_config
from train.layout.check import lay_out
from train.layout.memory import heaviest
from train.layout.stages import stages_of
from train.model.config import parameter_count, parameter_shapes

pytestmark = pytest.mark.slow

# 8 A100-40 a node, nothing that a site would refuse.
MACHINE = ("cluster=berzelius", "job.account=x", "data.prefix=/data/tokens")
SMALL = (
    "model=llama_25m",
    "model.vocab_size=512",
    "parallel.micro_batch_size=1",
    "loop.global_batch_size=64",
)
UNLIMITED = Limits(None, None, None)
BY_NAME = {one.name: one for one in CHECKS}


def facts(
    *overrides: str,
    place: Place = Place.login,
    root: Path = Path("/"),
    environ: Mapping[str, str] | None = None,
    limits: Limits = UNLIMITED,
    software: Software | None = None,
) -> Facts:
    """Of a machine with GPUs, unless the overrides name another."""
    given_cluster = any(text.startswith("cluster=") for text in overrides)
    texts = [*(MACHINE[2:] if given_cluster else MACHINE), *SMALL, *overrides]
    # The last of two settings of a key is taken.
    kept = {text.partition("=")[0]: text for text in texts}
    if any("gradient_accumulation_steps" in key for key in kept):
        kept.pop("loop.global_batch_size")
    env = {"PATH": "/nowhere"} if environ is None else environ
    return Facts(
        _read(tuple(kept.values()), tuple(item for item in env.items() if item[0].startswith("SBATCH_"))),
        Host(place, env, root, limits),
        SlurmSays("slurm", env),
        software or Software(),
    )


@functools.cache  # to compose takes longer than to check
def _read(texts: tuple[str, ...], environ: tuple[tuple[str, str], ...]) -> Asked:
    return read(texts, dict(environ))


def say(name: str, of: Facts) -> list[Finding]:
    """What one check finds; fails where it cannot be made."""
    (outcome,) = examine(of, [BY_NAME[name]])
    assert not outcome.not_checked, outcome
    return list(outcome.findings)


def one(name: str, of: Facts, severity: Severity | None = Severity.warning) -> Finding:
    """The one thing that a check finds."""
    findings = say(name, of)
    assert len(findings) == 1, findings
    assert severity is None or findings[0].severity is severity
    assert findings[0].what and "  " not in findings[0].what, findings[0]
    return findings[0]


def silent(name: str, of: Facts) -> None:
    assert say(name, of) == []


def remedies(finding: Finding) -> list[list[str]]:
    """The settings of each way out that a finding names."""
    ways = [
        re.findall(r"(?<!\S)[a-z_]+\.[a-z_]+=[^\s,;()]+", way) for way in re.split(r" or |; ", finding.fix)
    ]
    return [way for way in ways if way]


# (check, where it speaks, where it does not)
LAYOUTS = [
    (
        "data parallelism alone",
        ("nodes=17", "loop.global_batch_size=136"),
        ("nodes=16", "loop.global_batch_size=128"),
    ),
    (
        "data parallelism alone",
        ("nodes=32", "loop.global_batch_size=256"),
        ("nodes=32", "loop.global_batch_size=256", "parallel.zero=1"),
    ),
    (
        "groups inside nodes",
        ("nodes=2", "model.heads=16", "model.kv_heads=16", "parallel.tp=16"),
        ("nodes=2", "parallel.tp=8"),
    ),
    (
        "heads of keys and values",
        ("model.kv_heads=4", "parallel.tp=8"),
        ("model.kv_heads=4", "parallel.tp=4"),
    ),
    (
        "balance of the stages",
        ("parallel.pp=4", "parallel.split=[2,2,3,1]", "parallel.gradient_accumulation_steps=32"),
        ("parallel.pp=4", "parallel.split=[2,2,2,2]", "parallel.gradient_accumulation_steps=32"),
    ),
    (
        "bubble of the pipeline",
        ("parallel.pp=4", "parallel.gradient_accumulation_steps=4"),
        ("parallel.pp=4", "parallel.gradient_accumulation_steps=32"),
    ),
    ("sizes for matrix units", ("model.ffn_dim=1380", "parallel.tp=1"), ("model.ffn_dim=1408",)),
    ("width of a head", ("model.dim=480", "model.heads=40"), ("model.dim=512", "model.heads=8")),
    ("rows of the vocabulary", ("model.vocab_size=50257",), ("model.vocab_size=50304",)),
    (
        "rows of the vocabulary",
        ("model.vocab_size=1012", "parallel.tp=4"),
        ("model.vocab_size=1024", "parallel.tp=4"),
    ),
    ("warm-up", ("optim.warmup_steps=0", "optim.lr=3e-4"), ("optim.warmup_steps=0", "optim.lr=1e-5")),
    (
        "warm-up",
        ("optim.warmup_steps=2000", "loop.steps=1000"),
        ("optim.warmup_steps=100", "loop.steps=1000"),
    ),
    ("loss scale", ("precision=fp16", "precision.loss_scale=1"), ("precision=fp16",)),
    (
        "8 bits early in training",
        ("precision.embedding=int8",),
        ("precision.embedding=int8", "run.init_from=/x"),
    ),
    ("8 bits early in training", ("precision.float8=true",), ("precision=bf16",)),
    ("8 bits early in training", ("precision.optimizer_state=int8",), ("precision.optimizer_state=float32",)),
    ("types that the GPU has", ("precision.float8=true",), ("precision.float8=true", "cluster.gpu=h100")),
    ("types that the GPU has", ("cluster.gpu=v100",), ("cluster.gpu=v100", "precision=fp16")),
    ("types that the GPU has", ("cluster.gpu=v100", "precision=tf32"), ("precision=tf32",)),
    (
        "time limit of a step",
        ("model=deepseek_67b", "parallel.tp=8", "loop.global_batch_size=4096", "data.sequence_length=4096"),
        ("model=deepseek_67b", "parallel.tp=8", "loop.global_batch_size=8", "data.sequence_length=4096"),
    ),
]


@pytest.mark.req("B12", "A24")
@pytest.mark.parametrize(("name", "bad", "good"), LAYOUTS)
def test_a_check_speaks_where_it_should_and_is_silent_elsewhere(
    name: str, bad: tuple[str, ...], good: tuple[str, ...]
) -> None:
    assert facts(*bad).asked.refused == [] and facts(*good).asked.refused == []
    finding = one(name, facts(*bad))
    assert finding.fix or " would stay inside" in finding.what
    silent(name, facts(*good))


@pytest.mark.parametrize(("name", "bad"), [(name, bad) for name, bad, _ in LAYOUTS])
def test_what_it_advises_is_taken_and_helps(name: str, bad: tuple[str, ...]) -> None:
    for way in remedies(one(name, facts(*bad))):
        if set(way) & set(bad):
            continue  # what is to be left out
        better = facts(*bad, *way)
        assert better.asked.refused == [], way
        silent(name, better)


def test_advice_is_given_by_most_checks() -> None:
    """The test above would pass if no finding named a setting."""
    named = {name for name, bad, _ in LAYOUTS if remedies(one(name, facts(*bad)))}
    assert {name for name, _, _ in LAYOUTS} - named <= {
        "groups inside nodes",  # in its sentence
        "types that the GPU has",
        "8 bits early in training",
        "width of a head",
        "loss scale",
    }


@pytest.mark.req("B12")
def test_quantisation_is_no_matter_when_the_beginning_is_over(tmp_path: Path) -> None:
    asked = (f"run.root={tmp_path}", "run.name=a", "precision.embedding=int8", "optim.warmup_steps=200")
    steps = tmp_path / "a/checkpoints"
    (steps / "step_199").mkdir(parents=True)
    assert "step 199" in one("8 bits early in training", facts(*asked)).what
    (steps / "step_200").mkdir()
    silent("8 bits early in training", facts(*asked))


def test_a_run_that_continues_needs_no_warm_up(tmp_path: Path) -> None:
    asked = (f"run.root={tmp_path}", "run.name=a", "optim.warmup_steps=0", "optim.lr=1e-3", "precision=fp16")
    more = "precision.loss_scale=1"
    assert one("warm-up", facts(*asked)) and one("loss scale", facts(*asked, more))
    (tmp_path / "a/checkpoints/step_10").mkdir(parents=True)
    silent("warm-up", facts(*asked))
    silent("loss scale", facts(*asked, more))


@given(st.lists(st.integers(1, 6), min_size=4, max_size=4), st.sampled_from([512, 32_000, 102_400]))
def test_imbalance_counts_every_product(split: list[int], vocabulary: int) -> None:
    base = _read((*SMALL, "cluster=local"), ()).config
    config = dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, vocab_size=vocabulary, layers=sum(split)),
        parallel=dataclasses.replace(base.parallel, pp=4, split=split),
    )
    shapes = parameter_shapes(config.model)
    work = []
    for rank in range(4):
        first = sum(split[:rank])
        own = [
            shape
            for name, shape in shapes.items()
            if (found := re.match(r"layers\.(\d+)\.", name)) and first <= int(found[1]) < first + split[rank]
        ]
        # Two for each weight and token, and of attention the two products with the whole sequence.
        products = sum(2 * math.prod(shape) for shape in own if len(shape) == 2)
        attention = 2 * 2 * config.data.sequence_length * config.model.dim * split[rank]
        head = 2 * math.prod(shapes["lm_head.weight"]) if rank == 3 else 0
        work.append(products + attention + head)
    expected = max(work) / (sum(work) / 4) - 1
    assert pipeline.imbalance_of(config, config.parallel) == pytest.approx(expected, rel=1e-9)


def test_imbalance_counts_both_stages_of_a_folded_pipeline() -> None:
    settings = ["model=llama_25m", "model.vocab_size=512", "parallel.pp=2", "parallel.schedule=zbv"]
    even = load_config([*settings, "parallel.split=[3,1,3,1]", "parallel.gradient_accumulation_steps=8"])
    assert [stages_of(even.parallel, rank) for rank in (0, 1)] == [[0, 3], [1, 2]]
    assert pipeline.imbalance_of(even, even.parallel) < 0.05
    uneven = load_config([*settings, "parallel.split=[3,1,1,3]", "parallel.gradient_accumulation_steps=8"])
    assert pipeline.imbalance_of(uneven, uneven.parallel) > 0.4


@pytest.mark.parametrize("steps", [8, 12, 16, 32])
def test_the_bubble_is_that_of_the_closed_form(steps: int) -> None:
    asked = facts("parallel.pp=4", f"parallel.gradient_accumulation_steps={steps}")
    speaks = 3 / (steps + 3) > pipeline.MOST_BUBBLE
    assert bool(say("bubble of the pipeline", asked)) is speaks


LARGE = ("model=deepseek_7b", "data.sequence_length=4096", "nodes=2", "parallel.tp=8", "parallel.zero=1")


@pytest.mark.req("A24", "B12")
@pytest.mark.parametrize(
    "asked",
    [
        ("model=deepseek_7b", "data.sequence_length=4096"),
        (*LARGE, "parallel.micro_batch_size=8"),
        ("model=deepseek_67b", "nodes=8", "parallel.tp=8", "parallel.zero=1", "data.sequence_length=4096"),
        (
            "model=llama_1b",
            "data.sequence_length=2048",
            "parallel.micro_batch_size=16",
            "loop.global_batch_size=256",
        ),
    ],
)
def test_what_does_not_fit_is_said_with_what_does(asked: tuple[str, ...]) -> None:
    before = facts(*asked)
    finding = one("memory of the GPUs", before, Severity.error)
    assert memory.needed_bytes(before.memory) > memory.room_bytes(before, before.dims)
    ways = remedies(finding)
    assert ways, finding
    for way in ways:
        after = facts(*asked, *way)
        assert after.asked.refused == [], way
        assert memory.needed_bytes(after.memory) <= memory.room_bytes(after, after.dims)
        silent("memory of the GPUs", after)


@pytest.mark.req("B12")
def test_too_long_a_sequence_is_named_with_the_longest_that_fits() -> None:
    asked = (*LARGE, "model.max_sequence_length=200000")
    before = facts(*asked, "data.sequence_length=131072")
    finding = one("memory of the GPUs", before, Severity.error)
    assert finding.where == "data.sequence_length"
    longest = int(re.search(r"longest that fit have (\d+)", finding.what)[1])  # type: ignore[index]
    room = memory.CLOSE * memory.room_bytes(before, before.dims)

    def needs(length: int) -> float:
        config = load_config([*SMALL, *asked[:1], *asked[3:], f"data.sequence_length={length}"])
        return memory.needed_bytes(heaviest(config, lay_out(config, 16, 8), "cuda")[1])

    assert needs(longest) <= room < needs(longest + 64)
    silent("memory of the GPUs", facts(*asked, f"data.sequence_length={longest}"))


def test_how_bad_it_is_follows_from_what_is_lacking(tmp_path: Path) -> None:
    """On GPUs of a size made for it: the class is a file of the user's."""
    needed = memory.needed_bytes(facts(*LARGE).memory) / 2**30
    text = (configs.compose.FOLDER / "gpu/a100_40.yaml").read_text()
    taken = 40 * USABLE - memory.room_bytes(facts(*LARGE), facts(*LARGE).dims) / 2**30
    for share, severity in (
        (0.94, None),
        (0.97, Severity.note),
        (1.05, Severity.warning),
        (1.15, Severity.error),
    ):
        file = tmp_path / f"{share}.yaml"
        file.write_text(text.replace("memory_gb: 40", f"memory_gb: {(needed / share + taken) / USABLE}"))
        findings = say("memory of the GPUs", facts(*LARGE, f"cluster.gpu={file}"))
        assert [one.severity for one in findings] == ([severity] if severity else []), share


def test_a_gpu_with_more_memory_takes_what_a_smaller_one_does_not() -> None:
    asked = (*LARGE, "parallel.micro_batch_size=8")
    assert say("memory of the GPUs", facts(*asked, "cluster.gpu=a100_40"))
    silent("memory of the GPUs", facts(*asked, "cluster.gpu=h200"))


def test_one_stage_that_keeps_far_more_is_noted() -> None:
    deep = (
        *("model=deepseek_67b", "data.sequence_length=4096", "nodes=4", "parallel.tp=8", "parallel.pp=4"),
        *("parallel.gradient_accumulation_steps=32", "parallel.zero=1", "cluster.gpu=a100_80"),
    )
    assert "rank 0" in one("memory of the stages", facts(*deep), Severity.note).what
    silent("memory of the stages", facts("parallel.pp=4", "parallel.gradient_accumulation_steps=32"))


@pytest.mark.req("B12")
def test_checkpoints_are_rarer_than_failures_allow() -> None:
    many = ("nodes=512", "parallel.zero=1", "loop.global_batch_size=4096", "loop.steps=10000000")
    finding = one("checkpoints and failures", facts(*many, "checkpoint.every_minutes=120"))
    best_s = 60 * float(re.search(r"every_minutes=(\d+)", finding.fix)[1])  # type: ignore[index]
    silent("checkpoints and failures", facts(*many, f"checkpoint.every_minutes={best_s / 60:g}"))
    silent("checkpoints and failures", facts("nodes=4", "checkpoint.every_minutes=120"))
    # Saved by steps, and what a step takes is predicted.
    by_steps = ("checkpoint.every_minutes=0", "checkpoint.every_steps=10000000")
    assert "every_steps" in one("checkpoints and failures", facts(*many, *by_steps)).where
    silent(
        "checkpoints and failures", facts(*many, "checkpoint.every_minutes=0", "checkpoint.every_steps=10")
    )


@given(st.floats(1e3, 1e6), st.floats(0.1, 100))
def test_youngs_interval_is_the_best(between_s: float, cost_s: float) -> None:
    """What the check recommends: brute force over intervals finds none that loses less."""

    def lost(interval_s: float) -> float:
        return cost_s / interval_s + interval_s / 2 / between_s

    best_s = math.sqrt(2 * between_s * cost_s)
    assert all(lost(best_s) <= lost(best_s * factor) * (1 + 1e-9) for factor in (0.5, 0.9, 1.1, 2.0))
    # At twice the best interval, where the check begins to speak, a quarter more is lost.
    assert lost(saving.TIMES_BEST * best_s) == pytest.approx(1.25 * lost(best_s))


def test_what_is_refused_does_not_hide_the_rest() -> None:
    asked = facts(
        "cluster=juwels_booster", "optim.lr=-1", "run.nam=x", "checkpoint.keep_last=-2", "loop.steps=ten"
    )
    settings = [one.where for one in say("settings", asked)]
    assert set(settings) >= {"run.nam", "optim.lr", "checkpoint.keep_last", "loop.steps", "juwels_booster"}
    assert "did you mean run.name" in " ".join(one.what for one in say("settings", asked))
    assert asked.asked.dims is not None  # none of them shapes the layout
    silent("settings", facts())


def test_a_layout_is_not_judged_by_what_was_left_out() -> None:
    """Without tp the layout would be another one: nothing is said of that."""
    asked = facts("nodes=32", "loop.global_batch_size=256", "paralel.tp=8")
    (outcome,) = examine(asked, [BY_NAME["data parallelism alone"]])
    assert "paralel.tp=8 is refused" in outcome.not_checked
    assert examine(facts("parallel.tp=nine"), [BY_NAME["memory of the GPUs"]])[0].not_checked


@pytest.mark.req("B12")
def test_a_batch_that_does_not_divide_is_said_and_the_rest_is_judged() -> None:
    asked = facts("loop.global_batch_size=61", "optim.warmup_steps=0")
    refused = say("settings", asked)
    assert "does not divide over 8" in refused[0].what and refused[0].severity is Severity.error
    assert "loop.global_batch_size=64" in refused[1].what and refused[1].severity is Severity.note
    assert one("warm-up", asked)
    silent("memory of the GPUs", asked)


def test_several_things_that_a_layout_is_refused_for() -> None:
    asked = facts(
        *("parallel.pp=2", "parallel.schedule=zbv", "parallel.zero=3", "precision.embedding=int8"),
        *("model.tie_embeddings=true", "parallel.stages_per_rank=3"),
    )
    said = " ".join(one.what for one in say("settings", asked))
    assert "stages_per_rank=3" in said and "tie_embeddings" in said


def test_limits_of_the_site_are_told_beside_a_missing_account() -> None:
    asked = facts("cluster=juwels_booster", "nodes=500", "loop.global_batch_size=2000")
    said = {one.where for one in say("settings", asked)}
    assert said == {"juwels_booster", "job.nodes"}


def test_a_class_of_gpus_that_there_is_not() -> None:
    assert "a100_80" in one("settings", facts("cluster.gpu=a100_81"), Severity.error).what
    silent("settings", facts("cluster.gpu=a100_80"))


def test_a_layout_that_is_chosen_later_is_not_judged() -> None:
    asked = facts("parallel=auto", "optim.warmup_steps=0")
    silent("settings", asked)
    assert one("warm-up", asked)
    (outcome,) = examine(asked, [BY_NAME["memory of the GPUs"]])
    assert "trierarch plan" in outcome.not_checked


def test_recipes_bring_their_job() -> None:
    asked = facts("recipe=extreme", "cluster=karolina", "job.partition=qgpu_big")
    assert asked.settings.job.spares > 0 and asked.settings.job.nodes > 1
    local = facts("recipe=extreme", "cluster=local")
    assert any(one.where.startswith("job") for one in say("settings", local))


def test_a_recipe_without_data_is_told_so_and_looked_at() -> None:
    environ = {"PATH": "/nowhere"}
    asked = read(["recipe=basic", "cluster=berzelius", "job.account=x"], environ)
    assert [one.where for one in asked.refused] == ["data.prefix"] and asked.dims is not None


# ---------------------------------------------------------------- this host


def tree(root: Path, files: Mapping[str, str], folders: Sequence[str] = ()) -> Path:
    """Files as /proc and /sys have them, below `root`."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for name in folders:
        (root / name).mkdir(parents=True, exist_ok=True)
    return root


def mounts(*lines: str) -> dict[str, str]:
    return {"proc/self/mounts": "".join(f"{line} rw 0 0\n" for line in ("/dev/sda1 / ext4", *lines))}


@pytest.mark.req("B12")
@pytest.mark.parametrize(
    ("line", "severity"),
    [
        ("tmpfs {} tmpfs", Severity.error),
        ("/dev/nvme0n1 {} xfs", Severity.warning),
        ("overlay {} overlay", Severity.warning),
        ("fancyfs#1 {} fancyfs", Severity.note),
        ("server:/home {} nfs4", None),
        ("10.0.0.1@o2ib:/scratch {} lustre", None),
        ("gpfs1 {} gpfs", None),
        ("beegfs_nodev {} beegfs", None),
    ],
)
def test_a_run_folder_must_be_shared(tmp_path: Path, line: str, severity: Severity | None) -> None:
    home = tmp_path / "my home"
    home.mkdir()
    root = tree(tmp_path / "root", mounts(line.format(str(home).replace(" ", "\\040"))))
    asked = facts("nodes=2", f"run.root='{home}/runs'", root=root)
    findings = say("run folder on shared storage", asked)
    assert [one.severity for one in findings] == ([severity] if severity else [])
    assert all(str(home) in one.what for one in findings)


def test_a_disk_that_this_host_exports_is_shared(tmp_path: Path) -> None:
    root = tree(tmp_path / "root", mounts(f"/dev/sdb {tmp_path} ext4"))
    asked = facts("nodes=2", f"run.root={tmp_path}/home/runs", root=root)
    assert one("run folder on shared storage", asked)
    tree(root, {"etc/exports": f"# homes\n{tmp_path}/home 10.0.0.0/8(rw)\n"})
    silent("run folder on shared storage", facts("nodes=2", f"run.root={tmp_path}/home/runs", root=root))


def test_the_innermost_and_latest_file_system_counts(tmp_path: Path) -> None:
    lines = (f"a {tmp_path} nfs", f"b {tmp_path}/x tmpfs", f"c {tmp_path}/x lustre")
    host = Host(Place.login, {}, tree(tmp_path / "root", mounts(*lines)))
    for path, source in ((tmp_path / "x/y", "c"), (tmp_path / "xy", "a"), (Path("/"), "/dev/sda1")):
        mount = host.mount_of(path)
        assert mount is not None and mount.source == source


def test_the_mounts_of_this_machine_are_read() -> None:
    host = Host(Place.login, os.environ)
    root = host.mount_of(Path("/"))
    assert root is not None and root.kind
    memory_disk = host.mount_of(Path("/proc/self"))
    assert memory_disk is not None and memory_disk.kind == "proc"
    assert "lo" in host.interfaces


def test_data_beside_the_run_must_be_shared_too(tmp_path: Path) -> None:
    data = tmp_path / "local/tokens.bin"
    data.parent.mkdir()
    data.write_bytes(b"")
    root = tree(tmp_path / "root", mounts(f"s {tmp_path} nfs", f"d {tmp_path}/local ext4"))
    asked = facts("nodes=2", f"run.root={tmp_path}/runs", f"data.prefix={data.with_suffix('')}", root=root)
    assert one("run folder on shared storage", asked).where == "data.prefix"


def test_data_that_is_not_there(tmp_path: Path) -> None:
    absent = f"data.prefix={tmp_path}/tokens"
    assert one("data", facts(absent))
    assert one("data", facts(absent, "cluster=local", place=Place.ranks), Severity.error)
    (tmp_path / "tokens.bin").write_bytes(b"")
    silent("data", facts(absent))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    silent("run folder can be written", facts(f"run.root={tmp_path}/runs"))
    (tmp_path / "file").write_text("")
    assert one("run folder can be written", facts(f"run.root={tmp_path}/file/runs"), Severity.error)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    if os.access(closed, os.W_OK):  # the superuser
        closed = Path("/proc/self")
    assert one("run folder can be written", facts(f"run.root={closed}/runs"), Severity.error)


def test_disks_of_nodes(tmp_path: Path) -> None:
    root = tree(tmp_path / "root", mounts(f"s {tmp_path}/shared nfs", f"t {tmp_path}/memory tmpfs"))
    for name in ("shared", "memory", "disk"):
        (tmp_path / name).mkdir()

    def asked(folder: str, *more: str) -> Facts:
        fast = f"checkpoint.fast_path={folder}"
        return facts("cluster=local", fast, *more, root=root, place=Place.ranks)

    assert "share" in one("disks of the nodes", asked(f"{tmp_path}/shared")).what
    assert "memory" in one("disks of the nodes", asked(f"{tmp_path}/memory")).what
    assert "variable" in one("disks of the nodes", asked("'$NO_SUCH_VARIABLE_HERE/x'")).what
    silent("disks of the nodes", asked(f"{tmp_path}/disk"))
    nvme = ("offload.optimizer=nvme", f"offload.nvme_path=[{tmp_path}/none]")
    assert (
        one("disks of the nodes", asked(f"{tmp_path}/disk", *nvme), Severity.error).where
        == "offload.nvme_path"
    )
    # On a login node they cannot be there.
    (outcome,) = examine(facts("checkpoint.fast_path=/local"), [BY_NAME["disks of the nodes"]])
    assert outcome.not_checked


def test_room_for_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = (f"run.root={tmp_path}", "run.name=a", "checkpoint.keep_last=2")
    size = 12 * parameter_count(load_config([*SMALL]).model)
    assert saving.checkpoint_bytes(facts(*asked)) == size

    def with_free(count: float, files: int = 10**7) -> Facts:
        said = os.statvfs_result((1, 1, 10**12, 0, int(count * size), 10**9, files, files, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda path: said)
        return facts(*asked)

    assert "none can be saved" in one("room for checkpoints", with_free(0.9), Severity.error).what
    # Two are kept, and a third is written beside them.
    assert one("room for checkpoints", with_free(2.9))
    silent("room for checkpoints", with_free(3.01))
    assert "files left" in one("room for checkpoints", with_free(3.01, files=10)).what
    (tmp_path / "a/checkpoints/step_5").mkdir(parents=True)
    silent("room for checkpoints", with_free(2.9))  # one of them is there already


def test_checkpoints_that_are_all_kept_are_counted(tmp_path: Path) -> None:
    every = ("loop.steps=1000", "checkpoint.every_steps=10", "checkpoint.keep_last=0", f"run.root={tmp_path}")
    findings = say("room for checkpoints", facts(*every))
    assert any("all 100 checkpoints" in one.what for one in findings)


def test_the_clock_of_the_file_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = facts(f"run.root={tmp_path}/runs")
    silent("clock of the file server", asked)
    assert list(tmp_path.iterdir()) == []  # its file is gone
    real = os.fsync
    for skew_s, word in ((30.0, "ahead of"), (-30.0, "behind")):

        def server(fd: int, skew_s: float = skew_s) -> None:
            real(fd)
            at = os.fstat(fd).st_mtime + skew_s
            os.utime(fd, (at, at))

        monkeypatch.setattr(os, "fsync", server)
        said = one("clock of the file server", asked).what
        assert word in said and re.search(r"(29|30)\.\d s", said)


# ---------------------------------------------------------------- network, GPUs, limits


NICS = ["sys/class/net/lo", "sys/class/net/ib0", "sys/class/net/eth0", "sys/class/infiniband/mlx5_0"]


@pytest.mark.req("B12")
@pytest.mark.parametrize(
    ("environ", "severity"),
    [
        ({"NCCL_SOCKET_IFNAME": "ib0"}, None),
        ({"NCCL_SOCKET_IFNAME": "ib"}, None),  # the beginning of a name
        ({"NCCL_SOCKET_IFNAME": "=ib"}, Severity.error),
        ({"NCCL_SOCKET_IFNAME": "^docker,lo"}, None),
        ({"NCCL_SOCKET_IFNAME": "bond0,eth"}, None),  # one of them is there
        ({"NCCL_SOCKET_IFNAME": "hsn0"}, Severity.error),
        ({"GLOO_SOCKET_IFNAME": "ib"}, Severity.error),
        ({"GLOO_SOCKET_IFNAME": "ib0"}, None),
    ],
)
def test_interfaces_that_are_named(
    tmp_path: Path, environ: dict[str, str], severity: Severity | None
) -> None:
    root = tree(tmp_path, {}, NICS)
    asked = (
        "cluster=berzelius",
        "job.account=x",
        "nodes=2",
        "cluster.socket_interface=null",
        "cluster.env={}",
    )
    here = facts(*asked, root=root, environ=environ, place=Place.ranks)
    assert [one.severity for one in say("network interfaces", here)] == ([severity] if severity else [])
    # Compute nodes may have what a login node lacks.
    login = facts(*asked, root=root, environ=environ)
    assert [one.severity for one in say("network interfaces", login)] == ([Severity.note] if severity else [])


def test_the_profile_goes_before_the_shell(tmp_path: Path) -> None:
    root = tree(tmp_path, {}, NICS)
    asked = ("cluster=juwels_booster", "job.account=x", "nodes=2")  # whose interface is ib0
    silent(
        "network interfaces",
        facts(*asked, root=root, environ={"NCCL_SOCKET_IFNAME": "hsn0"}, place=Place.ranks),
    )


def test_an_interface_that_leads_nowhere(tmp_path: Path) -> None:
    root = tree(tmp_path, {}, NICS)
    lo = {"NCCL_SOCKET_IFNAME": "lo"}
    two, alone = ("nodes=2", "cluster.socket_interface=null"), ("nodes=1", "cluster.socket_interface=null")
    assert (
        "no other node" in one("network interfaces", facts(*two, root=root, environ=lo), Severity.error).what
    )
    silent("network interfaces", facts(*alone, root=root, environ=lo))


def test_adapters_that_are_named(tmp_path: Path) -> None:
    root = tree(tmp_path, {}, NICS)

    def asked(text: str, place: Place = Place.ranks) -> Facts:
        return facts("nodes=2", "cluster.hcas=[]", root=root, environ={"NCCL_IB_HCA": text}, place=place)

    silent("InfiniBand adapters", asked("mlx5"))
    silent("InfiniBand adapters", asked("=mlx5_0:1"))
    silent("InfiniBand adapters", asked("^mlx5_9"))
    assert one("InfiniBand adapters", asked("=mlx5"), Severity.error)
    assert one("InfiniBand adapters", asked("mlx5_1"), Severity.error)
    assert one("InfiniBand adapters", asked("mlx5_1", Place.login), Severity.note)
    profile = facts("nodes=2", "cluster.hcas=[mlx5_0,mlx5_7]", root=root, place=Place.ranks)
    assert "no mlx5_7" in one("InfiniBand adapters", profile, Severity.error).what


def test_variables_that_slow_nccl() -> None:
    assert (
        one("variables of NCCL", facts("nodes=2", environ={"NCCL_IB_DISABLE": "1"})).where
        == "NCCL_IB_DISABLE"
    )
    silent("variables of NCCL", facts("nodes=1", environ={"NCCL_IB_DISABLE": "1"}))
    silent("variables of NCCL", facts("nodes=2", environ={"NCCL_IB_DISABLE": "0"}))
    assert one("variables of NCCL", facts(environ={"NCCL_P2P_DISABLE": "1"}))


def test_variables_of_the_shell() -> None:
    said = one("variables of the shell", facts(environ={"SBATCH_QOS": "long"}), Severity.note)
    assert said.where == "SBATCH_QOS"
    silent("variables of the shell", facts(environ={"PATH": "/bin"}))


@pytest.mark.req("B12")
@pytest.mark.parametrize(
    ("text", "severity", "word"),
    [
        ("0,1,2,3,4,5,6,7", None, ""),
        ("GPU-1f,GPU-2f,GPU-3f,GPU-4f,GPU-5f,GPU-6f,GPU-7f,GPU-8f", None, ""),
        ("", Severity.error, "hides all"),
        ("-1", Severity.error, "hides all"),
        ("0,1", Severity.error, "2 GPUs to 8 ranks"),
        ("0,one,2", Severity.warning, "'one'"),
        ("0,1,1,2", Severity.warning, "twice"),
        ("MIG-a,MIG-b,MIG-c,MIG-d", Severity.warning, "slice"),
    ],
)
def test_gpus_that_a_shell_hides(text: str, severity: Severity | None, word: str) -> None:
    here = facts(environ={"CUDA_VISIBLE_DEVICES": text}, place=Place.ranks)
    findings = say("CUDA_VISIBLE_DEVICES", here)
    assert [one.severity for one in findings] == ([severity] if severity else [])
    assert all(word in one.what for one in findings)
    silent("CUDA_VISIBLE_DEVICES", facts(environ={}))


DRIVER = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Tue Mar 1 00:00:00 UTC 2024\nGCC version:  gcc 12\n"
)


def test_gpus_are_counted(tmp_path: Path) -> None:
    root = tree(tmp_path, {f"dev/nvidia{index}": "" for index in range(4)} | {"dev/nvidiactl": ""})
    assert "it has 4 GPUs" in one("number of GPUs", facts(root=root, place=Place.ranks), Severity.error).what
    silent("number of GPUs", facts("job.ranks_per_node=4", root=root, place=Place.ranks))
    assert examine(facts(root=root), [BY_NAME["number of GPUs"]])[0].not_checked  # a login node


def test_a_profile_without_gpus_gets_none() -> None:
    assert one("GPUs are asked for", facts("cluster=slurm"), Severity.note)
    silent("GPUs are asked for", facts())


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert one("memory in /dev/shm", facts(root=tmp_path, place=Place.ranks))
    tree(tmp_path, {}, ["dev/shm"])
    silent("memory in /dev/shm", facts(root=tmp_path, place=Place.ranks))  # the disk of this test is large
    monkeypatch.setattr(
        "tools.doctor.host.shutil.disk_usage", lambda path: type("", (), {"total": 64 * 2**20})
    )
    assert "67.11 MB" in one("memory in /dev/shm", facts(root=tmp_path, place=Place.ranks)).what


def test_locked_memory_and_what_slurm_hands_on(tmp_path: Path) -> None:
    low = Limits(64 * 2**10, None, None)
    two = ("nodes=2",)
    assert one("locked memory", facts(*two, limits=low, place=Place.ranks))
    silent("locked memory", facts(*two, limits=UNLIMITED, place=Place.ranks))
    assert examine(facts("nodes=1", limits=low), [BY_NAME["locked memory"]])[0].no_use
    for line, speaks in (
        ("PropagateResourceLimits = ALL", True),
        ("PropagateResourceLimits = NONE", False),
        ("PropagateResourceLimitsExcept = MEMLOCK,STACK", False),
        ("PropagateResourceLimitsExcept = CORE", True),
    ):
        environ = with_slurm(tmp_path, config=line)
        assert bool(say("locked memory", facts(*two, limits=low, environ=environ))) is speaks, line


def test_open_files() -> None:
    many = ("nodes=512", "parallel.zero=1", "loop.global_batch_size=4096")
    assert one("open files", facts(*many, limits=Limits(None, 1024, None), place=Place.ranks))
    assert one("open files", facts(*many, limits=Limits(None, 1024, 4096), place=Place.ranks), Severity.error)
    silent("open files", facts(*many, limits=Limits(None, 65_536, 65_536), place=Place.ranks))
    silent("open files", facts("nodes=4", limits=Limits(None, 1024, 4096), place=Place.ranks))


def test_the_limits_of_this_process() -> None:
    ours = Limits.of_this_process()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert ours.open_files == (None if soft == resource.RLIM_INFINITY else soft)
    assert ours.most_open_files == (None if hard == resource.RLIM_INFINITY else hard)


# ---------------------------------------------------------------- Slurm


def with_slurm(
    folder: Path, config: str = "", partitions: str = "", accounts: str = "", code: int = 0
) -> dict[str, str]:
    """An environment whose Slurm commands say this."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    said = {
        "config": f"Configuration data as of 2026\nClusterName = dragon\n{config}\n",
        "partition": partitions
        or "PartitionName=gpu Default=YES State=UP MaxNodes=UNLIMITED TotalNodes=99 MaxTime=1-00:00:00\n",
        "assoc": accounts,
    }
    for name, text in said.items():
        (folder / name).write_text(text)
    for program in ("scontrol", "sacctmgr", "sbatch"):
        file = programs / program
        file.write_text(
            f'#!/bin/sh\nfor word in "$@"; do [ -f {folder}/"$word" ] && cat {folder}/"$word"; done\n'
            f"[ {code} = 0 ] || echo 'slurm_load: error: Unable to contact slurm controller' >&2\nexit {code}\n"
        )
        file.chmod(0o755)
    return {"PATH": f"{programs}:/usr/bin:/bin"}


PARTITIONS = (
    "PartitionName=gpu AllowAccounts=ALL AllowQos=ALL Default=YES State=UP MaxNodes=8 MinNodes=1 TotalNodes=20 "
    "MaxTime=12:00:00\n"
    "PartitionName=big AllowAccounts=astro,bio AllowQos=normal Default=NO State=DRAIN MaxNodes=UNLIMITED MinNodes=4 "
    "TotalNodes=20 MaxTime=UNLIMITED\n"
)
ANY = ("cluster=slurm", "cluster.gpus_per_node=8", "cluster.gpu_directive=gres", "cluster.gpu=a100_40")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (("nodes=2",), []),
        (
            ("nodes=9", "loop.global_batch_size=72"),
            [(Severity.error, "job.nodes", "the 8 that partition gpu allows")],
        ),
        (("nodes=8", "job.spares=1"), [(Severity.error, "job.nodes", "9 nodes")]),
        (("job.time_limit=24:00:00",), [(Severity.error, "job.time_limit", "12:00:00 of partition gpu")]),
        (("job.partition=gpus",), [(Severity.error, "job.partition", "no partition gpus")]),
        (
            ("job.partition=big", "nodes=4"),
            [(Severity.warning, "job.partition", "DRAIN")],
        ),
        (
            ("job.partition=big", "nodes=2"),
            [(Severity.warning, "job.partition", "DRAIN"), (Severity.error, "job.nodes", "less than 4")],
        ),
        (
            ("job.partition=big", "nodes=4", "job.account=geo"),
            [(Severity.warning, "job.partition", "DRAIN"), (Severity.error, "job.account", "astro, bio")],
        ),
        (
            ("job.partition=big", "nodes=4", "job.account=bio", "job.qos=fast"),
            [(Severity.warning, "job.partition", "DRAIN"), (Severity.error, "job.qos", "normal")],
        ),
        (
            ("nodes=21", "job.partition=big", "loop.global_batch_size=168"),
            [
                (Severity.warning, "job.partition", "DRAIN"),
                (Severity.error, "job.nodes", "the 20 that partition big has"),
            ],
        ),
    ],
)
def test_a_partition_must_take_the_job(
    tmp_path: Path, asked: tuple[str, ...], expected: list[tuple[Severity, str, str]]
) -> None:
    environ = with_slurm(tmp_path, partitions=PARTITIONS)
    findings = say("partition", facts(*ANY, *asked, environ=environ))
    assert [(one.severity, one.where) for one in findings] == [(kind, where) for kind, where, _ in expected]
    assert all(words in one.what for one, (_, _, words) in zip(findings, expected, strict=True))


def test_without_a_default_partition(tmp_path: Path) -> None:
    environ = with_slurm(tmp_path, partitions=PARTITIONS.replace("Default=YES", "Default=NO"))
    assert "no default" in one("partition", facts(*ANY, environ=environ)).what


def test_accounts(tmp_path: Path) -> None:
    def asked(account: str, enforced: bool) -> Facts:
        config = f"AccountingStorageEnforce = {'associations,limits' if enforced else 'none'}"
        environ = with_slurm(tmp_path, config=config, accounts="astro\nbio\nastro\n")
        return facts(*ANY, f"job.account={account}", environ=environ)

    silent("account", asked("bio", True))
    assert "astro, bio" in one("account", asked("boi", True), Severity.error).what
    assert one("account", asked("boi", False), Severity.note)
    (unknown,) = examine(facts(*ANY, "job.account=x", environ=with_slurm(tmp_path)), [BY_NAME["account"]])
    assert unknown.not_checked


def test_slurm_that_does_not_answer(tmp_path: Path) -> None:
    silent("Slurm", facts(*ANY, environ=with_slurm(tmp_path)))
    assert (
        "Unable to contact"
        in one("Slurm", facts(*ANY, environ=with_slurm(tmp_path, code=1)), Severity.error).what
    )
    assert one("Slurm", facts(*ANY, place=Place.elsewhere), Severity.note)


def test_what_this_host_is_to_a_run(tmp_path: Path) -> None:
    environ = with_slurm(tmp_path)

    def of(cluster: str, hostname: str, env: Mapping[str, str]) -> Place:
        profile = facts(f"cluster={cluster}", "job.account=x").cluster
        return place(profile, env, hostname, SlurmSays(cluster, env))

    assert of("local", "laptop", {}) is Place.ranks
    assert of("slurm", "laptop", {"PATH": "/nowhere"}) is Place.elsewhere
    assert of("slurm", "login1", environ) is Place.login
    assert of("slurm", "node7", {**environ, "SLURM_JOB_ID": "5"}) is Place.ranks
    # Another Slurm than that of a site whose hosts are known.
    assert of("juwels_booster", "login1", environ) is Place.elsewhere
    assert of("juwels_booster", "jwlogin22.juwels", environ) is Place.login
    named = with_slurm(tmp_path, config="ClusterName = juwels_booster")
    assert of("juwels_booster", "elsewhere", named) is Place.login
    assert of("a100_ib", "login1", named) is Place.elsewhere


# ---------------------------------------------------------------- software


class Packages(Software):
    """An environment with these packages, as their files describe them."""

    def __init__(
        self, folder: Path, versions: Mapping[str, str], needs: Mapping[str, Sequence[str]], cuda: str
    ) -> None:
        for name, version in versions.items():
            lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
            lines += [f"Requires-Dist: {need}" for need in needs.get(name, ())]
            tree(folder, {f"{name.replace('-', '_')}-{version}.dist-info/METADATA": "\n".join(lines) + "\n"})
        tree(folder, {"torch/version.py": f"from typing import Optional\ncuda: Optional[str] = {cuda}\n"})

        def look(name: str) -> Distribution | None:
            return next(iter(Distribution.discover(name=name, path=[str(folder)])), None)

        project = folder / "pyproject.toml"
        project.write_text(
            '[project]\ndependencies = ["torch>=2.13", "typer>=0.15,<0.29", "scipy; sys_platform == \'win32\'"]\n'
        )
        super().__init__(look, project)


GOOD = {"torch": "2.13.0", "typer": "0.20", "nvidia-nccl-cu13": "2.28.9"}
NEEDS = {"torch": ["nvidia-nccl-cu13==2.28.9; platform_system == 'Linux'", "sympy; extra == 'all'"]}


@pytest.mark.req("B11", "B12")
def test_versions_of_packages(tmp_path: Path) -> None:
    folders = (tmp_path / str(number) for number in itertools.count())

    def asked(changes: Mapping[str, str], cuda: str = "'13.0'", root: Path = Path("/")) -> Facts:
        versions = {name: version for name, version in (GOOD | dict(changes)).items() if version}
        return facts(software=Packages(next(folders), versions, NEEDS, cuda), root=root)

    for name in ("torch", "NCCL", "packages", "Python"):
        silent(name, asked({}))
    assert "not installed" in one("torch", asked({"torch": ""}), Severity.error).what
    assert "without CUDA" in one("torch", asked({}, cuda="None"), Severity.error).what
    assert "older than 2.12" in one("NCCL", asked({"nvidia-nccl-cu13": "2.10.3"})).what
    assert "typer" in one("packages", asked({"typer": "0.30"}), Severity.error).where
    assert "not installed" in one("packages", asked({"typer": ""}), Severity.error).what
    assert one("packages", asked({"nvidia-nccl-cu13": "2.27.1"})).where == "nvidia-nccl-cu13"
    root = tree(tmp_path / "root", {"proc/driver/nvidia/version": DRIVER.format("535.161.08")})
    assert "535.161.08" in one("driver", asked({}, root=root), Severity.error).what
    silent("driver", asked({}, cuda="'12.8'", root=root))
    new = tree(tmp_path / "new", {"proc/driver/nvidia/version": DRIVER.format("580.65.06")})
    silent("driver", asked({}, root=new))


def test_the_environment_of_this_test_is_whole() -> None:
    """What CI installs is what the project asks for."""
    here = facts("cluster=local", place=Place.ranks)
    for name in ("torch", "packages", "Python", "interpreter of the job"):
        silent(name, here)
    assert here.software.version("torch") is not None
    import torch

    assert here.software.cuda == torch.version.cuda


def test_an_interpreter_of_its_own(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\necho 3 9\n")
    old.chmod(0o755)
    environ = {"PATH": "/usr/bin:/bin"}
    assert (
        "3.9"
        in one("interpreter of the job", facts(f"cluster.python={old}", environ=environ), Severity.error).what
    )
    assert one("interpreter of the job", facts(f"cluster.python={tmp_path}/none", environ=environ))
    silent("interpreter of the job", facts(f"cluster.python={sys.executable}", environ=environ))
    (outcome,) = examine(facts(f"cluster.python={old}", environ=environ), [BY_NAME["torch"]])
    assert str(old) in outcome.not_checked
    contained = ("cluster.container.runtime=apptainer", "job.image=/images/a.sif")
    assert "container" in examine(facts(*contained), [BY_NAME["packages"]])[0].not_checked


def test_the_quota_is_said_to_be_unknown() -> None:
    (outcome,) = examine(facts(), [BY_NAME["quota of the file system"]])
    assert "quota" in outcome.not_checked


# ---------------------------------------------------------------- the report


def test_the_gravest_comes_first_and_decides() -> None:
    three = (note("a", "some"), error("b", "bad"), warning("c", "costly"))
    outcomes = [Outcome("x", CHECKS[0].about, three)]
    assert [one.where for one in found(outcomes)] == ["b", "c", "a"]
    assert (
        exit_code(three) == 78 and exit_code(three[::2]) == 1 and exit_code(three[:1]) == 0 == exit_code(())
    )
    assert as_tree(outcomes)["exit_code"] == 78
    assert json.loads(to_json(outcomes))["findings"][0] == {
        "severity": "error", "check": "x", "where": "b", "what": "bad", "fix": None
    }  # fmt: skip


def test_every_check_is_told_of_in_the_report() -> None:
    outcomes = examine(facts())
    text = render(outcomes, None)
    assert all(one.name in text for one in CHECKS)
    assert all(len(line) <= 80 for line in render(outcomes, 80).splitlines() if "/" not in line)
    checks = as_tree(outcomes)["checks"]
    assert [one["check"] for one in checks] == [one.name for one in CHECKS]
    assert all(sum((one["checked"], bool(one["no_use"]), bool(one["not_checked"]))) == 1 for one in checks)


def test_on_another_machine_nothing_is_said_of_this_one() -> None:
    here = {one.name for one in examine(facts(place=Place.elsewhere)) if one.not_checked}
    assert {"packages", "clock of the file server", "room for checkpoints", "number of GPUs"} <= here


def test_findings_before_a_check_stops_stay() -> None:
    def half(facts: Facts) -> Iterator[Finding]:
        yield warning("a", "b")
        raise NotCheckedError("why")

    (outcome,) = examine(facts(), [dataclasses.replace(CHECKS[0], find=half)])
    assert len(outcome.findings) == 1 and outcome.not_checked == "why"


@pytest.mark.parametrize("recipe", configs.compose.choices("recipe"))
def test_no_false_alarm_on_the_machine_of_a_recipe(recipe: str) -> None:
    """Each on its own number of nodes of 8 A100-80, with its data given."""
    own = {"first_run": ("cluster=local",)}.get(
        recipe, ("cluster=berzelius", "job.account=x", "cluster.gpu=a100_80")
    )
    environ = {"PATH": "/nowhere"}
    asked = read([f"recipe={recipe}", *own, "data.prefix=/data/tokens"], environ)
    of = Facts(asked, Host(Place.elsewhere, environ, limits=UNLIMITED), SlurmSays("slurm", environ))
    findings = found(examine(of))
    assert [one for one in findings if one.severity is not Severity.note] == []


def test_each_check_has_been_asked() -> None:
    """Last in the file: every check has a test above in which it speaks, by name."""
    source = Path(__file__).read_text()
    assert [one.name for one in CHECKS if f'"{one.name}"' not in source] == []
