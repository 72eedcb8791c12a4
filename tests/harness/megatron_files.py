"""Makes `tests/golden/megatron.tar.gz` by Megatron, which wants psutil for it, which no test needs.

python megatron_files.py FOLDER
"""

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist


def main(folder: str) -> None:
    """Save one step as Megatron's `torch_dist`, with a tensor in two parts."""
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
        torch.cuda.synchronize = lambda *device: None  # type: ignore[assignment,misc]
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    name = "decoder.layers.w"
    whole = torch.arange(48.0).reshape(8, 6)

    def part(key: str, data: torch.Tensor, *offsets: tuple[int, int, int]) -> Any:
        return ShardedTensor.from_rank_offsets(key, data, *offsets, replica_id=0)

    state = {
        "first": part(name, whole[:4].clone(), (0, 0, 2)),
        "second": part(name, whole[4:].clone(), (0, 1, 2)),
        "moment": part(f"optimizer.state.exp_avg.{name}", whole / 7),
        "rng": ShardedObject("rng_state", {"a": 1}, (1,), (0,), replica_id=0),
        "iteration": 12,
        "args": argparse.Namespace(tensor_model_parallel_size=1),
    }
    dist_checkpointing.save(state, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
