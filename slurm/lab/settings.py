"""What a lab looks like: the sizes and times that its slurm.conf is made from."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Literal, get_args

from contract.errors import ConfigError

Auth = Literal["none", "munge"]


@dataclass(frozen=True)
class LabSettings:
    """Sizes, times and plugins of a lab.

    nodes, cpus, gpus, memory_mb: how many nodes, and what each claims to have (the host need not).
        `gpus` are of type a100 and fake: jobs get CUDA_VISIBLE_DEVICES but no device.
    grace_s: Slurm's GraceTime of partition `low`, from the warning to the end of a pre-empted job.
    kill_wait_s: from SIGTERM to SIGKILL.
    slurmd_timeout_s: silence after which the controller calls a node down.
    mpi: Slurm's MpiDefault, for example `none`, `pmi2` or `pmix`.
    auth: with `none` anyone who can connect to the nodes' ports can run anything as the one who started the
        lab: only for a host that nobody else reaches.
    extra: more lines for slurm.conf.
    """

    nodes: int = 4
    cpus: int = 2
    gpus: int = 0
    memory_mb: int = 4000
    grace_s: int = 10
    kill_wait_s: int = 5
    slurmd_timeout_s: int = 10
    mpi: str = "none"
    auth: Auth = "munge"
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        least = {"nodes": 1, "cpus": 1, "gpus": 0, "memory_mb": 1, "grace_s": 0, "kill_wait_s": 1}
        for name, minimum in (least | {"slurmd_timeout_s": 3}).items():
            if getattr(self, name) < minimum:
                raise ConfigError(f"The lab's {name} is {getattr(self, name)}: give {minimum} or more.")
        if self.nodes > 250:
            raise ConfigError(f"The lab's nodes is {self.nodes}: give 250 or fewer (one address each).")
        if self.auth not in get_args(Auth):
            raise ConfigError(f"The lab's auth is {self.auth!r}: give one of {', '.join(get_args(Auth))}.")

    @property
    def node_names(self) -> list[str]:
        """The nodes' host names, which are also their names in Slurm: n1, n2, ..."""
        return [f"n{index}" for index in range(1, self.nodes + 1)]

    def to_json(self) -> str:
        """The text that `from_json` reads."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "LabSettings":
        """The settings that `to_json` wrote."""
        values = json.loads(text)
        return cls(**values | {"extra": tuple(values["extra"])})
