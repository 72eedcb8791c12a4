"""AdamW for weights, moments and gradients that are kept in other types than fp32."""

import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from train.checkpoint.stored import Path, ReadInto, Stored
from train.config import TrainConfig
from train.monitor.live_bytes import local_bytes
from train.offload.buckets import Slot, local, make_buckets, slots
from train.optim.blocks import Blocks
from train.optim.tree import paths, stand_ins
from train.parallel.fill import Read, local_part
from train.precision.config import BLOCK, Moments
from train.precision.rows import Rows

CHUNK = 1 << 20
"""Elements, or a little more, of which copies in fp32 exist at a time."""


class Numbers:
    """A flat row of numbers of which a part can be had in fp32, and given back."""

    def __init__(self, held: Tensor | Rows | Blocks) -> None:
        """`held`: where they are; an fp32 tensor is worked on in place."""
        self.held = held

    @property
    def nbytes(self) -> int:
        """Memory that they take."""
        if isinstance(self.held, Blocks):
            return self.held.codes.nbytes + self.held.scale.nbytes
        return local_bytes([self.held])

    def take(self, start: int, end: int) -> Tensor:
        """Numbers `start` to `end`."""
        if isinstance(self.held, Rows):
            columns = self.held.shape[1]
            return self.held.decode(start // columns, end // columns).view(-1)
        if isinstance(self.held, Blocks):
            return self.held.read(start, end)
        return self.held.view(-1)[start:end]

    def give(self, start: int, numbers: Tensor, generator: torch.Generator | None = None) -> None:
        """Keep what was taken and has changed; rounded at random with a generator, where it is rounded at all."""
        if isinstance(self.held, Rows):
            columns = self.held.shape[1]
            self.held.replace_rows(start // columns, numbers.view(-1, columns), generator)
        elif isinstance(self.held, Blocks):
            self.held.write(start, numbers)


class Kept:
    """What is kept of one parameter on this rank."""

    def __init__(self, slot: Slot, moments: Moments) -> None:
        self.slot = slot
        weight = slot.parameter
        assert weight.dtype is torch.float32, "weights in a narrower type belong to MasterAdamW"
        columns = weight.shape[1] if weight.ndim > 1 else 1
        self.chunk = max(1, CHUNK // (columns * BLOCK)) * columns * BLOCK
        self.first, self.second = (
            Numbers(self._zeros(moments, weight.device, signed)) for signed in (True, False)
        )

    def _zeros(self, moments: Moments, device: torch.device, signed: bool) -> Tensor | Blocks:
        # What norms have is too little to be worth it.
        if moments is Moments.int8 and self.slot.parameter.ndim > 1:
            return Blocks(self.slot.size, signed, device)
        return torch.zeros(self.slot.size, device=device)

    @property
    def weight(self) -> Numbers:
        """Where it is now: `fully_shard` may move what it pads."""
        return Numbers(local(self.slot.parameter.detach()))

    @property
    def numbers(self) -> tuple[Numbers, Numbers, Numbers]:
        """The weight, and the moments in the order of `tree.MOMENTS`."""
        return self.weight, self.first, self.second

    @property
    def moments_bytes(self) -> int:
        """Memory of both moments."""
        return self.first.nbytes + self.second.nbytes

    def whole(self, row: int) -> Tensor:
        """All of one of `numbers`, spread over the ranks as the parameter is."""
        return self.slot.like(self.numbers[row].take(0, self.slot.size))


class CompactAdamW(torch.optim.Optimizer):
    """torch's fused AdamW on pieces that are turned into fp32 and back one by one.

    Weights may be `Rows`, moments `Blocks`, gradients anything. In rounding at random it depends on the seed, the step
    and the row alone: copies of a table stay equal, and a run that is continued goes on as it would have.
    """

    def __init__(self, parts: nn.ModuleList, config: TrainConfig) -> None:
        found = slots(make_buckets(parts, config.model))
        matrices, vectors = (
            [slot.parameter for slot in found if (slot.parameter.ndim >= 2) is matrix]
            for matrix in (True, False)
        )
        groups = [
            {"params": matrices, "weight_decay": config.optim.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        super().__init__(groups, {"lr": config.optim.lr})
        self._betas, self._eps = (config.optim.beta1, config.optim.beta2), config.optim.eps
        self._seed = config.seed
        self._steps = 0
        self._factor: Tensor | None = None
        self.kept = [Kept(slot, config.precision.optimizer_state) for slot in found]

    @property
    def updates(self) -> int:
        """Steps that the moments have seen."""
        return self._steps

    def gradients(self) -> Mapping[nn.Parameter, Tensor]:
        """Gradients of this rank by parameter, once a backward pass is done."""
        return {p: p.grad for group in self.param_groups for p in group["params"] if p.grad is not None}

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply all gradients by `factor` (0-d) when they are next used."""
        self._factor = factor

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all weights."""
        self._steps += 1
        for kept in self.kept:
            gradient = kept.slot.parameter.grad
            if gradient is None:
                continue
            flat = local(gradient).reshape(-1)
            for start in range(0, kept.slot.size, kept.chunk):
                self._update(kept, flat[start : start + kept.chunk], start)
        self._factor = None

    def _update(self, kept: Kept, gradient: Tensor, start: int) -> None:
        group = self.param_groups[0 if kept.slot.parameter.ndim >= 2 else 1]
        end = start + len(gradient)
        weight, first, second = (numbers.take(start, end) for numbers in kept.numbers)
        wide = gradient.to(weight, copy=True)
        if self._factor is not None:
            wide.mul_(self._factor)
        torch._fused_adamw_(
            [weight],
            [wide],
            [first],
            [second],
            [],
            [torch.tensor(float(self._steps), device=weight.device)],
            lr=group["lr"],
            beta1=self._betas[0],
            beta2=self._betas[1],
            weight_decay=group["weight_decay"],
            eps=self._eps,
            amsgrad=False,
            maximize=False,
        )
        generator = self._generator(kept, start) if isinstance(kept.weight.held, Rows) else None
        kept.weight.give(start, weight, generator)
        kept.first.give(start, first)
        kept.second.give(start, second)

    def _generator(self, kept: Kept, start: int) -> torch.Generator:
        """The source of the noise of some rows, the same wherever there is a copy of them."""
        _, where = local_part(kept.slot.parameter)
        row = where[0].start + start // kept.slot.parameter.shape[1]
        digest = hashlib.sha256(f"{self._seed}:{kept.slot.name}:{self._steps}:{row}".encode()).digest()
        generator = torch.Generator(kept.slot.parameter.device)
        return generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)

    def moments(self) -> Iterator[tuple[nn.Parameter, Tensor, Tensor]]:
        """Parameters with their two moments, fp32, spread over the ranks as they are."""
        for kept in self.kept:
            yield kept.slot.parameter, kept.whole(1), kept.whole(2)

    @torch.no_grad()
    def fill(self, read: Read) -> None:
        """Give all weights their values; moments are those of a new optimizer."""
        for kept in self.kept:
            place, where = local_part(kept.slot.parameter)
            if kept.slot.size:
                place.copy_(read(kept.slot.name, tuple(kept.slot.parameter.shape), where))

    def whole_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return weights, and moments with the number of steps, by name in the whole model.

        Tensors have their shape and place in the layout, but no values: `stored` has them, in fp32.
        """
        return stand_ins((kept.slot for kept in self.kept), self._steps)

    def stored(self) -> dict[Path, Stored]:
        """The values of `whole_state`, by path in a checkpoint; until the next step."""
        found: dict[Path, Stored] = {}
        for order, kept in enumerate(self.kept):
            for row, path in enumerate(paths(kept.slot.name)):
                found[path] = Stored(order, partial(_read, kept, row))
        return found

    @torch.no_grad()
    def load(self, read: ReadInto) -> None:
        """Take over what was saved of `whole_state`, in this layout, a parameter at a time."""
        for kept in self.kept:
            weight, first, second = (kept.whole(row) for row in range(3))
            step = torch.zeros(())
            moments = {"step": step, "exp_avg": first, "exp_avg_sq": second}
            read({"model": {kept.slot.name: weight}, "optimizer": {kept.slot.name: moments}})
            for numbers, values in zip(kept.numbers, (weight, first, second), strict=True):
                numbers.give(0, local(values).reshape(-1))
            self._steps = int(step)

    def finish(self) -> None:
        """Nothing to wait for: a step is done when it returns."""

    def metrics(self) -> dict[str, float]:
        """Nothing to tell."""
        return {}

    def close(self) -> None:
        """Nothing to give up."""


def _read(kept: Kept, row: int) -> Tensor:
    """The values of a parameter, or of one of its moments, that this rank has."""
    return local(kept.whole(row)).detach()
