"""What a process asks of the C library."""

import os
import subprocess
import sys

import pytest

FAULTS = """
import ctypes, resource, sys
from train.resilience.process import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
if sys.argv[1] == "keep":
    keep_freed_memory()

def use():
    block = libc.malloc(24 << 20)
    ctypes.memset(ctypes.c_void_p(block), 1, 24 << 20)
    libc.free(block)

use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(what: str, **more: str) -> int:
    """Pages that the kernel had to give again for a block of 24 MiB that was freed before."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", FAULTS, what]
    done = subprocess.run(
        command, env=environment | more, capture_output=True, text=True, timeout=60, check=True
    )
    return int(done.stdout)


@pytest.mark.req("A14")
def test_freed_memory_is_kept_for_the_next_step() -> None:
    pages = (24 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert faults("leave") > pages / 1000  # huge pages count once
    assert faults("keep") == 0


def test_what_the_user_has_set_stays() -> None:
    assert faults("keep", MALLOC_TRIM_THRESHOLD_="0", MALLOC_TOP_PAD_="0", MALLOC_MMAP_THRESHOLD_="4096") > 0
