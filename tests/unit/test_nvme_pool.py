"""The pool's bound is the memory that is really taken."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from contract.errors import NodeError
from train.offload.nvme.files import ALIGN_BYTES
from train.offload.nvme.pool import BufferPool

SWAP = """
import sys
from collections import deque
from pathlib import Path
from train.offload.nvme.leftovers import Identity
from train.offload.nvme.pool import BufferPool, bytes_of
from train.offload.nvme.settings import NvmeSettings
from train.offload.nvme.store import NvmeStore

def resident(peak):
    wanted = "VmHWM:" if peak else "VmRSS:"
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(wanted)) << 10

size, count = 16_000_001, 4
store = NvmeStore([Path(sys.argv[1])], Identity.of(Path("run"), 0, "test"), NvmeSettings(block_bytes=1 << 18))
slots = [store.allocate(str(index), size) for index in range(12)]
store.open()
warm = BufferPool(1, 1 << 18, pinned=False).acquire().fill_(1)
tiny = NvmeStore([Path(sys.argv[1])], Identity.of(Path("run"), 1, "test"))
slot = tiny.allocate("", 100)
tiny.open()
tiny.write(slot, bytes_of(warm)).wait()
tiny.read(slot, bytes_of(warm)).wait()
open("/proc/self/clear_refs", "w").write("5")
before = resident(False)
pool = BufferPool(count, size, pinned=False)
for move in (store.write, store.read):
    under_way = deque()
    for slot in slots:
        if len(under_way) == count:
            handle, buffer = under_way.popleft()
            handle.wait()
            pool.release(buffer)
        buffer = pool.acquire(10)
        if move == store.write:
            buffer.fill_(1)
        under_way.append((move(slot, bytes_of(buffer)), buffer))
    for handle, buffer in under_way:
        handle.wait()
        pool.release(buffer)
print((resident(True) - before) / pool.held_bytes)
store.close()
tiny.close()
"""


def test_memory_stays_within_five_per_cent_of_the_bound(tmp_path: Path) -> None:
    """Three times as much goes through the pool as it holds."""
    command = [sys.executable, "-c", SWAP, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert 0.95 <= float(done.stdout) <= 1.05


def test_buffers_are_aligned_and_apart() -> None:
    pool = BufferPool(3, 10_000, pinned=False)
    buffers = [pool.acquire() for _ in range(3)]
    assert pool.held_bytes == 3 * 3 * ALIGN_BYTES
    for value, buffer in enumerate(buffers):
        assert len(buffer) >= 10_000 and buffer.data_ptr() % ALIGN_BYTES == 0
        buffer.fill_(value)
    assert [int(buffer.sum()) for buffer in buffers] == [0, len(buffers[1]), 2 * len(buffers[2])]
    pool.close()


def test_acquire_waits_for_a_release_and_not_for_ever() -> None:
    pool = BufferPool(1, 100, pinned=False)
    buffer = pool.acquire()
    with pytest.raises(NodeError, match=r"no buffer of 4,096 bytes came free within 0.1 s"):
        pool.acquire(0.1)
    threading.Timer(0.1, pool.release, [buffer[:40].view(torch.float32)]).start()
    assert pool.acquire(10).data_ptr() == buffer.data_ptr()


def test_only_its_own_buffers_come_back() -> None:
    pool = BufferPool(2, 100, pinned=False)
    buffer = pool.acquire()
    pool.release(buffer)
    for wrong in (buffer, torch.zeros(100, dtype=torch.uint8)):
        with pytest.raises(AssertionError, match="not a buffer that this pool has given out"):
            pool.release(wrong)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pinned_buffers_are_pinned() -> None:
    pool = BufferPool(2, 10_000, pinned=True)
    assert pool.acquire().is_pinned()
    pool.close()
