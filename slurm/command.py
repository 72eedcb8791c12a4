"""The commands that start ranks: what stands after `--` in the supervisor's command line, as groups of words."""

import json
import re
import sys

from contract.errors import ConfigError
from contract.run_folder import RunFolder
from slurm.launch import mpi_command
from slurm.settings import SubmitConfig
from slurm.sites.profile import ContainerRuntime, GpuDirective, Profile, Scheduler

# srun waits this long for the last rank after the first one ended, so that a stuck rank can't hold the nodes.
_LAST_RANK_WAIT_S = 300
_CPU_LIST = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


def agent_command(run: RunFolder, settings: SubmitConfig) -> list[list[str]]:
    """Return what starts the agent of one node; the supervisor fills in {node}."""
    train = [*_container(run, settings), [_python(settings), "-u", "-m", "train.agent"]]
    if settings.cluster.scheduler is Scheduler.local:
        return train
    srun = [
        *("srun", "--overlap", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--nodelist={node}"),
        # No --cpus-per-task: with it srun hands out so many cores and no more, and the agent, which shares the
        # node's among its ranks, should see all that the job has.
        *_gpus(settings),
        *("--mpi=none", "--cpu-bind=none", "--no-kill", "--kill-on-bad-exit=1", "--unbuffered"),
        *_pyxis(run, settings),
    ]
    return [srun, *train]


def step_command(
    run: RunFolder, settings: SubmitConfig, sweep: bool
) -> tuple[list[list[str]], dict[str, str]]:
    """Return what starts all ranks, and what to add to the environment.

    In a sweep the supervisor fills in {run}, the folder of the task.
    """
    cluster = settings.cluster
    folder = "{run}" if sweep else str(run.path)
    python = [_python(settings), "-u", "-m", "train", "--config", f"{folder}/config.yaml"]
    train = [*_container(run, settings), python]
    if cluster.scheduler is Scheduler.local:
        words = [word for group in train for word in group]
        command, environment = mpi_command(settings.ranks_per_node, words)
        # The command may be the bare trainer; what comes before it starts the ranks.
        launch = command[: len(command) - len(words)]
        return [launch, *train] if launch else train, environment
    srun = [
        *("srun", "--kill-on-bad-exit=1", f"--wait={_LAST_RANK_WAIT_S}", f"--mpi={cluster.mpi}"),
        *_placement(settings),
        *_pyxis(run, settings),
        "--open-mode=append",
        # The supervisor fills in the words in braces, srun the rank.
        f"--output={escape(folder)}/logs/{{job}}.r{{attempt}}.%t.log",
    ]
    return [srun, *train], {}


def rank_cpus(settings: SubmitConfig) -> str | None:
    """Return the cores of each local rank as JSON, None where the profile has no map for this job.

    Raises ConfigError if the map is not one list of cores a GPU.
    """
    sets = cpu_sets(settings.cluster)
    # With fewer ranks than GPUs the job may have been given any of them.
    return json.dumps(sets) if len(sets) == settings.ranks_per_node else None


def cpu_sets(cluster: Profile) -> list[list[int]]:
    """Return the cores near each GPU; raises ConfigError for a map that is none."""
    for text in cluster.gpu_cpus:
        if not _CPU_LIST.fullmatch(text):
            raise ConfigError(f"cluster.gpu_cpus: {text!r} is no list of cores, write one like 0-11,48-59")
    if cluster.gpu_cpus and len(cluster.gpu_cpus) != cluster.gpus_per_node:
        raise ConfigError(
            f"cluster.gpu_cpus has {len(cluster.gpu_cpus)} lists of cores and there are "
            f"{cluster.gpus_per_node} GPUs a node: give one for each"
        )
    return [expand_cpus(text) for text in cluster.gpu_cpus]


def expand_cpus(text: str) -> list[int]:
    """Return the cores of a list like 0-11,48-59."""
    cores: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def escape(path: str) -> str:
    """Keep Slurm from reading a % in the path as one of its patterns."""
    return path.replace("%", "%%")


def _python(settings: SubmitConfig) -> str:
    return settings.cluster.python or ("python3" if settings.contained else sys.executable)


def _gpus(settings: SubmitConfig) -> list[str]:
    cluster = settings.cluster
    if cluster.gpu_directive is GpuDirective.none or not cluster.gpus_per_node:
        return []
    kind = f"{cluster.gpu_type}:" if cluster.gpu_type else ""
    return [f"--gres=gpu:{kind}{settings.ranks_per_node}"]


def _placement(settings: SubmitConfig) -> list[str]:
    """Return srun's options for the cores of each rank."""
    cluster, cpus = settings.cluster, settings.cpus_per_rank
    if cluster.exclusive and rank_cpus(settings):
        # No --cpus-per-task: the cores near the GPUs might not be among those that srun then picks.
        masks = [sum(1 << core for core in cores) for cores in cpu_sets(cluster)]
        return [f"--cpu-bind=mask_cpu:{','.join(hex(mask) for mask in masks)}"]
    # Slurm 22.05 to 23.02: srun does not take over the job's --cpus-per-task.
    count = [f"--cpus-per-task={cpus}"] if cpus else []
    return [*count, *([f"--cpu-bind={cluster.cpu_bind}"] if cluster.cpu_bind else [])]


def _binds(run: RunFolder, settings: SubmitConfig) -> list[str]:
    return [str(run.path), *settings.cluster.container.binds]


def _container(run: RunFolder, settings: SubmitConfig) -> list[list[str]]:
    if settings.cluster.container.runtime is not ContainerRuntime.apptainer:
        return []
    gpus = ["--nv"] if settings.cluster.gpus_per_node else []
    binds = [f"--bind={bind}" for bind in _binds(run, settings)]
    return [["apptainer", "exec", *gpus, *binds, f"--pwd={run.code}", str(settings.image)]]


def _pyxis(run: RunFolder, settings: SubmitConfig) -> list[str]:
    if settings.cluster.container.runtime is not ContainerRuntime.pyxis:
        return []
    mounts = ",".join(bind if ":" in bind else f"{bind}:{bind}" for bind in _binds(run, settings))
    return [
        f"--container-image={settings.image}",
        f"--container-mounts={mounts}",
        f"--container-workdir={run.code}",
    ]
