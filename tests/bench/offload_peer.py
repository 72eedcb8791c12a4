"""A training with everything offloaded beside DeepSpeed's ZeRO-3 with the same: tokens/s (at least 1.2 x), memory.

    python tests/bench/offload_peer.py [--nvme FOLDER] [--rounds 7] [--steps 3] [--tokens 64]

Two ranks of one thread each, one model of 20 M parameters in bf16 with fp32 weights, moments and gradients elsewhere;
with --nvme weights and the optimizer's state lie in files of that folder. Each side has processes of its own, which
take turns of some steps, because machines are noisy: the median of the ratios of neighbours is what counts. Memory is
the most that a rank's process has had, torch and its libraries included; what importing them takes stands beside it.

`--tokens` is what a rank takes in a step: the fewer, the more the traffic counts beside the products of matrices, which
both sides leave to torch.

Needs DeepSpeed (`pip install deepspeed`), which no environment of ours has; without it our side alone is measured.
"""

import argparse
import importlib.util
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

RANKS = 2
MODEL = [
    "model=llama_25m",
    "model.vocab_size=8192",
    "model.dim=384",
    "model.layers=8",
    "model.heads=6",
    "model.ffn_dim=1024",
    "parallel.micro_batch_size=1",
    "parallel.gradient_accumulation_steps=1",
    "loop.global_batch_size=null",
    "parallel.zero=3",
    # As DeepSpeed's gradients travel where bf16 computes, unless it is told otherwise.
    "precision.reduce=bfloat16",
]
LIMIT_S = 600.0
Step = Callable[[], None]


def ours(folder: Path, nvme: Path | None, tokens: int) -> Step:
    """A step of the trainer."""
    import torch

    from train.config import load_config
    from train.data.loader import Batch
    from train.layout.check import lay_out
    from train.mesh import Mesh
    from train.optim.adamw import build_optimizer
    from train.optim.master import MasterAdamW
    from train.parallel.apply import build_engine, build_parts
    from train.parallel.clip import clip_grad_norm
    from train.parallel.fill import draw

    tier = "cpu" if nvme is None else "nvme"
    more = [f"offload.{name}={tier}" for name in ("optimizer", "parameters")]
    more += ["offload.gradients=cpu", f"run.root={folder}"]
    more += [f"offload.nvme_path=[{nvme}]"] * (nvme is not None)
    config, device = load_config([*MODEL, f"data.sequence_length={tokens}", *more]), torch.device("cpu")
    mesh = Mesh.build(lay_out(config, RANKS), "cpu")
    sharded = build_parts(config, mesh, device, None)
    optimizer = build_optimizer(sharded.parts, config, device, sharded.shelved)
    assert isinstance(optimizer, MasterAdamW)
    optimizer.fill(draw(config.model, seed=1))
    engine = build_engine(sharded, config, device)
    sample = torch.randint(config.model.vocabulary, (1, tokens + 1))
    batch = Batch(sample[:, :-1].contiguous(), sample[:, 1:].contiguous(), None)

    def step() -> None:
        engine.train([batch])
        clip_grad_norm(optimizer, 1.0, mesh)
        optimizer.step()
        optimizer.zero_grad()

    return step


def deepspeed_step(folder: Path, nvme: Path | None, tokens: int) -> Step:
    """A step of DeepSpeed's engine."""
    import deepspeed
    import torch
    import torch.nn.functional as F
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    from train.config import load_config
    from train.model.llama import build

    config = load_config([*MODEL, f"data.sequence_length={tokens}"])
    model = build(config.model, 1, torch.device("cpu"))
    place = {"device": "cpu"} if nvme is None else {"device": "nvme", "nvme_path": str(nvme)}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 3,
            "contiguous_gradients": True,
            "offload_optimizer": place | {"pin_memory": False},
            "offload_param": place | {"pin_memory": False},
        },
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
    }
    adam = DeepSpeedCPUAdam(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, adamw_mode=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=settings)
    sample = torch.randint(config.model.vocabulary, (1, tokens + 1))
    inputs, targets = sample[:, :-1].contiguous(), sample[:, 1:].contiguous()

    def step() -> None:
        logits = engine(inputs)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        engine.backward(loss)
        engine.step()

    return step


def rank_of(side: str, rank: int, folder: Path, nvme: Path | None, tokens: int, orders: Connection) -> None:
    """Set up one rank of one side, then take as many steps as each order says; None ends it."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / side), RANKS), rank=rank, world_size=RANKS
    )
    if side == "DeepSpeed":
        import deepspeed

        deepspeed.init_distributed("gloo")
    imported_bytes = most_bytes()
    step = (deepspeed_step if side == "DeepSpeed" else ours)(folder, nvme, tokens)
    while (steps := orders.recv()) is not None:
        dist.barrier()
        began_s = time.perf_counter()
        for _ in range(steps):
            step()
        dist.barrier()
        orders.send(time.perf_counter() - began_s)
    orders.send((most_bytes(), imported_bytes))
    os._exit(0)  # DeepSpeed's threads do not all end by themselves


def most_bytes() -> int:
    """Most memory that this process has had."""
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


class Side:
    """The ranks of one side."""

    def __init__(self, name: str, folder: Path, nvme: Path | None, tokens: int) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(RANKS)]
        self.tokens = tokens
        self.orders = [own for own, _ in pipes]
        self.processes = [
            context.Process(target=rank_of, args=(name, rank, folder, nvme, tokens, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for rank, process in enumerate(self.processes):
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
            process.start()

    def take(self, steps: int | None) -> list[object]:
        """Give an order; returns what the ranks answer."""
        for one in self.orders:
            one.send(steps)
        for one in self.orders:
            if not one.poll(LIMIT_S):
                raise TimeoutError(f"no answer within {LIMIT_S:.0f} s")
        return [one.recv() for one in self.orders]

    def tokens_per_s(self, steps: int) -> float:
        """Of some steps."""
        took_s = max(took for took in self.take(steps) if isinstance(took, float))
        return steps * RANKS * self.tokens / took_s


def main() -> None:
    """Take turns and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nvme", type=Path, help="a folder on a local disk")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="of one turn")
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1"}
    names = ["ours", "DeepSpeed"]
    if importlib.util.find_spec("deepspeed") is None:
        print("DeepSpeed is not installed here")
        names.pop()
    with tempfile.TemporaryDirectory() as folder:
        sides = {name: Side(name, Path(folder), options.nvme, options.tokens) for name in names}
        found: dict[str, list[float]] = {name: [] for name in names}
        for number in range(options.rounds + 1):
            for name, side in sides.items():
                rate = side.tokens_per_s(options.steps)
                if number:  # the first turn sets things up
                    found[name].append(rate)
        for name, rates in found.items():
            memory = [one for one in sides[name].take(None) if isinstance(one, tuple)]
            most, imported = (max(column) / 2**20 for column in zip(*memory, strict=True))
            print(
                f"{name}: {statistics.median(rates):,.0f} tokens/s, at most {most:,.0f} MiB a rank, of which "
                f"{imported:,.0f} MiB were there before the model"
            )
    if len(names) == 2:
        ratio = statistics.median(a / b for a, b in zip(found["ours"], found["DeepSpeed"], strict=True))
        print(f"ours is {ratio:.2f} x DeepSpeed (at least 1.2 is wanted)")


if __name__ == "__main__":
    main()
