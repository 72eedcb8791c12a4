"""How much of a hand-written torch script's speed a layout of ours keeps: at least 0.97 is wanted.

    python tests/bench/layouts.py [--steps 5] [--only zero=3,tp=2] [--precision bf16]

Two ranks of one thread each, one model of 20 M parameters. Ours is what a run builds: parts, engine, optimizer and
clipping. The script is the shortest way to the same with torch alone. Both live in the same processes and take
turns step by step, because machines are noisy: the median of the ratios of neighbours is what counts, of the
time, and on a machine that others use of the processor's work. Then the memory of each ZeRO stage beside its formula.
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `harness`

from harness.zero_memory import formula, live_bytes

from train.config import TrainConfig, load_config
from train.data.loader import Batch
from train.layout.check import lay_out
from train.mesh import Mesh
from train.model.config import parameter_count
from train.model.llama import Llama, build
from train.monitor.live_bytes import local
from train.optim.adamw import build_optimizer
from train.parallel.apply import build_engine, build_parts
from train.parallel.clip import clip_grad_norm

RANKS, SKIP = 2, 2
CPU = torch.device("cpu")
MICRO_BATCH, LENGTH = 2, 256
MODEL = [
    "model=llama_25m",
    "model.vocab_size=8192",
    "model.dim=384",
    "model.layers=8",
    "model.heads=6",
    "model.ffn_dim=1024",
    f"data.sequence_length={LENGTH}",
    f"parallel.micro_batch_size={MICRO_BATCH}",
    "loop.global_batch_size=null",
]
LAYOUTS = {"zero=0": 1, "zero=1": 1, "zero=2": 1, "zero=3": 1, "tp=2": 1, "pp=2": 4}
"""And the micro-batches of a step."""

Step = Callable[[], Any]
"""One step of training on this rank."""


@dataclass(frozen=True)
class Case:
    """What both sides are given."""

    config: TrainConfig
    layout: str
    bf16: bool
    batches: list[Batch]
    """The micro-batches of this rank, the same in each step."""

    @classmethod
    def of(cls, layout: str, precision: str) -> "Case":
        more = [
            f"parallel.{layout}",
            f"precision={precision}",
            f"parallel.gradient_accumulation_steps={LAYOUTS[layout]}",
        ]
        config = load_config([*MODEL, *more])
        generator = torch.Generator().manual_seed(0)
        shape = LAYOUTS[layout], MICRO_BATCH, LENGTH + 1
        tokens = torch.randint(config.model.vocabulary, shape, generator=generator)
        batches = [Batch(one[:, :-1].contiguous(), one[:, 1:].contiguous(), None) for one in tokens]
        return cls(config, layout, precision == "bf16", batches)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """What the script computes under where nothing else brings the precision."""
        return torch.autocast("cpu", torch.bfloat16) if self.bf16 else contextlib.nullcontext()


def ours(case: Case) -> Step:
    """A step of the trainer."""
    dims = lay_out(case.config, RANKS)
    sharded = build_parts(case.config, Mesh.build(dims, "cpu"), CPU, seed=1)
    optimizer = build_optimizer(sharded.parts, case.config, CPU)
    engine = build_engine(sharded, case.config, CPU)

    def step() -> None:
        engine.train(case.batches)
        clip_grad_norm(optimizer, 1.0, sharded.mesh)
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_hand(case: Case) -> Step:
    """A step of the script."""
    model = build(case.config.model, 1, CPU)
    mesh = init_device_mesh("cpu", (RANKS,))
    kind, _, value = case.layout.partition("=")
    if kind == "pp":
        return pipeline_by_hand(model, case)
    if kind == "tp":
        shard_by_hand(model, mesh)
        return direct_by_hand(model, case.autocast(), case, clip_together)
    if value == "0":
        return direct_by_hand(
            DistributedDataParallel(model, gradient_as_bucket_view=True), case.autocast(), case
        )
    types = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if case.bf16 else {}
    policy = MixedPrecisionPolicy(**types)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=value == "3")
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=value == "3")
    return direct_by_hand(model, contextlib.nullcontext(), case)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def clip_together(model: nn.Module) -> None:
    """Clip by the norm over both ranks: what is a DTensor, or in a pipeline everything, is on one of them alone."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    shared = [p for p in parameters if isinstance(p, DTensor)] or parameters
    same = [p for p in parameters if all(p is not other for other in shared)]
    square = nn.utils.get_total_norm([local(p.grad) for p in shared]) ** 2
    dist.all_reduce(square)
    if same:
        square += nn.utils.get_total_norm([p.grad for p in same]) ** 2
    torch._foreach_mul_([local(p.grad) for p in parameters], (1.0 / (square.sqrt() + 1e-6)).clamp(max=1.0))


def clip_alone(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def direct_by_hand(
    model: nn.Module,
    precision: contextlib.AbstractContextManager[object],
    case: Case,
    clip: Callable[[nn.Module], None] = clip_alone,
) -> Step:
    (batch,) = case.batches
    # The fused step takes either kind of tensor, but not both at once.
    kinds = [[p for p in model.parameters() if isinstance(p, DTensor) is kind] for kind in (True, False)]
    optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds if kind], lr=1e-3, fused=True)

    def step() -> None:
        with precision:
            logits = model(batch.tokens)
        loss_of(logits, batch.targets).backward()
        clip(model)
        optimizer.step()
        optimizer.zero_grad()

    return step


def shard_by_hand(model: Llama, mesh: DeviceMesh) -> None:
    """Attention and MLP by torch's own plan; embedding, norms and head stay whole on each rank."""
    plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    for layer in model.layers.values():
        parallelize_module(
            layer, mesh, {**plan, "self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        )


def pipeline_by_hand(model: Llama, case: Case) -> Step:
    rank, half = dist.get_rank(), len(model.layers) // RANKS
    for name in [name for name in model.layers if int(name) // half != rank]:
        del model.layers[name]
    if rank == 0:
        model.norm = model.lm_head = None
    else:
        model.embed_tokens = None
    schedule = Schedule1F1B(PipelineStage(model, rank, RANKS, CPU), len(case.batches), loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = torch.cat([batch.tokens for batch in case.batches])
    targets = torch.cat([batch.targets for batch in case.batches])

    def step() -> None:
        with case.autocast():
            schedule.step(*([tokens] if rank == 0 else []), target=targets if rank else None)
        clip_together(model)
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(step: Step) -> tuple[float, float]:
    """Seconds of a step, of the slowest rank, and the seconds that the cores of all ranks have worked for it."""
    dist.barrier()
    began_s, began_work_s = time.perf_counter(), time.process_time()
    step()
    work_s = torch.tensor(time.process_time() - began_work_s)
    dist.all_reduce(work_s)
    return time.perf_counter() - began_s, float(work_s)


def compare(case: Case, steps: int) -> str:
    """A line about tokens/s of ours and of the script, and the median ratios of time and of work."""
    sides = ours(case), by_hand(case)
    rounds = [[timed(step) for step in sides] for _ in range(SKIP + steps)][SKIP:]
    copies = 1 if case.layout[:2] in ("tp", "pp") else RANKS
    tokens = copies * len(case.batches) * MICRO_BATCH * LENGTH
    own, their = (tokens / statistics.median(one[side][0] for one in rounds) for side in range(2))
    time_ratio, work_ratio = (
        statistics.median(one[1][what] / one[0][what] for one in rounds) for what in range(2)
    )
    return f"{own:9,.0f} {their:9,.0f} {time_ratio:6.3f} {work_ratio:6.3f}"


def memory(zero: int, precision: str) -> str:
    """A line about the memory of a stage; short sequences, so that activations do not count."""
    layout = [f"parallel.zero={zero}", f"precision={precision}", "parallel.gradient_accumulation_steps=2"]
    config = load_config([*MODEL, *layout, "data.sequence_length=8", "model.max_sequence_length=8"])
    tokens = torch.zeros((MICRO_BATCH, 8), dtype=torch.int64)
    found = live_bytes(config, lay_out(config, RANKS), [Batch(tokens, tokens, None)] * 2)
    parameters = parameter_count(config.model)
    columns = [
        f"{size_bytes / parameters:7.2f} {said:6.2f}"
        for size_bytes, said in zip(found, formula(zero, RANKS, precision), strict=True)
    ]
    return f"zero={zero} {precision:5}" + "".join(columns)


def work(rank: int, folder: str, options: argparse.Namespace) -> None:
    """What a rank does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    for precision in options.precision.split(","):
        for layout in options.only.split(","):
            line = compare(Case.of(layout, precision), options.steps)
            if rank == 0:
                print(f"{layout:8} {precision:5} {line}", flush=True)
    if options.memory:
        lines = [memory(zero, precision) for precision in options.precision.split(",") for zero in range(4)]
        if rank == 0:
            print(
                "bytes a parameter: between steps, at most within one, at its end; each measured and by formula"
            )
            print("\n".join(lines), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's own teardown may abort


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", default=",".join(LAYOUTS), help="layouts, with commas between")
    parser.add_argument("--precision", default="fp32,bf16")
    parser.add_argument("--no-memory", dest="memory", action="store_false")
    options = parser.parse_args()
    print("tokens/s          ours   by hand   time   work (ratios; wanted: at least 0.97)")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (folder, options), nprocs=RANKS)


if __name__ == "__main__":
    main()
