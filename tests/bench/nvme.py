"""The NVMe store's bandwidth against fio's, with the same block size and queue depth: at least 0.9 is wanted.

    python tests/bench/nvme.py [--path FOLDER] [--rounds 7] [--size-mib 1024] [--block-kib 1024] [--threads 2]

Sequential, direct I/O, on a file that was written before. The two take turns, because disks are noisy: the median of
the ratios of neighbours is what counts. Ours moves slots of 32 MiB through a pool of three buffers, as a
tier of a training does. Without fio (Debian has it) a bare loop over os.preadv and os.pwritev in as many threads
stands in for it.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from train.offload.nvme.files import aligned_buffer
from train.offload.nvme.leftovers import Identity
from train.offload.nvme.plan import Slot
from train.offload.nvme.pool import BufferPool, bytes_of
from train.offload.nvme.settings import NvmeSettings
from train.offload.nvme.store import NvmeStore

SLOT_BYTES = 32 << 20
BUFFERS = 3
Peer = Callable[[Path, int, NvmeSettings, bool], float]


def ours(store: NvmeStore, slots: list[Slot], pool: BufferPool, write: bool) -> float:
    """Bytes/s of all slots, moved one after the other with as many under way as there are buffers."""
    began_s = time.perf_counter()
    under_way = deque()
    for slot in slots:
        if len(under_way) == BUFFERS:
            handle, buffer = under_way.popleft()
            handle.wait()
            pool.release(buffer)
        buffer = pool.acquire()
        move = store.write if write else store.read
        under_way.append((move(slot, bytes_of(buffer)), buffer))
    for handle, buffer in under_way:
        handle.wait()
        pool.release(buffer)
    return len(slots) * SLOT_BYTES / (time.perf_counter() - began_s)


def fio(file: Path, size: int, settings: NvmeSettings, write: bool) -> float:
    """Bytes/s as fio reports them, by asynchronous I/O with the same queue depth."""
    way = "write" if write else "read"
    command = ["fio", f"--name={way}", f"--filename={file}", f"--size={size}", f"--rw={way}", "--direct=1"]
    command += [f"--bs={settings.block_bytes}", "--ioengine=libaio", f"--iodepth={settings.threads}"]
    command += ["--overwrite=1", "--output-format=json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    return float(json.loads(done.stdout)["jobs"][0][way]["bw_bytes"])


def bare(file: Path, size: int, settings: NvmeSettings, write: bool) -> float:
    """Bytes/s of threads that do nothing but call the kernel."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)

    def work(number: int) -> None:
        buffer = aligned_buffer(settings.block_bytes)
        for offset in range(number * len(buffer), size, settings.threads * len(buffer)):
            (os.pwritev if write else os.preadv)(descriptor, [buffer], offset)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(settings.threads)]
    began_s = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    took_s = time.perf_counter() - began_s
    os.close(descriptor)
    return size / took_s


def compare(folder: Path, rounds: int, size: int, settings: NvmeSettings, name: str, peer: Peer) -> None:
    """Take turns and print."""
    identity = Identity.of(Path("bench"), os.getpid(), "bench")
    pool = BufferPool(BUFFERS, SLOT_BYTES, pinned=False)
    with closing(NvmeStore([folder], identity, settings)) as store:
        slots = [store.allocate(str(index), SLOT_BYTES) for index in range(size // SLOT_BYTES)]
        store.open()
        file = folder / "peer"
        ours(store, slots, pool, write=True)
        peer(file, size, settings, True)
        for write in (True, False):
            ratios = []
            for _ in range(rounds):
                reference, own = peer(file, size, settings, write), ours(store, slots, pool, write)
                ratios.append(own / reference)
                print(
                    f"{'write' if write else 'read '}  {name} {reference / 1e9:.2f} GB/s  store {own / 1e9:.2f} GB/s  "
                    f"ratio {ratios[-1]:.2f}",
                    flush=True,
                )
            print(
                f"{'write' if write else 'read'}: median ratio {statistics.median(ratios):.2f} (wanted: at least 0.9)"
            )


def main() -> None:
    """Compare with fio, or with what there is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", type=Path, help="a folder on the disk; default: that of temporary files")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--block-kib", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    settings = NvmeSettings(block_bytes=options.block_kib << 10, threads=options.threads)
    name, peer = "fio", fio
    if shutil.which("fio") is None:
        name, peer = "bare loop", bare
        print("fio is not installed: a bare loop in Python stands in for it")
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        compare(Path(folder), options.rounds, options.size_mib << 20, settings, name, peer)


if __name__ == "__main__":
    main()
