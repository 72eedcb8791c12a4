"""Recipes: complete, at home on the machines that they are for, and never half ignored."""

import copy
import functools
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import configs.compose
from configs.compose import choices, to_yaml
from contract.errors import ConfigError
from slurm.recipe import job_of, split
from slurm.settings import SubmitConfig, compose_submit, load_submit
from slurm.sites.profile import Profile
from slurm.submit import submit
from tools.cli import app
from tools.cli_sweep_plan import Request, make_plan
from train.config import TrainConfig, load_config
from train.layout.check import lay_out
from train.layout.dims import ParallelDims
from train.layout.memory import heaviest, total
from train.layout.notes import notes
from train.layout.traffic import traffic

pytestmark = pytest.mark.slow

RECIPES = choices("job")
DATA = "data.prefix=/data/tokens"


@functools.cache
def profile_of(name: str) -> Profile:
    return configs.compose.fill(SubmitConfig, [f"cluster={name}"]).cluster


GPU_CLUSTERS = [name for name in choices("cluster") if profile_of(name).gpus_per_node]

# What a machine needs beside the recipe, and the sentence that says so.
MORE = {
    ("deepseek_7b_4x8", 4): (["nodes=8", "job.ranks_per_node=4"], "has 4 GPUs a node, ask for at most 4"),
    ("extreme", "karolina"): (["job.partition=qgpu_big"], "give job.partition=qgpu_big"),
    ("extreme", "perlmutter"): (
        ["job.preflight=none", "job.spares=0"],
        "job.preflight=nccl: agents do it, and there are none under launch=step",
    ),
}


def on(recipe: str, cluster: str) -> list[str]:
    """The command line of a recipe on a machine."""
    more: list[str] = []
    for key in ((recipe, cluster), (recipe, profile_of(cluster).gpus_per_node)):
        more += MORE.get(key, ([], ""))[0]  # type: ignore[call-overload]
    return [f"recipe={recipe}", DATA, "run.root=/runs", f"cluster={cluster}", "job.account=project", *more]


@functools.cache
def composed(*what: str) -> TrainConfig:
    return load_config(what)


def laid_out(overrides: list[str]) -> tuple[TrainConfig, ParallelDims, SubmitConfig]:
    return _laid_out(*overrides)


@functools.cache
def _laid_out(*overrides: str) -> tuple[TrainConfig, ParallelDims, SubmitConfig]:
    where, what = split(overrides)
    settings, config = compose_submit(where, {}), copy.deepcopy(composed(*what))
    ranks = settings.job.nodes * settings.ranks_per_node
    return config, lay_out(config, ranks, settings.ranks_per_node, on_gpus=True), settings


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that has an sbatch, which nothing here starts."""
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\nexit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(sbatch.parent))
    monkeypatch.chdir(tmp_path)


@pytest.mark.req("B10", "D8")
def test_the_recipes_of_the_product_are_there() -> None:
    assert {"basic", "advanced", "extreme", "deepseek_7b_4x8"} <= set(RECIPES) <= set(choices("recipe"))


@pytest.mark.req("B10", "D8")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_says_for_whom_it_is_and_leaves_nothing_but_the_data(recipe: str) -> None:
    head = (configs.compose.FOLDER / f"recipe/{recipe}.yaml").read_text().split("defaults:")[0]
    assert re.search(r"nodes? .*of (\d or )?\d A100 \(40 GB or more\)", head.replace("\n# ", " "))
    config = load_config([f"recipe={recipe}", DATA])
    assert config.model.vocab_size is not None, "else a layout is not known before the data is"
    assert config.data.prefix == "/data/tokens"
    with pytest.raises(ConfigError, match=r"data\.prefix is not given: name your token files"):
        load_config([f"recipe={recipe}"])
    # Who only looks at a layout needs none.
    unread = load_config([f"recipe={recipe}"], reads_data=False)
    unread.data.prefix = config.data.prefix
    assert unread == config


@pytest.mark.req("B10", "D8")
@pytest.mark.parametrize("cluster", GPU_CLUSTERS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_lies_well_on_every_machine_and_fits_its_gpus(recipe: str, cluster: str) -> None:
    config, dims, settings = laid_out(on(recipe, cluster))
    assert notes(config, dims, settings.ranks_per_node) == []
    memory_gb = settings.cluster.gpu_memory_gb or 40
    gpu = yaml.safe_load((configs.compose.FOLDER / f"gpu/a100_{memory_gb:g}.yaml").read_text())
    _, kept = heaviest(config, dims, "cuda")
    # The rest is CUDA's and NCCL's own, and gaps between tensors.
    assert total(kept).device < 0.85 * gpu["memory_gb"] * 1e9


@pytest.mark.req("B10", "D8", "C11")
@pytest.mark.parametrize("cluster", GPU_CLUSTERS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.usefixtures("slurm")
def test_a_recipe_renders_a_job_or_says_what_the_machine_needs(recipe: str, cluster: str) -> None:
    overrides = on(recipe, cluster)
    config, dims, settings = laid_out(overrides)
    assert load_submit(split(overrides)[0]) == settings
    script = submit(config.run_folder, to_yaml(config), settings, dry_run=True).script
    (nodes,) = re.findall(r"(?m)^#SBATCH --nodes=(\d+)$", script)
    (ranks,) = re.findall(r"(?m)^#SBATCH --ntasks-per-node=(\d+)$", script)
    assert int(nodes) == settings.job.nodes + settings.job.spares
    assert f"--nodes={settings.job.nodes} " in script.replace("\\\n", " "), "how many train"
    assert (int(nodes) - settings.job.spares) * int(ranks) == dims.ranks
    assert ("--network-test-s=" in script) == (settings.job.preflight == "nccl")
    for key in ((recipe, cluster), (recipe, settings.cluster.gpus_per_node)):
        if key in MORE:
            bare = [one for one in overrides if one not in MORE[key][0]]  # type: ignore[index]
            with pytest.raises(ConfigError) as refused:
                load_submit(split(bare)[0])
            assert MORE[key][1] in str(refused.value)  # type: ignore[index]


@pytest.mark.req("B10", "D8", "C11")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.usefixtures("slurm")
def test_the_command_gives_the_same_script(recipe: str) -> None:
    overrides = on(recipe, "karolina")
    done = CliRunner().invoke(app, ["submit", "--dry-run", *overrides])
    assert done.exit_code == 0, done.exception
    config, _, settings = laid_out(overrides)
    assert submit(config.run_folder, to_yaml(config), settings, dry_run=True).script in done.output


@pytest.mark.req("B10")
def test_each_recipe_has_what_it_is_named_for() -> None:
    basic, dims, _ = laid_out(on("basic", "karolina"))
    assert (dims.ranks, dims.dp_replicate) == (8, 8) and basic.precision.compute_bytes == 2

    advanced, dims, settings = laid_out(on("advanced", "karolina"))
    assert dims.tp > 1 and dims.pp > 1 and not dims.spans_nodes("tp", settings.ranks_per_node)
    wide = load_config(["recipe=advanced", DATA, "precision.reduce=float32"])
    sent = [
        sum(one.sent_bytes for one in traffic(config, dims, 0) if "gradients" in one.what)
        for config in (advanced, wide)
    ]
    assert 0 < sent[0] <= 0.51 * sent[1]

    for cluster in ("karolina", "juwels_booster"):
        extreme, dims, settings = laid_out(on("extreme", cluster))
        assert dims.tp > 1 and dims.pp > 1 and extreme.precision.dynamic
        assert settings.job.spares and settings.job.preflight == "nccl"
    # In nodes of 8 nothing but copies and stages crosses the network.
    _, dims, _ = laid_out(on("extreme", "karolina"))
    assert dims.dp_replicate > 1 and not dims.spans_nodes("dp_shard", 8) and dims.spans_nodes("pp", 8)
    # More nodes are more copies.
    assert laid_out([*on("extreme", "karolina"), "nodes=32"])[1].dp_replicate == 2 * dims.dp_replicate


@pytest.mark.req("D8")
def test_the_worked_case_is_the_one_that_was_asked_for() -> None:
    config, dims, settings = laid_out(on("deepseek_7b_4x8", "karolina"))
    assert (settings.job.nodes, settings.ranks_per_node, dims.ranks) == (4, 8, 32)
    assert config.model.name == "deepseek_7b" and config.parallel.micro_batch_size == 2
    assert dims.tp > 1 and dims.dp > 1 and dims.tp * dims.dp == 32


@pytest.mark.req("B10")
def test_the_jobs_half_comes_with_the_recipe_and_leaves_the_last_word_to_the_user() -> None:
    def job(*overrides: str) -> tuple[int, int]:
        settings = compose_submit(split(["cluster=juwels_booster", *overrides])[0], {}).job
        return settings.nodes, settings.spares

    assert job("recipe=extreme") == (16, 1)
    assert job("recipe=extreme", "nodes=32") == job("nodes=32", "recipe=extreme") == (32, 1)
    assert job("recipe=extreme", "job.spares=0") == (16, 0)
    assert job("recipe=extreme", "job=advanced") == (4, 0)
    assert job("job=extreme") == (16, 1), "with any training"
    assert job("recipe=first_run") == job() == (1, 0)
    assert job_of(["recipe=basic", "recipe=extreme"]) == "extreme"
    with pytest.raises(ConfigError, match=r"job=extrem: there is no such job, did you mean extreme\?"):
        job("job=extrem")


def test_a_job_of_the_users_own_is_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("nodes: 1\nmax_restarts: 5\n")
    assert load_submit([f"job={path}", "cluster=local"]).job.max_restarts == 5
    path.write_text("preflight_s: 60\n")
    with pytest.raises(ConfigError, match=r"job\.yaml: job\.preflight_s has no effect without a preflight"):
        load_submit([f"job={path}", "cluster=local"])
    path.write_text("nods: 1\n")
    with pytest.raises(ConfigError, match="nods"):
        load_submit([f"job={path}", "cluster=local"])
    with pytest.raises(ConfigError, match=r"job\.nodes=16: without Slurm there is one node"):
        load_submit(["job=extreme", "cluster=local"])


@pytest.mark.usefixtures("slurm")
def test_a_sweep_takes_the_job_of_its_recipe_and_refuses_two() -> None:
    there = ["cluster=karolina", "job.account=project"]
    _, settings = make_plan(Request(["recipe=advanced", DATA, "optim.lr=1e-4,2e-4", *there]))
    assert settings.job.nodes == 4
    plan, settings = make_plan(Request(["recipe=advanced", "data.prefix=/data/a,/data/b", *there]))
    assert settings.job.nodes == 4 and len(plan.tasks) == 2
    two = ["recipe=basic,advanced", DATA, *there]
    with pytest.raises(ConfigError, match="come with job=advanced and job=basic: give job=NAME"):
        make_plan(Request(two))
    plan, settings = make_plan(Request([*two, "job=basic"]))
    assert settings.job.nodes == 1 and plan.folder.name == "recipe"
    with pytest.raises(ConfigError, match=r"data\.prefix is not given"):
        make_plan(Request(["recipe=basic", "optim.lr=1,2", *there]))


@pytest.mark.usefixtures("slurm")
def test_a_layout_is_that_of_the_recipes_machine() -> None:
    shown = CliRunner().invoke(app, ["layout", "recipe=deepseek_7b_4x8"])
    assert shown.exit_code == 0 and "on 4 nodes of 8: dp_shard 8 x tp 4" in shown.output
    shown = CliRunner().invoke(app, ["layout", "recipe=extreme", "cluster=juwels_booster"])
    assert shown.exit_code == 0 and "on 16 nodes of 4: pp 8 x dp_shard 2 x tp 4" in shown.output
    shown = CliRunner().invoke(app, ["layout", "recipe=extreme", "--nodes", "32"])
    assert shown.exit_code == 0 and "on 32 nodes of 8: pp 8 x dp_replicate 4" in shown.output


@pytest.mark.parametrize("recipe", ["basic", "first_run"])
def test_a_training_here_says_that_it_leaves_the_job_out(
    recipe: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("slurm.foreground.run_in_foreground", lambda *_: 0)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["train", "--ranks", "2", f"recipe={recipe}", DATA])
    assert done.exit_code == 0, done.exception
    assert ("configs/job/basic.yaml, the recipe's job, is for" in done.output) == (recipe == "basic")


@pytest.mark.slow
@pytest.mark.req("B10", "D8")
@pytest.mark.parametrize(
    "recipe", [one if one == "basic" else pytest.param(one, marks=pytest.mark.chaos) for one in RECIPES]
)
def test_a_dry_run_builds_a_rank_that_holds_what_the_formula_says(recipe: str) -> None:
    from train.dry_run import dry_run

    # Every layer is built in turn: a few tell as much. A rank of the last recipe has 12 of 95.
    fewer = [f"model.layers={10 if recipe != 'basic' else 6}"] if recipe != "extreme" else []
    config, dims, settings = laid_out([*on(recipe, "karolina"), *fewer])
    rank, _ = heaviest(config, dims, "cuda")
    found = dry_run(config, dims.ranks, rank, settings.ranks_per_node)
    assert found.built.parameters == found.reckoned.parameters > 0
    assert found.built.total == pytest.approx(found.reckoned.total, rel=0.05)
