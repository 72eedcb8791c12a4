"""What may be kept elsewhere in which layout. Imports no torch."""

from typing import TYPE_CHECKING

from contract.errors import ConfigError
from train.layout.config import Recompute
from train.offload.config import OffloadConfig, Tier

if TYPE_CHECKING:
    from train.config import TrainConfig

DEFAULTS = OffloadConfig()


def check_offload(config: "TrainConfig") -> None:
    """Raise `ConfigError` for what this layout does not allow, or what does nothing in it.

    Other degrees would not mend that.
    """
    offload, parallel = config.offload, config.parallel
    if offload.parameters is not Tier.none and parallel.zero != 3:
        raise ConfigError(
            f"offload.parameters={offload.parameters.value} frees a layer's weights between its uses, which "
            f"parallel.zero={parallel.zero} does not: set parallel.zero=3, or offload.parameters=none"
        )
    activations = offload.activations is not Tier.none
    if activations and parallel.compile:
        raise ConfigError(
            "offload.activations=cpu does not see what compiled layers keep: set parallel.compile=false, or "
            "offload.activations=none"
        )
    if offload.host_budget_gb is not None and not offload.is_used:
        raise ConfigError(
            f"offload.host_budget_gb={offload.host_budget_gb:g} limits what offloading takes, and nothing is "
            "offloaded: leave it out"
        )
    if offload.link_gb_s != DEFAULTS.link_gb_s and not (activations and parallel.recompute is Recompute.auto):
        raise ConfigError(
            f"offload.link_gb_s={offload.link_gb_s:g} is for parallel.recompute=auto with offload.activations=cpu, and "
            "does nothing without them: leave it out"
        )
    moves = activations or offload.parameters is not Tier.none or offload.optimizer is Tier.nvme
    if offload.prefetch_layers != DEFAULTS.prefetch_layers and not moves:
        raise ConfigError(
            f"offload.prefetch_layers={offload.prefetch_layers} does nothing without offload.parameters, "
            "offload.activations or offload.optimizer=nvme: leave it out"
        )
