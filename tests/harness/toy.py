"""A run small enough for a test: a few thousand tokens and a model of some thousand parameters."""

from pathlib import Path

import torch
import torch.distributed as dist

from contract.exit_codes import ExitCode
from harness.composed import composed
from train.bootstrap import World
from train.resilience.stop import StopRequest
from train.run import run_rank

MODEL = [
    "model=llama_1m",
    "model.dim=32",
    "model.layers=2",
    "model.heads=4",
    "model.kv_heads=2",
    "model.ffn_dim=64",
]
LOOP = [
    "loop.global_batch_size=8",
    "loop.log_every_steps=1",
    "loop.eval_batches=2",
    "loop.eval_every_steps=0",
]
REST = ["data.sequence_length=32", "parallel.micro_batch_size=2", "optim.warmup_steps=5", "optim.lr=1e-2"]
QUIET = ["monitor.progress=off", "monitor.tensorboard=false"]


def toy_overrides(prefix: Path, root: Path, name: str, *more: str) -> list[str]:
    """Hydra settings of a toy run on the token files at `prefix`."""
    return [
        *MODEL,
        *LOOP,
        *REST,
        *QUIET,
        f"data.prefix={prefix}",
        f"run.root={root}",
        f"run.name={name}",
        *more,
    ]


class StopAfter(StopRequest):
    """A stop request that arrives by itself, at the beginning of some step, on one rank alone."""

    def __init__(self, step: int | None, here: bool = True) -> None:
        self.replaced: list[str] = []
        self._looks_left = step
        self._here = here

    @property
    def received(self) -> str | None:  # type: ignore[override]
        if self._looks_left is None or not self._here:
            return None
        self._looks_left -= 1
        return "SIGUSR2" if self._looks_left < 0 else None


def train_toy(
    overrides: list[str], stop_after: int | None = None, ranks_per_node: int | None = None
) -> ExitCode:
    """Run a toy configuration as this rank of the test's process group; only the last rank is told to stop.

    `ranks_per_node`: what the ranks take for a node; None is all of them.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    local = ranks_per_node or size
    world = World(rank, size, rank % local, local, rank // local, size // local, launcher="test")
    request = StopAfter(stop_after, here=rank == size - 1)
    return run_rank(composed(overrides), request, world, torch.device("cpu"))
