"""How fast two checkpoints are compared, and in how much memory: of 2 GB each, 1 GB/s of both together and under 1 GB.

    python tests/bench/ckpt_diff.py [--gb 2] [--rounds 3] [--dtype float32] [--folder FOLDER]

Two files of safetensors in the page cache: of the same bytes, then with every element changed. Beside each, in the same
run: reading both and nothing else, and what numpy takes for `abs(a - b).max()` on one core. Each is a process of its
own, so that its memory is. Where others use the cores too, seconds of a core tell more.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tools.ckpt.diff import diff
from tools.ckpt.dtypes import BITS
from tools.ckpt.open import open_source

_TENSORS = 32


def main() -> None:
    """Write the files, time each way, print medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=2.0, help="of each checkpoint")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--folder", type=Path, help="where files are written; a temporary one by default")
    options = parser.parse_args()
    ways = {"read": read, "numpy on one core": plain, "diff": ours}
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        a, same, other = (Path(temporary) / f"{name}.safetensors" for name in ("a", "same", "other"))
        write(a, options.dtype, options.gb, change=0)
        shutil.copy(a, same)
        write(other, options.dtype, options.gb, change=1)
        for what, b in (("the same bytes", same), ("all changed", other)):
            for name, way in ways.items():
                found = [in_process(way, a, b) for _ in range(options.rounds)]
                took_s, core_s = (statistics.median(one[k] for one in found) for k in (0, 1))
                memory = max(one[2] for one in found)
                total = a.stat().st_size + b.stat().st_size
                rate = f"{total / took_s / 1e9:5.2f} GB/s of both, {total / core_s / 1e9:5.2f} GB per second of a core"
                print(f"{what:15} {name:18} {took_s:6.2f} s  {rate}  {memory / 1e6:6.0f} MB resident")


def write(path: Path, dtype: str, gb: float, change: int) -> None:
    """Write tensors; `change` is added to the bits of each element."""
    bits = BITS[dtype]
    rows = int(gb * 1e9 / _TENSORS / bits.itemsize / 4096)
    names = [f"model.layers.{number}.weight" for number in range(_TENSORS)]
    nbytes = rows * 4096 * bits.itemsize
    kind = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[dtype]
    header = {
        name: {"dtype": kind, "shape": [rows, 4096], "data_offsets": [at * nbytes, (at + 1) * nbytes]}
        for at, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in names:
            values = generator.standard_normal((rows, 4096), np.float32)
            if dtype == "bfloat16":
                raw = (values.view(np.uint32) >> 16).astype(np.uint16)
            else:
                raw = values.astype(bits).view(f"uint{bits.itemsize * 8}")
            file.write((raw + raw.dtype.type(change)).tobytes())


def ours(a: Path, b: Path) -> None:
    """Compare with `diff`."""
    diff(a, b)


def read(a: Path, b: Path) -> None:
    """Read both."""
    with open_source(a) as one, open_source(b) as other:
        for source in (one, other):
            for entry in source.entries:
                for _ in source.windows(entry):
                    pass


def plain(a: Path, b: Path) -> None:
    """Find the largest difference of each tensor, as a script would; of bfloat16 that of its bits."""
    with open_source(a) as one, open_source(b) as other:
        for x, y in zip(one.entries, other.entries, strict=True):
            np.abs(np.subtract(one.rows(x, 0, x.shape[0]), other.rows(y, 0, y.shape[0]))).max()


def in_process(way: Callable[[Path, Path], None], a: Path, b: Path) -> tuple[float, float, int]:
    """Return seconds, seconds of all cores together, and the largest resident memory in bytes."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(timed, (way, a, b))


def timed(way: Callable[[Path, Path], None], a: Path, b: Path) -> tuple[float, float, int]:
    """Run once."""
    began_s, began_core_s = time.perf_counter(), time.process_time()
    way(a, b)
    took_s, core_s = time.perf_counter() - began_s, time.process_time() - began_core_s
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    # Not that of `getrusage`, which starts with what the parent had.
    return took_s, core_s, int(status["VmHWM"].split()[0]) * 1024


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
