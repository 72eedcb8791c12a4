"""Which cores each rank of a node runs on."""

import json
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from contract.errors import ConfigError

NUMA = "numa"
Places = list[list[int]]
Key = Callable[[int], tuple[int, ...]]
_SYSTEM = Path("/sys/devices/system/cpu")


def parse_rank_cpus(text: str) -> Places | None:
    """Read `--rank-cpus`: `numa` (None: shared out evenly), or a JSON list of CPU numbers for each local rank.

    Raises ConfigError for anything else.
    """
    if text == NUMA:
        return None
    try:
        places = json.loads(text)
    except ValueError:
        places = None
    if (
        not isinstance(places, list)
        or not places
        or not all(isinstance(p, list) and all(type(c) is int for c in p) for p in places)
    ):
        raise ConfigError(
            f"--rank-cpus={text}: give {NUMA}, or a list of CPU numbers for each rank of a node such as [[0,1],[2,3]]"
        )
    return places


def place(wanted: Places | None, usable: Sequence[int], ranks: int, key: Key) -> tuple[Places | None, str]:
    """Return the CPUs of each local rank and a complaint, empty if all is well; None leaves the ranks unbound.

    `wanted` is a map that the profile gives, cut to what may be used here; without one, or where it does not
    fit, the usable CPUs are shared out. `key` orders CPUs so that neighbours share a core and a NUMA node.
    """
    complaint = ""
    if wanted is not None:
        allowed = set(usable)
        cut = [[cpu for cpu in cpus if cpu in allowed] for cpus in wanted[:ranks]]
        if len(cut) == ranks and all(cut):
            return cut, ""
        complaint = (
            f"the map of ranks to CPUs does not fit the job's CPUs ({_short(usable)}), they are shared out"
        )
    shares = share_out(usable, ranks, key)
    if shares is None:
        return None, f"{ranks} ranks have only {len(usable)} cores on a node, so they are not bound to cores"
    return shares, complaint


def share_out(cpus: Sequence[int], ranks: int, key: Key) -> Places | None:
    """Split CPUs evenly in the order of `key`, whole cores only; None when there are fewer cores than ranks."""
    cores: dict[tuple[int, ...], list[int]] = {}
    for cpu in sorted(cpus):
        cores.setdefault(key(cpu), []).append(cpu)
    ordered = [cores[core] for core in sorted(cores)]
    if len(ordered) < ranks:
        return None
    bounds = [rank * len(ordered) // ranks for rank in range(ranks + 1)]
    return [sorted(cpu for core in ordered[first:last] for cpu in core) for first, last in pairwise(bounds)]


def core_of(cpu: int) -> tuple[int, ...]:
    """Order CPUs of this host by NUMA node and core: hardware threads of one core are equal.

    Nodes of a job are taken to be alike; where the kernel does not say, a CPU is a core.
    """
    folder = _SYSTEM / f"cpu{cpu}"
    numa = next(iter(sorted(folder.glob("node[0-9]*"))), None)
    try:
        siblings = (folder / "topology" / "thread_siblings_list").read_text()
        first = int(re.split(r"[-,]", siblings.strip())[0])
    except (OSError, ValueError):
        first = cpu
    return (int(numa.name[4:]) if numa else 0, first)


def _short(cpus: Sequence[int]) -> str:
    return f"{len(cpus)} from {min(cpus)} to {max(cpus)}" if cpus else "none"
