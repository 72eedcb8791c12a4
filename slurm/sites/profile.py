"""A cluster profile: what a site wants in a batch script, and what its machine is like.

A profile is a dataclass filled from `configs/cluster/<name>.yaml`.
"""

from dataclasses import dataclass, field
from enum import StrEnum


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


class Launch(StrEnum):
    """How the supervisor starts ranks."""

    agents = "agents"
    """One agent a node, which forks the ranks: a restart takes less than a second, a lost node is replaced."""
    step = "step"
    """One srun (without Slurm: mpirun) for all ranks: for ranks that are to meet through MPI."""


class ContainerRuntime(StrEnum):
    """What runs the trainer's image."""

    none = "none"
    apptainer = "apptainer"
    pyxis = "pyxis"


class Topology(StrEnum):
    """How it can be known which nodes are near each other."""

    none = "none"
    slurm = "slurm"
    """Slurm's topology plugin: `scontrol show topology`, SLURM_TOPOLOGY_ADDR."""
    file = "file"
    """A file that the site publishes."""


@dataclass
class Limit:
    """What one partition and QOS allow a job; null: any, or no limit."""

    partition: str | None = None
    qos: str | None = None
    min_nodes: int = 1
    max_nodes: int | None = None
    max_hours: float | None = None
    comment: str = ""


@dataclass
class Container:
    """The image that the trainer runs in; the supervisor stays outside."""

    runtime: ContainerRuntime = ContainerRuntime.none
    image: str | None = None
    binds: list[str] = field(default_factory=list)
    """Folders besides the run's, each `PATH` or `OUTSIDE:INSIDE`."""


@dataclass
class Profile:
    """One site, or one partition of it."""

    name: str = "local"
    description: str = ""
    sources: list[str] = field(default_factory=list)
    """Where the facts are from, each with its date."""
    unverified: list[str] = field(default_factory=list)
    """What nobody has tried on the machine, or could not find out."""
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
    template: str | None = None
    """Path of a Jinja2 template of the user's own for the batch script."""

    limits: list[Limit] = field(default_factory=list)
    """What the site's partitions and QOS allow, in the order in which they are proposed."""
    max_array_size: int | None = None
    """Slurm's MaxArraySize: an array's largest index is one less."""
    max_submit_jobs: int | None = None
    """Jobs, and tasks of arrays, that a user may have in the queue at once."""

    gpu_directive: GpuDirective = GpuDirective.none
    gpu_type: str | None = None
    """For `--gres=gpu:TYPE:N`, where the site wants it."""
    gpus_per_node: int = 0
    gpu_model: str | None = None
    gpu_memory_gb: float | None = None
    """What each GPU has at least, in 10^9 bytes; the health check compares."""
    gpu: str | None = None
    """What the planner takes it for: a class of `configs/gpu`, or the path of a file like them; null goes by
    `gpu_model` and `gpu_memory_gb`."""
    cpus_per_node: int | None = None
    """Cores that the ranks of a node share; null leaves it to Slurm."""
    memory: str | None = None
    """Memory a node in Slurm's words, such as `480G`; null leaves it to Slurm."""
    ranks_per_node: int | None = None
    """Used when the job names none; null is one a GPU."""

    python: str | None = None
    """Interpreter on the compute nodes, or in the container; null is the one that submits, `python3` in one."""
    container: Container = field(default_factory=Container)
    modules: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    """Shell commands before the training starts."""
    env: dict[str, str] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)
    scratch_shared: str | None = None
    """Fast folder that all nodes see, in the shell's words: $SCRATCH."""
    scratch_local: str | None = None
    """Fast folder of each node."""

    socket_interface: str | None = None
    """Network interface for NCCL's and gloo's sockets."""
    hcas: list[str] = field(default_factory=list)
    """InfiniBand adapters for NCCL and UCX, each `NAME` or `NAME:PORT`; none leaves the choice to them."""
    nics_per_node: int | None = None
    """Adapters that carry traffic between nodes; the planner reckons with them."""
    nic_gbit: float | None = None
    """What each carries in one direction, 10^9 bits a second."""
    master_suffix: str = ""
    """Appended to rank 0's short host name to get its address on the fast network."""
    topology: Topology = Topology.none
    topology_file: str | None = None

    launch: Launch = Launch.agents
    mpi: MpiFlavour = MpiFlavour.none
    """Used by `launch=step`."""
    cpu_bind: str | None = None
    """srun's `--cpu-bind`, used by `launch=step` where `gpu_cpus` does not say better."""
    gpu_cpus: list[str] = field(default_factory=list)
    """The cores near each GPU of a node, in the GPUs' order: `18-23`. Ranks are bound to them."""
    stop_signal: str = "SIGUSR2"
    """Asks the trainer for a checkpoint and an orderly end."""
    stop_margin_s: int = 60
    """Spare time at the job's end, beside what saving takes; without Slurm the whole of it."""
