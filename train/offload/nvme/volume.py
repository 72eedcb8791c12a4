"""The files of one rank, one on each path: made when there is room for them, removed in the end."""

import errno
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from contract.errors import ConfigError, NodeError
from train.offload.nvme.files import BlockFile
from train.offload.nvme.leftovers import BLOCKS_FILE, Identity, OwnedFolder, clear_leftovers


class Volume:
    """Files of given lengths with their space set aside; what dead processes have left is removed first."""

    def __init__(
        self, paths: Sequence[Path], sizes: Sequence[int], identity: Identity, tell: Callable[[str], None]
    ) -> None:
        """`sizes`: bytes on each of `paths`. `tell` is given what a person should know.

        Raises `ConfigError` for paths that can never do, `NodeError` for what this node lacks: the folder, the right
        to write there, room.
        """
        self.files: list[BlockFile] = []
        self._folders: list[OwnedFolder] = []
        _check_paths(paths, identity.host)
        for path in paths:
            clear_leftovers(path, identity.host, tell)
        _check_room(paths, sizes)
        try:
            for path, nbytes in zip(paths, sizes, strict=True):
                self._folders.append(OwnedFolder(path, identity))
                self.files.append(BlockFile(self._folders[-1].path / BLOCKS_FILE))
                _reserve(self.files[-1], path, nbytes)
        except BaseException:
            self.close()
            raise
        for path, file in zip(paths, self.files, strict=True):
            if not file.direct:
                tell(
                    f"{identity.host}: {path} takes no direct I/O, so blocks pass through the page cache: slower, and "
                    "in memory that no budget counts"
                )

    def close(self) -> None:
        """Remove the files."""
        for file in self.files:
            file.close()
        for folder in self._folders:
            folder.remove()

    def leave(self) -> None:
        """Leave the files to the next start: to remove them could hang, too.

        They stay open for the thread that hangs in one.
        """
        for folder in self._folders:
            folder.leave()


def _check_paths(paths: Sequence[Path], host: str) -> None:
    assert paths, "a store needs a path"
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError(
            f"the NVMe paths name a folder twice ({', '.join(map(str, paths))}): give each once"
        )
    for path in paths:
        if not path.is_dir():
            problem = "is no folder" if path.exists() else "does not exist"
        elif not os.access(path, os.W_OK | os.X_OK):
            problem = "cannot be written to"
        else:
            continue
        raise NodeError(
            f"{host}: the NVMe path {path} {problem} here: give a folder of a local disk where you may write"
        )


def _check_room(paths: Sequence[Path], sizes: Sequence[int]) -> None:
    """Add up what goes to the same file system."""
    wanted: dict[int, int] = {}
    for path, nbytes in zip(paths, sizes, strict=True):
        device = path.stat().st_dev
        wanted[device] = wanted.get(device, 0) + nbytes
        # Some file systems don't tell their size.
        if os.statvfs(path).f_blocks and wanted[device] > _free_bytes(path):
            raise _no_room(path, wanted[device])


def _free_bytes(path: Path) -> int:
    facts = os.statvfs(path)
    return facts.f_bavail * facts.f_frsize


def _no_room(path: Path, wanted_bytes: int) -> NodeError | ConfigError:
    facts = os.statvfs(path)
    sentence = (
        f"{socket.gethostname()}: the NVMe path {path} has {_gb(_free_bytes(path))} free and a rank wants "
        f"{_gb(wanted_bytes)} there: make room, name more disks, or put less there"
    )
    if wanted_bytes > facts.f_blocks * facts.f_frsize > 0:
        return ConfigError(sentence)
    return NodeError(sentence)


def _reserve(file: BlockFile, path: Path, nbytes: int) -> None:
    try:
        file.reserve(nbytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            # Part of it has been set aside: what was free counts.
            with suppress(OSError):
                os.truncate(file.path, 0)
            raise _no_room(path, nbytes) from None
        raise NodeError(
            f"{socket.gethostname()}: {nbytes / 1e9:.2f} GB could not be set aside on the NVMe path {path} "
            f"({error.strerror}): name another disk, or put less there"
        ) from None


def _gb(size: int) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e6:,.2f} MB"
