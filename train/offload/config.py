"""The `offload` section of the configuration: what leaves the device, and where to. Imports no torch."""

from dataclasses import dataclass, field
from enum import StrEnum

from contract.errors import ConfigError
from train.layout.config import LARGEST_GB

STAGED = 2
"""Buckets on their way between a device and the host, each way: one moves while the other is computed with."""
WRITERS = 2
"""Blocks of one size that may be written at a time: one is filled while the one before goes to its file."""


class Tier(StrEnum):
    """Where something is kept between its uses."""

    none = "none"
    """On the device that computes."""
    cpu = "cpu"
    """In memory of the host, pinned where there is a GPU."""
    nvme = "nvme"
    """In files on `nvme_path`."""


@dataclass
class OffloadConfig:
    """What a rank keeps elsewhere than on its device (ZeRO-Offload, ZeRO-Infinity)."""

    optimizer: Tier = Tier.none
    """fp32 weights and the moments of Adam: none, cpu or nvme. On the device weights stay in the compute type."""
    gradients: Tier = Tier.none
    """none, or cpu: they leave the device as they become ready."""
    parameters: Tier = Tier.none
    """none, cpu or nvme: a layer's weights come when it is needed. Needs parallel.zero=3."""
    activations: Tier = Tier.none
    """none, or cpu: what the backward pass will need."""
    nvme_path: list[str] = field(default_factory=list)
    """Folders on local disks, each its own disk; blocks are striped over them."""
    nvme_settings: str | None = None
    """A file that `trierarch nvme-bench` has written, for all nodes; null reads `nvme.json` in the first path."""
    nvme_checksums: bool = False
    """Check every block that is read against the checksum of what was written."""
    host_budget_gb: float | None = None
    """Memory of the host that one rank may use for all of this, GB (1e9 bytes); null checks against what is free."""
    prefetch_layers: int = 2
    """How many layers ahead parameters and activations are asked for."""
    link_gb_s: float = 25.0
    """Speed between device and host in each direction, GB (1e9 bytes) a second, by which parallel.recompute=auto weighs
    what activations cost on the host; 25 is what PCIe 4.0 reaches."""
    delayed_update: bool = False
    """Apply a step's update while the next one computes: it takes no time, and each step computes with weights that
    are one update old."""

    @property
    def is_used(self) -> bool:
        """Whether anything is kept elsewhere."""
        return any(tier is not Tier.none for tier in (self.optimizer, self.activations))

    @property
    def uses_nvme(self) -> bool:
        """Whether there are files on disks."""
        return Tier.nvme in (self.optimizer, self.parameters)

    def validate(self) -> None:
        """Raise `ConfigError` for values that are wrong in every layout."""
        for name in ("gradients", "activations"):
            if getattr(self, name) is Tier.nvme:
                raise ConfigError(f"offload.{name}=nvme: choose none or cpu")
        if self.optimizer is Tier.none:
            for name in ("gradients", "parameters"):
                if getattr(self, name) is not Tier.none:
                    raise ConfigError(
                        f"offload.{name}={getattr(self, name).value} with the optimizer's state on the device frees "
                        "less than it costs: set offload.optimizer=cpu too"
                    )
            if self.delayed_update:
                raise ConfigError(
                    "offload.delayed_update delays offloaded updates: set offload.optimizer=cpu"
                )
        if self.delayed_update and self.parameters is not Tier.none:
            raise ConfigError(
                "offload.delayed_update keeps a second copy of all weights, which offload.parameters has no memory "
                "for: drop one of them"
            )
        if self.uses_nvme and not self.nvme_path:
            raise ConfigError(
                "offload.nvme_path is empty: give the folder of a local disk, or use cpu instead of nvme"
            )
        if "" in (path.strip() for path in self.nvme_path) or len(set(self.nvme_path)) < len(self.nvme_path):
            raise ConfigError(
                f"offload.nvme_path=[{','.join(self.nvme_path)}]: name folders of different disks, each once"
            )
        if not self.uses_nvme:
            self._refuse_of_disks()
        for name in ("host_budget_gb", "link_gb_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= LARGEST_GB:
                raise ConfigError(f"offload.{name}={value}: must be above 0 and at most {LARGEST_GB:g}")
        if not 1 <= self.prefetch_layers <= 1000:
            raise ConfigError(f"offload.prefetch_layers={self.prefetch_layers}: must be from 1 to 1000")

    def _refuse_of_disks(self) -> None:
        """Nothing is ever silently ignored."""
        for name in ("nvme_path", "nvme_settings", "nvme_checksums"):
            if getattr(self, name):
                raise ConfigError(
                    f"offload.{name} is given, but nothing goes to disks: set offload.optimizer=nvme, or drop it"
                )
