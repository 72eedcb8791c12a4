"""Threads that read and write blocks in the background: Python releases its lock in the calls that do so."""

import queue
import socket
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from contract.errors import NodeError
from train.offload.nvme.files import BlockFile, Spare
from train.offload.nvme.settings import NvmeSettings

_LOOK_EVERY_S = 0.2
_END_S = 10.0
"""How long `close` waits for requests under way, which may hang in the kernel."""


@dataclass
class Traffic:
    """What has gone to and from the disks."""

    read_bytes: int = 0
    written_bytes: int = 0
    busy_s: float = 0.0
    """Time in which a request was under way."""
    waited_s: float = 0.0
    """Time that callers have waited: the part that nothing hid."""


class Sums:
    """CRC-32 of the blocks of a slot."""

    def __init__(self) -> None:
        self._sums: dict[int, int] = {}

    def keep(self, index: int, view: memoryview) -> None:
        """Note what block `index` is about to be."""
        self._sums[index] = zlib.crc32(view)

    def check(self, index: int, view: memoryview, path: Path, offset: int) -> None:
        """Raise `NodeError` unless block `index` is what was written; a block never written has no sum."""
        if index in self._sums and zlib.crc32(view) != self._sums[index]:
            raise NodeError(
                f"{socket.gethostname()}: block {index} of {len(view):,} bytes at offset {offset:,} of {path} is not "
                "what was written there: the disk or its memory is damaged, take this node out"
            )


@dataclass(frozen=True, slots=True)
class Request:
    """One read or write of a block."""

    path: int
    """Index of the file."""
    offset: int
    view: memoryview
    """What to fill or to write."""
    index: int = 0
    """The block's number in its slot."""
    sums: Sums | None = None
    """The slot's checksums, if it has any."""


class Handle:
    """Requests that are under way together."""

    def __init__(self, threads: "IoThreads", write: bool, left: int) -> None:
        self.write = write
        self.left = left
        self.error: Exception | None = None
        self.over = threading.Event()
        self.waited = False
        """Whether somebody has seen how it ended."""
        self._threads = threads
        if not left:
            self.over.set()

    @property
    def done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self.over.is_set()

    def wait(self) -> None:
        """Return when all is read or written; raise `NodeError` when that failed or hangs."""
        if not self.over.is_set():
            self._threads.wait_for(self.over)
        self.waited = True
        if self.error is not None:
            raise self.error


class IoThreads:
    """Threads for each file, each with one request at a time."""

    def __init__(
        self, files: Sequence[BlockFile], settings: NvmeSettings, tell: Callable[[str], None]
    ) -> None:
        """`tell` is given a sentence about the first request that takes long."""
        self._files = files
        self._settings = settings
        self._tell = tell
        self._told = False
        self._stop = False
        self._lock = threading.Lock()
        self._traffic = Traffic()
        self._under_way = 0
        self._busy_since_s = 0.0
        self._queues: list[queue.SimpleQueue[tuple[Handle, Request] | None]] = [
            queue.SimpleQueue() for _ in files
        ]
        self._began_s: dict[threading.Thread, tuple[float, int, bool]] = {}
        """Of the threads that are at work: since when, on which file, and whether it writes."""
        self._threads = [
            threading.Thread(target=self._work, args=(path,), name=f"nvme-{path}-{number}", daemon=True)
            for path in range(len(files))
            for number in range(settings.threads)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, requests: Sequence[Request], write: bool) -> Handle:
        """Have the requests carried out, in any order; their memory is in use until the handle is done."""
        handle = Handle(self, write, len(requests))
        with self._lock:
            if requests and not self._under_way:
                self._busy_since_s = time.perf_counter()
            self._under_way += len(requests)
        for request in requests:
            self._queues[request.path].put((handle, request))
        return handle

    def traffic(self) -> Traffic:
        """Return what there was so far."""
        with self._lock:
            busy_s = self._traffic.busy_s
            if self._under_way:
                busy_s += time.perf_counter() - self._busy_since_s
            return Traffic(
                self._traffic.read_bytes, self._traffic.written_bytes, busy_s, self._traffic.waited_s
            )

    def wait_for(self, over: threading.Event) -> None:
        """Wait for the end of a handle; raise `NodeError` when a disk has not answered for `limit_s`."""
        began_s = time.perf_counter()
        try:
            while not over.wait(_LOOK_EVERY_S):
                self._look()
        finally:
            with self._lock:
                self._traffic.waited_s += time.perf_counter() - began_s

    def close(self) -> bool:
        """Drop what has not begun, and end the threads; return False if one of them hangs."""
        self._stop = True
        for path in range(len(self._files)):
            for _ in range(self._settings.threads):
                self._queues[path].put(None)
        deadline = time.monotonic() + _END_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, path: int) -> None:
        spare = Spare()
        me = threading.current_thread()
        while (job := self._queues[path].get()) is not None:
            handle, request = job
            began_s = time.monotonic()
            self._began_s[me] = began_s, path, handle.write
            error: Exception | None = None
            if self._stop:
                error = RuntimeError("the store was closed before this was done")
            elif handle.error is None:
                try:
                    self._carry_out(handle.write, request, spare)
                except Exception as caught:
                    error = caught
            del self._began_s[me]
            self._tell_if_slow(time.monotonic() - began_s, path, handle.write)
            self._finish(handle, len(request.view), error)
            # Else the last buffer stays in use for as long as the thread has nothing else to do.
            del job, handle, request

    def _carry_out(self, write: bool, request: Request, spare: Spare) -> None:
        file, view, sums = self._files[request.path], request.view, request.sums
        if write:
            if sums is not None:
                sums.keep(request.index, view)
            file.write(view, request.offset, spare)
            return
        file.read(view, request.offset, spare)
        if sums is not None:
            sums.check(request.index, view, file.path, request.offset)

    def _finish(self, handle: Handle, nbytes: int, error: Exception | None) -> None:
        with self._lock:
            if error is not None:
                handle.error = handle.error or error
            elif handle.write:
                self._traffic.written_bytes += nbytes
            else:
                self._traffic.read_bytes += nbytes
            self._under_way -= 1
            if not self._under_way:
                self._traffic.busy_s += time.perf_counter() - self._busy_since_s
            handle.left -= 1
            if not handle.left:
                handle.over.set()

    def _look(self) -> None:
        """See whether a disk still answers."""
        now_s = time.monotonic()
        for began_s, path, write in list(self._began_s.values()):
            self._tell_if_slow(now_s - began_s, path, write)
            if now_s - began_s > self._settings.limit_s:
                raise NodeError(
                    f"{self._what(path, write)} for {now_s - began_s:.0f} s: the disk or its file system hangs, take "
                    "this node out, or use another NVMe path"
                )

    def _tell_if_slow(self, took_s: float, path: int, write: bool) -> None:
        if took_s <= self._settings.slow_s:
            return
        with self._lock:
            said, self._told = self._told, True
        if not said:
            self._tell(
                f"{self._what(path, write)} for {took_s:.0f} s: the disk is slow, or others use it (over "
                f"{self._settings.limit_s:g} s end the run; said once)"
            )

    def _what(self, path: int, write: bool) -> str:
        doing = "written to" if write else "read from"
        return f"{socket.gethostname()}: a block was being {doing} {self._files[path].path}"
