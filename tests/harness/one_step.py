"""One real step of a small model in some layout, and what can be measured of it."""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

from harness.composed import composed
from train.config import TrainConfig
from train.data.loader import Batch
from train.layout.check import lay_out
from train.mesh import Mesh
from train.monitor.live_bytes import LiveBytes, local_bytes
from train.offload.states import Resident
from train.optim.adamw import build_optimizer
from train.optim.compact import CompactAdamW
from train.optim.master import MasterAdamW
from train.parallel.apply import build_engine, build_parts
from train.parallel.engine import Direct
from train.parallel.recompute import plan_of
from train.parallel.tensor import loss_context

SHAPE = [
    "model=llama_1m",
    "model.vocab_size=320",
    "model.dim=64",
    "model.layers=4",
    "model.heads=4",
    "model.kv_heads=2",
    "model.ffn_dim=192",
    "data.sequence_length=128",
    "parallel.micro_batch_size=4",
    "loop.global_batch_size=null",
    "parallel.gradient_accumulation_steps=2",
]
CPU = torch.device("cpu")


class OneStep:
    """A step of two micro-batches on this rank. Collective."""

    def __init__(self, overrides: Sequence[str]) -> None:
        self.config = composed([*SHAPE, *overrides])
        self.dims = lay_out(self.config, dist.get_world_size())
        mesh = Mesh.build(self.dims, "cpu")
        self.sharded = build_parts(self.config, mesh, CPU, seed=1)
        self._engine = build_engine(self.sharded, self.config, CPU)
        self._batches = [make_batch(self.config, mesh, index) for index in range(2)]
        self.plan = plan_of(self.config, mesh)
        self.loss = float(self._engine.train(self._batches))
        parameters = list(self.sharded.parts.parameters())
        self.parameter_bytes = local_bytes(parameters)
        self.gradient_bytes = local_bytes(p.grad for p in parameters if p.grad is not None)

    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients by name, of this rank's parts. Collective."""
        found = {}
        for name, parameter in self.sharded.parts.named_parameters():
            gradient = parameter.grad
            assert gradient is not None, name
            found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        return found

    def optimizer_bytes(self) -> int:
        """Take the optimizer's step; returns the bytes of its state."""
        optimizer = build_optimizer(self.sharded.parts, self.config, CPU, self.sharded.shelved)
        optimizer.step()
        if isinstance(optimizer, CompactAdamW):
            return sum(kept.moments_bytes for kept in optimizer.kept)
        if isinstance(optimizer, MasterAdamW):
            optimizer.finish()
            assert isinstance(optimizer._states, Resident)
            held_bytes = sum(block.nbytes for block in optimizer._states._blocks)
            optimizer.close()
            return held_bytes
        return local_bytes(value for state in optimizer.state.values() for value in state.values())

    def micro_batch(self) -> tuple[int, int]:
        """Bytes kept between forward and backward of one micro-batch, and FLOPs of its backward. No pipeline.

        The FLOPs are those of matrix products: torch's counter does not know attention on a CPU.
        """
        assert isinstance(self._engine, Direct)
        with loss_context(self.config, self.sharded.mesh):
            with LiveBytes() as live:
                loss = self._engine._loss(self._batches[0], "mean")
            kept_bytes = self._settled(live)
            with FlopCounterMode(display=False) as flops:
                loss.backward()
        return kept_bytes, flops.get_total_flops()

    def _settled(self, live: LiveBytes) -> int:
        """What lives when the threads of the collectives have let go of their buffers."""
        counts = [live.count(without=self.sharded.parts.parameters())]
        while len(counts) < 4 or len(set(counts[-4:])) > 1:
            time.sleep(0.05)
            counts.append(live.count(without=self.sharded.parts.parameters()))
        return counts[-1]


def make_batch(config: TrainConfig, mesh: Mesh, index: int) -> Batch:
    """Random tokens, other ones for each data-parallel rank and `index`."""
    generator = torch.Generator().manual_seed(2 * mesh.dp.get_local_rank() + index)
    shape = (config.parallel.micro_batch_size, config.data.sequence_length)
    tokens, targets = (torch.randint(config.model.vocabulary, shape, generator=generator) for _ in range(2))
    documents = torch.arange(shape[1]).expand(shape) // 5 if config.data.mask_documents else None
    return Batch(tokens=tokens, targets=targets, documents=documents)
