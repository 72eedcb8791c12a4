"""How a step runs: the engines that take the micro-batches of a step through forward and backward."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.config import TrainConfig
from train.data.loader import Batch
from train.layout.dims import is_sharded
from train.mesh import Mesh
from train.offload.activations import Carrier
from train.parallel.context import own_share
from train.parallel.data import accumulate
from train.parallel.tensor import loss_context, vocabulary_loss
from train.precision.policy import autocast


class Engine(Protocol):
    """Runs the parts of a model that this rank holds, together with the other ranks."""

    batches_at_once: int
    """Micro-batches that `evaluate` takes."""

    def train(self, micro_batches: Sequence[Batch], scale: float = 1.0) -> Tensor:
        """Take the micro-batches of one step through forward and backward.

        Returns the mean loss over this rank's tokens, detached, in nats a token; 0 where the rank has no loss.
        Gradients are those of the mean over all ranks' tokens, times `scale`.
        """
        ...

    def evaluate(self, micro_batches: Sequence[Batch]) -> Tensor:
        """Sum of the loss over this rank's tokens that count, in nats; 0 where the rank has no loss."""
        ...

    def metrics(self) -> dict[str, float]:
        """What there is to log of the last step besides its loss, the same on every rank of a pipeline. Collective."""
        ...


class Direct:
    """Without a pipeline: the whole depth of the model is on this rank, or a share of each of its tensors."""

    batches_at_once = 1

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        mesh: Mesh,
        device: torch.device,
        carrier: Carrier | None = None,
    ) -> None:
        """`model` is what is called, wrapped where there are replicas. `carrier`: of its activations, for `metrics`."""
        self._model = model
        self._carrier = carrier
        self._config = config
        self._mesh = mesh
        self._device = device

    def train(self, micro_batches: Sequence[Batch], scale: float = 1.0) -> Tensor:
        """See `Engine`."""
        if self._carrier is not None:
            self._carrier.steps += 1
        total = torch.zeros((), device=self._device)
        for index, batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            with (
                accumulate(self._model, self._config.parallel.zero, last),
                loss_context(self._config, self._mesh),
            ):
                loss = self._loss(batch, "mean") / len(micro_batches)
                (loss * scale).backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Batch]) -> Tensor:
        """See `Engine`."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for batch in micro_batches:
            with loss_context(self._config, self._mesh):
                total += self._loss(batch, "sum").double()
        return total

    def metrics(self) -> dict[str, float]:
        """See `Engine`."""
        return {} if self._carrier is None else self._carrier.metrics()

    def _loss(self, batch: Batch, reduction: str) -> Tensor:
        own = own_share(batch.to(self._device), self._config, self._mesh)
        with compute_context(self._config, self._mesh, self._device):
            logits = self._model(own.tokens, own.documents)
        return vocabulary_loss(logits, own.targets, reduction)


def mean_loss(loss: Tensor, mesh: Mesh) -> float:
    """Mean over all tokens of a step, from what `Engine.train` has returned; the same on every rank.

    Ranks of one tensor-parallel group have the same loss, and only the last stage has one at all.
    """
    total = loss.detach() if mesh.coordinate("tp") == 0 else torch.zeros_like(loss)
    total = total.clone()
    dist.all_reduce(total)
    return float(total) / (mesh.dims.dp * mesh.dims.cp)


def compute_context(config: TrainConfig, mesh: Mesh, device: torch.device) -> AbstractContextManager[object]:
    """Context of a forward pass: sharded parts bring their own policy, plain ones compute under autocast."""
    if is_sharded(config, mesh.dims):
        return nullcontext()
    return autocast(config.precision, device)
