"""The files of a step as they were written, whether they are stored compressed now or not."""

import os
from pathlib import Path

from train.checkpoint.compress.container import Container
from train.checkpoint.compress.rounding import Bytes
from train.checkpoint.errors import DamagedError
from train.checkpoint.manifest import LONGEST_CHAIN, Manifest, read_parent

_OPEN_FILES = 32


class StepFiles:
    """Reads parts of a step's files. For one thread."""

    def __init__(self, folder: Path, manifest: Manifest | None = None, depth: int = 0) -> None:
        """`manifest`: of the step in `folder`; None where it has none (yet): all its files are plain then."""
        self.folder = folder
        self._manifest = manifest
        self._depth = depth
        self._plain: dict[str, int] = {}
        self._containers: dict[str, Container] = {}
        self._parent: StepFiles | None = None

    def close(self) -> None:
        """Close all files."""
        for descriptor in self._plain.values():
            os.close(descriptor)
        for container in self._containers.values():
            container.close()
        if self._parent is not None:
            self._parent.close()
        self._plain, self._containers, self._parent = {}, {}, None

    def is_compressed(self, name: str) -> bool:
        """Whether a file, by its plain name, is stored compressed."""
        return self._manifest is not None and name in self._manifest.compressed

    def size(self, name: str) -> int:
        """Of a plain file, bytes. Raises `DamagedError`, or OSError."""
        if self.is_compressed(name):
            return self._container(name).nbytes
        return os.fstat(self._descriptor(name)).st_size

    def read_into(self, name: str, offset: int, out: Bytes) -> None:
        """Fill `out` from a place of a plain file; raises `DamagedError`, or OSError."""
        if self.is_compressed(name):
            self._container(name).read_into(offset, out)
            return
        done, view = 0, memoryview(out)  # type: ignore[arg-type]
        while done < len(view):
            count = os.preadv(self._descriptor(name), [view[done:]], offset + done)
            if count == 0:
                raise DamagedError(f"{name} ends after {offset + done} bytes")
            done += count

    def _descriptor(self, name: str) -> int:
        if name not in self._plain:
            if len(self._plain) >= _OPEN_FILES:
                os.close(self._plain.pop(next(iter(self._plain))))
            self._plain[name] = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC)
        return self._plain[name]

    def _container(self, name: str) -> Container:
        if name not in self._containers:
            assert self._manifest is not None
            if len(self._containers) >= _OPEN_FILES:
                self._containers.pop(next(iter(self._containers))).close()
            stored = self._manifest.compressed[name]
            self._containers[name] = Container(self.folder / stored["file"], self._read_parent)
        return self._containers[name]

    def _read_parent(self, name: str, offset: int, out: Bytes) -> None:
        assert self._manifest is not None
        if self._parent is None:
            parent = self._manifest.parent
            if parent is None:
                raise DamagedError("it is stored as the difference to a step that it does not name")
            if self._depth >= LONGEST_CHAIN:
                raise DamagedError(f"the steps that it needs ({parent}, ...) need each other")
            try:
                manifest = read_parent(self.folder, self._manifest)
            except ValueError as error:
                raise DamagedError(str(error)) from error
            self._parent = StepFiles(self.folder.with_name(parent), manifest, self._depth + 1)
        try:
            self._parent.read_into(name, offset, out)
        except (OSError, DamagedError) as error:
            raise DamagedError(f"{self._manifest.parent}, which it is the difference to: {error}") from error
