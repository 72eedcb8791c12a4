"""A model with its optimizer, built as a run builds it, that trains on the same samples again and again."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from train.config import TrainConfig
from train.data.loader import Batch
from train.layout.check import lay_out
from train.mesh import Mesh
from train.optim.adamw import build_optimizer
from train.parallel.apply import build_engine, build_parts
from train.parallel.clip import clip_grad_norm
from train.parallel.fill import draw
from train.precision.state import PrecisionState
from train.state import TrainState


class Training:
    """On this rank. Collective."""

    def __init__(self, config: TrainConfig, device: torch.device, samples: int = 1) -> None:
        """`samples`: batches of micro-batches, which take turns."""
        size = dist.get_world_size()
        self.config = config
        self.dims = lay_out(config, size, size)
        self.mesh = Mesh.build(self.dims, device.type)
        self.sharded = build_parts(config, self.mesh, device, None)
        self.optimizer = build_optimizer(self.sharded.parts, config, device, self.sharded.shelved)
        self.state = TrainState(
            self.sharded.parts,
            self.optimizer,
            config.model,
            rank=dist.get_rank(),
            precision=PrecisionState.of(config.precision),
        )
        self.state.fill(draw(config.model, config.seed))
        self.engine = build_engine(self.sharded, config, device)
        generator = torch.Generator().manual_seed(1)
        shape = (config.parallel.micro_batch_size, config.data.sequence_length)
        self._batches = [
            Batch(
                *(torch.randint(config.model.vocabulary, shape, generator=generator) for _ in range(2)), None
            )
            for _ in range(samples)
        ]
        self._taken = 0

    def step(self) -> Tensor:
        """Take one step; returns its loss."""
        batch = self._batches[self._taken % len(self._batches)]
        self._taken += 1
        scale = self.state.precision.scale
        loss = self.engine.train([batch], scale.value)
        norm = clip_grad_norm(self.optimizer, 1.0, self.mesh, scale=scale.value)
        if scale.passes(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def steps(self, count: int) -> Sequence[float]:
        """Take some steps, and finish what the last one leaves to do in the background: nothing can hide that."""
        losses = [self.step() for _ in range(count)]
        self.optimizer.finish()
        return [float(loss) for loss in losses]

    def close(self) -> None:
        """Give up all memory and files."""
        self.optimizer.close()
