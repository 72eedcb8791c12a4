"""AdamW whose fp32 weights and moments lie elsewhere than the weights that compute (ZeRO-Offload, arXiv 2101.06840)."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from train.checkpoint.stored import Path, ReadInto, Stored
from train.config import OptimConfig
from train.offload.buckets import Bucket, Slot, alone, cut, elements, local, slots
from train.offload.gradients import Gradients, Taken
from train.offload.seam import before_unshard, gathered_parameters, sharded_modules
from train.offload.states import States
from train.offload.telemetry import Telemetry
from train.offload.update import Progress, Worker
from train.offload.weights import Weights
from train.optim.tree import paths, stand_ins
from train.parallel.fill import Read, local_part

CHUNK = 1 << 18
"""Elements that a CPU takes through the update at a time: what one pass leaves for the next stays in its cache."""


@dataclass
class Step:
    """What one update does to every bucket."""

    number: int
    """Of the update, from 1."""
    rates: tuple[float, ...]
    """Learning rate of each of `param_groups`."""
    factor: Tensor | None
    """By which gradients are multiplied first."""
    gradients: Taken


class MasterAdamW(torch.optim.Optimizer):
    """torch's fused AdamW on blocks of fp32 weights and moments that `States` brings, a bucket at a time.

    With `background` an update runs on a thread of its own, in the order of the forward pass: a forward or backward
    waits for the weights that it is about to gather. Everything else that looks at weights calls `finish` first.
    """

    def __init__(
        self,
        parts: nn.ModuleList,
        buckets: Sequence[Bucket],
        config: OptimConfig,
        states: States,
        gradients: Gradients,
        weights: Weights,
        background: bool,
    ) -> None:
        """`states` have no blocks yet; they are closed with this."""
        everything = [slot.parameter for slot in slots(buckets)]
        groups = [
            {"params": [p for p in everything if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in everything if p.ndim < 2], "weight_decay": 0.0},
        ]
        super().__init__(groups, {"lr": config.lr})
        self._betas, self._eps = (config.beta1, config.beta2), config.eps
        self._steps = 0
        self._factor: Tensor | None = None
        self._buckets = buckets
        self._states, self._gradients, self._weights = states, gradients, weights
        self._worker = Worker(background)
        self._telemetry = Telemetry(buckets, states, gradients, weights, self._worker)
        self._update: Progress | None = None
        """The newest update, unless it is known to be over."""
        self._weights_from: Progress | None = None
        """The update whose weights are on their way to where they compute."""
        states.allocate([elements(bucket) for bucket in buckets])
        if background:
            self._watch(parts)

    def gradients(self) -> Mapping[nn.Parameter, Tensor]:
        """Gradients of this rank by parameter, once a backward pass is done."""
        found = self._gradients.found()
        # In the order in which an optimizer on the device has them: a norm adds up in it.
        return {p: found[p] for group in self.param_groups for p in group["params"] if p in found}

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply all gradients by `factor` (0-d) when they are next used."""
        self._factor = factor

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients that no update has taken."""
        self._gradients.drop()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Begin to update all weights; raises what has ended an update before."""
        self._settle()
        self._steps += 1
        rates = tuple(float(group["lr"]) for group in self.param_groups)
        step = Step(self._steps, rates, self._factor, self._gradients.take())
        self._factor = None
        self._telemetry.updates += 1
        self._update = progress = Progress(len(self._buckets))
        if not self._weights.later:
            self._weights_from = progress
        jobs = [partial(self._take_through, index, step, progress) for index in range(len(self._buckets))]
        self._worker.run(progress, [partial(self._bring_factor, step), *jobs])
        if not self._worker.background:
            self._settle()

    def finish(self) -> None:
        """Return when every update is over and its weights are where they compute."""
        self._settle()
        if self._weights_from is not None:
            self._wait(self._weights_from.wait_for_all)
            self._weights_from = None

    def close(self) -> None:
        """End the thread, and give up all states."""
        self._worker.close()
        self._states.close()
        self._gradients.close()
        self._weights.close()

    def _watch(self, parts: nn.ModuleList) -> None:
        """Have modules wait for their weights before these are gathered."""
        index_of = {slot.parameter: index for index, bucket in enumerate(self._buckets) for slot in bucket}
        for module in sharded_modules(parts):
            indices = sorted({index_of[p] for p in gathered_parameters(module) if p in index_of})
            before_unshard(module, partial(self._wait_for, indices))

    def _wait_for(self, indices: Sequence[int]) -> None:
        if self._weights_from is not None:
            for index in indices:
                self._wait(partial(self._weights_from.wait_for, index))

    def _settle(self) -> None:
        """Wait for the end of the newest update; weights that were to be sent after it are sent."""
        if self._update is None:
            return
        self._wait(self._update.wait)
        if self._weights.later:
            self._weights_from = Progress(len(self._buckets))
            for index in range(len(self._buckets)):
                self._weights_from.sent(index, self._weights.send(index))
        self._update = None

    def _wait(self, wait: Callable[[], None]) -> None:
        began_s = time.perf_counter()
        wait()
        self._telemetry.waited_s += time.perf_counter() - began_s

    def _bring_factor(self, step: Step) -> None:
        """Once an update: it waits for all that the device was told before."""
        if step.factor is not None:
            step.factor = step.factor.to(self._states.device)
            if step.factor.device.type == "cpu" and float(step.factor) == 1:
                step.factor = None  # gradients need no pass of their own

    @torch.no_grad()
    def _take_through(self, index: int, step: Step, progress: Progress) -> None:
        """Update one bucket."""
        for following in range(index + 1, min(index + 1 + self._states.ahead, len(self._buckets))):
            self._states.ask(following)
        if index + 1 < len(self._buckets):
            step.gradients.ask(index + 1)
        block = self._states.get(index)
        for slot, rows, gradient, held in zip(
            self._buckets[index],
            cut(block, self._buckets[index]),
            step.gradients.get(index),
            self._weights.get(index),
            strict=True,
        ):
            if gradient is None:
                held.copy_(rows[0])
            else:
                self._update_rows(rows, gradient, held, 0 if slot.parameter.ndim >= 2 else 1, step)
        self._states.put(index)
        step.gradients.put(index)
        if not self._weights.later:
            progress.sent(index, self._weights.send(index))

    def _update_rows(self, rows: Tensor, gradient: Tensor, held: Tensor, group: int, step: Step) -> None:
        """Update the weight and moments of one parameter, and write the new weight to `held` too."""
        number = torch.tensor(float(step.number), device=rows.device)
        chunk = min(CHUNK, rows.shape[1]) if rows.device.type == "cpu" else rows.shape[1]
        scratch = torch.empty(chunk, device=rows.device)
        for start in range(0, rows.shape[1], max(chunk, 1)):
            end = start + chunk
            weight, first, second = rows[:, start:end].unbind()
            wide = _scaled(gradient[start:end], step.factor, scratch)
            torch._fused_adamw_(
                [weight],
                [wide],
                [first],
                [second],
                [],
                [number],
                lr=step.rates[group],
                beta1=self._betas[0],
                beta2=self._betas[1],
                weight_decay=self.param_groups[group]["weight_decay"],
                eps=self._eps,
                amsgrad=False,
                maximize=False,
            )
            held[start:end].copy_(weight)

    @torch.no_grad()
    def fill(self, read: Read) -> None:
        """Give all weights their values, and forget the moments."""
        self.finish()
        self._steps = 0
        for index, bucket in enumerate(self._buckets):
            block = self._states.get(index).zero_()
            for slot, rows in zip(bucket, cut(block, bucket), strict=True):
                where = local_part(slot.parameter)[1]
                if slot.size:
                    rows[0].copy_(read(slot.name, tuple(slot.parameter.shape), where).reshape(-1))
            self._written(index, block)

    def whole_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return weights, and moments with the number of steps, by name in the whole model.

        Tensors have their shape and place in the layout, but no values: `stored` has them.
        """
        self.finish()
        return stand_ins(slots(self._buckets), self._steps)

    def stored(self) -> dict[Path, Stored]:
        """The values of `whole_state`, by path in a checkpoint; until the next step."""
        found: dict[Path, Stored] = {}
        for index, bucket in enumerate(self._buckets):
            for slot in bucket:
                for row, path in enumerate(paths(slot.name)):
                    found[path] = Stored(index, partial(self._read, index, slot, row))
        return found

    @torch.no_grad()
    def load(self, read: ReadInto) -> None:
        """Take over what was saved of `whole_state`, in this layout, a bucket at a time."""
        self.finish()
        for index, bucket in enumerate(self._buckets):
            block = self._states.get(index)
            weights: dict[str, Any] = {}
            moments: dict[str, Any] = {}
            for slot, rows in zip(bucket, cut(block, bucket), strict=True):
                weights[slot.name], first, second = (slot.like(row) for row in rows)
                moments[slot.name] = {"step": torch.zeros(()), "exp_avg": first, "exp_avg_sq": second}
            read({"model": weights, "optimizer": moments})
            self._steps = int(moments[bucket[0].name]["step"])
            self._written(index, block)

    def metrics(self) -> dict[str, float]:
        """What this rank has moved and waited for since the last call, a step; empty where nothing is elsewhere."""
        return self._telemetry.take() if self._worker.background else {}

    def _read(self, index: int, slot: Slot, row: int) -> Tensor:
        """One row of a parameter, there until the next one is read."""
        if index + 1 < len(self._buckets):
            self._states.ask(index + 1)
        values = self._states.get(index)[row, slot.start : slot.end]
        self._states.put(index, changed=False)
        return alone(values).view(local(slot.parameter).shape)

    def _written(self, index: int, block: Tensor) -> None:
        """Keep a block that was given new values, and have its weights compute."""
        bucket = self._buckets[index]
        for rows, held in zip(cut(block, bucket), self._weights.get(index), strict=True):
            held.copy_(rows[0])
        self._states.put(index)
        self._weights.send(index).synchronize()


def _scaled(gradient: Tensor, factor: Tensor | None, scratch: Tensor) -> Tensor:
    """A gradient in fp32, times a factor; in `scratch` unless it is that already."""
    if gradient.dtype is torch.float32 and gradient.device == scratch.device:
        return gradient if factor is None else torch.mul(gradient, factor, out=scratch[: gradient.numel()])
    wide = scratch[: gradient.numel()].copy_(gradient)
    return wide if factor is None else wide.mul_(factor)
