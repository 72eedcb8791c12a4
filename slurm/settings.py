"""The submit configuration: which cluster, and how much of it for how long."""

import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import configs.compose
from contract.errors import ConfigError
from slurm.client import parse_duration
from slurm.profile import GpuDirective, Profile, Scheduler, detect
from slurm.supervise import STOP_SIGNALS

# What a site charges and queues a job by.
OF_THE_QUEUE = ("account", "partition", "qos", "constraint", "reservation")


@dataclass
class JobConfig:
    """One batch job. A null takes what the cluster's profile says."""

    nodes: int = 1
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


@dataclass
class SubmitConfig:
    """All of a submission but the training itself."""

    cluster: Profile = field(default_factory=Profile)
    job: JobConfig = field(default_factory=JobConfig)

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
        seconds = parse_time_limit(
            "job.time_limit" if job.time_limit else "cluster.time_limit", self.time_limit
        )
        for name, value in (
            ("job.nodes", job.nodes),
            ("job.ranks_per_node", self.ranks_per_node),
            ("job.cpus_per_rank", 1 if job.cpus_per_rank is None else job.cpus_per_rank),
        ):
            _require(value > 0, f"{name}={value}: must be above 0")
        _require(job.max_restarts >= 0, f"job.max_restarts={job.max_restarts}: must not be below 0")
        _require(cluster.stop_lead_s >= 0, f"cluster.stop_lead_s={cluster.stop_lead_s}: must not be below 0")
        _require(
            cluster.stop_signal in STOP_SIGNALS,
            f"cluster.stop_signal={cluster.stop_signal}: srun and mpirun pass on only {' and '.join(STOP_SIGNALS)}",
        )
        _require(
            seconds > cluster.stop_lead_s,
            f"the time limit {self.time_limit} is not above cluster.stop_lead_s={cluster.stop_lead_s}: "
            "give the job more time, or a shorter lead",
        )
        gpus = cluster.gpus_per_node
        asks = cluster.gpu_directive is not GpuDirective.none
        _require(
            not asks or gpus > 0,
            f"cluster.gpu_directive={cluster.gpu_directive} asks for no GPU: give cluster.gpus_per_node=N too",
        )
        _require(
            asks or cluster.gpu_type is None,
            f"cluster.gpu_type={cluster.gpu_type} is not asked for: give cluster.gpu_directive=gres too",
        )
        _require(
            not gpus or self.ranks_per_node <= gpus,
            f"job.ranks_per_node={self.ranks_per_node}: {cluster.name} has {gpus} GPUs a node, "
            f"ask for at most {gpus}",
        )
        cpus = (self.cpus_per_rank or 0) * self.ranks_per_node
        _require(
            cluster.cpus_per_node is None or cpus <= cluster.cpus_per_node,
            f"{self.ranks_per_node} ranks of {self.cpus_per_rank} cores are more than the "
            f"{cluster.cpus_per_node} cores of a node of {cluster.name}: lower job.cpus_per_rank",
        )
        if cluster.scheduler is Scheduler.local:
            self._validate_local()
        _require(
            not cluster.account_required or bool(self.queue("account", environ)),
            f"{cluster.name} needs an account: give job.account=YOUR_PROJECT",
        )

    def queue(self, name: str, environ: Mapping[str, str]) -> str | None:
        """The `account` to charge, `partition`, ...: the job's, the profile's, else the user's shell's SBATCH_*."""
        return getattr(self.job, name) or getattr(self.cluster, name) or environ.get(f"SBATCH_{name.upper()}")

    def _validate_local(self) -> None:
        _require(
            self.job.nodes == 1, f"job.nodes={self.job.nodes}: without Slurm there is one node, this one"
        )
        of_job, of_cluster = ("exclude",), ("memory", "exclusive", "sbatch_lines")
        asked = {f"job.{name}": getattr(self.job, name) for name in (*OF_THE_QUEUE, *of_job)}
        asked |= {f"cluster.{name}": getattr(self.cluster, name) for name in (*OF_THE_QUEUE, *of_cluster)}
        for key, value in asked.items():
            _require(not value, f"{key}={value}: there is no Slurm here that could honour it")


def parse_time_limit(key: str, text: str) -> int:
    """Return the seconds of a time limit in Slurm's words; raises ConfigError, naming `key`, for anything else."""
    seconds = parse_duration(text)
    if not seconds:
        raise ConfigError(f"{key}={text}: write a time limit as HH:MM:SS or D-HH:MM:SS, like 12:00:00")
    return seconds


def load_submit(overrides: Sequence[str], environ: Mapping[str, str] | None = None) -> SubmitConfig:
    """Compose and check the submit configuration; without `cluster=NAME` the machine's own profile is taken."""
    env = os.environ if environ is None else environ
    chosen = list(overrides)
    if not any(configs.compose.key_of(override) == "cluster" for override in chosen):
        chosen.insert(0, f"cluster={detect(socket.gethostname(), env)}")
    settings = configs.compose.fill(SubmitConfig, chosen)
    settings.validate(env)
    if settings.cluster.scheduler is Scheduler.slurm and not shutil.which("sbatch", path=env.get("PATH")):
        raise ConfigError(
            f"cluster={settings.cluster.name} needs Slurm and there is no sbatch in PATH: "
            "load the site's Slurm module, or give cluster=local"
        )
    return settings


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
