"""Write a profile from what a Slurm says of itself: `trierarch cluster init`."""

import json
import os
import re
import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from datetime import date
from pathlib import Path
from typing import Any

from contract.errors import ConfigError, closest
from slurm.client import ask, clean_environment, parse_duration
from slurm.command import expand_cpus
from slurm.sites.probe import Node
from slurm.sites.profile import GpuDirective, Limit, MpiFlavour, Profile, Topology

_WORD = re.compile(r"(\w+)=(.*?)\s*(?=\s\w+=|$)")
_GPU = re.compile(r"\bgpu(?::([A-Za-z][\w.-]*))?:(\d+)")
# A profile that asks for more by default would wait long; a job can always ask.
_LONGEST_DEFAULT_S = 24 * 3600
Record = dict[str, str]


def discover(name: str | None, partition: str | None, environ: Mapping[str, str]) -> Profile:
    """Return a profile of the Slurm that answers; `partition` is what jobs should use by default.

    Raises ConfigError if no Slurm answers or it has no such partition.
    """
    env = clean_environment(environ)
    config = _config(env)
    partitions = {record["PartitionName"]: record for record in _records("partition", env)}
    nodes = _records("node", env)
    chosen = _choose(partitions, nodes, partition)
    cluster = config.get("ClusterName", "slurm")
    profile = Profile(name=name or re.sub(r"\W", "_", cluster), partition=chosen)
    profile.description = f"{cluster}, partition {chosen}, from what its Slurm says"
    profile.sources = [
        f"scontrol of Slurm {config.get('SLURM_VERSION', '')} on {socket.gethostname()}, {date.today()}"
    ]
    if profile.name != cluster:
        profile.host_patterns = [socket.gethostname()]
    _add_node(profile, _members(nodes, chosen))
    _add_limits(profile, partitions, nodes)
    _add_config(profile, config)
    _add_doubts(profile, config, partitions[chosen])
    return profile


def probe_node(profile: Profile, environ: Mapping[str, str], account: str | None, wait_s: int) -> Node:
    """Run a short job on one node of the profile's partition and return what it has.

    Raises ConfigError if the job did not start within `wait_s`, or failed.
    """
    gpus = f"--gres=gpu:{profile.gpus_per_node}" if profile.gpu_directive is not GpuDirective.none else None
    options = [
        f"--partition={profile.partition}",
        f"--immediate={wait_s}",
        gpus,
        account and f"--account={account}",
    ]
    command = ["srun", "--nodes=1", "--ntasks=1", "--time=5", *(option for option in options if option)]
    env = clean_environment(environ) | {"PYTHONPATH": str(Path(__file__).parents[2])}
    answer = ask([*command, sys.executable, "-m", "slurm.sites.probe"], env, timeout_s=wait_s + 120)
    if answer.code != 0:
        said = " ".join(answer.error.split()) or "it did not say why"
        raise ConfigError(f"a node could not be looked at ({said}): try again later, or leave out --probe")
    return Node(**json.loads(answer.output))


def add_probe(profile: Profile, node: Node) -> None:
    """Add to a profile what one of its nodes told."""
    profile.sources.append(f"a look at one node of partition {profile.partition}, {date.today()}")
    if node.gpu_models:
        profile.gpu_model = Counter(node.gpu_models).most_common(1)[0][0]
        profile.gpus_per_node = profile.gpus_per_node or len(node.gpu_models)
    if node.gpu_memory_bytes:
        profile.gpu_memory_gb = float(min(node.gpu_memory_bytes) // 10**9)
    if node.gpu_models and len(node.gpu_models) == profile.gpus_per_node and all(node.gpu_cpus):
        profile.gpu_cpus = share_cpus(node.gpu_cpus)
    profile.hcas = node.hcas
    profile.socket_interface = next(iter(node.infiniband_interfaces), None)
    looked_at = {
        "GPUs": "" if node.gpu_models else "the node shows none",
        "adapters": "take out of hcas those for storage"
        if node.hcas
        else "no active InfiniBand port on the node",
        "socket_interface": "" if node.infiniband_interfaces else "none over InfiniBand on the node",
    }
    doubts = [doubt for doubt in profile.unverified if doubt.partition(":")[0] not in looked_at]
    profile.unverified = doubts + [f"{key}: {text}" for key, text in looked_at.items() if text]


def share_cpus(near: Sequence[str]) -> list[str]:
    """Split cores that several GPUs are near to evenly among these."""
    shared = []
    for index, text in enumerate(near):
        cores = expand_cpus(text)
        others = near.count(text)
        each = len(cores) // others
        place = near[:index].count(text)
        mine = cores[place * each : (place + 1) * each] if each else cores
        shared.append(_ranges(mine))
    return shared


def to_yaml(profile: Profile) -> str:
    """Print what in a profile differs from the defaults, as a file for configs/cluster."""
    from omegaconf import OmegaConf

    values, defaults = _plain(profile), _plain(Profile())
    changed = {key: value for key, value in values.items() if key == "name" or value != defaults[key]}
    header = "# Written by `trierarch cluster init`: read it, correct it, keep it.\n"
    return header + OmegaConf.to_yaml(OmegaConf.create(changed))


def _plain(profile: Profile) -> dict[str, Any]:
    values = {field.name: getattr(profile, field.name) for field in fields(profile)}
    values["container"] = asdict(profile.container) | {"runtime": str(profile.container.runtime)}
    blank = asdict(Limit())
    values["limits"] = [
        {key: value for key, value in asdict(limit).items() if value != blank[key]}
        for limit in profile.limits
    ]
    return {key: str(value) if isinstance(value, str) else value for key, value in values.items()}


def _config(environ: Mapping[str, str]) -> Record:
    answer = ask(["scontrol", "show", "config"], environ)
    if answer.code != 0:
        said = " ".join(answer.error.split())
        raise ConfigError(f"Slurm does not answer here ({said}): run this on a login node")
    return dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", answer.output, re.MULTILINE))


def _records(kind: str, environ: Mapping[str, str]) -> list[Record]:
    answer = ask(["scontrol", "--oneliner", "show", kind], environ, timeout_s=30.0)
    if answer.code != 0:
        raise ConfigError(f"scontrol show {kind} failed ({' '.join(answer.error.split())}): try again later")
    return [dict(_WORD.findall(line)) for line in answer.output.splitlines() if "=" in line]


def _members(nodes: Sequence[Record], partition: str) -> list[Record]:
    return [node for node in nodes if partition in node.get("Partitions", "").split(",")]


def _gpus(node: Record) -> int:
    return sum(int(count) for _, count in _GPU.findall(node.get("Gres", "")))


def _choose(partitions: Mapping[str, Record], nodes: Sequence[Record], wanted: str | None) -> str:
    """Return the partition to use: the wanted one, else the one with most GPU nodes, the default one first."""
    if wanted is not None:
        if wanted not in partitions:
            raise ConfigError(
                f"--partition {wanted}: there is no such partition, {closest(wanted, partitions)}"
            )
        return wanted
    if not partitions:
        raise ConfigError("this Slurm shows you no partition: ask the site's support")

    def worth(name: str) -> tuple[bool, bool, int]:
        members = _members(nodes, name)
        with_gpus = sum(1 for node in members if _gpus(node))
        return with_gpus > 0, partitions[name].get("Default") == "YES", with_gpus or len(members)

    return max(partitions, key=worth)


def _add_node(profile: Profile, members: Sequence[Record]) -> None:
    """Describe the partition's most common kind of node."""
    kinds = Counter(
        (
            node.get("Gres", ""),
            node.get("CPUTot", ""),
            node.get("ThreadsPerCore", "1"),
            node.get("RealMemory", ""),
        )
        for node in members
    )
    if not kinds:
        profile.unverified.append(f"nodes: partition {profile.partition} shows none")
        return
    gres, cpus, threads, memory_mb = kinds.most_common(1)[0][0]
    if len(kinds) > 1:
        others = ", ".join(
            f"{count} x (Gres={kind[0]} CPUs={kind[1]})" for kind, count in kinds.most_common()[1:]
        )
        profile.unverified.append(f"nodes: the most common kind is described, there are also {others}")
    profile.cpus_per_node = int(cpus) if cpus.isdigit() else None
    if threads not in ("", "1"):
        profile.unverified.append(f"cpus_per_node: Slurm counts {threads} hardware threads a core there")
    profile.description += f", {memory_mb} MB a node"
    features = sorted({node.get("AvailableFeatures", "(null)") for node in members} - {"(null)", ""})
    if features:
        profile.unverified.append(
            f"constraint: none is asked for, nodes have the features {'; '.join(features)}"
        )
    found = _GPU.findall(gres)
    if not found:
        profile.unverified.append("GPUs: Slurm shows none in that partition; a site may still have them")
        return
    profile.gpus_per_node = sum(int(count) for _, count in found)
    profile.gpu_directive = GpuDirective.gres
    profile.exclusive = True
    types = sorted({kind for node in members for kind, _ in _GPU.findall(node.get("Gres", "")) if kind})
    profile.gpu_model = types[0] if len(types) == 1 else None
    if len(types) > 1:
        profile.gpu_type = max(found, key=lambda one: int(one[1]))[0]


def _add_limits(profile: Profile, partitions: Mapping[str, Record], nodes: Sequence[Record]) -> None:
    """List the partitions that have such nodes, the chosen one first."""
    for name in sorted(partitions, key=lambda name: name != profile.partition):
        record, members = partitions[name], _members(nodes, name)
        if record.get("State") != "UP" or (profile.gpus_per_node and not any(map(_gpus, members))):
            continue
        most = [int(value) for value in (record.get("MaxNodes", ""), str(len(members))) if value.isdigit()]
        seconds = parse_duration(record.get("MaxTime", ""))
        comments = ["the default"] if record.get("Default") == "YES" else []
        if (mode := record.get("PreemptMode", "OFF")) != "OFF":
            comments.append(f"can be pre-empted ({mode}), grace time {record.get('GraceTime', '?')} s")
        profile.limits.append(
            Limit(
                partition=name,
                min_nodes=max(1, int(record.get("MinNodes", "1") or 1)),
                max_nodes=min(most) or None,
                max_hours=seconds / 3600 if seconds else None,
                comment=", ".join(comments),
            )
        )
        if name == profile.partition:
            limit_s = min(seconds or _LONGEST_DEFAULT_S, _LONGEST_DEFAULT_S)
            profile.time_limit = f"{limit_s // 3600:02}:{limit_s // 60 % 60:02}:{limit_s % 60:02}"


def _add_config(profile: Profile, config: Record) -> None:
    size = config.get("MaxArraySize", "")
    profile.max_array_size = int(size) if size.isdigit() else None
    flavour = config.get("MpiDefault", "none").partition("_")[0]
    if flavour in list(MpiFlavour):
        profile.mpi = MpiFlavour(flavour)
    elif flavour:
        profile.unverified.append(f"mpi: Slurm's MpiDefault is {flavour}, which launch=step cannot use")
    if config.get("TopologyPlugin", "").endswith(("/tree", "/block", "/3d_torus")):
        profile.topology = Topology.slurm


def _add_doubts(profile: Profile, config: Record, partition: Record) -> None:
    """List what Slurm does not say."""
    doubts = [
        "max_submit_jobs, QOS and their limits: `sacctmgr show qos` may tell",
        "requeue: whether you may requeue your jobs; if not, set it to false and a successor is submitted",
        "adapters: NCCL chooses by itself; --probe looks at a node",
        "socket_interface: NCCL and gloo choose by themselves; --probe looks at a node",
        "scratch_shared, scratch_local, modules: see the site's documentation",
    ]
    if profile.gpus_per_node and profile.gpu_model is None:
        doubts.append("GPUs: their model is not told; --probe looks at a node")
    if "associations" in config.get("AccountingStorageEnforce", ""):
        doubts.append("account: jobs need one; without job.account the user's default is charged")
    for key in ("DefMemPerNode", "DefMemPerCPU"):
        value = partition.get(key, "UNLIMITED")
        if value.isdigit():
            doubts.append(f"memory: a job that asks for none gets {key}={value} MB; set cluster.memory")
    profile.unverified += doubts


def _ranges(cores: Sequence[int]) -> str:
    """Write cores as 0-5,48-53."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def write_profile(profile: Profile, path: Path, force: bool) -> None:
    """Write the profile's file as a whole; raises ConfigError if there is one already and not `force`."""
    if path.exists() and not force:
        raise ConfigError(f"{path} is there already: give --force to replace it, or another name")
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(to_yaml(profile))
        fresh.rename(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): give another --output") from error
