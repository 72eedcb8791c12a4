"""The scripts' lines, given to the real sbatch and srun: on imitations of the sites, and run on the lab."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.programs import write_program
from harness.slurm_lab import SlurmLab, wait_until
from harness.toy import LOOP, MODEL, QUIET, REST
from typer.testing import CliRunner

import configs.compose
from contract.errors import ConfigError
from contract.run_folder import RunFolder
from slurm.lab import Lab, LabSettings
from slurm.render import render
from slurm.settings import JobConfig, SubmitConfig, load_submit
from slurm.sites.detect import detect
from slurm.sites.profile import Container, ContainerRuntime, GpuDirective, Launch, Profile
from slurm.submit import submit
from tools.cli_cluster import app
from train.config import load_config

# What the sites say of their nodes and partitions, in the words of slurm.conf. Cloud nodes count as there
# without a slurmd: sbatch --test-only plans with them.
SITES = {
    "juwels_booster": (
        "NodeName=jwb[1-400] Sockets=2 CoresPerSocket=24 ThreadsPerCore=2 RealMemory=490000 Gres=gpu:4",
        "PartitionName=booster Nodes=jwb[1-400] MaxNodes=384",
        "PartitionName=develbooster Nodes=jwb[1-8] MaxTime=02:00:00",
    ),
    "leonardo_booster": (
        "NodeName=lrdn[1-64] Sockets=1 CoresPerSocket=32 RealMemory=490000 Gres=gpu:a100:4",
        "PartitionName=boost_usr_prod Nodes=lrdn[1-64] MaxTime=4-00:00:00",
    ),
    "karolina": (
        "NodeName=acn[1-72] Sockets=2 CoresPerSocket=64 RealMemory=1000000 Gres=gpu:8",
        "PartitionName=qgpu Nodes=acn[1-72] MaxNodes=16 MaxTime=2-00:00:00",
    ),
    "berzelius": (
        "NodeName=thin[1-60] Sockets=2 CoresPerSocket=64 ThreadsPerCore=2 RealMemory=1000000 Gres=gpu:8 Features=thin",
        "NodeName=fat[1-34] Sockets=2 CoresPerSocket=64 ThreadsPerCore=2 RealMemory=2000000 Gres=gpu:8 Features=fat",
        "PartitionName=berzelius Nodes=thin[1-60],fat[1-34] Default=YES MaxTime=3-00:00:00",
    ),
    "jean_zay": (
        "NodeName=jza[1-52] Sockets=2 CoresPerSocket=32 ThreadsPerCore=2 RealMemory=500000 Gres=gpu:8 Features=a100",
        "NodeName=jzv[1-100] Sockets=2 CoresPerSocket=20 RealMemory=190000 Gres=gpu:4 Features=v100",
        "PartitionName=gpu_all Nodes=jza[1-52],jzv[1-100] Default=YES MaxTime=100:00:00",
    ),
    "horeka_green": (
        "NodeName=hkn[1-64] Sockets=2 CoresPerSocket=38 ThreadsPerCore=2 RealMemory=500000 Gres=gpu:4",
        "PartitionName=accelerated Nodes=hkn[1-64] OverSubscribe=EXCLUSIVE MaxTime=2-00:00:00",
    ),
    "perlmutter": (
        "NodeName=nid[1-64] Sockets=1 CoresPerSocket=64 ThreadsPerCore=2 RealMemory=250000 Gres=gpu:4 "
        "Features=gpu,hbm40g",
        "NodeName=nid[2001-2016] Sockets=1 CoresPerSocket=64 ThreadsPerCore=2 RealMemory=250000 Gres=gpu:4 "
        "Features=gpu,hbm80g",
        "PartitionName=gpu_ss11 Nodes=nid[1-64],nid[2001-2016] Default=YES",
    ),
    "azure_ndv4": (
        "NodeName=nd[1-16] Sockets=2 CoresPerSocket=48 RealMemory=900000 Gres=gpu:8",
        "PartitionName=hpc Nodes=nd[1-16]",
    ),
    "a100_ib": (
        "NodeName=ib[1-8] Sockets=2 CoresPerSocket=32 RealMemory=500000 Gres=gpu:4",
        "PartitionName=gpu Nodes=ib[1-8] Default=YES",
    ),
}
CLOUD = ("ResumeProgram=/bin/true", "SuspendProgram=/bin/true", "SuspendTime=-1")


def lab_of(name: str, *more: str) -> Lab:
    """A lab with one real node of two CPUs and two fake GPUs, and the nodes that `more` tells of."""
    folder = Path(tempfile.gettempdir()) / f"trierarch-test-{os.getuid()}-{name}-{os.getpid()}"
    lab = Lab(folder)
    lab.up(LabSettings(nodes=1, cpus=2, gpus=2, extra=more))
    return lab


@pytest.fixture(scope="module")
def sites() -> Iterator[Lab]:
    lines = [
        f"{line} State=CLOUD" if line.startswith("NodeName") else line
        for site in SITES.values()
        for line in site
    ]
    # One cluster has one default partition; the sites' own are named on sbatch's command line.
    lab = lab_of("sites", *CLOUD, *(line.replace(" Default=YES", "") for line in lines))
    yield lab
    lab.down()
    shutil.rmtree(lab.folder, ignore_errors=True)


@pytest.mark.req("C3", "C11")
@pytest.mark.parametrize("launch", Launch)
@pytest.mark.parametrize("name", SITES)
def test_sbatch_takes_the_script_of_every_site(name: str, launch: Launch, sites: Lab, tmp_path: Path) -> None:
    settings = configs.compose.fill(SubmitConfig, [f"cluster={name}"])
    settings.job = JobConfig(nodes=2, spares=int(launch is Launch.agents), account="project", launch=launch)
    settings.validate({})
    script = tmp_path / "job.sbatch"
    script.write_text(render(RunFolder(tmp_path / "run"), settings, {}))
    default = re.search(r"PartitionName=(\w+).* Default=YES", "\n".join(SITES[name]))
    options = [f"--partition={default[1]}"] if default else []
    # sbatch says on stderr when and where the job would start.
    done = subprocess.run(
        ["sbatch", "--test-only", *options, str(script)],
        env=sites.full_environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0 and "to start at" in done.stderr, done.stderr


def test_imitated_sites_refuse_what_their_limits_do(sites: Lab, tmp_path: Path) -> None:
    """So that the test above can fail: the same script for more nodes than the partition allows."""
    settings = configs.compose.fill(
        SubmitConfig, ["cluster=juwels_booster", "job.nodes=385", "job.account=x"]
    )
    with pytest.raises(ConfigError, match=r"give job\.partition=largebooster"):
        settings.validate({})
    script = tmp_path / "job.sbatch"
    script.write_text(render(RunFolder(tmp_path / "run"), settings, {}))
    refused = subprocess.run(
        ["sbatch", "--test-only", str(script)],
        env=sites.full_environment(),
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert refused.returncode != 0


def rewritten(run: RunFolder, settings: SubmitConfig, told: str, nodes: list[str]) -> str:
    """The rendered script with a shell line in the place of Python, started on each node without a supervisor."""
    before, _, after = render(run, settings, {}).partition("\nexec ")
    command = shlex.split(after.partition("-- \\\n")[2].replace("\\\n", " "))
    python = command.index("-u") - 1
    started = [*command[:python], "bash", "-c", told]
    filled = [
        shlex.join(started).replace("{node}", node).replace("{job}.r{attempt}", "out") for node in nodes
    ]
    return f"{before}\n" + "".join(f"{line} &\n" for line in filled) + "wait\n"


def run_job(lab: SlurmLab | Lab, run: RunFolder, script: str) -> list[str]:
    """Run a script as a job and return what it and its ranks printed, sorted."""
    run.create()
    run.code.mkdir(exist_ok=True)
    run.job_script.write_text(script)
    job = lab.run("sbatch", "--parsable", str(run.job_script)).strip()

    def over() -> bool:
        return "JobState=COMPLETED" in lab.run("scontrol", "--oneliner", "show", "job", job)

    texts = "".join(path.read_text() for path in run.logs.glob("*")) if wait_until(over, 30) else ""
    assert texts, f"{lab.run('scontrol', 'show', 'job', job)} {list(run.logs.glob('*'))}"
    return sorted(line for line in texts.splitlines() if "lacks support" not in line)


SEEN = 'sleep 1; echo "$(hostname) gpus=$CUDA_VISIBLE_DEVICES cpus=$SLURM_CPUS_ON_NODE tasks=$SLURM_NTASKS"'


@pytest.mark.req("C11")
@pytest.mark.parametrize("directive", [GpuDirective.gres, GpuDirective.gpus_per_node])
def test_an_agent_sees_all_that_the_job_has_of_its_node(
    directive: GpuDirective, lab: SlurmLab, tmp_path: Path
) -> None:
    """Two at once on each node, as when one is started anew, and in a job that asks for half of the cores."""
    cluster = Profile(name="lab", partition="low", gpu_directive=directive, gpu_type="a100", gpus_per_node=2)
    cluster.exclusive = True
    job = JobConfig(
        nodes=1, spares=1, cpus_per_rank=1, sbatch_lines=["--hint=nomultithread", "--nodelist=n3,n4"]
    )
    run = RunFolder(tmp_path / "run")
    script = rewritten(run, SubmitConfig(cluster, job), SEEN, ["n3", "n3", "n4", "n4"])
    assert run_job(lab, run, script) == [
        f"{node} gpus=0,1 cpus=2 tasks=1" for node in ("n3", "n3", "n4", "n4")
    ]


@pytest.mark.req("C11")
def test_a_step_starts_the_ranks_in_the_container_with_their_cores(lab: SlurmLab, tmp_path: Path) -> None:
    """A stand-in for apptainer: it takes the words up to the image and becomes the rest."""
    stand_in = write_program(
        tmp_path / "bin/apptainer",
        'until [ "$1" = /images/x.sif ]; do shift; done\nshift\nIMAGE=x exec "$@"',
    )
    cluster = Profile(name="lab", partition="low", ranks_per_node=2, cpus_per_node=2, launch=Launch.step)
    cluster.container = Container(ContainerRuntime.apptainer, "/images/x.sif")
    cluster.env = {"PATH": f"{stand_in.parent}:/usr/bin:/bin"}
    run = RunFolder(tmp_path / "run")
    told = 'echo "$SLURM_PROCID of $SLURM_NTASKS: $SLURM_CPUS_PER_TASK core, image $IMAGE"'
    script = rewritten(run, SubmitConfig(cluster, JobConfig(nodes=2)), told, ["all"])
    assert run_job(lab, run, script) == [f"{rank} of 4: 1 core, image x" for rank in range(4)]
    assert {path.name for path in run.logs.glob("out.*")} == {f"out.{rank}.log" for rank in range(4)}


@pytest.mark.req("C11")
def test_srun_binds_each_rank_to_the_cores_near_its_gpu(tmp_path: Path) -> None:
    lab = lab_of("bind", "TaskPlugin=task/affinity")
    try:
        cluster = Profile(name="lab", partition="low", gpus_per_node=2, cpus_per_node=2, exclusive=True)
        cluster.gpu_cpus = ["1", "0"]
        run = RunFolder(tmp_path / "run")
        told = 'echo "$SLURM_PROCID: $(grep Cpus_allowed_list /proc/self/status | cut -f2)"'
        script = rewritten(run, SubmitConfig(cluster, JobConfig(launch=Launch.step)), told, ["all"])
        assert run_job(lab, run, script) == ["0: 1", "1: 0"]
    finally:
        lab.down()
        shutil.rmtree(lab.folder, ignore_errors=True)


@pytest.fixture
def own_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of configs/ to add profiles to."""
    shutil.copytree(configs.compose.FOLDER, tmp_path / "configs")
    monkeypatch.setattr("configs.compose.FOLDER", tmp_path / "configs")
    return tmp_path / "configs"


@pytest.mark.req("C3")
def test_a_profile_is_made_from_what_slurm_says_and_a_job_runs_with_it(
    lab: SlurmLab, own_configs: Path, tmp_path: Path, toy_tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        monkeypatch.delenv(name)
    for name, value in lab.environment.items():
        monkeypatch.setenv(name, value)
    trierarch = CliRunner()
    made = trierarch.invoke(app, ["init", "mine", "--partition", "high", "--probe"], catch_exceptions=False)
    assert made.exit_code == 0 and "GPUs: the node shows none" in made.output, made.output
    profile = configs.compose.load(own_configs / "cluster/mine.yaml", Profile)
    assert (profile.partition, profile.gpus_per_node, profile.cpus_per_node) == ("high", 2, 2)
    assert profile.max_array_size == 1001
    assert (profile.gpu_directive, profile.gpu_model, profile.requeue) == (GpuDirective.gres, "a100", True)
    assert [(limit.partition, limit.max_nodes, limit.max_hours) for limit in profile.limits] == [
        ("high", 4, None),
        ("low", 4, None),
    ]
    assert profile.limits[1].comment == "the default, can be pre-empted (REQUEUE), grace time 5 s"
    assert profile.host_patterns == [socket.gethostname()]
    assert detect(socket.gethostname(), {"PATH": ""}) == "mine"
    with pytest.raises(ConfigError, match=r"is there already: give --force"):
        trierarch.invoke(app, ["init", "mine"], catch_exceptions=False)
    with pytest.raises(ConfigError, match=r"there is no such partition, did you mean high\?"):
        trierarch.invoke(app, ["init", "other", "--partition", "hihg"], catch_exceptions=False)
    shown = trierarch.invoke(app, ["show", "mine"], catch_exceptions=False).output
    assert "job.partition=high: at most 4 nodes, any time" in shown
    assert "memory: a job that asks for none" in shown
    assert "\n  mine " in trierarch.invoke(app, ["list"], catch_exceptions=False).output

    toy = [
        *MODEL,
        *LOOP,
        *REST,
        *QUIET,
        f"data.prefix={toy_tokens}",
        f"run.root={tmp_path}",
        "run.name=first",
    ]
    config = load_config([*toy, "loop.steps=3"])
    # The lab's GPUs are not real, which the health check would find.
    job = ["job.time_limit=00:05:00", "cluster.memory=1G", "job.health_check=false"]
    settings = load_submit(["cluster=mine", *job], lab.environment)
    dry = submit(
        config.run_folder, configs.compose.to_yaml(config), settings, dry_run=True, environ=lab.environment
    )
    assert "--gres=gpu:2" in dry.script and not config.run_folder.path.exists()
    done = submit(config.run_folder, configs.compose.to_yaml(config), settings, environ=lab.environment)
    assert done.job_id
    lab.wait_for_state(done.job_id, {"COMPLETED"}, 60)
    assert config.run_folder.finished.exists()
