"""What types of numbers do to a training: its final loss within 0.5 % of fp32 is wanted, and what a step costs.

    python tests/bench/precision.py [--steps 300] [--only four_level,bf16]

One rank, one thread, one small model on the prepared text, each policy from the same weights through the same samples.
The cost is the processor's work for the whole run, as a ratio to fp32: other programs on the machine do not count. On
a CPU without float16 units it says nothing about a GPU. `another seed` is fp32 with other weights and other samples:
what chance does.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `harness`

from harness.toy import train_toy

from contract.run_folder import RunFolder, read_json_lines

SETTINGS = [
    "model=llama_1m",
    "model.dim=64",
    "model.layers=4",
    "model.heads=4",
    "model.kv_heads=2",
    "model.ffn_dim=176",
    "data.sequence_length=128",
    "loop.global_batch_size=8",
    "loop.log_every_steps=10",
    "loop.eval_every_steps=0",
    "loop.eval_batches=20",
    "parallel.micro_batch_size=4",
    "optim.lr=1.5e-3",
    "optim.warmup_steps=30",
    "monitor.progress=off",
    "monitor.tensorboard=false",
]
POLICIES = {
    "fp32": "precision=fp32",
    "another seed": "precision=fp32 seed=4321",
    "bf16": "precision=bf16",
    "fp16": "precision=fp16",
    "four_level": "precision=four_level",
    "backward in float16": "precision=fp32 precision.backward=float16",
    "gradients in float64": "precision=fp32 precision.accumulate=float64 precision.reduce=float64",
    "gradients in bfloat16": "precision=fp32 precision.accumulate=bfloat16 precision.reduce=bfloat16",
    "embedding in int8": "precision=fp32 precision.embedding=int8",
    "moments in int8": "precision=fp32 precision.optimizer_state=int8",
    "bf16, dynamic": "precision=bf16 precision.dynamic=true precision.dynamic_steps=20",
}
TOLERANCE = 0.005


def outcome(name: str, steps: int, folder: Path) -> tuple[float, float, str]:
    """Final loss on held-out text, seconds of the processor, and what the loss scale or the types went through."""
    run = RunFolder(folder / name.replace(" ", "-").replace(",", ""))
    more = [f"run.root={folder}", f"run.name={run.name}", f"loop.steps={steps}", *POLICIES[name].split()]
    began_s = time.process_time()
    train_toy([*SETTINGS, *more])
    work_s = time.process_time() - began_s
    lines = list(read_json_lines(run.metrics))
    (loss,) = (line["eval_loss"] for line in lines if "eval_loss" in line)
    last = [line for line in lines if "loss" in line][-1]
    said = [
        f"{last[key]:g} {word}"
        for key, word in (("skipped_steps", "skipped"), ("precision_switches", "switches"))
        if key in last
    ]
    return loss, work_s, ", ".join(said)


def main() -> int:
    """Print a row for each policy; 1 when the loss of one is too far from that of fp32."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", default=",".join(POLICIES))
    options = parser.parse_args()
    wanted = [name for name in POLICIES if name == "fp32" or name in options.only]
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        print(f"{'policy':24s} {'loss':>8s} {'to fp32':>9s} {'work':>6s}")
        reference: tuple[float, float] | None = None
        for name in wanted:
            loss, work_s, said = outcome(name, options.steps, Path(folder))
            reference = reference or (loss, work_s)
            away = loss / reference[0] - 1
            failed |= abs(away) > TOLERANCE and name != "another seed"
            print(f"{name:24s} {loss:8.4f} {away:+9.2%} {work_s / reference[1]:6.2f} {said}", flush=True)
        dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
