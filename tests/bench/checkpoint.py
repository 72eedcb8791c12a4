"""How long training stands still for a checkpoint, and how fast one is written and read.

    python tests/bench/checkpoint.py [--ranks 2] [--model llama_25m] [--rounds 5] [--folder FOLDER]

Ranks of one thread each, with the state of a model and its optimizer sharded among them. In turns, because machines
are noisy: a plain `dcp.save`, torch's `dcp.async_save`, and ours in the background (under 5 % of the plain save's time
is wanted for the stall). Only ours hashes, reads back and publishes; all sync their files. Then both ways to read:
`dcp.load`, and ours with and without hashing, each from files that were just read. Then `validate` of the last step,
from memory, on one thread, and on as many as there are ranks.

Beside them what could be reached: the ranks at the same time writing as many bytes to a file each, reading their share
of the files from the disk, and from memory to as much other memory, as a load does; and threads that read files into a
buffer, and hash what is in their caches, as `validate` does. What does several things to each byte one after the other
is limited by 1 / (1 / one + 1 / other): 80 % of that are wanted.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `harness`

from harness.offload import opened
from harness.pool import RankPool
from harness.toy import QUIET
from harness.toy_text import write_toy_text
from limits import BUFFER_BYTES, drop, hash_bytes, read_files, side_by_side, timed, write_file

from tools.ckpt.open import newest_step, open_source
from tools.ckpt.validate import validate
from train.checkpoint.manifest import read_manifest
from train.data.prepare import prepare
from train.loop import Parts

Seconds = dict[str, list[float]]


def main() -> None:
    """Measure and print medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default="llama_25m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, help="where checkpoints are written; a temporary one by default"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        prepare([write_toy_text(folder / "text")], folder / "toy", workers=1)
        overrides = [
            *QUIET,
            f"model={options.model}",
            f"data.prefix={folder / 'toy'}",
            f"run.root={folder}",
            "run.name=run",
            "parallel.zero=3",
            "loop.eval_batches=0",
            "checkpoint.keep_last=1",
        ]
        pool = RankPool(1)
        try:
            found = pool.run(options.ranks, measure, overrides, folder, options.rounds, timeout_s=1800)
        finally:
            pool.close()
        # Here, where no rank waits for another.
        step = newest_step(folder / "run")
        with open_source(step) as source:
            slices = sum(len(entry.pieces) for entry in source.entries)
        size, seconds = found[0]
        report(size, slices, seconds | validated(step, options.ranks, options.rounds))


def measure(overrides: list[str], folder: Path, rounds: int) -> tuple[int, Seconds]:
    """Bytes of the state, and seconds of rank 0 by what was done; the first round doesn't count."""
    warnings.filterwarnings("ignore")
    found: Seconds = {}
    with opened(overrides) as parts:
        group = dist.new_group(backend="gloo")
        for number in range(rounds + 1):
            for name, turn in turns(parts, folder, group).items():
                dist.barrier()
                for kind, seconds in turn().items():
                    if number > 0:
                        found.setdefault(f"{name}: {kind}", []).append(seconds)
                    elif name == "ours" and kind == "stall":
                        found["ours: stall of the first"] = [seconds]
        manifest = read_manifest(parts.run.checkpoints / f"step_{parts.state.step}")
    return manifest.bytes, found


def validated(folder: Path, threads: int, rounds: int) -> Seconds:
    """Seconds of `validate`, and of reading and hashing the same files, as often as `validate` hashes a byte.

    Those of one thread are of its core, as `both` has them.
    """
    files = sorted(folder.glob("*.distcp"))
    with open_source(folder) as source:
        cut = sum(entry.nbytes for entry in source.entries if len(entry.pieces) > 1)
    size = sum(path.stat().st_size for path in files)
    hashing = partial(hash_bytes, (size + cut) // threads)
    found: Seconds = {}
    for _ in range(rounds):
        for name, work in (
            ("one core: read", partial(read_files, files)),
            ("one core: hash", partial(hash_bytes, size + cut)),
            ("one core: validate", partial(validate, folder, threads=1)),
            ("threads: read", partial(side_by_side, *(partial(read_files, [file]) for file in files))),
            ("threads: hash", partial(side_by_side, *[hashing] * threads)),
            ("threads: validate", partial(validate, folder, threads=threads)),
        ):
            seconds, of_cores = timed(work)
            found.setdefault(name, []).append(of_cores if name.startswith("one core") else seconds)
    return found


def turns(parts: Parts, folder: Path, group: Any) -> dict[str, Callable[[], dict[str, float]]]:
    """What is compared."""
    state, store = parts.state, parts.checkpoints
    plain = folder / "plain"

    def fresh() -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(plain, ignore_errors=True)
        dist.barrier()

    def save() -> dict[str, float]:
        fresh()
        began_s = time.perf_counter()
        dcp.save(state.state_dict(), checkpoint_id=plain, process_group=group)
        return {"stall": time.perf_counter() - began_s}

    def async_save() -> dict[str, float]:
        fresh()
        began_s = time.perf_counter()
        future = dcp.async_save(state.state_dict(), checkpoint_id=plain, process_group=group)
        stall_s = time.perf_counter() - began_s
        future.result()  # type: ignore[union-attr]
        return {"stall": stall_s, "until it is there": time.perf_counter() - began_s}

    def ours() -> dict[str, float]:
        state.step += 1
        began_s, began_core_s = time.perf_counter(), time.thread_time()
        assert store.save(state, background=True)
        stall_s, core_s = time.perf_counter() - began_s, time.thread_time() - began_core_s
        # What a step would compute meanwhile: on other tensors, for as long as a small one takes.
        compute()
        waited_s = time.perf_counter()
        store.before_update()
        stall_s += time.perf_counter() - waited_s
        assert store.wait()
        there_s = time.perf_counter() - began_s
        return {"stall": stall_s, "stall, of a core": core_s, "until it is there": there_s}

    def load() -> dict[str, float]:
        tree = state.state_dict()
        return both("load", partial(dcp.load, tree, checkpoint_id=plain, process_group=group))

    def load_ours(verify: bool) -> dict[str, float]:
        manifest = read_manifest(parts.run.checkpoints / f"step_{state.step}")
        store.verify_load = verify
        return both("load", partial(store.load, state, manifest))

    def limits() -> dict[str, float]:
        files = sorted((parts.run.checkpoints / f"step_{state.step}").glob("*.distcp"))
        own = files[dist.get_rank() :: dist.get_world_size()]
        mine = folder / f"plain_{dist.get_rank()}"
        found = {"write": timed(lambda: write_file(mine, sum(path.stat().st_size for path in own)))[0]}
        mine.unlink()
        drop(own)
        dist.barrier()
        found["read from the disk"] = timed(lambda: read_files(own))[0]
        taken = np.ones(sum(path.stat().st_size for path in own) + BUFFER_BYTES, np.uint8)
        dist.barrier()
        found |= both("read to memory", partial(read_files, own, taken))
        dist.barrier()
        return found | both("hash", partial(hash_bytes, taken.nbytes))

    return {
        "dcp.save": save,
        "dcp.async_save": async_save,
        "ours": ours,
        "dcp": load,
        "ours without hashes": lambda: load_ours(False),
        "ours with hashes": lambda: load_ours(True),
        "limit": limits,
    }


def both(name: str, work: Callable[[], object]) -> dict[str, float]:
    """Do something; return seconds, and those of a core: what else goes on on the machine counts less there."""
    seconds, of_a_core = timed(work)
    return {name: seconds, f"{name}, of a core": of_a_core}


def compute() -> None:
    """Forward and backward of a small batch through a matrix: some 50 ms."""
    weights = torch.ones(1024, 1024, requires_grad=True)
    for _ in range(2):
        (torch.ones(256, 1024) @ weights).sum().backward()


def report(size: int, slices: int, found: Seconds) -> None:
    """Print medians, and what they mean."""
    print(f"checkpoint of {size / 1e6:,.0f} MB in {slices} slices")
    middle = {name: statistics.median(seconds) for name, seconds in found.items()}
    for name, seconds in middle.items():
        print(f"{name:36} {seconds:8.3f} s  {size / seconds / 1e6:8,.0f} MB/s")
    plain = middle["dcp.save: stall"]
    for name in ("ours: stall", "ours: stall, of a core", "dcp.async_save: stall"):
        print(f"{name}: {100 * middle[name] / plain:.1f} % of a plain save's time")
    write, disk, memory, hashing = (
        middle[f"limit: {kind}"]
        for kind in ("write", "read from the disk", "read to memory, of a core", "hash, of a core")
    )
    for name, limit_s in (
        ("dcp.save: stall", write),
        ("ours: until it is there", write + disk),
        ("dcp: load, of a core", memory),
        ("ours without hashes: load, of a core", memory),
        ("ours with hashes: load, of a core", memory + hashing),
        ("one core: validate", middle["one core: read"] + middle["one core: hash"]),
        ("threads: validate", middle["threads: read"] + middle["threads: hash"]),
    ):
        print(f"{name}: {100 * limit_s / middle[name]:.0f} % of what could be reached ({limit_s:.3f} s)")


if __name__ == "__main__":
    main()
