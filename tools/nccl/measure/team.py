"""The ranks that measure together: who is where, on what device, and how they agree."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from contract.errors import ConfigError
from tools.nccl.measure.watch import Watch
from train.bootstrap import World

_CPU_SHARE = 0.25
"""Of a host's free memory, for the buffers of all its ranks."""
_GPU_SHARE = 0.9


@dataclass(frozen=True)
class Team:
    """All ranks, seen from one; rank = node * gpus_per_node + gpu."""

    rank: int
    ranks: int
    nodes: list[str]
    gpus_per_node: int
    device: torch.device
    watch: Watch
    limit_s: float
    """How long ranks wait for each other where nothing large is sent."""
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    """`inside`: this rank's node, `between`: its peers of the same number on each node; see `make_groups`."""

    @property
    def leads(self) -> bool:
        """Whether this rank decides."""
        return self.rank == 0

    @property
    def backend(self) -> str:
        """The library that is measured."""
        return "gloo" if self.device.type == "cpu" else "nccl"

    @property
    def node(self) -> str:
        """Name of this rank's node."""
        return self.nodes[self.rank // self.gpus_per_node]

    @property
    def leaders(self) -> list[int]:
        """The first rank of each node."""
        return list(range(0, self.ranks, self.gpus_per_node))

    def make_groups(self) -> None:
        """Make the groups of nodes and rails, where there are several of both. Collective."""
        if self.gpus_per_node == 1 or len(self.nodes) == 1:
            return
        self.watch.step("start", "making groups of ranks", self.limit_s)
        first = self.rank - self.rank % self.gpus_per_node
        members = {
            "inside": range(first, first + self.gpus_per_node),
            "between": range(self.rank % self.gpus_per_node, self.ranks, self.gpus_per_node),
        }
        for name, ranks in members.items():
            # Known to its members only: thousands of groups of all ranks would take minutes.
            group = dist.new_group(list(ranks), use_local_synchronization=True)
            assert isinstance(group, dist.ProcessGroup)
            self.groups[name] = group

    def told(self, values: Sequence[int], limit_s: float | None = None) -> list[int]:
        """Return what rank 0 has given, as many numbers as everyone gives. Collective."""
        self.watch.step("plan", "what rank 0 says", limit_s or self.limit_s, [] if self.leads else [0])
        numbers = torch.tensor(values, dtype=torch.int64)
        dist.broadcast(numbers, 0)
        return [int(number) for number in numbers]

    def meet(self, what: str, limit_s: float | None = None) -> None:
        """Wait for all ranks, at the point that `what` names. Collective."""
        self.watch.step("plan", what, limit_s or self.limit_s)
        # On the CPU: a barrier would be NCCL's.
        dist.all_reduce(torch.zeros(1))

    def gathered(self, values: Sequence[float], what: str, limit_s: float | None = None) -> list[list[float]]:
        """Return the values of each rank to rank 0, nothing to others; `what` all wait for. Collective."""
        self.watch.step("plan", what, limit_s or self.limit_s)
        mine = torch.tensor(values, dtype=torch.float64)
        all_of_them = [torch.empty_like(mine) for _ in range(self.ranks)] if self.leads else None
        dist.gather(mine, all_of_them)
        return [[float(value) for value in one] for one in all_of_them or []]

    def memory_bytes(self) -> int:
        """Memory that every rank has for buffers. Collective."""
        self.watch.step("plan", "how much memory there is", self.limit_s)
        if self.device.type == "cuda":
            own = _GPU_SHARE * torch.cuda.mem_get_info(self.device)[0]
        else:
            own = _CPU_SHARE * _available_bytes() / self.gpus_per_node
        least = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)


def _available_bytes() -> int:
    """Memory of this host that is free, or that the kernel can free."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def slowest(seconds: Sequence[float], group: dist.ProcessGroup | None) -> Tensor:
    """Return the largest of each time over the ranks of a group. Collective there."""
    times = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=group)
    return times


def check_places(world: World, names: Sequence[str]) -> None:
    """Raise ConfigError where ranks are not as many on each node, and one node's after another's. Collective."""
    mine = [world.rank, world.node_rank, world.local_rank, world.local_size, world.nodes]
    numbers = torch.tensor(mine, dtype=torch.int64)
    lowest, highest = numbers[3:].clone(), numbers[3:].clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    off = torch.tensor(int(world.rank != world.node_rank * world.local_size + world.local_rank))
    dist.all_reduce(off)
    if off or not torch.equal(lowest, highest):
        raise ConfigError(
            "the ranks of the network test are not as many on each node, or not one node's after another's: start the "
            "same number on every node, in the order of the nodes"
        )
    if names and len(names) != world.nodes:
        raise ConfigError(
            f"nodes names {len(names)} nodes and there are {world.nodes}: name them all, or none"
        )
