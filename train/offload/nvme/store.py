"""Blocks of a rank on its NVMe disks: reserve a slot for each, then read and write them in the background."""

from collections.abc import Callable, Sequence
from pathlib import Path

from train.monitor.progress import tell
from train.offload.nvme.leftovers import Identity
from train.offload.nvme.plan import Plan, Slot
from train.offload.nvme.settings import NvmeSettings
from train.offload.nvme.threads import Handle, IoThreads, Request, Sums, Traffic
from train.offload.nvme.volume import Volume


class NvmeStore:
    """Slots striped over files on one or several disks.

    `allocate` all slots, then `open`; a slot that was never written reads as zeros. Used by one thread at a time.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        identity: Identity,
        settings: NvmeSettings | None = None,
        checksum: bool = False,
        warn: Callable[[str], None] = tell,
        alarm: Callable[[str], None] | None = None,
    ) -> None:
        """`settings`: by default those that `trierarch nvme-bench` has left in the first path.

        `checksum`: check each block that is read against what was written. Sentences for a person go to `warn`
        when the store is opened, later to `alarm`, by default the same.
        Raises `ConfigError` for settings that are no such thing.
        """
        self._paths = paths
        self._identity = identity
        if settings is None:  # a folder that is not there is told of when it is opened
            settings = NvmeSettings.load(paths[0]) if paths[0].is_dir() else NvmeSettings()
        self._settings = settings
        self._warn, self._alarm = warn, alarm or warn
        self._plan = Plan(len(paths), self._settings.block_bytes)
        self._sums: dict[str, Sums] | None = {} if checksum else None
        self._writes: dict[str, Handle] = {}
        self._volume: Volume | None = None
        self._threads: IoThreads | None = None

    def allocate(self, name: str, nbytes: int) -> Slot:
        """Give a slot of `nbytes` bytes its place; `name` tells it from the others."""
        assert self._volume is None, "the space is reserved already"
        return self._plan.add(name, nbytes)

    @property
    def file_bytes(self) -> list[int]:
        """What the slots take on each path."""
        return list(self._plan.file_bytes)

    def open(self) -> None:
        """Remove what dead processes have left, and reserve the space.

        Raises `ConfigError` or `NodeError`, in a sentence, where there is no room or no right to write.
        """
        assert self._volume is None, "open already"
        self._volume = Volume(self._paths, self._plan.file_bytes, self._identity, self._warn)
        self._threads = IoThreads(self._volume.files, self._settings, self._alarm)

    def read(self, slot: Slot, view: memoryview) -> Handle:
        """Begin to fill the first `slot.nbytes` bytes of `view`: raw bytes, in use until the handle is done.

        Aligned memory (of a `BufferPool`) is filled in place, other memory through a bounce buffer.
        """
        return self._start(slot, view, write=False)

    def write(self, slot: Slot, view: memoryview) -> Handle:
        """Begin to write the first `slot.nbytes` bytes of `view`, which are in use until the handle is done."""
        return self._start(slot, view, write=True)

    def traffic(self) -> Traffic:
        """Return what has been moved so far, and how long that took."""
        return Traffic() if self._threads is None else self._threads.traffic()

    def close(self) -> None:
        """Drop what is under way and remove the files; those of a disk that hangs are left to the next start."""
        if self._volume is None:
            return
        assert self._threads is not None
        if self._threads.close():
            self._volume.close()
        else:
            self._volume.leave()
        self._volume = None

    def _start(self, slot: Slot, view: memoryview, write: bool) -> Handle:
        assert self._volume is not None and self._threads is not None, "it is not open"
        assert view.format == "B" and view.contiguous and len(view) >= slot.nbytes, slot
        before = self._writes.get(slot.name)
        assert before is None or before.waited, f"wait for the write of {slot.name} first"
        sums = None if self._sums is None else self._sums.setdefault(slot.name, Sums())
        handle = self._threads.start(
            [
                Request(piece.path, piece.offset, view[piece.begin : piece.end], index, sums)
                for index, piece in enumerate(self._plan.pieces(slot))
            ],
            write,
        )
        if write:
            self._writes[slot.name] = handle
        return handle
