"""Ranks that save on disks of their own, as if each were a node, with as little of a training as that needs."""

import ctypes
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from contract.run_folder import RunFolder
from train.checkpoint.fast import FastTier
from train.checkpoint.fast_folder import fast_folder
from train.checkpoint.manifest import Manifest
from train.checkpoint.retain import Retention
from train.checkpoint.staging import Staging
from train.checkpoint.store import CheckpointStore

TENSORS = 8


@dataclass
class State:
    """As little of a `TrainState` as a store needs: every value is the step."""

    step: int

    def state_dict(self) -> dict[str, Any]:
        tensors = {f"w{number}": torch.full((300,), float(self.step)) for number in range(TENSORS)}
        return {"model": tensors, "rng": {f"rank_{dist.get_rank()}": torch.tensor([dist.get_rank()])}}

    def stored(self) -> Mapping[Any, Any]:
        return {}


def node_store(
    run: RunFolder, node: Path | None, group: dist.ProcessGroup | None = None, keep_last: int = 2
) -> CheckpointStore:
    """The store of this rank, on a node with a disk at `node`, if any."""
    group = group or dist.group.WORLD
    assert group is not None
    if node is not None:
        node.mkdir(parents=True, exist_ok=True)
    return CheckpointStore(
        run,
        group,
        Manifest(0, dist.get_world_size(group), {}, {}),
        Retention(keep_last),
        lambda: None,
        staging=Staging(lambda: 1 << 30, pinned=False),
        fast=None if node is None else FastTier(fast_folder(str(node), run), run),
    )


def join(rank: int, ranks: int, store_file: Path) -> None:
    """Make a process group of forked processes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    dist.init_process_group("gloo", store=dist.FileStore(str(store_file), ranks), rank=rank, world_size=ranks)


def forked(ranks: int, work: Callable[[int], object]) -> list[int]:
    """Fork ranks that do their work until they end or are killed; return their process ids."""
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            try:
                work(rank)
            finally:
                os._exit(1)
        children.append(child)
    return children


def see_an_empty(folder: Path) -> None:
    """Have this process, and no other, see a disk of its own in the place of `folder`, as another node would."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, private = 0x20000, 0x4000 | 1 << 18  # CLONE_NEWNS, MS_REC | MS_PRIVATE
    for failed in (
        libc.unshare(new_mounts),
        libc.mount(b"none", b"/", None, private, None),
        libc.mount(b"none", str(folder).encode(), b"tmpfs", 0, None),
    ):
        if failed:
            raise OSError(ctypes.get_errno(), f"{folder} cannot be hidden")
