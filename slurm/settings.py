"""The submit configuration: which cluster, and how much of it for how long."""

import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

import configs.compose
from contract.errors import ConfigError
from slurm.client import CLUSTERS_VARIABLES, parse_duration
from slurm.sites.detect import detect
from slurm.sites.limits import check_limits
from slurm.sites.profile import ContainerRuntime, GpuDirective, Launch, Profile, Scheduler
from slurm.supervise.stop import STOP_SIGNALS

SHORTEST_TEST_S = 10
"""A network test of less does not come to its end."""


class Preflight(StrEnum):
    """What is tested before the training starts, beside the nodes themselves (health_check)."""

    none = "none"
    nccl = "nccl"
    """The network: every pair of nodes and of GPUs in a node. Slow nodes are left out, the others put in order."""


# What a site charges and queues a job by.
OF_THE_QUEUE = ("account", "partition", "qos", "constraint", "reservation")


# Options of sbatch that the script's other parts rely on, and what to give instead.
_OWNED = {
    option: f"give {setting}"
    for options, setting in (
        ("--nodes -N", "job.nodes=N"),
        ("--ntasks -n --ntasks-per-node", "job.ranks_per_node=N"),
        ("--cpus-per-task -c", "job.cpus_per_rank=N"),
        ("--time -t", "job.time_limit=HH:MM:SS"),
        ("--partition -p", "job.partition=NAME"),
        ("--qos -q", "job.qos=NAME"),
        ("--requeue --no-requeue", "job.requeue=true or false"),
        ("--array -a", "several values with `trierarch sweep`"),
    )
    for option in options.split()
} | dict.fromkeys(
    ("--output", "-o", "--error", "-e", "--open-mode"), "leave it out, the logs have a place of their own"
)


FOR_PLANS = ("cluster.gpu", "cluster.nics_per_node", "cluster.nic_gbit")
"""What a profile says for the planner alone."""


@dataclass
class JobConfig:
    """One batch job. A null takes what the cluster's profile says."""

    nodes: int = 1
    """Nodes that train."""
    spares: int = 0
    """More nodes in the allocation that stand by for one that fails."""
    ranks_per_node: int | None = None
    """Null is one a GPU, or the profile's own number."""
    cpus_per_rank: int | None = None
    """Null is an equal share of the node's cores."""
    time_limit: str | None = None
    """HH:MM:SS, D-HH:MM:SS, or another form that sbatch takes: 90 is minutes."""
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    exclude: str | None = None
    """Nodes to keep away from, as Slurm writes them: n3,n[7-9]."""
    max_restarts: int = 3
    """Crashes in a row without a new checkpoint after which the run is given up."""
    requeue: bool = True
    """Whether the job comes back after a pre-emption or its time limit."""
    launch: Launch | None = None
    """`agents` or `step`, where the profile's own is not wanted."""
    health_check: bool = True
    """Whether the nodes are tested before the ranks start; agents do it."""
    preflight: Preflight = Preflight.none
    """Whether the network is tested before the training starts; agents do it."""
    preflight_s: float = 180
    """How long such a test may take."""
    preflight_baseline: str | None = None
    """Path of the measurement of an earlier test of this machine, for the new one to be compared with."""
    node_order: str | None = None
    """Path of a file with node names, such as the `hostfile` of a network test: ranks are placed in its order."""
    exclude_for_h: float = 24
    """How long a node that failed is kept away from."""
    image: str | None = None
    """The container's image, where the profile's own is not wanted."""
    sbatch_lines: list[str] = field(default_factory=list)
    """More options, each as after #SBATCH; they follow the profile's."""
    template: str | None = None
    """Path of a Jinja2 template for the batch script, where the profile's own is not wanted."""


@dataclass
class SubmitConfig:
    """All of a submission but the training itself."""

    SYNONYMS: ClassVar[dict[str, str]] = {"preflight": "job.preflight", "nodes": "job.nodes"}

    cluster: Profile = field(default_factory=Profile)
    job: JobConfig = field(default_factory=JobConfig)

    @property
    def nodes(self) -> int:
        """Nodes of the allocation: those that train, and spares."""
        return self.job.nodes + self.job.spares

    @property
    def launch(self) -> Launch:
        """How ranks are started."""
        return self.job.launch or self.cluster.launch

    @property
    def contained(self) -> bool:
        """Whether the trainer runs in a container."""
        return self.cluster.container.runtime is not ContainerRuntime.none

    @property
    def image(self) -> str | None:
        """The container's image."""
        return self.job.image or self.cluster.container.image

    @property
    def template(self) -> str | None:
        """Path of the user's own template."""
        return self.job.template or self.cluster.template

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node."""
        asked = (self.job.ranks_per_node, self.cluster.ranks_per_node, self.cluster.gpus_per_node or 1)
        return next(number for number in asked if number is not None)

    @property
    def cpus_per_rank(self) -> int | None:
        """Cores of a rank, None where it is left to Slurm."""
        if self.job.cpus_per_rank is not None or self.cluster.cpus_per_node is None:
            return self.job.cpus_per_rank
        return max(1, self.cluster.cpus_per_node // self.ranks_per_node)

    @property
    def time_limit(self) -> str:
        """The job's time limit, as Slurm reads it."""
        return self.job.time_limit or self.cluster.time_limit

    def validate(self, environ: Mapping[str, str]) -> None:
        """Check what must hold before a script is written; raises ConfigError for the first that does not."""
        job, cluster = self.job, self.cluster
        for name, value, least in (
            ("job.nodes", job.nodes, 1),
            ("job.spares", job.spares, 0),
            ("job.ranks_per_node", self.ranks_per_node, 1),
            ("job.cpus_per_rank", 1 if job.cpus_per_rank is None else job.cpus_per_rank, 1),
            ("job.max_restarts", job.max_restarts, 0),
            ("job.exclude_for_h", job.exclude_for_h, 0),
            ("job.preflight_s", job.preflight_s, SHORTEST_TEST_S),
            ("cluster.stop_margin_s", cluster.stop_margin_s, 0),
        ):
            _require(value >= least, f"{name}={value:g}: must not be below {least}")
        _require(
            cluster.stop_signal in STOP_SIGNALS,
            f"cluster.stop_signal={cluster.stop_signal}: srun and mpirun pass on only {' and '.join(STOP_SIGNALS)}",
        )
        _require(
            job.preflight is Preflight.none or self.launch is Launch.agents,
            f"job.preflight={job.preflight}: agents do it, and there are none under launch={self.launch}",
        )
        for key, path, what in (
            ("job.node_order", job.node_order, "the hostfile"),
            ("job.preflight_baseline", job.preflight_baseline, "the measurement.npz"),
        ):
            _require(
                path is None or Path(path).expanduser().is_file(),
                f"{key}={path}: there is no such file, give {what} of a network test",
            )
        self._validate_node()
        self._validate_container()
        for key, lines in (
            ("job.sbatch_lines", job.sbatch_lines),
            ("cluster.sbatch_lines", cluster.sbatch_lines),
        ):
            for line in lines:
                _refuse_owned(key, line)
        seconds = parse_time_limit(
            "job.time_limit" if job.time_limit else "cluster.time_limit", self.time_limit
        )
        tested_s = job.preflight_s if job.preflight is not Preflight.none else 0
        _require(
            not tested_s or tested_s + cluster.stop_margin_s < seconds,
            f"job.preflight_s={tested_s:g} and cluster.stop_margin_s={cluster.stop_margin_s} leave nothing of the time "
            f"limit {self.time_limit}: give the job more time, or a shorter test",
        )
        if cluster.scheduler is Scheduler.local:
            self._validate_local(seconds)
            return
        _require(
            not job.spares or self.launch is Launch.agents,
            f"job.spares={job.spares}: a node can only be replaced under launch=agents",
        )
        _require(
            not cluster.account_required or bool(self.queue("account", environ)),
            f"{cluster.name} needs an account: give job.account=YOUR_PROJECT",
        )
        partition, qos = self.queue("partition", environ), self.queue("qos", environ)
        check_limits(cluster.limits, partition, qos, self.nodes, seconds / 3600)

    def queue(self, name: str, environ: Mapping[str, str]) -> str | None:
        """The `account` to charge, `partition`, ...: the job's, the profile's, else the user's shell's SBATCH_*."""
        value, _ = self.origin(name, environ)
        return value

    def origin(self, name: str, environ: Mapping[str, str]) -> tuple[str | None, str]:
        """Return what `queue` does, and the setting that it is from: `job.account`, `SBATCH_ACCOUNT`, ..."""
        variable = f"SBATCH_{name.upper()}"
        candidates = (
            (getattr(self.job, name), f"job.{name}"),
            (getattr(self.cluster, name), f"cluster.{name}"),
            (environ.get(variable), variable),
        )
        return next(((value, where) for value, where in candidates if value), (None, ""))

    def notes(self, environ: Mapping[str, str]) -> list[str]:
        """Say what becomes of the SBATCH_* variables of the user's shell, which sbatch would let win silently."""
        if self.cluster.scheduler is Scheduler.local:
            return []
        used = {where for name in OF_THE_QUEUE for _, where in [self.origin(name, environ)]}
        notes = []
        for variable in sorted(name for name in environ if name.startswith("SBATCH_")):
            if variable in CLUSTERS_VARIABLES:
                continue
            is_used = variable in used
            notes.append(
                f"{variable}={environ[variable]} of your shell is {'used' if is_used else 'not used: write a setting'}"
            )
        return notes

    def _validate_node(self) -> None:
        """Check ranks, GPUs and cores against what a node has."""
        cluster, ranks = self.cluster, self.ranks_per_node
        gpus, asks = cluster.gpus_per_node, cluster.gpu_directive is not GpuDirective.none
        _require(
            not asks or gpus > 0,
            f"cluster.gpu_directive={cluster.gpu_directive} asks for no GPU: give cluster.gpus_per_node=N too",
        )
        _require(
            asks or cluster.gpu_type is None,
            f"cluster.gpu_type={cluster.gpu_type} is not asked for: give cluster.gpu_directive=gres too",
        )
        _require(
            not gpus or ranks <= gpus,
            f"job.ranks_per_node={ranks}: {cluster.name} has {gpus} GPUs a node, ask for at most {gpus}",
        )
        _require(
            cluster.cpus_per_node is None or (self.cpus_per_rank or 0) * ranks <= cluster.cpus_per_node,
            f"{ranks} ranks of {self.cpus_per_rank} cores are more than the {cluster.cpus_per_node} cores of "
            f"a node of {cluster.name}: lower job.cpus_per_rank",
        )

    def _validate_container(self) -> None:
        container = self.cluster.container
        _require(
            not self.contained or bool(self.image),
            f"cluster.container.runtime={container.runtime} runs no image: give job.image=PATH",
        )
        _require(
            not (self.contained and self.job.spares),
            f"job.spares={self.job.spares}: a node that fails ends a job in a container, which is requeued: "
            "give job.spares=0",
        )
        for key, value in (
            ("job.image", self.job.image),
            ("cluster.container.image", container.image),
            ("cluster.container.binds", container.binds),
        ):
            _require(
                self.contained or not value,
                f"{key}={value}: nothing runs it, give cluster.container.runtime=apptainer or pyxis",
            )

    def _validate_local(self, seconds: int) -> None:
        job, cluster = self.job, self.cluster
        _require(job.nodes == 1, f"job.nodes={job.nodes}: without Slurm there is one node, this one")
        _require(
            cluster.container.runtime is not ContainerRuntime.pyxis,
            "cluster.container.runtime=pyxis: it is a part of Slurm, and there is none here",
        )
        _require(
            seconds > cluster.stop_margin_s,
            f"the time limit {self.time_limit} is not above cluster.stop_margin_s={cluster.stop_margin_s}: "
            "give the job more time, or a shorter margin",
        )
        of_job = ("exclude", "spares", "sbatch_lines", "node_order")
        of_cluster = (
            "memory",
            "exclusive",
            "sbatch_lines",
            "master_suffix",
            "gpu_cpus",
            "limits",
            "account_required",
        )
        asked = {f"job.{name}": getattr(job, name) for name in (*OF_THE_QUEUE, *of_job)}
        asked |= {f"cluster.{name}": getattr(cluster, name) for name in (*OF_THE_QUEUE, *of_cluster)}
        asked["cluster.gpu_directive"] = (
            cluster.gpu_directive is not GpuDirective.none and cluster.gpu_directive
        )
        for key, value in asked.items():
            _require(not value, f"{key}={value}: there is no Slurm here that could honour it")


def says_where(key: str) -> bool:
    """Whether a key of the user's is one of these settings, and none of the training's."""
    return key.partition(".")[0] in ("cluster", "job", *SubmitConfig.SYNONYMS)


def parse_time_limit(key: str, text: str) -> int:
    """Return the seconds of a time limit in Slurm's words; raises ConfigError, naming `key`, for anything else."""
    seconds = parse_duration(text)
    if not seconds:
        raise ConfigError(f"{key}={text}: write a time limit as HH:MM:SS or D-HH:MM:SS, like 12:00:00")
    return seconds


def compose_submit(overrides: Sequence[str], environ: Mapping[str, str]) -> SubmitConfig:
    """Compose the submit configuration unchecked; without `cluster=NAME` the machine's own profile is taken."""
    chosen = configs.compose.spell_out(overrides, SubmitConfig)
    if not any(configs.compose.key_of(override) == "cluster" for override in chosen):
        chosen.insert(0, f"cluster={detect(socket.gethostname(), environ)}")
    return configs.compose.fill(SubmitConfig, chosen)


def load_submit(overrides: Sequence[str], environ: Mapping[str, str] | None = None) -> SubmitConfig:
    """Compose and check the submit configuration; without `cluster=NAME` the machine's own profile is taken."""
    env = os.environ if environ is None else environ
    settings = compose_submit(overrides, env)
    given = configs.compose.spell_out(overrides, SubmitConfig)
    refuse_without_effect(settings, [configs.compose.key_of(override) for override in given])
    settings.validate(env)
    refuse_job_without_effect(settings, given)
    if settings.cluster.scheduler is Scheduler.slurm and not shutil.which("sbatch", path=env.get("PATH")):
        raise ConfigError(
            f"cluster={settings.cluster.name} needs Slurm and there is no sbatch in PATH: "
            "load the site's Slurm module, or give cluster=local"
        )
    return settings


def refuse_job_without_effect(settings: SubmitConfig, overrides: Sequence[str]) -> None:
    """As `refuse_without_effect`, for what is in a file that `job=` chooses: a wish too, and no fact of the site's."""
    for override in map(configs.compose.parse_setting, overrides):
        if override.key_or_group != "job":
            continue
        choice = str(override.value())
        try:
            refuse_without_effect(
                settings, [f"job.{key}" for key in configs.compose.load_choice("job", choice)]
            )
        except ConfigError as error:
            raise ConfigError(f"job={choice}: {error}") from error


def refuse_without_effect(settings: SubmitConfig, keys: Sequence[str]) -> None:
    """Raise ConfigError if one of the keys, which the user gave, does nothing in the mode that was chosen.

    What a profile says of these is a fact of the site, and waits for the mode that uses it.
    """
    local = settings.cluster.scheduler is Scheduler.local
    for key in keys:
        told = (
            "cluster.topology",
            "cluster.topology_file",
            "cluster.scratch_shared",
            "cluster.scratch_local",
            *FOR_PLANS,
        )
        _require(
            key not in told, f"{key} says what the site has and changes no job: write it into the profile"
        )
    unused = {
        Launch.agents: ("cluster.mpi", "cluster.cpu_bind"),
        Launch.step: ("job.health_check", "cluster.gpu_memory_gb"),
    }[settings.launch]
    for key in ("job.preflight_s", "job.preflight_baseline"):
        _require(
            settings.job.preflight is not Preflight.none or key not in keys,
            f"{key} has no effect without a preflight: set job.preflight=nccl too, or leave it",
        )
    for key in keys:
        _require(
            key not in unused,
            f"{key} has no effect under launch={settings.launch}: set job.launch too, or leave it",
        )
        of_slurm = ("cluster.mpi", "cluster.cpu_bind", "cluster.requeue", "job.requeue", "job.exclude_for_h")
        _require(not (local and key in of_slurm), f"{key}: there is no Slurm here that could honour it")


def _refuse_owned(key: str, line: str) -> None:
    """Raise ConfigError for a line of the user's that would contradict, unnoticed, what the supervisor is told."""
    option, _, _ = line.strip().replace("=", " ", 1).partition(" ")
    # Slurm takes `-N2` too.
    instead = _OWNED.get(option) or ("" if option.startswith("--") else _OWNED.get(option[:2], ""))
    _require(not instead, f"{key}: {line}: {instead}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
