"""What offloading the optimizer costs: the update itself, and a step of training with it.

    python tests/bench/offload.py [update|step] [--rounds 9] [--cpu-time] [--parameters 4e7] [--model llama_3m]
                                  [--nvme FOLDER]

`update`: parameters/s of our update (gradients in bf16 and fp32, fp32 weight and moments, bf16 weight out) on one
thread, beside DeepSpeedCPUAdam with the copies that DeepSpeed makes around it (at least 1.2 x is wanted) and beside
the memory's bandwidth. DeepSpeed is left out where it isn't installed; no environment of ours has it.

`step`: seconds of a step with everything on the device, with the optimizer and gradients on the host, and with the
optimizer on NVMe, in one process with the same threads; how much of the update a step hides; and the bandwidth of the
disk within a step beside fio's (at least 0.9 is wanted).

All take turns in one run, because machines are noisy: medians, and medians of the ratios of neighbours. `--cpu-time`
counts the processor's time instead of the clock's, where others use the machine too.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `harness`

from harness.training import Training
from nvme import fio

from train.config import OptimConfig, load_config
from train.model.config import ModelConfig
from train.offload.buckets import make_buckets
from train.offload.gradients import OnDevice
from train.offload.nvme.settings import NvmeSettings
from train.offload.states import Resident
from train.offload.weights import InPlace
from train.optim.master import MasterAdamW

CPU = torch.device("cpu")
MATRIX = 1 << 20
"""Elements of a parameter of the update's benchmark."""
STEPS = 4
"""Of training, one after the other in one turn."""
FIO_BYTES = 256 << 20
Turn = Callable[[], object]


def main() -> None:
    """Measure one of the two, or both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=["update", "step"])
    parser.add_argument("--parameters", type=float, default=4e7)
    parser.add_argument("--model", default="llama_3m")
    parser.add_argument("--nvme", type=Path, help="folder of a local disk; a temporary one by default")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    clock = time.process_time if options.cpu_time else time.perf_counter
    if options.what != "step":
        compare_updates(int(options.parameters), options.rounds, clock)
    if options.what == "update":
        return
    with tempfile.TemporaryDirectory(dir=options.nvme) as folder:
        compare_steps(options.model, Path(folder), options.rounds, clock)


def take_turns(turns: dict[str, Turn], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each, in the order of the rounds; one round more goes first and doesn't count."""
    found: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds + 1):
        for name, turn in turns.items():
            began_s = clock()
            turn()
            if number:
                found[name].append(clock() - began_s)
    return found


def ratio(one: list[float], other: list[float]) -> float:
    """Median of the ratios of neighbours."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def compare_updates(parameters: int, rounds: int, clock: Callable[[], float]) -> None:
    """Print parameters/s."""
    layers = max(1, parameters // MATRIX)
    count = layers * MATRIX
    source, target = torch.zeros(count), torch.zeros(count)
    turns: dict[str, Turn] = {"copy": lambda: target.copy_(source)}
    for kind in (torch.bfloat16, torch.float32):
        turns[f"ours, {_short(kind)} gradients"] = _our_update(layers, kind)
    try:
        turns |= {
            f"DeepSpeed, {_short(k)} gradients": _deepspeed_update(layers, k)
            for k in (torch.bfloat16, torch.float32)
        }
    except ImportError:
        print("DeepSpeed is not installed here")
    found = take_turns(turns, rounds, clock)
    bandwidth = 8 * count / statistics.median(found.pop("copy"))
    print(f"{count / 1e6:.0f} M parameters, one thread; a copy moves {bandwidth / 1e9:.1f} GB/s")
    for name, seconds in found.items():
        rate = count / statistics.median(seconds)
        # The weight and moments come and go, the gradient comes, the weight that computes goes.
        moved = 24 + 2 + (2 if "bf16" in name else 4)
        print(
            f"{name}: {rate / 1e6:.0f} M parameters/s, {rate * moved / bandwidth:.2f} of a copy's bandwidth"
        )
    for kind in ("bf16", "fp32"):
        if f"DeepSpeed, {kind} gradients" in found:
            times = ratio(found[f"DeepSpeed, {kind} gradients"], found[f"ours, {kind} gradients"])
            print(f"ours is {times:.2f} x DeepSpeed with {kind} gradients (at least 1.2 is wanted)")


def _our_update(layers: int, kind: torch.dtype) -> Turn:
    parts = nn.ModuleList([nn.ModuleDict({"layers": nn.ModuleDict(_matrices(layers))})]).bfloat16()
    buckets = make_buckets(parts, ModelConfig())
    states, gradients = Resident(CPU, pinned=False), OnDevice(buckets, None)
    optimizer = MasterAdamW(
        parts, buckets, OptimConfig(), states, gradients, InPlace(buckets), background=False
    )
    given = {parameter: torch.randn(parameter.shape).to(kind) for parameter in parts.parameters()}
    optimizer.fill(lambda name, shape, where: torch.randn(shape))

    def update() -> None:
        for parameter, gradient in given.items():
            parameter.grad_dtype = None
            parameter.grad = gradient
        optimizer.scale_gradients(torch.tensor(0.5))
        optimizer.step()

    return update


def _deepspeed_update(layers: int, kind: torch.dtype) -> Turn:
    """As its ZeRO-Offload does: copy gradients to fp32, scale them, update, copy the weights to where they compute."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    weights = [nn.Parameter(torch.randn(1 << 10, MATRIX >> 10)) for _ in range(layers)]
    given = [torch.randn(weight.shape).to(kind) for weight in weights]
    computing = [torch.empty_like(weight, dtype=torch.bfloat16) for weight in weights]
    for weight in weights:
        weight.grad = torch.empty_like(weight)
    optimizer = DeepSpeedCPUAdam(weights, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, adamw_mode=True)

    def update() -> None:
        with torch.no_grad():
            for weight, gradient in zip(weights, given, strict=True):
                assert weight.grad is not None
                weight.grad.copy_(gradient)
                weight.grad.mul_(0.5)
            optimizer.step()
            for weight, copy in zip(weights, computing, strict=True):
                copy.copy_(weight)

    return update


def _matrices(layers: int) -> dict[str, nn.Module]:
    return {str(number): nn.Linear(MATRIX >> 10, 1 << 10, bias=False) for number in range(layers)}


def _short(kind: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[kind]


def compare_steps(model: str, folder: Path, rounds: int, clock: Callable[[], float]) -> None:
    """Print seconds of a step, of one rank alone."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1"}
    store = dist.FileStore(str(folder / "ranks"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    nvme = ["offload.optimizer=nvme", f"offload.nvme_path=[{folder}]", "offload.gradients=cpu"]
    tiers = {
        "none": ["precision.parameters=bfloat16"],
        "cpu": ["offload.optimizer=cpu", "offload.gradients=cpu"],
        "cpu, delayed": ["offload.optimizer=cpu", "offload.gradients=cpu", "offload.delayed_update=true"],
        "nvme": nvme,
    }
    common = [f"model={model}", "model.vocab_size=2048", "loop.global_batch_size=null", f"run.root={folder}"]
    common += ["parallel.micro_batch_size=2", "parallel.gradient_accumulation_steps=1"]
    trainings = {name: Training(load_config([*common, *more]), CPU) for name, more in tiers.items()}
    turns: dict[str, Turn] = {name: partial(training.steps, STEPS) for name, training in trainings.items()}
    found = take_turns(turns, rounds, clock)
    found = {name: [one / STEPS for one in seconds] for name, seconds in found.items()}
    for name, seconds in found.items():
        against = "" if name == "none" else f", {ratio(seconds, found['none']):.2f} x none"
        print(f"{name}: {statistics.median(seconds):.3f} s a step{against}")
        metrics = trainings[name].optimizer.metrics()
        for key, value in metrics.items():
            print(f"    {key}: {value:.4g}")
        if metrics:
            share = metrics["offload_hidden_s"] / metrics["offload_update_s"]
            print(f"    of the update's time the step hides {share:.0%}")
    print(f"nvme is {ratio(found['nvme'], found['cpu']):.2f} x cpu")
    compare_swaps(trainings["nvme"], folder, rounds)
    for training in trainings.values():
        training.close()
    dist.destroy_process_group()


def compare_swaps(training: Training, folder: Path, rounds: int) -> None:
    """Print the bandwidth of the disk within a step beside fio's, for as many bytes each way in blocks of one size."""
    if shutil.which("fio") is None:
        print("fio is not installed")
        return
    settings = NvmeSettings.load(folder)
    ratios = []
    training.optimizer.metrics()
    for _ in range(rounds):
        training.steps(STEPS)
        moved = training.optimizer.metrics()
        read, written = (moved[f"offload_states_{way}_nvme_bytes"] for way in ("from", "to"))
        own = (read + written) / moved["offload_nvme_busy_s"]
        rates = {write: fio(folder / "peer", FIO_BYTES, settings, write) for write in (True, False)}
        peer = (read + written) / (read / rates[False] + written / rates[True])
        ratios.append(own / peer)
        print(f"swaps of a step {own / 1e9:.2f} GB/s, fio {peer / 1e9:.2f} GB/s")
    print(f"swaps: median ratio {statistics.median(ratios):.2f} (wanted: at least 0.9)")


if __name__ == "__main__":
    main()
