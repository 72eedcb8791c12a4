"""What a save in the background costs training beside it: a thread that writes, or a process.

    python tests/bench/save_beside_training.py [--model llama_25m] [--rounds 5]

One rank with the state of a model and its optimizer, and a loop of small steps that keeps the interpreter busy, as
training on a GPU does: a thread that held the interpreter's lock would slow it down. In turns: the loop alone, beside
ours (a thread, which also hashes and reads back), and beside torch's `dcp.async_save` with a thread and with a process.
Printed are steps of the loop a second while the save is under way, and how long the loop stood still before.
"""

import argparse
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `harness`

from harness.offload import opened
from harness.toy import QUIET
from harness.toy_text import write_toy_text

from train.data.prepare import prepare

ALONE_S = 2.0


def main() -> None:
    """Measure and print medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama_25m")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        # A saving process of torch's makes a group of its own from these.
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare([write_toy_text(folder / "text")], folder / "toy", workers=1)
        overrides = [*QUIET, f"model={options.model}", f"data.prefix={folder / 'toy'}", f"run.root={folder}"]
        overrides += ["run.name=run", "loop.eval_batches=0", "checkpoint.keep_last=1"]
        dist.init_process_group("gloo", init_method="env://")
        with opened(overrides) as parts:
            found = measure(parts, folder, options.rounds)
        dist.destroy_process_group()
    alone = statistics.median(found.pop("alone")[1])
    print(f"{'alone':28} {alone:8.0f} steps/s")
    for name, (stalls, rates, seconds) in found.items():
        print(
            f"{name:28} {statistics.median(rates):8.0f} steps/s, {statistics.median(rates) / alone:6.1%} of alone, for "
            f"{statistics.median(seconds):.2f} s after standing still for {statistics.median(stalls):.3f} s"
        )


def measure(parts: Any, folder: Path, rounds: int) -> dict[str, tuple[list[float], list[float], list[float]]]:
    """Stalls in s, steps a second, and seconds of each kind; the first round doesn't count."""
    step = loop()
    plain = folder / "plain"

    def ours() -> Callable[[], bool]:
        parts.state.step += 1
        assert parts.checkpoints.save(parts.state, background=True)
        return lambda: parts.checkpoints.poll() is not None

    def torchs(kind: AsyncCheckpointerType) -> Callable[[], bool]:
        shutil.rmtree(plain, ignore_errors=True)
        future = dcp.async_save(parts.state.state_dict(), checkpoint_id=plain, async_checkpointer_type=kind)
        return future.done  # type: ignore[union-attr, return-value]

    kinds: dict[str, Callable[[], Callable[[], bool]]] = {
        "ours, a thread": ours,
        "dcp.async_save, a thread": lambda: torchs(AsyncCheckpointerType.THREAD),
        "dcp.async_save, a process": lambda: torchs(AsyncCheckpointerType.PROCESS),
    }
    found: dict[str, tuple[list[float], list[float], list[float]]] = {}
    for number in range(rounds + 1):
        for name, begin in {"alone": None, **kinds}.items():
            began_s = time.perf_counter()
            over = begin() if begin is not None else (lambda: time.perf_counter() > began_s + ALONE_S)  # noqa: B023
            begun_s = time.perf_counter()
            steps = 0
            while not over():
                step()
                steps += 1
            seconds = time.perf_counter() - begun_s
            if number > 0:
                kept = found.setdefault(name, ([], [], []))
                for values, value in zip(kept, (begun_s - began_s, steps / seconds, seconds), strict=True):
                    values.append(value)
    return found


def loop() -> Callable[[], None]:
    """A step of training with more Python in it than arithmetic."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3)
    batch = torch.randn(8, 64)

    def step() -> None:
        layers(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
