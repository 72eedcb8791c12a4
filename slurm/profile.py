"""A cluster profile: what a site wants in a batch script, and which site this is.

A profile is a dataclass filled from `configs/cluster/<name>.yaml`.
"""

import fnmatch
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import configs.compose
from contract.errors import ConfigError, UserError
from slurm.client import ask

# Names a lab for commands that the lab started.
LAB_VARIABLE = "TRIERARCH_LAB"
# The lab's ClusterName, which no site has.
LAB_CLUSTER = "trierarch_lab"
_NOT_CONFIGURED = re.compile(
    "Could not establish a configuration source|Unable to process configuration file"
)


class Scheduler(StrEnum):
    """Who starts the job."""

    slurm = "slurm"
    local = "local"


class GpuDirective(StrEnum):
    """How a site wants GPUs asked for."""

    none = "none"
    gres = "gres"
    gpus_per_node = "gpus_per_node"


class MpiFlavour(StrEnum):
    """srun's `--mpi`: which process-management interface the ranks meet."""

    none = "none"
    pmi2 = "pmi2"
    pmix = "pmix"


@dataclass
class Profile:
    """One site, or one partition of it."""

    name: str = "local"
    description: str = ""
    source: str = ""
    """Where the facts are from, and when."""
    unverified: list[str] = field(default_factory=list)
    """What nobody has tried on the machine."""
    host_patterns: list[str] = field(default_factory=list)
    """Host names of its login nodes, as `hostname` prints them, with * and ?."""
    scheduler: Scheduler = Scheduler.slurm

    account: str | None = None
    account_required: bool = False
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    time_limit: str = "01:00:00"
    """Used when the job names none."""
    exclusive: bool = False
    requeue: bool = True
    """Whether the site lets a job be requeued; where it does not, a successor is submitted."""
    sbatch_lines: list[str] = field(default_factory=list)
    """More options, each as after #SBATCH: `--licenses=scratch`."""

    gpu_directive: GpuDirective = GpuDirective.none
    gpu_type: str | None = None
    """For `--gres=gpu:TYPE:N`, where the site wants it."""
    gpus_per_node: int = 0
    cpus_per_node: int | None = None
    """Cores that the ranks of a node share; null leaves it to Slurm."""
    memory: str | None = None
    """Memory a node in Slurm's words, such as `480G`; null leaves it to Slurm."""
    ranks_per_node: int | None = None
    """Used when the job names none; null is one a GPU."""

    python: str | None = None
    """Interpreter on the compute nodes; null is the one that submits."""
    modules: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    """Shell commands before the training starts."""
    env: dict[str, str] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)

    socket_interface: str | None = None
    """Network interface for NCCL's and gloo's sockets."""
    master_suffix: str = ""
    """Appended to rank 0's short host name to get its address on the fast network."""
    mpi: MpiFlavour = MpiFlavour.none
    cpu_bind: str | None = None
    stop_signal: str = "SIGUSR2"
    """Asks the trainer for a checkpoint and an orderly end."""
    stop_lead_s: int = 120
    """How long before the time limit that is asked; Slurm may ask up to 60 s earlier."""


def detect(hostname: str, environ: Mapping[str, str]) -> str:
    """Name the profile of this machine: a lab that is meant, a known site, any Slurm, the lab that is up, local.

    Raises ConfigError if there is a Slurm that does not answer: training on a login node is no substitute.
    """
    if _names_a_lab(environ):
        return "lab"
    for name, patterns in _host_patterns().items():
        if any(fnmatch.fnmatch(hostname, pattern) for pattern in patterns):
            return name
    if shutil.which("sbatch", path=environ.get("PATH")):
        cluster = _cluster_name(environ)
        if cluster is not None:
            return "lab" if cluster == LAB_CLUSTER else "slurm"
    return "lab" if _default_lab() is not None else "local"


def scheduler_environment(profile: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that point Slurm's commands at the profile's Slurm: a lab's SLURM_CONF, else none.

    Raises ConfigError if a lab is meant and there is none.
    """
    env = os.environ if environ is None else environ
    if profile != "lab":
        return {}
    if env.get(LAB_VARIABLE):
        return {"SLURM_CONF": str(Path(env[LAB_VARIABLE]) / "slurm.conf")}
    if _names_a_lab(env):
        return {"SLURM_CONF": env["SLURM_CONF"]}
    found = _default_lab()
    if found is None:
        raise ConfigError("cluster=lab: no lab is up on this machine, run `make lab-up`")
    return found


def _names_a_lab(environ: Mapping[str, str]) -> bool:
    if environ.get(LAB_VARIABLE):
        return True
    try:
        text = Path(environ["SLURM_CONF"]).read_text()
    except (KeyError, OSError, UnicodeDecodeError):
        return False
    return re.search(rf"^ClusterName={LAB_CLUSTER}\s*$", text, re.MULTILINE | re.IGNORECASE) is not None


def _host_patterns() -> dict[str, list[str]]:
    from omegaconf import OmegaConf

    files = sorted((configs.compose.FOLDER / "cluster").glob("*.yaml"))
    return {path.stem: OmegaConf.select(OmegaConf.load(path), "host_patterns", default=[]) for path in files}


def _cluster_name(environ: Mapping[str, str]) -> str | None:
    """Return the name of the cluster whose controller answers, None if Slurm is not configured here."""
    answer = ask(["scontrol", "show", "config"], environ)
    match = re.search(r"^ClusterName\s*=\s*(\S+)", answer.output, re.MULTILINE)
    if answer.code == 0 and match:
        return match[1]
    if _NOT_CONFIGURED.search(answer.error):
        return None
    raise ConfigError("Slurm does not answer: try again, or give cluster=local to train on this machine")


def _default_lab() -> dict[str, str] | None:
    """Return the environment of the user's own lab if it is up."""
    from slurm.lab.cluster import Lab
    from slurm.lab.folder import default_folder

    lab = Lab(default_folder())
    try:
        return lab.environment() if lab.is_up() else None
    except UserError:  # somebody else's folder has that name: it is no lab of this user
        return None
