"""Before the process group is made: every rank is there, each with a device of its own, or all know who lacks what."""

import json
import os
import socket
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from contract.errors import ConfigError, NodeError, PeerError, ReportedError
from contract.run_folder import start_number
from train.bootstrap import Joined, World

Roll = list[tuple[str, str, str, str]]
"""(host, device type, GPU id, what is wrong with the device) of each rank."""


def start_process_group(joined: Joined, timeout_s: float, collective_timeout_s: float) -> torch.device:
    """Wait for every rank, start the process group (NCCL with CUDA, gloo without), return the device.

    Raises `PeerError` that names the ranks that did not come within `timeout_s`, `ConfigError` where the devices do
    not fit the ranks, and `NodeError` on the ranks of a node that is to blame for it, `PeerError` on the others.
    """
    world = joined.world
    device, trouble = _own_device(world)
    _roll_call(joined, device, trouble, timeout_s)
    interfaces = [name for _, name in socket.if_nameindex()]
    if world.nodes == 1 and "lo" in interfaces:
        # A laptop's host name often resolves to nothing or to an interface that comes and goes.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        device_id=None if device.type == "cpu" else device,
        store=dist.PrefixStore("process_group", joined.store),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=collective_timeout_s),
    )
    return device


def _own_device(world: World) -> tuple[torch.device, str]:
    """Choose this rank's GPU: its own number on the node, or the one that the launcher shows it.

    Returns the device and what is wrong with it, empty when nothing is.
    """
    if not torch.cuda.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
        if Path("/dev/nvidia0").exists() and not hidden:
            trouble = "has NVIDIA GPUs that torch cannot use (driver, or a CPU build of torch?)"
            return torch.device("cpu"), trouble
        return torch.device("cpu"), ""
    visible = torch.cuda.device_count()
    # With --gpus-per-task each rank sees its own GPU alone, as number 0.
    number = world.local_rank if visible > 1 else 0
    if number >= visible:
        return torch.device("cuda", 0), f"shows {visible} GPUs to more than {number} ranks"
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device, ""


def _roll_call(joined: Joined, device: torch.device, trouble: str, timeout_s: float) -> None:
    """Wait until every rank is there, each with a device of its own and all with the same kind.

    Every rank reads the whole list and comes to the same judgement, so that none waits for one that has left.
    """
    world, store = joined.world, joined.store
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    store.set(f"here/{world.rank}", json.dumps([socket.gethostname(), device.type, gpu, trouble]))
    keys = [f"here/{rank}" for rank in range(world.size)]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        absent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        raise PeerError(
            f"rank {', '.join(absent) or '0'} of {world.size} did not come within {timeout_s:.0f} s: look at the "
            "first error in its log, or raise resilience.start_timeout_s"
        ) from error
    roll: Roll = [tuple(json.loads(value)) for value in store.multi_get(keys)]
    if sentence := judge_roll(roll):
        if unfit := unfit_ranks(roll, start_number() > 0):
            raise NodeError(sentence) if world.rank in unfit else PeerError(sentence)
        raise ConfigError(sentence) if world.rank == 0 else ReportedError(sentence)


def unfit_ranks(roll: Roll, went_well_before: bool) -> set[int]:
    """Return the ranks without a proper device where that is their node's fault, none where it is everybody's.

    A GPU that has fallen off the bus must not end a run of a hundred nodes for good, as a wrong setting does.
    `went_well_before`: in this job the same ranks have had their devices already.
    """
    unfit = {rank for rank, (_, _, _, trouble) in enumerate(roll) if trouble}
    if not unfit and any(kind != "cpu" for _, kind, _, _ in roll):
        unfit = {rank for rank, (_, kind, _, _) in enumerate(roll) if kind == "cpu"}
    unfit = unfit or set(_sharing(roll))
    fit_hosts = {host for host, _, _, _ in roll} - {roll[rank][0] for rank in unfit}
    return unfit if fit_hosts or went_well_before else set()


def judge_roll(roll: Roll) -> str:
    """Say what is wrong with the devices of the ranks; empty if nothing."""
    for rank, (host, _, _, trouble) in enumerate(roll):
        if trouble:
            return f"{host} (rank {rank}) {trouble}: start one rank a GPU, or set CUDA_VISIBLE_DEVICES= for the CPU"
    bare = sorted({host for host, kind, _, _ in roll if kind == "cpu"})
    if bare and any(kind != "cpu" for _, kind, _, _ in roll):
        return f"{', '.join(bare)} shows its ranks no GPU, other nodes do: leave it out of the job"
    for rank, first in _sharing(roll).items():
        return f"ranks {first} and {rank} on {roll[rank][0]} share one GPU: start one rank a GPU"
    return ""


def _sharing(roll: Roll) -> dict[int, int]:
    """Map each rank whose GPU is another's to the first rank that has it."""
    first: dict[tuple[str, str], int] = {}
    firsts = {rank: first.setdefault((host, gpu), rank) for rank, (host, _, gpu, _) in enumerate(roll) if gpu}
    return {rank: other for rank, other in firsts.items() if other != rank}
