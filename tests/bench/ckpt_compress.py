"""How much room consecutive checkpoints of a training take when they are compressed, and how fast that goes.

    python tests/bench/ckpt_compress.py [--model llama_3m] [--steps 200] [--every 10] [--run RUN] [--folder FOLDER]

A training by two ranks makes them, or RUN has them. Of its two newest steps, weights and moments apart, on one core and
in processor time: ours by itself and as the difference to the step before, rounded to 8 bits, zstd alone, and, where
they are installed, blosc2 and ZipNN, on the same bytes in the same run. What each has compressed is decompressed and
compared. Then the commands, on copies of the steps, by the clock.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import zstandard
from numpy.typing import NDArray

from tools.ckpt.chains import steps_in
from tools.ckpt.compress import Compressor
from tools.ckpt.open import open_source
from train.checkpoint.compress.container import BLOCK_BYTES
from train.checkpoint.compress.methods import Method, decode, encode
from train.checkpoint.compress.rounding import round_moments, round_weights

Bytes = NDArray[np.uint8]
ROLES = ("weights", "exp_avg", "exp_avg_sq")
ITEMSIZE = 4


@dataclass(frozen=True)
class Way:
    """A way to compress; both functions take the tensor's values, and those of the step before."""

    name: str
    pack: Callable[[Bytes, Bytes], object]
    unpack: Callable[[object, Bytes], object]
    size: Callable[[object], int] = len  # type: ignore[assignment]
    change: Callable[[Bytes, str], Bytes] = lambda values, role: values
    """What is done to values before, and not timed: rounding."""


def main() -> None:
    """Train, measure, print tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama_3m")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--prefix", type=Path, default=Path("data/python-stdlib"), help="token files")
    parser.add_argument("--run", type=Path, help="a run that has checkpoints, in place of a training")
    parser.add_argument("--folder", type=Path, help="where files are written; a temporary one by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        run = options.run or train(Path(temporary), options)
        steps = steps_in(run)
        measure(*steps[-2:])
        commands(Path(temporary) / "copy", steps)


def train(folder: Path, options: argparse.Namespace) -> Path:
    """Let our trainer make checkpoints."""
    command = [
        *(sys.executable, "-m", "tools.cli", "train", "--ranks", "2", "recipe=first_run"),
        *(f"model={options.model}", "run.name=bench", f"run.root={folder}"),
        *(f"data.prefix={options.prefix.resolve()}", f"loop.steps={options.steps}"),
        *("loop.eval_every_steps=0", "loop.eval_batches=0", f"checkpoint.every_steps={options.every}"),
        *("checkpoint.every_minutes=0", "checkpoint.keep_last=6", "optim.lr=2e-3"),
    ]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return folder / "bench"


def measure(parent: Path, step: Path) -> None:
    """Print ratio and speed of each way for each role."""
    print(f"{step.name}, as the difference to {parent.name} where that is said; one core, processor time")
    with open_source(parent) as old, open_source(step) as new:
        before = {entry.name: entry for entry in old.entries}
        for role in ROLES:
            pairs = [
                (
                    values(new.rows(entry, 0, entry.shape[0])),
                    values(old.rows(before[entry.name], 0, entry.shape[0])),
                )
                for entry in new.entries
                if entry.role == role
            ]
            total = sum(one.nbytes for one, _ in pairs)
            print(f"\n{role}, {total / 1e6:.0f} MB   ratio   pack MB/s   unpack MB/s")
            for way in ways():
                changed = [(way.change(one, role), other) for one, other in pairs]
                packed, pack_s = timed(lambda way=way, changed=changed: [way.pack(*pair) for pair in changed])
                found, unpack_s = timed(
                    lambda way=way, packed=packed, pairs=pairs: [
                        way.unpack(one, other) for one, (_, other) in zip(packed, pairs, strict=True)
                    ]
                )
                for one, (wanted, _) in zip(found, changed, strict=True):
                    assert bytes(memoryview(one)) == wanted.tobytes(), way.name  # type: ignore[arg-type]
                ratio = sum(map(way.size, packed)) / total
                print(
                    f"{way.name:28} {ratio:8.3f} {total / pack_s / 1e6:11.0f} {total / unpack_s / 1e6:13.0f}"
                )


def values(rows: NDArray[np.generic]) -> Bytes:
    """The bytes of a tensor."""
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8)


def timed(work: Callable[[], list[object]]) -> tuple[list[object], float]:
    """Return what it makes, and the processor time that it took, s."""
    began_s = time.process_time()
    found = work()
    return found, max(time.process_time() - began_s, 1e-9)


def ways() -> Iterator[Way]:
    """All that can be had here."""
    yield Way("ours", partial(ours, [Method.PLAIN]), unpack_ours, size_ours)
    yield Way("ours, difference", partial(ours, [Method.XOR, Method.DIFFERENCE]), unpack_ours, size_ours)
    yield Way("ours, rounded", partial(ours, [Method.ROUNDED, Method.PLAIN]), unpack_ours, size_ours, rounded)
    for level in (1, 3):
        yield Way(
            f"zstd -{level}",
            lambda one, _, level=level: zstandard.ZstdCompressor(level=level).compress(one.tobytes()),
            lambda one, _: zstandard.ZstdDecompressor().decompress(one),
        )
    with suppress(ImportError):
        yield from blosc2_ways()
    with suppress(ImportError):
        yield zipnn_way()


def ours(methods: list[Method], one: Bytes, other: Bytes) -> tuple[Method, int, list[bytes]]:
    """As `compress_file` does: the method that makes the first 64 kB smallest, in blocks."""
    begin = slice(0, 64 << 10)
    method = min(methods, key=lambda method: len(encode(one[begin], ITEMSIZE, method, other[begin])))
    blocks = [
        encode(one[at : at + BLOCK_BYTES], ITEMSIZE, method, other[at : at + BLOCK_BYTES])
        for at in range(0, one.nbytes, BLOCK_BYTES)
    ]
    return method, one.nbytes, blocks


def unpack_ours(packed: object, other: Bytes) -> Bytes:
    """Decode all blocks."""
    method, nbytes, blocks = packed  # type: ignore[misc]
    out = np.empty(nbytes, np.uint8)
    for number, block in enumerate(blocks):
        part = slice(number * BLOCK_BYTES, (number + 1) * BLOCK_BYTES)
        decode(block, ITEMSIZE, method, other[part], out[part])
    return out


def size_ours(packed: object) -> int:
    """Bytes of all blocks."""
    return sum(map(len, packed[2]))  # type: ignore[index]


def rounded(one: Bytes, role: str) -> Bytes:
    """Moments to 8 bits, weights to bfloat16."""
    words = one.view(np.uint32)
    return (round_weights(words) if role == "weights" else round_moments(words, 0.1))[0].view(np.uint8)


def blosc2_ways() -> Iterator[Way]:
    """With planes of bytes, and of bits."""
    import blosc2

    for name, kind in (("shuffle", blosc2.Filter.SHUFFLE), ("bitshuffle", blosc2.Filter.BITSHUFFLE)):
        settings = {"typesize": ITEMSIZE, "codec": blosc2.Codec.ZSTD, "clevel": 1, "nthreads": 1}
        yield Way(
            f"blosc2, {name} + zstd",
            lambda one, _, kind=kind, settings=settings: blosc2.compress2(one, filters=[kind], **settings),
            lambda one, _: blosc2.decompress2(one, nthreads=1),
        )


def zipnn_way() -> Way:
    """With its own choice of a method."""
    from zipnn import ZipNN

    packer = ZipNN(input_format="byte", bytearray_dtype="float32", threads=1)
    return Way(
        "ZipNN",
        lambda one, _: packer.compress(bytearray(one.tobytes())),
        lambda one, _: packer.decompress(one),
    )


def commands(copy: Path, steps: list[Path]) -> None:
    """Time the commands on the two newest steps, checks and all."""
    for step in steps[-2:]:
        shutil.copytree(step, copy / f"checkpoints/{step.name}")
    parent, step = steps_in(copy)
    print("\ncommands, checks included: MB/s by the clock, with syncs, and of processor time")
    compressor = Compressor()
    for name, work in (
        ("compress", lambda: compressor.compress(parent)),
        ("delta", lambda: compressor.delta(step, parent)),
        ("restore", lambda: compressor.restore(step)),
    ):
        began_s = time.process_time()
        done = work()
        core_s = time.process_time() - began_s
        ratio, nbytes = done.after_bytes / done.plain_bytes, done.plain_bytes / 1e6
        rates = f"{nbytes / done.seconds:5.0f} {nbytes / core_s:5.0f}"
        print(f"{name:10} {nbytes:6.0f} MB   ratio {ratio:.3f}   {rates}")


if __name__ == "__main__":
    main()
