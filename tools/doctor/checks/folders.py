"""Folders of the run: on storage that all nodes share, or on a disk of each, as they must be; and the clock."""

import os
from collections.abc import Iterator
from pathlib import Path

from tools.doctor.facts import Facts
from tools.doctor.finding import About, Finding, NotCheckedError, NoUseError, check, error, note, warning
from tools.doctor.host import existing

IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
LOCAL = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "overlay", "aufs", "vfat", "squashfs"}
)
SHARED = frozenset(
    {
        "nfs",
        "nfs4",
        "lustre",
        "gpfs",
        "mmfs",
        "beegfs",
        "beegfs_nodev",
        "ceph",
        "fuse.ceph",
        "cifs",
        "smb3",
        "afs",
    }
    | {
        "pvfs2",
        "orangefs",
        "wekafs",
        "panfs",
        "dvs",
        "glusterfs",
        "fuse.glusterfs",
        "fuse.juicefs",
        "9p",
        "virtiofs",
    }
)
MOST_SKEW_S = 2.0
"""More than this between a node and the file server confuses whoever compares times of files and events."""


@check("run folder on shared storage", About.environment)
def shared(facts: Facts) -> Iterator[Finding]:
    """What a rank writes, the others must see."""
    facts.need_here()
    if facts.is_local or facts.cluster.name == "lab":
        raise NoUseError("all ranks run on this host")
    for key, path in _shared_folders(facts):
        mount = facts.host.mount_of(path)
        if mount is None:
            raise NotCheckedError("/proc/mounts does not say what file systems there are")
        said = f"{path} is on {mount.source} ({mount.kind}, mounted at {mount.point})"
        fix = f"put {key} on storage that all nodes share" + _scratch(facts)
        if mount.kind in IN_MEMORY:
            yield error(key, f"{said}: it is in this host's memory, and no other node sees it", fix)
        elif mount.kind in LOCAL and not _is_exported(facts, path):
            yield warning(
                key,
                f"{said}, a disk of this host, and this host exports it to nobody: other nodes would not see it",
                fix,
            )
        elif mount.kind not in LOCAL | SHARED | IN_MEMORY:
            yield note(
                key,
                f"{said}: it is not known whether all nodes share that; the run finds out in its first seconds",
            )


@check("run folder can be written", About.environment)
def writable(facts: Facts) -> Iterator[Finding]:
    """The folder, or the one above in which it will be made."""
    facts.need_here()
    folder = existing(facts.run_path)
    if not folder.is_dir():
        yield error("run.root", f"{folder} is no folder", "give another run.root")
    elif not os.access(folder, os.W_OK | os.X_OK):
        yield error(
            "run.root", f"{folder} cannot be written by you", "give another run.root, or ask its owner"
        )


@check("disks of the nodes", About.environment)
def local_disks(facts: Facts) -> Iterator[Finding]:
    """Folders that are meant to be on a disk of each node."""
    named = [("checkpoint.fast_path", facts.config.checkpoint.fast_path)]
    named += [("offload.nvme_path", path) for path in facts.config.offload.nvme_path]
    given = [(key, path) for key, path in named if path is not None]
    if not given:
        raise NoUseError("checkpoint.fast_path and offload.nvme_path are not set")
    facts.need_host_of_ranks()
    for key, text in given:
        path = Path(os.path.expandvars(text)).expanduser()
        if "$" in str(path):
            yield warning(
                key,
                f"{key}={text} names a variable that is not set here",
                "set it, or write the folder's path",
            )
            continue
        mount = facts.host.mount_of(path)
        if mount is not None and mount.kind in SHARED:
            yield warning(
                key,
                f"{path} is on {mount.source} ({mount.kind}), which all nodes share: it is no faster than the "
                "run's folder",
                "give a folder on a disk of each node",
            )
        elif mount is not None and mount.kind in IN_MEMORY:
            yield warning(
                key,
                f"{path} is in the host's memory ({mount.kind}), of which the run needs each byte",
                "give a folder on a disk",
            )
        if key == "offload.nvme_path" and not path.is_dir():
            yield error(key, f"{path} is not there", "make it, or give another folder")


@check("clock of the file server", About.environment)
def clock(facts: Facts) -> Iterator[Finding]:
    """Times of files against the clock of this host."""
    facts.need_here()
    folder = existing(facts.run_path)
    try:
        skew_s = facts.host.skew_s(folder)
    except OSError as problem:
        raise NotCheckedError(f"no file can be written to {folder} ({problem.strerror})") from None
    if abs(skew_s) > MOST_SKEW_S:
        way = "ahead of" if skew_s > 0 else "behind"
        yield warning(
            str(folder),
            f"the clock of the file server of {folder} is {abs(skew_s):.1f} s {way} this host's: heartbeats and "
            "events of a run are judged by their times",
            "ask the site to synchronise the clocks (chronyc tracking, timedatectl)",
        )


def _shared_folders(facts: Facts) -> list[tuple[str, Path]]:
    found = [("run.root", facts.run_path)]
    data = Path(f"{facts.config.data.prefix}.bin")
    # What is not there is told of by another check.
    return [*found, ("data.prefix", data)] if data.is_file() else found


def _is_exported(facts: Facts, path: Path) -> bool:
    real = Path(os.path.realpath(path))
    return any(real.is_relative_to(folder) for folder in facts.host.exports)


def _scratch(facts: Facts) -> str:
    scratch = facts.cluster.scratch_shared
    return f", such as {scratch}" if scratch else ""
