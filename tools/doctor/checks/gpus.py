"""GPUs that ranks will see, the driver, and memory that they share."""

import re
from collections.abc import Iterator

from tools.bytes_shown import size
from tools.doctor.facts import Facts
from tools.doctor.finding import About, Finding, NotCheckedError, NoUseError, check, error, note, warning
from tools.doctor.host import Place

HIDES = "CUDA_VISIBLE_DEVICES"
SHARED_MEMORY_BYTES = 64 * 2**20
"""Of each rank, that NCCL and torch may take in /dev/shm; containers begin with as much for all."""
OLDEST_DRIVERS = ((13, (580,)), (12, (525, 60)), (11, (450, 80)))
"""CUDA's version, and the oldest driver on which it runs (CUDA compatibility guide, minor version compatibility)."""
_DEVICE = re.compile(r"\d+|(GPU|MIG)-[0-9A-Za-z/-]+")


@check("GPUs are asked for", About.config)
def asked_for(facts: Facts) -> Iterator[Finding]:
    """A profile that names none gets none."""
    if facts.is_local:
        raise NoUseError("cluster=local asks for nothing")
    cluster = facts.cluster
    if cluster.gpus_per_node == 0 and cluster.name != "lab":
        yield note(
            "cluster.gpus_per_node",
            f"cluster={cluster.name} names no GPUs: none is asked for, and ranks compute on CPUs",
            "if nodes have some: cluster.gpu_directive=gres cluster.gpus_per_node=N, or `trierarch cluster init`",
        )


@check("CUDA_VISIBLE_DEVICES", About.environment)
def visible(facts: Facts) -> Iterator[Finding]:
    """What this shell hides from what it starts, and from the jobs that inherit it."""
    facts.need_gpus()
    text = facts.host.environ.get(HIDES)
    if text is None:
        return
    devices = [word.strip() for word in text.split(",")]
    odd = [word for word in devices if not _DEVICE.fullmatch(word)]
    here = facts.host.place is Place.ranks
    inherited = "" if here else ", which jobs inherit where Slurm does not set it"
    unset = f"unset {HIDES}"
    if text.strip() in ("", "-1", "NoDevFiles"):
        yield (error if here else warning)(HIDES, f"{HIDES}={text!r} hides all GPUs{inherited}", unset)
    elif odd:
        yield warning(
            HIDES,
            f"{HIDES}={text}: {odd[0]!r} is no GPU, and CUDA sees those before it only{inherited}",
            unset,
        )
    elif len(set(devices)) < len(devices):
        yield warning(HIDES, f"{HIDES}={text} names a GPU twice: CUDA sees none then{inherited}", unset)
    elif any(word.startswith("MIG-") for word in devices) and facts.settings.ranks_per_node > 1:
        yield warning(
            HIDES,
            f"{HIDES}={text} names a slice of a GPU (MIG): a process sees one slice, and NCCL does not join slices",
            "use whole GPUs, or one rank on each node",
        )
    elif here and len(devices) < facts.settings.ranks_per_node:
        yield error(
            HIDES,
            f"{HIDES}={text} shows {len(devices)} GPU{'s' * (len(devices) > 1)} to "
            f"{facts.settings.ranks_per_node} ranks",
            f"{unset}, or job.ranks_per_node={len(devices)}",
        )


@check("number of GPUs", About.environment)
def count(facts: Facts) -> Iterator[Finding]:
    """GPUs that the driver shows, against ranks."""
    facts.need_gpus()
    facts.need_host_of_ranks()
    ranks, there = facts.settings.ranks_per_node, facts.host.gpus
    if there < ranks:
        yield error(
            "job.ranks_per_node",
            f"{ranks} ranks on this host, and it has {there} GPU{'s' * (there != 1)} (/dev/nvidia*)",
            f"job.ranks_per_node={there}"
            if there
            else "load the driver, or ask Slurm for GPUs (cluster.gpu_directive)",
        )


@check("driver", About.environment)
def driver(facts: Facts) -> Iterator[Finding]:
    """NVIDIA's driver, against the CUDA that torch is built for."""
    facts.need_gpus()
    facts.need_here()
    if facts.settings.contained:
        raise NotCheckedError("torch is in the container")
    if not facts.host.driver:
        raise NotCheckedError("this host has no driver of NVIDIA's: run it in a job too")
    cuda = facts.software.cuda
    if cuda is None:
        raise NotCheckedError("torch is not built for CUDA here")
    have = tuple(int(part) for part in facts.host.driver.split("."))
    for major, oldest in OLDEST_DRIVERS:
        if int(cuda.split(".")[0]) == major and have < oldest:
            yield error(
                "driver",
                f"the driver is {facts.host.driver}, and torch's CUDA {cuda} runs on "
                f"{'.'.join(map(str, oldest))} or newer",
                "install torch for an older CUDA: see pytorch.org, and constraints.txt for its version "
                f"{facts.software.version('torch')}",
            )


@check("memory in /dev/shm", About.environment)
def shared_memory(facts: Facts) -> Iterator[Finding]:
    """What ranks of a node exchange by; samples are not: a thread of the rank reads them."""
    facts.need_gpus()
    if facts.settings.ranks_per_node == 1:
        raise NoUseError("one rank on a node")
    facts.need_host_of_ranks()
    there, wanted = facts.host.shared_memory_bytes, SHARED_MEMORY_BYTES * facts.settings.ranks_per_node
    if there is None or there < wanted:
        has = "there is no /dev/shm" if there is None else f"/dev/shm has {size(there)}"
        yield warning(
            "/dev/shm",
            f"{has}, and NCCL may want {size(wanted)} for {facts.settings.ranks_per_node} ranks of a node",
            "give a container more (--shm-size=2g), or mount a larger one",
        )
