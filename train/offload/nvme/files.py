"""One file of blocks: whole reads and writes at an offset, past the page cache where the file system lets."""

import ctypes
import errno
import mmap
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from contract.errors import NodeError

ALIGN_BYTES = 4096
"""Direct I/O needs addresses, offsets and lengths in multiples of a disk's sectors, which have 512 or 4096 bytes."""

_HUGE_BYTES = 2 << 20

_ADVICE = {
    errno.ENOSPC: "somebody has filled the disk: make room there, or use another NVMe path",
    errno.EDQUOT: "your quota is used up: make room there, or use another NVMe path",
    errno.EIO: "the disk fails: take this node out, or use another NVMe path",
    errno.ENODEV: "the disk is gone: take this node out, or use another NVMe path",
    errno.ENXIO: "the disk is gone: take this node out, or use another NVMe path",
    errno.ESTALE: "the file is gone: keep other jobs and clean-up scripts away from the NVMe path",
    errno.EROFS: "the disk has become read-only, as after an error: take this node out",
}
_OTHER_ADVICE = "look at the disk, or use another NVMe path"


def round_up(nbytes: int) -> int:
    """Return the next multiple of `ALIGN_BYTES`."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def aligned_buffer(nbytes: int) -> memoryview:
    """Return at least `nbytes` bytes of new, zeroed memory that direct I/O can use; a multiple of `ALIGN_BYTES`."""
    size = round_up(max(nbytes, 1))
    # Room to begin where a huge page does; what is never touched takes no memory.
    spare = _HUGE_BYTES if size >= _HUGE_BYTES else 0
    pages = mmap.mmap(-1, size + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if spare:
        with suppress(OSError):  # a kernel without huge pages
            # The kernel looks up every page that a request touches: in huge ones direct I/O is up to twice as fast.
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory = memoryview(pages)
    begin = -_address(memory) % (spare or ALIGN_BYTES)
    return memory[begin : begin + size]


class Spare:
    """A bounce buffer for what direct I/O can't take in place: it grows to the largest need. For one thread."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def take(self, nbytes: int) -> memoryview:
        """Return `nbytes` bytes, aligned, with any content."""
        if len(self._memory) < nbytes:
            self._memory = aligned_buffer(nbytes)
        return self._memory[:nbytes]


class BlockFile:
    """A new file that one rank reads and writes in blocks, from several threads.

    Every method raises `NodeError`, in a sentence with the file and the cause, for what a disk can do: it is full,
    broken, gone, or the file has been cut.
    """

    def __init__(self, path: Path) -> None:
        """Create the file; `direct` says whether its I/O goes past the page cache."""
        self.path = path
        self.direct = True
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            try:
                self._descriptor = os.open(path, flags | os.O_DIRECT, 0o600)
                self._try_direct()
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self.direct = False
                self._descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise self._failure("created", error) from None

    def _try_direct(self) -> None:
        """Some file systems open a file for direct I/O and then refuse it."""
        try:
            os.pwritev(self._descriptor, [aligned_buffer(ALIGN_BYTES)], 0)
            os.ftruncate(self._descriptor, 0)
        except OSError:
            os.close(self._descriptor)
            raise

    def reserve(self, nbytes: int) -> None:
        """Have the file system set the space aside: zeros, as long as nothing is written. Raises OSError."""
        if nbytes:
            os.posix_fallocate(self._descriptor, 0, nbytes)

    def read(self, view: memoryview, offset: int, spare: Spare) -> None:
        """Fill `view` from `offset`, a multiple of `ALIGN_BYTES`; fast where `view` is aligned, too."""
        in_place = self._in_place(view)
        self._move(os.preadv, "read", view[:in_place], offset)
        if rest := view[in_place:]:
            bounce = spare.take(round_up(len(rest)))
            self._move(os.preadv, "read", bounce, offset + in_place)
            rest[:] = bounce[: len(rest)]

    def write(self, view: memoryview, offset: int, spare: Spare) -> None:
        """Write `view` at `offset`, a multiple of `ALIGN_BYTES`; what follows up to the next multiple is lost."""
        in_place = self._in_place(view)
        self._move(os.pwritev, "written", view[:in_place], offset)
        if rest := view[in_place:]:
            bounce = spare.take(round_up(len(rest)))
            bounce[: len(rest)] = rest
            self._move(os.pwritev, "written", bounce, offset + in_place)

    def sync(self) -> None:
        """Wait until the disk has what was written."""
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise self._failure("written", error) from None

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):
            os.close(self._descriptor)

    def _in_place(self, view: memoryview) -> int:
        """How many of the first bytes need no bounce buffer."""
        if not self.direct:
            return len(view)
        if not len(view) or _address(view) % ALIGN_BYTES:
            return 0
        return len(view) // ALIGN_BYTES * ALIGN_BYTES

    def _move(
        self, call: Callable[[int, Sequence[memoryview], int], int], done: str, view: memoryview, offset: int
    ) -> None:
        moved = 0
        while moved < len(view):
            try:
                count = call(self._descriptor, [view[moved:]], offset + moved)
            except OSError as error:
                raise self._failure(done, error) from None
            if count == 0:
                raise NodeError(
                    f"{socket.gethostname()}: {self.path} ends at byte {offset + moved:,}, before what was kept there: "
                    "keep other jobs and clean-up scripts away from the NVMe path"
                )
            moved += count

    def _failure(self, done: str, error: OSError) -> NodeError:
        advice = _ADVICE.get(error.errno or 0, _OTHER_ADVICE)
        return NodeError(
            f"{socket.gethostname()}: {self.path} could not be {done} ({error.strerror}): {advice}"
        )


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
