"""The batch script, the profiles and the submit configuration."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness.programs import write_program
from hypothesis import given
from hypothesis import strategies as st

import configs.compose
from contract.errors import ConfigError
from contract.run_folder import RunFolder
from slurm.client import clean_environment
from slurm.render import render
from slurm.settings import JobConfig, SubmitConfig, load_submit, parse_time_limit
from slurm.sites.detect import detect, scheduler_environment
from slurm.sites.profile import (
    Container,
    ContainerRuntime,
    GpuDirective,
    Launch,
    MpiFlavour,
    Profile,
    Scheduler,
)
from slurm.submit import check_stop_signal

PROFILES = configs.compose.choices("cluster")
# No sbatch is there to be called: these tests look at text.
BARE = {"PATH": "/nonexistent"}


def directives(script: str) -> dict[str, str]:
    """The #SBATCH options as a shell reads them; sbatch's own quoting rules agree where a lab test shows it."""
    lines = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    pairs = (shlex.split(line)[0].partition("=") for line in lines)
    return {key.removeprefix("--"): value for key, _, value in pairs}


def final_command(script: str) -> list[str]:
    return shlex.split(script[script.index("\nexec ") :].replace("\\\n", " "))[1:]


def split_command(script: str) -> tuple[list[str], list[str]]:
    """The supervisor's words, and those of what it starts."""
    command = final_command(script)
    end = command.index("--")
    return command[:end], command[end + 1 :]


def settings_of(name: str, **job: object) -> SubmitConfig:
    settings = configs.compose.fill(SubmitConfig, [f"cluster={name}"])
    settings.job = JobConfig(**{"account": "project", **job})  # type: ignore[arg-type]
    if settings.cluster.scheduler is Scheduler.local:
        settings.job.account = None
    return settings


@pytest.mark.req("C3", "C11")
@pytest.mark.parametrize("name", PROFILES)
def test_script_of_every_profile_is_sound_shell(name: str, tmp_path: Path) -> None:
    settings = settings_of(name)
    settings.validate(BARE)
    script = tmp_path / "job.sbatch"
    script.write_text(render(RunFolder(tmp_path / "run"), settings, BARE))
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--shell=bash", str(script)], check=True, timeout=30)


@pytest.mark.req("C3")
def test_a100_site_asks_for_its_gpus_cores_and_network(tmp_path: Path) -> None:
    settings = settings_of(
        "juwels_booster", nodes=16, account="hai_x", time_limit="02:00:00", exclude="jwb[3-4]"
    )
    script = render(RunFolder(tmp_path / "big"), settings, BARE)
    options = directives(script)
    expected = {
        "job-name": "big",
        "account": "hai_x",
        "partition": "booster",
        "nodes": "16",
        "ntasks-per-node": "4",
        "cpus-per-task": "12",
        "gres": "gpu:4",
        "time": "02:00:00",
        "exclude": "jwb[3-4]",
        "open-mode": "append",
        "exclusive": "",
        "no-kill": "",
        "requeue": "",
    }
    assert expected.items() <= options.items()
    # The supervisor watches the time limit; what Slurm sent before it would come up to a minute early.
    assert "signal" not in options
    for line in ("OMP_NUM_THREADS=12", "NCCL_SOCKET_IFNAME=ib0", "GLOO_SOCKET_IFNAME=ib0"):
        assert f"export {line}\n" in script
    supervise, srun = split_command(script)
    assert {"--requeue=slurm", "--master-suffix=i", "--gpus-per-node=4", "--gpu-memory-gb=40"} <= set(
        supervise
    )
    assert {"--nodes=16", "--ranks-per-node=4", "--health-check", "--exclude-for-h=24"} <= set(supervise)
    assert {"--nodes=1", "--ntasks=1", "--gres=gpu:4", "--cpu-bind=none", "--nodelist={node}"} <= set(srun)
    assert srun[-1] == "train.agent"


@pytest.mark.req("C3", "C11")
def test_ranks_are_placed_on_the_cores_near_their_gpus(tmp_path: Path) -> None:
    cluster = Profile(
        gpus_per_node=2, cpus_per_node=8, exclusive=True, gpu_cpus=["4-5,7", "0-1"], cpu_bind="none"
    )
    for_agents, _ = split_command(render(RunFolder(tmp_path), SubmitConfig(cluster, JobConfig())))
    assert "--rank-cpus=[[4,5,7],[0,1]]" in for_agents
    step = JobConfig(launch=Launch.step)
    _, srun = split_command(render(RunFolder(tmp_path), SubmitConfig(cluster, step)))
    assert "--cpu-bind=mask_cpu:0xb0,0x3" in srun and not any("--cpus-per-task" in word for word in srun)
    # One rank may have been given either GPU, and of a shared node any cores.
    one = SubmitConfig(cluster, JobConfig(ranks_per_node=1))
    assert "--rank-cpus=numa" in split_command(render(RunFolder(tmp_path), one))[0]
    cluster.exclusive = False
    assert "rank-cpus" not in render(RunFolder(tmp_path), one)
    _, srun = split_command(render(RunFolder(tmp_path), SubmitConfig(cluster, step)))
    assert {"--cpus-per-task=4", "--cpu-bind=none"} <= set(srun)


@pytest.mark.parametrize(
    ("lists", "sentence"),
    [(["0-1"], r"1 lists of cores and there are 2 GPUs"), (["0-1", "2-"], r"'2-' is no list of cores")],
)
def test_map_of_cores_that_is_none_is_refused(lists: list[str], sentence: str, tmp_path: Path) -> None:
    settings = SubmitConfig(Profile(gpus_per_node=2, gpu_cpus=lists), JobConfig())
    with pytest.raises(ConfigError, match=sentence):
        render(RunFolder(tmp_path), settings)


@pytest.mark.req("C3")
def test_adapters_are_named_to_nccl_and_ucx(tmp_path: Path) -> None:
    script = render(RunFolder(tmp_path), SubmitConfig(Profile(hcas=["mlx5_0", "mlx5_3:2"]), JobConfig()))
    assert "export NCCL_IB_HCA==mlx5_0,mlx5_3:2\n" in script
    assert "export UCX_NET_DEVICES=mlx5_0:1,mlx5_3:2\n" in script


@pytest.mark.req("C11")
def test_step_starts_all_ranks_by_one_srun_of_the_sites_mpi(tmp_path: Path) -> None:
    cluster = Profile(mpi=MpiFlavour.pmix, cpus_per_node=8, ranks_per_node=4, master_suffix="i")
    script = render(RunFolder(tmp_path), SubmitConfig(cluster, JobConfig(launch=Launch.step)))
    supervise, srun = split_command(script)
    assert {"--kill-on-bad-exit=1", "--mpi=pmix", "--cpus-per-task=2"} <= set(srun)
    assert srun[-4:] == ["-m", "train", "--config", str(tmp_path / "config.yaml")]
    assert "--launch=step" in supervise and "--health-check" not in supervise
    assert "export TRIERARCH_MASTER_SUFFIX=i\n" in script
    # A step dies with its node, and the job's end is what brings it back.
    assert "no-kill" not in directives(script)


def test_spares_are_more_nodes_that_do_not_train(tmp_path: Path) -> None:
    script = render(RunFolder(tmp_path), SubmitConfig(Profile(), JobConfig(nodes=4, spares=2)))
    assert directives(script)["nodes"] == "6"
    assert "--nodes=4" in split_command(script)[0]


@pytest.mark.req("C12")
def test_script_of_a_sweep_leaves_the_task_to_the_supervisor(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "lr")
    script = render(folder, SubmitConfig(Profile(), JobConfig(launch=Launch.step)), sweep=True)
    assert directives(script)["output"] == f"{folder.logs}/%A_%a.batch.log"
    supervise, srun = split_command(script)
    assert str(folder.path) in supervise and srun[-1] == "{run}/config.yaml"
    assert "--output={run}/logs/{job}.r{attempt}.%t.log" in srun
    assert f"cd {folder.code}\n" in script
    odd = RunFolder(tmp_path / "50%")
    with pytest.raises(ConfigError, match="has a % in it"):
        render(odd, SubmitConfig(Profile(), JobConfig(launch=Launch.step)), sweep=True)
    render(odd, SubmitConfig(Profile(), JobConfig()), sweep=True)


@pytest.mark.req("C3")
@pytest.mark.parametrize("launch", Launch)
def test_trainer_runs_in_the_container_and_the_supervisor_outside(launch: Launch, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    job = JobConfig(launch=launch, image="/images/torch.sif")
    cluster = Profile(
        container=Container(ContainerRuntime.apptainer, binds=["/data"]),
        gpus_per_node=4,
        python="/opt/python",
    )
    script = render(run, SubmitConfig(cluster, job))
    supervise, command = split_command(script)
    assert supervise[0] == sys.executable
    # Agents in an image could not have the job requeued.
    assert "no-kill" not in directives(script)
    inside = command[command.index("apptainer") :]
    assert inside[:2] == ["apptainer", "exec"] and "--nv" in inside
    assert {f"--bind={run.path}", "--bind=/data", f"--pwd={run.code}"} <= set(inside)
    image = inside.index("/images/torch.sif")
    assert inside[image + 1 : image + 4] == ["/opt/python", "-u", "-m"]

    cluster.container.runtime = ContainerRuntime.pyxis
    _, command = split_command(render(run, SubmitConfig(cluster, job)))
    assert {
        "--container-image=/images/torch.sif",
        f"--container-mounts={run.path}:{run.path},/data:/data",
        f"--container-workdir={run.code}",
    } <= set(command)
    cluster.python = None
    _, command = split_command(render(run, SubmitConfig(cluster, job)))
    assert "python3" in command and sys.executable not in command


@pytest.mark.req("C11")
def test_users_template_may_extend_the_built_in_one(tmp_path: Path) -> None:
    own = tmp_path / "job.sbatch.j2"  # the name of the one that it extends
    own.write_text(
        '{% extends "job.sbatch.j2" %}\n'
        "{% block setup %}{{ super() }}module load site/{{ job.nodes }}\n{% endblock %}\n"
    )
    settings = SubmitConfig(Profile(template="/not/there"), JobConfig(nodes=3, template=str(own)))
    script = render(RunFolder(tmp_path / "run"), settings)
    assert (
        "module load site/3\n" in script
        and "train.agent" in script
        and script.startswith("#!/bin/bash\n#SBATCH")
    )
    for text, sentence in (
        ("{% block setup %}", r"job.sbatch.j2 line 1: "),
        ("{{ nodes }}", r"'nodes' is undefined"),
        ("echo", r"does not begin with #! or does not start slurm.supervise"),
    ):
        own.write_text(text)
        with pytest.raises(ConfigError, match=sentence):
            render(RunFolder(tmp_path / "run"), settings)
    own.unlink()
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file or directory\)"):
        render(RunFolder(tmp_path / "run"), settings)


def test_gpu_directives(tmp_path: Path) -> None:
    def gpu_options(cluster: Profile) -> dict[str, str]:
        script = render(RunFolder(tmp_path), SubmitConfig(cluster, JobConfig(ranks_per_node=2)))
        return {key: value for key, value in directives(script).items() if key.startswith("g")}

    assert gpu_options(Profile(gpus_per_node=4)) == {}
    assert gpu_options(Profile(gpus_per_node=4, gpu_directive=GpuDirective.gres, gpu_type="a100")) == {
        "gres": "gpu:a100:2"
    }
    assert gpu_options(Profile(gpus_per_node=4, gpu_directive=GpuDirective.gpus_per_node)) == {
        "gpus-per-node": "2"
    }


def test_script_follows_the_profile_and_the_job(tmp_path: Path) -> None:
    cluster = Profile(
        requeue=False,
        modules=["CUDA/12 x"],
        setup=["ulimit -n 4096"],
        env={"NCCL_IB_HCA": "mlx5_0,mlx5_1", "ODD": "it's $HOME"},
        unset=["LD_PRELOAD"],
        sbatch_lines=["--licenses=scratch"],
        memory="480G",
        python="/opt/py/bin/python",
    )
    script = render(RunFolder(tmp_path), SubmitConfig(cluster, JobConfig(sbatch_lines=["--nice=5"])))
    expected = {"no-requeue": "", "licenses": "scratch", "nice": "5", "mem": "480G"}
    assert expected.items() <= directives(script).items()
    body = script[script.index("set -euo") : script.index("\ncd ")] + '\nprintf %s "$ODD"\n'
    body = body.replace("module load", "printf '%s|'")
    said = subprocess.run(["bash", "-c", body], capture_output=True, text=True, check=True, timeout=10).stdout
    assert said == "CUDA/12 x|it's $HOME"
    assert "unset LD_PRELOAD\n" in script and "ulimit -n 4096\n" in script
    command = final_command(script)
    assert command[0] == "/opt/py/bin/python" and "--requeue=successor" in command
    never = final_command(render(RunFolder(tmp_path), SubmitConfig(Profile(), JobConfig(requeue=False))))
    assert "--requeue=never" in never


def test_enclosing_job_does_not_leak_into_the_ranks(tmp_path: Path) -> None:
    script = render(RunFolder(tmp_path), SubmitConfig(Profile(), JobConfig()))
    body = script[script.index("set -euo") : script.index("\ncd ")]
    leaks = {
        "SLURM_CPU_BIND_TYPE": "mask",
        "SLURM_CPUS_PER_TASK": "3",
        "SLURM_MEM_PER_NODE": "1",
        "RANK": "3",
        "MASTER_ADDR": "x",
    }
    keep = {"SLURM_CONF": "/etc/conf", "SLURM_JOB_ID": "7"}
    seen = subprocess.run(
        ["bash", "-c", body + "\nenv"],
        env=leaks | keep,
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    ).stdout
    assert not any(f"{name}=" in seen for name in leaks)
    assert all(f"{name}={value}" in seen for name, value in keep.items())


_PRINTABLE = st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_characters="/{").filter(
    str.isprintable
)
_NAMES = st.text(_PRINTABLE, min_size=1)


@given(name=_NAMES)
def test_any_path_survives_quoting(name: str) -> None:
    run = RunFolder(Path("/base") / name)
    script = render(run, SubmitConfig(Profile(), JobConfig(launch=Launch.step)))
    command = final_command(script)
    assert command[command.index("slurm.supervise") + 1] == str(run.path.absolute())
    assert command[-1] == str(run.config.absolute())
    escaped = str(run.logs.absolute()).replace("%", "%%")
    assert f"--output={escaped}/{{job}}.r{{attempt}}.%t.log" in command
    assert directives(script)["output"] == f"{escaped}/%j.batch.log"


@pytest.mark.parametrize("name", ["a\nb", "a\x85b", "a{attempt}"])
def test_path_that_no_script_can_carry_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="another name"):
        render(RunFolder(Path("/base") / name), SubmitConfig(Profile(), JobConfig()))


def test_local_script_asks_slurm_for_nothing(tmp_path: Path) -> None:
    script = render(RunFolder(tmp_path), settings_of("local", ranks_per_node=2))
    supervise, command = split_command(script)
    assert "#SBATCH" not in script and command == [sys.executable, "-u", "-m", "train.agent"]
    assert {"--ranks-per-node=2", "--requeue=never"} <= set(supervise)
    step = render(RunFolder(tmp_path), settings_of("local", ranks_per_node=2, launch=Launch.step))
    supervise, command = split_command(step)
    assert command[0].endswith("mpirun") and "--log={run}/logs/{job}.r{attempt}.log" in supervise
    one = render(RunFolder(tmp_path), settings_of("local", ranks_per_node=1, launch=Launch.step))
    assert split_command(one)[1][1:] == ["-u", "-m", "train", "--config", str(tmp_path / "config.yaml")]


@given(st.integers(0, 30), st.integers(0, 99), st.integers(0, 59), st.integers(0, 59))
def test_time_limits_are_read_as_slurm_reads_them(days: int, hours: int, minutes: int, seconds: int) -> None:
    total = days * 86400 + hours * 3600 + minutes * 60 + seconds
    text = f"{days}-{hours:02}:{minutes:02}:{seconds:02}"
    if total == 0:
        with pytest.raises(ConfigError):
            parse_time_limit("job.time_limit", text)
    else:
        assert parse_time_limit("job.time_limit", text) == total


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["job.time_limit=soon"], r"job.time_limit=soon: write a time limit as HH:MM:SS"),
        (["job.time_limit=10:99:00"], r"job.time_limit=10:99:00"),
        (["cluster=local", "job.time_limit=00:00:30"], r"00:00:30 is not above cluster.stop_margin_s=60"),
        (["job.nodes=0"], r"job.nodes=0: must not be below 1"),
        (["job.spares=-1"], r"job.spares=-1: must not be below 0"),
        (
            ["job.spares=1", "job.launch=step"],
            r"job.spares=1: a node can only be replaced under launch=agents",
        ),
        (["job.ranks_per_node=0"], r"job.ranks_per_node=0: must not be below 1"),
        (["cluster.stop_margin_s=-1"], r"cluster.stop_margin_s=-1: must not be below 0"),
        (["job.image=x.sif"], r"job.image=x.sif: nothing runs it, give cluster.container.runtime"),
        (["cluster.topology=file"], r"cluster.topology says what the site has and changes no job"),
        (["cluster.container.runtime=apptainer"], r"runs no image: give job.image=PATH"),
        (
            ["cluster.container.runtime=apptainer", "job.image=x.sif", "job.spares=1"],
            r"job.spares=1: a node that fails ends a job in a container",
        ),
        (
            ["cluster=local", "cluster.container.runtime=pyxis", "job.image=x"],
            r"pyxis: it is a part of Slurm",
        ),
        (["cluster.mpi=pmix"], r"cluster.mpi has no effect under launch=agents"),
        (["job.launch=step", "job.health_check=true"], r"job.health_check has no effect under launch=step"),
        (["cluster=local", "job.exclude_for_h=1"], r"job.exclude_for_h: there is no Slurm here"),
        (["cluster=local", "job.spares=1"], r"job.spares=1: there is no Slurm here"),
        (
            ["cluster=local", "cluster.gpu_directive=gres", "cluster.gpus_per_node=2"],
            r"gpu_directive=gres: there is no",
        ),
        (
            ["cluster=leonardo_booster", "job.account=x", "job.nodes=8", "job.time_limit=2-00:00:00"],
            r"give job.qos=boost_qos_lprod$",
        ),
        # srun would end itself and the ranks.
        (["cluster.stop_signal=SIGTERM"], r"pass on only SIGUSR1 and SIGUSR2"),
        (["cluster.stop_signal=USR2"], r"cluster.stop_signal=USR2: srun"),
        (["cluster.gpu_directive=gres"], r"gpu_directive=gres asks for no GPU: give cluster.gpus_per_node=N"),
        (["cluster.gpu_type=a100"], r"gpu_type=a100 is not asked for: give cluster.gpu_directive=gres"),
        (["cluster=local", "cluster.exclusive=true"], r"cluster.exclusive=True: there is no Slurm here"),
        (["cluster=local", "cluster.memory=4G"], r"cluster.memory=4G: there is no Slurm here"),
        (["job.max_restarts=-1"], r"job.max_restarts=-1"),
        (["job.cpus_per_rank=2"], r"more than the 2 cores of a node of lab"),
        (["job.nods=2"], r"did you mean job.nodes"),
        (["cluster=labb"], r"did you mean lab\?"),
        (["cluster=juwels_booster"], r"juwels_booster needs an account: give job.account=YOUR_PROJECT"),
        (["cluster=juwels_booster", "job.account=x", "job.ranks_per_node=8"], r"has 4 GPUs a node"),
        (["cluster=local", "job.nodes=2"], r"there is one node"),
        (["cluster=local", "job.partition=low"], r"no Slurm here"),
        (["cluster=slurm"], r"there is no sbatch in PATH"),
    ],
)
def test_bad_settings_are_one_sentence(overrides: list[str], sentence: str) -> None:
    chosen = (
        overrides if any(one.startswith("cluster=") for one in overrides) else ["cluster=lab", *overrides]
    )
    with pytest.raises(ConfigError, match=sentence) as error:
        load_submit(chosen, BARE)
    assert "\n" not in str(error.value)


def test_time_limit_on_the_command_line_stays_a_time(tmp_path: Path) -> None:
    settings = load_submit(["cluster=local", "job.time_limit=12:30:00"], BARE)
    assert settings.time_limit == "12:30:00"


def test_what_the_users_shell_asks_for_is_used_where_nothing_else_does(tmp_path: Path) -> None:
    shell = {
        "SBATCH_ACCOUNT": "of_shell",
        "SBATCH_PARTITION": "p",
        "SBATCH_QOS": "q",
        "SBATCH_RESERVATION": "r",
    }
    settings = configs.compose.fill(SubmitConfig, ["cluster=juwels_booster"])
    settings.validate(shell)
    options = directives(render(RunFolder(tmp_path), settings, shell))
    expected = {"account": "of_shell", "partition": "booster", "qos": "q", "reservation": "r"}
    assert expected.items() <= options.items()
    settings.job.account = "named"
    assert directives(render(RunFolder(tmp_path), settings, shell))["account"] == "named"


def test_what_becomes_of_the_users_shells_wishes_is_said() -> None:
    shell = {
        "SBATCH_ACCOUNT": "mine",
        "SBATCH_PARTITION": "p",
        "SBATCH_TIMELIMIT": "9",
        "SBATCH_CLUSTERS": "c",
    }
    settings = configs.compose.fill(SubmitConfig, ["cluster=juwels_booster"])
    assert settings.notes(shell) == [
        "SBATCH_ACCOUNT=mine of your shell is used",
        "SBATCH_PARTITION=p of your shell is not used: write a setting",
        "SBATCH_TIMELIMIT=9 of your shell is not used: write a setting",
    ]
    assert settings.origin("partition", shell) == ("booster", "cluster.partition")
    assert settings.origin("qos", shell) == (None, "")


def test_stop_signal_that_the_training_does_not_listen_to_is_refused() -> None:
    check_stop_signal("resilience:\n  stop_signal: SIGUSR2\n", "SIGUSR2")
    with pytest.raises(ConfigError, match=r"SIGHUP differs from cluster\.stop_signal=SIGUSR2"):
        check_stop_signal("resilience:\n  stop_signal: SIGHUP\n", "SIGUSR2")


def fake_command(folder: Path, name: str, body: str) -> dict[str, str]:
    """Stands in for one of Slurm's commands; the lab tests call the real ones."""
    write_program(folder / name, body)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("90:30", 5430), ("100:00:00", 360_000), ("2-12", 216_000), ("1-00:30", 88_200)],
)
def test_every_form_of_slurms_times_is_read(text: str, seconds: int) -> None:
    assert parse_time_limit("job.time_limit", text) == seconds


@pytest.mark.req("C3")
@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("jwlogin21.juwels", "juwels_booster"),
        ("login07.leonardo.local", "leonardo_booster"),
        ("login1.karolina.it4i.cz", "karolina"),
        ("berzelius1.nsc.liu.se", "berzelius"),
        ("jean-zay3", "jean_zay"),
        ("hkn1990.localdomain", "horeka_green"),
    ],
)
def test_a_site_is_known_by_its_login_nodes(host: str, name: str) -> None:
    assert detect(host, BARE) == name


def test_detect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm.sites.detect._default_lab", lambda: None)
    assert detect("laptop", BARE) == "local"
    assert detect("jwlogin24.juwels", BARE) == "juwels_booster"
    assert detect("laptop", BARE | {"TRIERARCH_LAB": "/somewhere"}) == "lab"

    (tmp_path / "slurm.conf").write_text("# a comment\nClusterName=trierarch_lab\n")
    assert detect("jwlogin24.juwels", BARE | {"SLURM_CONF": str(tmp_path / "slurm.conf")}) == "lab"
    (tmp_path / "slurm.conf").write_text("ClusterName=trierarch_lab2\n")
    assert detect("laptop", BARE | {"SLURM_CONF": str(tmp_path / "slurm.conf")}) == "local"

    fake_command(tmp_path, "sbatch", "exit 0")
    answers = fake_command(tmp_path, "scontrol", 'echo "ClusterName             = summit"')
    assert detect("laptop", answers) == "slurm"
    named = fake_command(tmp_path, "scontrol", 'echo "ClusterName             = perlmutter"')
    assert detect("login07", named) == "perlmutter"
    assert detect("laptop", fake_command(tmp_path, "scontrol", "echo ClusterName = local")) == "slurm"
    assert detect("laptop", fake_command(tmp_path, "scontrol", "echo ClusterName=trierarch_lab")) == "lab"
    # There is a Slurm, and its controller is slow or dead: a login node is no place to train on.
    silent = "echo ClusterName = cached; echo 'slurm_load_ctl_conf error: Unable to contact' >&2; exit 1"
    with pytest.raises(ConfigError, match=r"Slurm does not answer: try again, or give cluster=local"):
        detect("laptop", fake_command(tmp_path, "scontrol", silent))
    # The packages are installed and nobody has configured them.
    bare = "echo 'scontrol: fatal: Could not establish a configuration source' >&2; exit 1"
    assert detect("laptop", fake_command(tmp_path, "scontrol", bare)) == "local"
    monkeypatch.setattr("slurm.sites.detect._default_lab", lambda: {"SLURM_CONF": "/lab/slurm.conf"})
    assert detect("laptop", fake_command(tmp_path, "scontrol", bare)) == "lab"
    assert detect("laptop", BARE) == "lab"


def test_which_slurm_a_lab_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm.sites.detect._default_lab", lambda: None)
    of_lab, of_site = tmp_path / "lab.conf", tmp_path / "site.conf"
    of_lab.write_text("ClusterName=trierarch_lab\n")
    of_site.write_text("ClusterName=summit\n")
    site = {"SLURM_CONF": str(of_site)}
    assert scheduler_environment("lab", site | {"TRIERARCH_LAB": "/x"}) == {"SLURM_CONF": "/x/slurm.conf"}
    assert scheduler_environment("lab", {"SLURM_CONF": str(of_lab)}) == {"SLURM_CONF": str(of_lab)}
    with pytest.raises(ConfigError, match="run `make lab-up`"):
        scheduler_environment("lab", site)
    monkeypatch.setattr("slurm.sites.detect._default_lab", lambda: {"SLURM_CONF": "/lab/slurm.conf"})
    assert scheduler_environment("lab", site) == {"SLURM_CONF": "/lab/slurm.conf"}
    assert scheduler_environment("summit", site) == {}


def test_clean_environment_keeps_which_slurm_and_drops_which_job() -> None:
    kept = {
        "SLURM_CONF": "c",
        "SLURM_CLUSTERS": "a",
        "PATH": "p",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "HYDRA_FULL_ERROR": "1",
    }
    dropped = dict.fromkeys(
        [
            *("SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID", "SBATCH_ACCOUNT", "SRUN_CPUS_PER_TASK", "PMIX_RANK"),
            *("I_MPI_PIN", "HYDRA_BOOTSTRAP", "MPIR_CVAR_X", "TRIERARCH_MASTER_SUFFIX", "RANK"),
            *("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "CUDA_VISIBLE_DEVICES", "TRIERARCH_TERMINAL"),
        ],
        "x",
    )
    assert clean_environment(kept | dropped) == kept
    # Outside a job the GPUs are the user's own choice.
    assert clean_environment({"CUDA_VISIBLE_DEVICES": "1"}) == {"CUDA_VISIBLE_DEVICES": "1"}
