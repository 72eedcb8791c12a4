"""Makes `tests/golden/deepspeed.tar.gz` by DeepSpeed itself, which is not among the packages that tests need.

    python -m torch.distributed.run --nproc-per-node 2 deepspeed_files.py STAGE FOLDER   # 1, 2 and 3
    python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder FOLDER/global_step3 ...

zeroN was saved by 2 ranks (1 and 3 in bf16; 2 also a step earlier), universalN is what its own converter makes of it.
"""

import sys

import deepspeed
import torch
import torch.distributed as dist


class Small(torch.nn.Module):
    """Sizes that nothing divides."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(7, 5)
        self.norm = torch.nn.LayerNorm(5)
        self.b = torch.nn.Linear(5, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x)))


def main(stage: int, folder: str) -> None:
    """Take three steps and save."""
    torch.manual_seed(0)
    deepspeed.init_distributed(dist_backend="gloo")
    model = Small()
    decayed = {"params": [one for one in model.parameters() if one.dim() > 1], "weight_decay": 0.1}
    others = {"params": [one for one in model.parameters() if one.dim() < 2], "weight_decay": 0.0}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": stage != 2},
    }
    optimizer = torch.optim.AdamW([decayed, others], lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(3):
        torch.manual_seed(step * 10 + dist.get_rank())
        x = torch.randn(2, 7)
        loss = engine(x if stage == 2 else x.bfloat16()).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        if step == 2 or (stage, step) == (2, 1):
            engine.save_checkpoint(folder)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
