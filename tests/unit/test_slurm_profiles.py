"""The profiles that come with the project: sound, honest about what is not known, and their scripts reviewed."""

import os
import re
from pathlib import Path

import pytest

import configs.compose
from contract.errors import ConfigError
from contract.run_folder import RunFolder
from slurm.client import parse_duration
from slurm.command import cpu_sets
from slurm.render import render
from slurm.settings import SubmitConfig
from slurm.sites.profile import Profile, Scheduler

PROFILES = configs.compose.choices("cluster")
SITES = [name for name in PROFILES if name not in ("lab", "local", "slurm")]
GOLDEN = Path(__file__).parents[1] / "golden"
REWRITE = "TRIERARCH_REWRITE_GOLDEN"
# Scripts with parts that no profile has by itself.
VARIANTS = {
    "juwels_booster.step": ["cluster=juwels_booster", "job.launch=step", "cluster.mpi=pmix"],
    "leonardo_booster.spares": ["cluster=leonardo_booster", "job.nodes=8", "job.spares=1"],
    "a100_ib.apptainer": [
        "cluster=a100_ib",
        "cluster.container.runtime=apptainer",
        "job.image=/images/torch.sif",
    ],
    "a100_ib.pyxis": ["cluster=a100_ib", "cluster.container.runtime=pyxis", "job.image=/images/torch.sqsh"],
    "lab.sweep": ["cluster=lab"],
}


def load(*overrides: str) -> SubmitConfig:
    return configs.compose.fill(SubmitConfig, overrides)


def profile_of(name: str) -> Profile:
    return load(f"cluster={name}").cluster


@pytest.mark.req("C3", "C11")
@pytest.mark.parametrize("name", [*PROFILES, *VARIANTS])
def test_script_is_the_reviewed_one(name: str) -> None:
    settings = load(*VARIANTS.get(name, [f"cluster={name}"]))
    settings.cluster.python = settings.cluster.python or "/project/venv/bin/python"
    if settings.contained:  # the supervisor's, outside
        settings.cluster.python = "python3"
    if settings.cluster.scheduler is Scheduler.slurm:
        settings.job.account = "project"
        settings.job.nodes = max(2, settings.job.nodes)
    settings.validate({})
    script = render(RunFolder(Path("/scratch/runs/example")), settings, {}, sweep=name.endswith(".sweep"))
    script = re.sub(r"(?m)^exec \S+ -u", "exec /project/venv/bin/python -u", script)
    file = GOLDEN / f"{name}.sbatch"
    if os.environ.get(REWRITE) == "1":
        file.parent.mkdir(exist_ok=True)
        file.write_text(script)
    assert script == file.read_text(), (
        f"if this change is wanted: {REWRITE}=1 python -m pytest {__file__}, and review"
    )


def test_no_reviewed_script_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.sbatch")} == {*PROFILES, *VARIANTS}


@pytest.mark.req("C3")
def test_machines_that_must_have_a_profile_have_one() -> None:
    machines = {"juwels_booster", "leonardo_booster", "karolina", "berzelius", "jean_zay", "horeka_green"}
    assert machines | {"perlmutter", "azure_ndv4", "a100_ib", "slurm", "lab", "local"} <= set(PROFILES)


@pytest.mark.req("C3")
@pytest.mark.parametrize("name", SITES)
def test_profile_of_a_site_says_where_it_is_from_and_what_is_not_known(name: str) -> None:
    profile = profile_of(name)
    assert profile.name == name and profile.description
    assert profile.sources and profile.unverified
    assert profile.gpus_per_node > 0
    if profile.gpu_cpus:
        cores = [core for cores in cpu_sets(profile) for core in cores]
        assert len(cores) == len(set(cores)), "two GPUs share a core"
    defaults = [
        limit
        for limit in profile.limits
        if limit.partition in (None, profile.partition) and limit.qos == profile.qos
    ]
    assert bool(defaults) == bool(profile.limits), (
        "the limits say nothing about the default partition and QOS"
    )
    assert parse_duration(profile.time_limit)


def test_no_two_profiles_claim_a_host() -> None:
    patterns = [pattern for name in PROFILES for pattern in profile_of(name).host_patterns]
    assert len(patterns) == len(set(patterns))


@pytest.mark.parametrize("name", PROFILES)
def test_settings_of_a_submission_are_read_back_as_they_were(name: str, tmp_path: Path) -> None:
    settings = load(f"cluster={name}", "job.sbatch_lines=[--nice]")
    file = tmp_path / "submit.yaml"
    file.write_text(configs.compose.to_yaml(settings))
    assert configs.compose.load(file, SubmitConfig) == settings


@pytest.mark.parametrize(
    "text", ["name: x\nlimit: []\n", "limits: [{partition: a, nodes: 3}]\n", "mpi: openmpi\n"]
)
def test_misspelt_profile_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        configs.compose.load(tmp_path / "mine.yaml", Profile)


def test_the_guides_profile_and_template_work(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs/first-cluster.md").read_text()
    (profile,) = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    (template,) = re.findall(r'```\n(\{% extends "job.*?)```', guide, re.DOTALL)
    (tmp_path / "mysite.yaml").write_text(profile)
    (tmp_path / "own.j2").write_text(template)
    settings = SubmitConfig(cluster=configs.compose.load(tmp_path / "mysite.yaml", Profile))
    settings.job.account, settings.job.template = "x", str(tmp_path / "own.j2")
    settings.validate({})
    script = render(RunFolder(tmp_path / "run"), settings)
    assert "module load CUDA\n" in script and 'cp "$WORK/license.dat"' in script
    settings.job.nodes, settings.job.time_limit = 16, "4-00:00:00"
    with pytest.raises(ConfigError) as refusal:
        settings.validate({})
    assert str(refusal.value) in " ".join(guide.split())
