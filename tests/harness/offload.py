"""What a run leaves, bit by bit, whatever it has kept elsewhere than on its devices."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from contract.exit_codes import ExitCode
from contract.run_folder import RunFolder, read_json_lines
from harness.composed import composed
from harness.pool import Ranks
from harness.toy import StopAfter, toy_overrides, train_toy
from train.bootstrap import World
from train.launch import Launch
from train.loop import Parts

STEPS = 4
COMMON = [f"loop.steps={STEPS}", "loop.eval_batches=1", "optim.lr=3e-3", "model.layers=5"]
"""More layers than there are buffers for them."""


def outcome(ranks: Ranks, size: int, tokens: Path, folder: Path, name: str, *more: str) -> dict[str, Tensor]:
    """Train; return the tensors of the last checkpoint by what they are, the losses and the norms of gradients."""
    overrides = toy_overrides(tokens, folder, name, *COMMON, *more)
    assert ranks(size, train_toy, overrides, timeout_s=120) == [ExitCode.FINISHED] * size
    return left_by(RunFolder(folder / name), folder)


def left_by(run: RunFolder, folder: Path, step: int = STEPS) -> dict[str, Tensor]:
    """What a run has left after a step; `folder` is for a copy of it."""
    dcp_to_torch_save(run.checkpoints / f"step_{step}", folder / f"{run.name}.pt")
    tree = torch.load(folder / f"{run.name}.pt", weights_only=True)
    found = {f"weight {key}": value for key, value in tree["model"].items()}
    for key, moments in tree["optimizer"].items():
        found |= {f"{kind} {key}": value for kind, value in moments.items()}
    lines = list(read_json_lines(run.metrics))
    for kind in ("loss", "grad_norm", "eval_loss"):
        found[kind] = torch.tensor([line[kind] for line in lines if kind in line], dtype=torch.float64)
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    """To the last bit."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), f"{what}, {key}: {(found[key] - value).abs().max()}"


@contextmanager
def opened(overrides: list[str]) -> Iterator[Parts]:
    """What the loop of this rank works with."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank=rank, size=size, local_rank=rank, local_size=size, launcher="test")
    launch = Launch(composed(overrides), StopAfter(None), world, torch.device("cpu"))
    parts = launch.set_up()
    try:
        yield parts
    finally:
        parts.close()
        launch.owner.release()
