"""All that the checks look at: what is asked for, and what this host, its software and its Slurm are."""

import copy
import fnmatch
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import configs.compose
from contract.errors import ConfigError, UserError
from slurm.settings import SubmitConfig
from slurm.sites.profile import Profile, Scheduler
from tools.doctor.asked import Asked, read
from tools.doctor.finding import NotCheckedError, NoUseError
from tools.doctor.host import Host, Place
from tools.doctor.slurm_says import SlurmSays
from tools.doctor.software import Software
from train.layout.batch import micro_batches
from train.layout.check import check_gpu, fits
from train.layout.dims import ParallelDims
from train.layout.memory import Memory, heaviest
from train.precision.check import check_precision

if TYPE_CHECKING:
    from tools.plan.gpu import Gpu
    from train.config import TrainConfig
    from train.layout.config import ParallelConfig


@dataclass
class Facts:
    """What a check may look at; properties raise `NotCheckedError` or `NoUseError` where there is nothing."""

    asked: Asked
    host: Host
    slurm: SlurmSays
    software: Software = field(default_factory=Software)

    @classmethod
    def collect(cls, overrides: Sequence[str], environ: Mapping[str, str]) -> "Facts":
        """Read what a user gives, here."""
        asked = read(overrides, environ)
        profile = asked.settings.cluster
        slurm = SlurmSays(profile.name, environ)
        return cls(asked, Host(place(profile, environ, socket.gethostname(), slurm), environ), slurm)

    @property
    def config(self) -> "TrainConfig":
        """Settings of the training."""
        return self.asked.config

    @property
    def settings(self) -> SubmitConfig:
        """Settings of the submission."""
        return self.asked.settings

    @property
    def cluster(self) -> Profile:
        """The machine's profile."""
        return self.asked.settings.cluster

    @property
    def dims(self) -> ParallelDims:
        """The layout."""
        if self.asked.dims is None:
            raise NotCheckedError(self.asked.why_not)
        return self.asked.dims

    @property
    def sized(self) -> "TrainConfig":
        """The configuration, of which the size of the model is known."""
        if self.config.model.vocab_size is None:
            raise NotCheckedError(
                "model.vocab_size is null and comes from data that this host does not see: give it"
            )
        return self.config

    @property
    def micro_batches(self) -> int:
        """That a rank takes in a step."""
        return micro_batches(self.config, self.dims)

    @property
    def on_gpus(self) -> bool:
        """Whether ranks will compute on GPUs."""
        return self.cluster.gpus_per_node > 0 or (self.is_local and self.host.gpus > 0)

    @property
    def is_local(self) -> bool:
        """Whether the run needs no Slurm."""
        return self.cluster.scheduler is Scheduler.local

    def need_gpus(self) -> None:
        """Raise `NoUseError` where ranks compute on CPUs."""
        if not self.on_gpus:
            raise NoUseError(f"cluster={self.cluster.name} has no GPUs that it says of")

    @cached_property
    def gpu(self) -> "Gpu":
        """The class of the machine's GPUs."""
        self.need_gpus()
        from tools.plan.own import gpu_of

        try:
            return gpu_of(self.cluster)
        except ConfigError as problem:
            raise NotCheckedError(str(problem)) from None

    @cached_property
    def step_s(self) -> float:
        """Predicted time of a step."""
        dims, sized = self.dims, self.sized
        self.need_gpus()
        from tools.plan.own import case_of, machine_of
        from tools.plan.step import predict_step

        try:
            machine = machine_of(self.cluster, self.settings.job.nodes, self.settings.ranks_per_node)
        except ConfigError as problem:
            raise NotCheckedError(str(problem)) from None
        return predict_step(case_of(sized, dims, machine)).total_s

    @cached_property
    def memory(self) -> Memory:
        """Of the rank that keeps most."""
        _, kept = heaviest(self.sized, self.dims, "cuda" if self.on_gpus else "cpu")
        return kept

    @cached_property
    def continues_at(self) -> int:
        """Newest step that the run's folder has a checkpoint of; 0 without."""
        try:
            return max(self.config.run_folder.published_steps(), default=0)
        except OSError:
            return 0

    def instead(self, parallel: "ParallelConfig", samples: int | None = None) -> "TrainConfig | None":
        """Return the configuration with another layout, and another global batch, on the same ranks, if it works."""
        if not fits(self.config, parallel, self.dims.ranks, samples):
            return None
        changed = copy.copy(self.config)
        changed.parallel = parallel
        changed.loop = copy.copy(self.config.loop)
        changed.loop.global_batch_size = samples or self.config.loop.samples_per_step
        try:
            check_precision(changed, ParallelDims.of(parallel, self.dims.ranks))
            if self.on_gpus:
                check_gpu(changed)
        except UserError:
            return None
        return changed

    @property
    def run_path(self) -> Path:
        """The run's folder."""
        return self.config.run_folder.path

    def need_here(self) -> None:
        """Raise `NotCheckedError` on a machine that is not the run's."""
        if self.host.place is Place.elsewhere:
            raise NotCheckedError(
                f"no Slurm of cluster={self.cluster.name} is set up on this host: run it on a login node"
            )

    def need_host_of_ranks(self) -> None:
        """Raise `NotCheckedError` where ranks will not run on this host."""
        self.need_here()
        if self.host.place is Place.login:
            raise NotCheckedError("the ranks run on other nodes: run it in a job too")


def place(profile: Profile, environ: Mapping[str, str], hostname: str, slurm: SlurmSays) -> Place:
    """Say what this host is to a run on the machine of `profile`."""
    if profile.scheduler is Scheduler.local:
        return Place.ranks
    if not shutil.which("sbatch", path=environ.get("PATH")) or not slurm.is_configured:
        return Place.elsewhere
    if not any(fnmatch.fnmatch(hostname, pattern) for pattern in profile.host_patterns):
        others = set(configs.compose.choices("cluster")) - {profile.name}
        # A site's own profile knows its hosts; one of the user's may have another name than its cluster.
        if slurm.cluster in others or (profile.host_patterns and slurm.cluster != profile.name):
            return Place.elsewhere
    return Place.ranks if "SLURM_JOB_ID" in environ else Place.login
