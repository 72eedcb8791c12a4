"""What offloading and the types of numbers do on one CUDA device: checks with figures, in under five minutes.

    python tests/gpu/offload_check.py [--device cuda] [--nvme FOLDER] [--out FILE]

numbers    a training with something elsewhere has the losses of one with everything on the device
pinned     memory of the host is page-locked, and copies are as fast as those of torch's own pinned memory
overlap    how much of the copies the device spends beside computing, and what a step costs
memory     what the device and the host have at most is what `train.layout.memory` says
types      each precision trains to about the loss of fp32

`--device cpu` does what a CPU can of it, with a smaller model: so that the script is known to run. Ends with code 1
when a check fails. `--out` gets the figures as JSON.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `harness`

from harness.training import Training

from train.config import TrainConfig, load_config
from train.layout.memory import OFFLOADED, memory, total
from train.offload.config import Tier
from train.offload.nvme.pool import BufferPool
from train.offload.nvme_states import NvmeStates
from train.offload.states import Resident
from train.optim.master import MasterAdamW

SHAPES = {
    "cuda": "dim=2048 layers=8 heads=16 kv_heads=16 ffn_dim=5632 vocab_size=32000 sequence=2048 samples=4",
    "cpu": "dim=64 layers=4 heads=4 kv_heads=2 ffn_dim=192 vocab_size=320 sequence=64 samples=2",
}
EVERYTHING = [
    "offload.optimizer=cpu",
    "offload.gradients=cpu",
    "offload.parameters=cpu",
    "offload.activations=cpu",
]
TIERS = {
    "none": ["precision.parameters=bfloat16"],
    "optimizer": ["offload.optimizer=cpu"],
    "optimizer, gradients": ["offload.optimizer=cpu", "offload.gradients=cpu"],
    "parameters": ["offload.optimizer=cpu", "offload.gradients=cpu", "offload.parameters=cpu"],
    "activations": ["precision.parameters=bfloat16", "offload.activations=cpu"],
    "everything": EVERYTHING,
    "nvme": ["offload.optimizer=nvme", "offload.gradients=cpu", "offload.parameters=nvme"],
    "delayed": ["offload.optimizer=cpu", "offload.gradients=cpu", "offload.delayed_update=true"],
}
POLICIES = ["fp32", "tf32", "bf16", "fp16", "four_level"]
COPY_BYTES = 1 << 28
STEPS = 6


class Checks:
    """What was found, and what of it is wrong."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.device = torch.device(options.device)
        self.on_gpu = self.device.type == "cuda"
        self.folder = folder
        self.disk = options.nvme or folder
        self.figures: dict[str, Any] = {}
        self.failed: list[str] = []

    def note(self, check: str, name: str, value: float | str, wrong: bool = False) -> None:
        """Keep and print one figure."""
        self.figures.setdefault(check, {})[name] = value
        text = f"{value:.4g}" if isinstance(value, float) else value
        print(f"{check:9} {name:32} {text}{'   FAILED' if wrong else ''}", flush=True)
        if wrong:
            self.failed.append(f"{check}: {name}")

    def config(self, *more: str) -> TrainConfig:
        """Of the model for this device."""
        shape = dict(word.split("=") for word in SHAPES[self.device.type].split())
        length, samples = shape.pop("sequence"), shape.pop("samples")
        return load_config(
            [
                "model=llama_25m",
                *(f"model.{key}={value}" for key, value in shape.items()),
                f"data.sequence_length={length}",
                f"model.max_sequence_length={length}",
                f"parallel.micro_batch_size={samples}",
                "parallel.gradient_accumulation_steps=1",
                "loop.global_batch_size=null",
                "parallel.zero=3",
                f"run.root={self.folder}",
                *more,
            ]
        )

    def tier(self, name: str) -> TrainConfig:
        """The same with something elsewhere."""
        uses_disk = any(one.endswith("=nvme") for one in TIERS[name])
        return self.config(*TIERS[name], *[f"offload.nvme_path=[{self.disk}]"] * uses_disk)

    def wait(self) -> None:
        """For the device."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def forget(self) -> None:
        """Have the next training begin with an empty device."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def check_tiers(checks: Checks) -> None:
    """Losses, time, memory and overlap of each tier."""
    expected: list[float] = []
    for name in TIERS:
        checks.forget()
        before_bytes = torch.cuda.memory_allocated() if checks.on_gpu else 0
        training = Training(checks.tier(name), checks.device)
        losses = list(training.steps(STEPS))
        if name == "none":
            expected = losses
        elif name != "delayed":  # which computes with other weights
            off = max(abs(one / other - 1) for one, other in zip(losses, expected, strict=True))
            checks.note("numbers", name, off, wrong=not off < (2e-3 if checks.on_gpu else 1e-6))
        checks.note("overlap", f"{name}: seconds a step", step_time(checks, training))
        for key, value in training.optimizer.metrics().items():
            if key in ("offload_update_s", "offload_hidden_s", "offload_exposed_s"):
                checks.note("overlap", f"{name}: {key}", value)
        if checks.on_gpu:
            check_device_memory(checks, name, training, before_bytes)
            beside, copied_s = overlap(checks, training)
            if copied_s:
                checks.note("overlap", f"{name}: share of copies hidden", beside)
        check_host_memory(checks, name, training)
        training.close()
        del training


def step_time(checks: Checks, training: Training) -> float:
    """Median seconds of a step."""
    found = []
    for _ in range(STEPS):
        checks.wait()
        began_s = time.perf_counter()
        training.step()
        checks.wait()
        found.append(time.perf_counter() - began_s)
    return statistics.median(found)


def check_device_memory(checks: Checks, name: str, training: Training, before_bytes: int) -> None:
    """The most that torch has had on the device."""
    most = torch.cuda.max_memory_allocated() - before_bytes
    reckoned = total(memory(training.config, training.dims, 0, "cuda")).device
    checks.note("memory", f"{name}: device GB", most / 1e9)
    # `under way` is an upper bound; kernels have work space of their own.
    checks.note("memory", f"{name}: of the reckoned", most / reckoned, wrong=not 0.6 < most / reckoned < 1.1)


def check_host_memory(checks: Checks, name: str, training: Training) -> None:
    """Pools of the states and of the weights, against what was reckoned for all of the host."""
    reckoned = total(memory(training.config, training.dims, 0, checks.device.type), OFFLOADED).host
    optimizer, held = training.optimizer, 0
    if isinstance(optimizer, MasterAdamW):
        states = optimizer._states
        on_device = training.config.offload.optimizer is Tier.none
        if isinstance(states, NvmeStates):
            held += states.held_bytes
        elif isinstance(states, Resident) and states._pool is not None and not on_device:
            held += states._pool.held_bytes
        for one in {id(t): t for t in transfers(optimizer)}.values():
            held += sum(pool.held_bytes for pool in one._pools)
    if training.sharded.shelved is not None:
        held += training.sharded.shelved.host_bytes
    if training.sharded.carrier is not None:
        held += training.sharded.carrier.pool.held_bytes
    if reckoned:
        checks.note("memory", f"{name}: host GB", held / 1e9)
        small = held < 4e6  # pages count in a small model
        wrong = not small and not 0.7 < held / reckoned < 1.06
        checks.note("memory", f"{name}: host of the reckoned", held / reckoned, wrong=wrong)


def transfers(optimizer: MasterAdamW) -> list[Any]:
    """What copies gradients and weights."""
    owners = (optimizer._gradients, optimizer._weights)
    return [one for owner in owners if (one := getattr(owner, "_transfer", None)) is not None]


def overlap(checks: Checks, training: Training) -> tuple[float, float]:
    """Share of the time of copies between host and device in which kernels ran too, and that time."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        training.steps(2)
        checks.wait()
    copies, kernels = [], []
    for event in found.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        span = event.time_range.start, event.time_range.end
        if "HtoD" in event.name or "DtoH" in event.name:
            copies.append(span)
        elif "Mem" not in event.name:
            kernels.append(span)
    copied, both = length(merged(copies)), length(common(merged(copies), merged(kernels)))
    return (both / copied if copied else 0.0), copied


Spans = list[tuple[float, float]]


def merged(spans: Iterable[tuple[float, float]]) -> Spans:
    """Spans that do not overlap, in order."""
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def common(one: Spans, other: Spans) -> Spans:
    """What lies in both."""
    found, index = [], 0
    for start, end in one:
        while index < len(other) and other[index][1] <= start:
            index += 1
        place = index
        while place < len(other) and other[place][0] < end:
            found.append((max(start, other[place][0]), min(end, other[place][1])))
            place += 1
    return found


def length(spans: Spans) -> float:
    """All together."""
    return sum(end - start for start, end in spans)


def check_pinned(checks: Checks) -> None:
    """Copies from and to a pool, beside those of memory that torch has pinned."""
    pool = BufferPool(1, COPY_BYTES, pinned=checks.on_gpu)
    ours = pool.acquire()
    if not checks.on_gpu:
        checks.note("pinned", "buffers", "not on a CPU")
        return
    checks.note("pinned", "is page-locked", str(ours.is_pinned()), wrong=not ours.is_pinned())
    theirs = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=checks.device)
    for way in ("to the device", "to the host"):
        rates = {}
        for name, here in (("ours", ours), ("torch", theirs)):
            source, target = (here, there) if way == "to the device" else (there, here)
            took = []
            for _ in range(8):
                checks.wait()
                began_s = time.perf_counter()
                target.copy_(source, non_blocking=True)
                checks.wait()
                took.append(time.perf_counter() - began_s)
            rates[name] = COPY_BYTES / statistics.median(took) / 1e9
        checks.note("pinned", f"GB/s {way}", rates["ours"])
        ratio = rates["ours"] / rates["torch"]
        checks.note("pinned", f"of torch's {way}", ratio, wrong=ratio < 0.9)
    pool.close()


def check_types(checks: Checks) -> None:
    """Final losses of each policy."""
    losses: dict[str, float] = {}
    for name in POLICIES:
        if name == "tf32" and not checks.on_gpu:
            continue
        checks.forget()
        config = checks.config(
            f"precision={name}",
            "model.layers=2",
            "optim.lr=3e-4",
            "parallel.micro_batch_size=1",
            "parallel.zero=2",
        )
        training = Training(config, checks.device)
        losses[name] = training.steps(4 * STEPS)[-1]
        training.close()
        off = losses[name] / losses["fp32"] - 1
        checks.note("types", f"{name}: loss to fp32", off, wrong=not abs(off) < 0.03)


def main() -> None:
    """Run all and say what failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--nvme", type=Path, help="a folder on a local disk; a temporary one by default")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        checks = Checks(options, Path(name))
        store = dist.FileStore(str(Path(name) / "ranks"), 1)
        backend = "cpu:gloo,cuda:nccl" if checks.on_gpu else "gloo"
        device = torch.device("cuda", 0) if checks.on_gpu else None
        dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=device)
        if checks.on_gpu:
            print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
        try:
            for check in (check_pinned, check_tiers, check_types):
                check(checks)
        finally:
            if options.out is not None:
                options.out.write_text(json.dumps(checks.figures, indent=1))
            dist.destroy_process_group()
    print("failed: " + "; ".join(checks.failed) if checks.failed else "all checks passed")
    sys.exit(bool(checks.failed))


if __name__ == "__main__":
    main()
