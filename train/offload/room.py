"""What memory there is for a rank where it runs, and whether what it will keep fits."""

import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from contract.errors import ConfigError, NodeError
from train.config import TrainConfig
from train.layout.memory import STATE, Memory, Role, advice, on_host, total
from train.layout.recompute import up_gb
from train.offload.config import Tier

_GB = 1e9
_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Room:
    """Bytes for one rank; None where that is not known."""

    device: int | None
    """Of memory of its own that the device has; None for a CPU."""
    host: int
    """That are free on the node, in equal parts for its ranks."""
    host_total: int
    """That the rank would have if nothing else used the node."""
    nvme: int | None
    """That are free on the disks, in equal parts for the node's ranks."""

    def limits(self) -> Mapping[str, int]:
        """By tier, as for `train.layout.memory.lines`."""
        # What a CPU computes with is memory of the host.
        device = self.host if self.device is None else self.device
        known = {"device": device, "host": self.host, "nvme": self.nvme}
        return {tier: limit for tier, limit in known.items() if limit is not None}


def room(device: torch.device, local_ranks: int, nvme_paths: list[str]) -> Room:
    """Look at the node of this rank, which it shares with `local_ranks` - 1 others."""
    free, everything = host_memory()
    nvme = None
    if nvme_paths:
        # Two folders of one disk are no second disk.
        folders = [folder for folder in map(Path, nvme_paths) if folder.is_dir()]
        disks = {folder.stat().st_dev: folder for folder in folders}
        nvme = sum(shutil.disk_usage(folder).free for folder in disks.values()) // local_ranks
    return Room(
        device=torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None,
        host=free // local_ranks,
        host_total=everything // local_ranks,
        nvme=nvme,
    )


def check_fits(config: TrainConfig, memory: Memory, there: Room, rank: int, local_ranks: int) -> None:
    """Raise `ConfigError` where a rank's state has no room, or `NodeError` where only this node has too little.

    Activations are reckoned, not known to the byte: they are left to the table and to the device's own word.
    """
    state = total(memory, STATE)
    if there.device is not None and state.device > there.device:
        more = "optimizer" if config.offload.optimizer is Tier.none else "parameters"
        raise ConfigError(
            f"rank {rank} keeps {state.device / _GB:.3g} GB of weights, gradients and optimizer state on its device, "
            f"which has {there.device / _GB:.3g} GB: share them among more ranks (parallel.zero, parallel.tp, "
            f"parallel.pp, nodes), or set offload.{more}=cpu"
        )
    host = state.host + memory[Role.under_way].host + memory[Role.activations].host
    if there.device is None:
        host += state.device
    if host <= there.host:
        return
    what = on_host(memory) if there.device is not None else f"{up_gb(host):.3g} GB of memory"
    each = f" for each of its {local_ranks} ranks" * (local_ranks > 1)
    needs = f"rank {rank} needs {what}, and {socket.gethostname()} has {there.host / _GB:.3g} GB free{each}"
    if host > there.host_total:
        raise ConfigError(
            f"{needs}: {advice(config, memory)}, or ask for more memory of the node (cluster.memory)"
        )
    raise NodeError(
        f"{needs}: something else on that node uses {(there.host_total - there.host) / _GB:.3g} GB of it"
    )


def host_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> tuple[int, int]:
    """Bytes of memory that this process may still take, and may have in all: of the node, or of its job's share."""
    facts = {}
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        facts[name] = int(rest.split()[0]) * 1024
    free, everything = facts["MemAvailable"], facts["MemTotal"]
    for limit, used in _cgroup_limits(proc, cgroups):
        everything = min(everything, limit)
        free = min(free, max(0, limit - used))
    return free, everything


def _cgroup_limits(proc: Path, cgroups: Path) -> list[tuple[int, int]]:
    """Limits of the control groups that this process is in, and what counts against each and can't be dropped."""
    found = []
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            top, names = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = cgroups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = top / path.lstrip("/")
        while True:
            if (limit := _number(folder / names[0])) is not None:
                used = _number(folder / names[1]) or 0
                found.append((limit, max(0, used - _cache(folder / "memory.stat", names[2]))))
            if folder == top or top not in folder.parents:
                break
            folder = folder.parent
    return found


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)


def _cache(file: Path, name: str) -> int:
    """Bytes of files that the kernel drops when memory is asked for."""
    try:
        words = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return 0
    return next((int(value) for key, value in words if key == name), 0)
