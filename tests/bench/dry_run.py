"""What a dry run costs: time and memory of `trierarch train --dry-run` for layouts of 8, 512 and 4,096 ranks.

    python tests/bench/dry_run.py [--rounds 3]

A bare `import torch` in the same run stands beside it.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

COMMAND = [str(Path(sys.executable).with_name("trierarch")), "train", "--dry-run", "--json"]
MODEL = [
    *("model.dim=4096", "model.layers=32", "model.heads=32", "model.ffn_dim=11008", "model.vocab_size=32000"),
    *("model.max_sequence_length=4096", "data.sequence_length=4096", "parallel.micro_batch_size=1"),
    *("loop.global_batch_size=null", "parallel.gradient_accumulation_steps=8"),
]
LAYOUTS = {
    "8 ranks, zero=3": ["--ranks", "8", "parallel.zero=3"],
    "512 ranks, zero=3": ["--ranks", "512", "parallel.zero=3", "parallel.dp_shard=64"],
    "512 ranks, tp=8 pp=4": ["--ranks", "512", "parallel.tp=8", "parallel.pp=4", "parallel.zero=1"],
    "4096 ranks, zero=3": ["--ranks", "4096", "parallel.zero=3", "parallel.dp_shard=64"],
    "4096 ranks, tp=8 pp=4": ["--ranks", "4096", "parallel.tp=8", "parallel.pp=4", "parallel.zero=1"],
}


def measure(command: list[str]) -> tuple[float, float]:
    """Wall time, s, and largest resident memory, MiB, of a process."""
    began_s = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return time.perf_counter() - began_s, usage.ru_maxrss / 2**10


def main() -> None:
    """Measure every case in turn and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    cases = {"import torch": [sys.executable, "-c", "import torch, torch.distributed.fsdp"]}
    cases |= {name: [*COMMAND, *layout, *MODEL] for name, layout in LAYOUTS.items()}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for _ in range(options.rounds):
        for name, command in cases.items():
            found[name].append(measure(command))
    for name, results in found.items():
        times_s, memory_mib = (statistics.median(column) for column in zip(*results, strict=True))
        print(f"{name:24} {times_s:6.1f} s  {memory_mib:6.0f} MiB")


if __name__ == "__main__":
    main()
