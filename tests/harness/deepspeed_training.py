"""Makes `tests/golden/deepspeed_training.json`: DeepSpeed itself trains our toy model on our samples, by its JSON.

    pip install deepspeed
    cd tests && export PYTHONPATH=..:.
    python -m torch.distributed.run --nproc-per-node 2 harness/deepspeed_training.py golden/deepspeed_training.json

Needs the project's own environment too. `torch_adam` is what runs on a CPU without anything being compiled.
"""

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import deepspeed
import deepspeed.comm.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.toy import MODEL, QUIET, StopAfter
from harness.toy_text import write_toy_text
from tools.cli_deepspeed import with_deepspeed
from train.bootstrap import World
from train.config import load_config
from train.data.prepare import prepare
from train.launch import Launch
from train.model.llama import build, next_token_loss

CONFIG: dict[str, Any] = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.3,
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 0.004, "betas": [0.85, 0.97], "torch_adam": True, "weight_decay": 0},
    },
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 12, "warmup_num_steps": 4}},
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}
SETTINGS = [*MODEL, *QUIET, "data.sequence_length=32", "loop.eval_batches=0", "loop.log_every_steps=1"]


class WithLoss(nn.Module):
    """What DeepSpeed takes: a module that returns a loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return next_token_loss(self.model(tokens), targets, "mean")


def main(out: Path, folder: Path) -> None:
    """Train, and write loss, learning rate and gradient norm of each step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = folder / str(rank)
    mine.mkdir()
    prepare([write_toy_text(mine / "text")], mine / "toy", workers=1)
    file = mine / "ds_config.json"
    file.write_text(json.dumps(CONFIG))
    shared = [f"data.prefix={mine / 'toy'}", f"run.root={folder}", "run.name=samples"]
    config = load_config(with_deepspeed(file, [*SETTINGS, *shared], ranks))
    world = World(rank, ranks, rank, ranks, 0, 1, launcher="test")
    parts = Launch(config, StopAfter(None), world, torch.device("cpu")).set_up()
    whole = WithLoss(build(parts.config.model, config.seed, "cpu"))
    engine, *_ = deepspeed.initialize(model=whole, model_parameters=whole.parameters(), config=dict(CONFIG))
    steps = []
    for _ in range(config.loop.steps):
        (lr,) = engine.get_lr()
        losses = []
        for batch in next(parts.loader).micro_batches:
            loss = engine(batch.tokens, batch.targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        steps.append(
            {"loss": float(mean) / ranks, "lr": lr, "grad_norm": float(engine.get_global_grad_norm())}
        )
    if rank == 0:
        out.write_text(
            json.dumps({"deepspeed": deepspeed.__version__, "config": CONFIG, "steps": steps}, indent=1)
        )
    dist.barrier()
    parts.close()


if __name__ == "__main__":
    deepspeed.comm.torch.build_shm_op = lambda: None  # it would be compiled
    dist.init_process_group("gloo")
    name: list[Any] = [None]
    with TemporaryDirectory() as made:
        name = [made]
        dist.broadcast_object_list(name)
        main(Path(sys.argv[1]).absolute(), Path(name[0]))
        sys.stdout.flush()
        dist.barrier()
    os._exit(0)  # DeepSpeed's threads do not all end by themselves
