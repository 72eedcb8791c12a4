"""AdamW with weight decay on matrices only."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from train.config import OptimConfig, TrainConfig
from train.offload.buckets import local, make_buckets, slots
from train.offload.config import Tier
from train.offload.disks import store_of
from train.offload.gradients import Gradients, OnDevice, OnHost
from train.offload.nvme_states import NvmeStates
from train.offload.parameters import Shelved
from train.offload.states import Resident, States
from train.offload.transfer import Transfer
from train.offload.weights import InPlace, Staged, Weights
from train.optim.compact import CompactAdamW
from train.optim.master import MasterAdamW
from train.parallel.fill import EMBEDDING


class Optimizer(Protocol):
    """What the loop asks of an optimizer."""

    param_groups: list[dict[str, Any]]

    def gradients(self) -> Mapping[nn.Parameter, Tensor]:
        """Gradients of this rank by parameter, once a backward pass is done."""
        ...

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply all gradients by `factor` (0-d) before they are used."""
        ...

    def step(self) -> None:
        """Update all weights."""
        ...

    def zero_grad(self) -> None:
        """Forget the gradients."""
        ...

    def finish(self) -> None:
        """Return when all weights are what the last step makes of them."""
        ...

    def metrics(self) -> dict[str, float]:
        """What there is to log of this rank's last steps."""
        ...

    def close(self) -> None:
        """Give up what is held elsewhere than in tensors."""
        ...


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW on the weights themselves."""

    def __init__(self, model: nn.Module, config: OptimConfig) -> None:
        """Vectors (norms) are not decayed."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        super().__init__(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)

    def gradients(self) -> Mapping[nn.Parameter, Tensor]:
        """See `Optimizer`."""
        return gradients_of(p for group in self.param_groups for p in group["params"])

    def scale_gradients(self, factor: Tensor) -> None:
        """See `Optimizer`."""
        # On what this rank has: through a sharded tensor, torch looks for ways to shard the product each time anew.
        torch._foreach_mul_([local(gradient) for gradient in self.gradients().values()], factor)

    def finish(self) -> None:
        """See `Optimizer`: a step is done when it returns."""

    def metrics(self) -> dict[str, float]:
        """See `Optimizer`."""
        return {}

    def close(self) -> None:
        """See `Optimizer`."""


def gradients_of(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """The gradients that parameters have."""
    return {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}


AnyAdamW = AdamW | MasterAdamW | CompactAdamW


def build_optimizer(
    parts: nn.ModuleList, config: TrainConfig, device: torch.device, shelved: Shelved | None = None
) -> AnyAdamW:
    """Make the optimizer of this rank's parts; see `MasterAdamW.fill` for the values of weights that it keeps.

    `shelved`: the weights that compute, where they lie elsewhere; closed with the optimizer.

    With offload.optimizer=nvme it makes files: raises `ConfigError` or `NodeError` where it cannot.
    """
    if not config.has_masters:
        return CompactAdamW(parts, config) if config.precision.compact else AdamW(parts, config.optim)
    buckets = make_buckets(parts, config.model)
    states = _states(config, device)
    held = local(buckets[0][0].parameter).device
    crosses = held.type != states.device.type
    transfer = Transfer(device)
    gradients: Gradients = OnDevice(buckets, transfer if crosses else None)
    if config.offload.gradients is Tier.cpu:
        tied = [slot.parameter for slot in slots(buckets) if slot.name == EMBEDDING]
        gradients = OnHost(buckets, tied if config.model.tie_embeddings else [], transfer)
    weights: Weights = InPlace(buckets)
    if shelved is not None:
        weights = shelved.weights(buckets)
    elif crosses or config.offload.delayed_update:
        weights = Staged(buckets, transfer, later=config.offload.delayed_update)
    background = config.offload.optimizer is not Tier.none
    return MasterAdamW(parts, buckets, config.optim, states, gradients, weights, background)


def _states(config: TrainConfig, device: torch.device) -> States:
    """Where fp32 weights and moments lie."""
    pinned = device.type == "cuda"
    if config.offload.optimizer is Tier.none:
        return Resident(device, pinned=False)
    if config.offload.optimizer is Tier.cpu:
        return Resident(torch.device("cpu"), pinned)
    return NvmeStates(store_of(config, "optimizer"), config.offload.prefetch_layers, pinned)
