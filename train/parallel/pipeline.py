"""Pipeline parallelism: the layers shared by several ranks, under a schedule of torch.distributed.pipelining."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from train.config import TrainConfig
from train.data.loader import Batch
from train.layout.stages import bubble, stage_layers, stages_of
from train.mesh import Mesh
from train.model.llama import Llama
from train.offload.activations import Carrier
from train.parallel.busy import BusyTime
from train.parallel.context import own_share
from train.parallel.stage import Boundary, TimedStage
from train.parallel.tensor import loss_context, vocabulary_loss
from train.parallel.tied import add_gradients

SINGLE: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
"""Schedules of one stage a rank."""
MULTI: dict[str, type[PipelineScheduleMulti]] = {
    "looped_bfs": ScheduleLoopedBFS,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}

# When a stage fails it prints the whole schedule, in front of the one sentence that says why.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)


@dataclass(frozen=True)
class Stage:
    """A range of layers, one of `count` in a row."""

    index: int
    count: int
    layers: range


def own_stages(config: TrainConfig, mesh: Mesh) -> list[Stage]:
    """Stages that this rank holds, in their order; without a pipeline one with all layers."""
    if mesh.dims.pp == 1:
        return [Stage(0, 1, range(config.model.layers))]
    layers = stage_layers(config.parallel, config.model, config.data.sequence_length)
    own = stages_of(config.parallel, mesh.coordinate("pp"))
    return [Stage(index, len(layers), layers[index]) for index in own]


def cut(part: Llama, stage: Stage) -> None:
    """Remove from a whole model what does not belong to `stage`, in place.

    The last stage of a tied model gets a head of its own, see `train.parallel.tied`.
    """
    if stage.count == 1:
        return
    assert part.embed_tokens is not None
    for name in list(part.layers):
        if int(name) not in stage.layers:
            del part.layers[name]
    if stage.index < stage.count - 1:
        part.norm = part.lm_head = None
    elif part.config.tie_embeddings:
        vocabulary, dim = part.embed_tokens.weight.shape
        part.lm_head = nn.Linear(dim, vocabulary, bias=False, device=part.embed_tokens.weight.device)
    if stage.index > 0:
        part.embed_tokens = None


class Pipelined:
    """Runs the stages of this rank under a schedule; all micro-batches of a step are one run of it."""

    def __init__(
        self,
        parts: nn.ModuleList,
        config: TrainConfig,
        mesh: Mesh,
        device: torch.device,
        carrier: Carrier | None = None,
    ) -> None:
        """`parts` are the modules of `own_stages`, in that order. `carrier`: of their activations, for `metrics`."""
        parallel = config.parallel
        self._carrier = carrier
        self.batches_at_once = config.loop.samples_per_step // (parallel.micro_batch_size * mesh.dims.dp)
        self._parts = parts
        self._config = config
        self._mesh = mesh
        self._device = device
        self._busy = BusyTime(device)
        self._scale = 1.0
        boundary = Boundary.of(config, mesh, device)
        self._stages = [
            TimedStage(part, stage.index, stage.count, boundary, self._loss, self._busy, config, mesh)
            for part, stage in zip(parts, own_stages(config, mesh), strict=True)
        ]
        self._first = any(stage.is_first for stage in self._stages)
        self._last = any(stage.is_last for stage in self._stages)
        self._schedule: PipelineScheduleSingle | PipelineScheduleMulti
        arguments: dict[str, Any] = {"loss_fn": _computed, "scale_grads": False}
        if parallel.schedule in SINGLE:
            (stage,) = self._stages
            self._schedule = SINGLE[parallel.schedule](stage, self.batches_at_once, **arguments)
        else:
            self._schedule = MULTI[parallel.schedule](list(self._stages), self.batches_at_once, **arguments)

    def train(self, micro_batches: Sequence[Batch], scale: float = 1.0) -> Tensor:
        """See `Engine`."""
        self._scale = scale
        if self._carrier is not None:
            self._carrier.steps += 1
        self._busy.begin()
        with loss_context(self._config, self._mesh):
            losses = self._run(micro_batches, self._schedule.step)
        self._busy.end()
        add_gradients(self._parts, self._mesh)
        return torch.stack(losses).sum() / scale if losses else torch.zeros((), device=self._device)

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Batch]) -> Tensor:
        """See `Engine`."""
        with loss_context(self._config, self._mesh):
            losses = self._run(micro_batches, self._schedule.eval)
        nats = torch.zeros((), dtype=torch.float64, device=self._device)
        return torch.stack(losses).double().sum() if losses else nats

    def metrics(self) -> dict[str, float]:
        """See `Engine`: the bubble of the last step, see `BusyTime`, and that of theory, as shares of the step."""
        return {
            "pipeline_bubble": self._busy.idle_share(self._mesh.group("pp")),
            "pipeline_bubble_theory": bubble(self._config.parallel, self.batches_at_once),
            **({} if self._carrier is None else self._carrier.metrics()),
        }

    def _run(self, micro_batches: Sequence[Batch], run: Callable[..., Any]) -> list[Tensor]:
        """Give a run of the schedule what this rank's stages need; returns the losses of the last stage."""
        assert len(micro_batches) == self.batches_at_once
        batches = [own_share(batch.to(self._device), self._config, self._mesh) for batch in micro_batches]
        documents = [batch.documents for batch in batches if batch.documents is not None]
        # torch cuts what it is given into micro-batches again.
        inputs = (torch.cat([batch.tokens for batch in batches]),) if self._first else ()
        more = {"documents": torch.cat(documents)} if documents else {}
        if self._last:
            more["targets"] = torch.cat([batch.targets for batch in batches])
        losses: list[Tensor] = []
        run(*inputs, target=more.get("targets"), losses=losses, return_outputs=False, **more)
        return [loss.detach() for loss in losses]

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """In training this micro-batch's part of the mean over the step, times the scale; in evaluation the sum."""
        if not torch.is_grad_enabled():
            return vocabulary_loss(logits, targets, "sum")
        return vocabulary_loss(logits, targets, "mean") / self.batches_at_once * self._scale


def _computed(loss: Tensor, targets: Tensor) -> Tensor:
    """The loss of a micro-batch as torch's schedules ask for it: the last stage has computed it already.

    If the schedule had the logits, they would live until those of the next micro-batch are there.
    """
    return loss
