"""The machine's settings that the evidence speaks for, as a profile that a job is submitted with.

NCCL's own choices are good on most machines: a variable is set only for a reason that was seen, and the reason stands
beside it. `trierarch submit cluster=PATH/cluster.yaml` uses the file.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from slurm.sites.profile import Profile
from tools.nccl.measurement import Measurement
from tools.nccl.parsers.log import Log
from tools.nccl.parsers.log_words import offers_sharp
from tools.nccl.parsers.topo_xml import Distance, Topology

_GENERIC = "slurm"
_HARMFUL = {
    "NCCL_P2P_DISABLE": "GPUs of a node then talk through the host's memory",
    "NCCL_SHM_DISABLE": "ranks of a node without NVLink then talk through the network",
    "NCCL_NET_GDR_DISABLE": "adapters then cannot reach GPU memory",
}
_LEAST_NODES_FOR_SHARP = 3


@dataclass(frozen=True)
class Setting:
    """One key of a profile."""

    key: str
    """`hcas`, `socket_interface`, a variable's name for `env`, or `unset NAME`."""
    value: Any
    reason: str

    @property
    def text(self) -> str:
        """What it does in a few words: `NAME=1`, `unset NAME`, `NCCL_IB_HCA=a:1,b:1`."""
        if self.value is None:
            return self.key
        name = {"hcas": "NCCL_IB_HCA", "socket_interface": "NCCL_SOCKET_IFNAME"}.get(self.key, self.key)
        return f"{name}={','.join(self.value) if isinstance(self.value, list) else self.value}"


@dataclass(frozen=True)
class Evidence:
    """What was read beside the measurement."""

    logs: Sequence[Log] = ()
    topologies: Sequence[Topology] = ()


def suggest(measurement: Measurement, evidence: Evidence) -> list[Setting]:
    """Return the settings for which there is a reason."""
    found = [
        *_adapters(evidence.topologies),
        *_interface(evidence.logs),
        *_unset(evidence.logs, measurement),
        *_gpu_direct(evidence),
        *_sharp(measurement, evidence.logs),
    ]
    return list({one.key: one for one in found}.values())


def base_profile(measurement: Measurement) -> Profile:
    """Return the profile that the measurement was submitted with, else the one for any Slurm."""
    import configs.compose

    name = str(measurement.about.get("cluster") or "")
    known = name in configs.compose.choices("cluster")
    return configs.compose.load(
        configs.compose.FOLDER / "cluster" / f"{name if known else _GENERIC}.yaml", Profile
    )


def cluster_yaml(profile: Profile, settings: Sequence[Setting], source: str) -> str:
    """Return a profile's file: what differs from the defaults, then each setting with its reason above it.

    `source` says what it is from.
    """
    import yaml

    from configs.compose import to_tree

    changed = apply(profile, settings)
    plain, tree = to_tree(Profile()), to_tree(changed)
    differing = {key: value for key, value in tree.items() if value != plain[key] or key == "name"}
    ours = {"hcas", "socket_interface", "env", "unset"}
    lines = [
        f"# The profile {profile.name} with what a network test found: trierarch submit cluster=THIS_FILE ...",
        f"# From {' '.join(source.split())}",
        yaml.safe_dump(
            {key: value for key, value in differing.items() if key not in ours},
            sort_keys=False,
            allow_unicode=True,
            width=10_000,
        ).rstrip(),
    ]
    reasons = {one.key: one.reason for one in settings}
    for key in ("socket_interface", "hcas"):
        if key in differing:
            lines += [*_comment(reasons.get(key), ""), _line(key, differing[key])]
    if changed.env:
        lines.append("env:")
        for name, value in changed.env.items():
            lines += [*_comment(reasons.get(name), "  "), f"  {_line(name, value)}"]
    if changed.unset:
        lines.append("unset:")
        for name in changed.unset:
            lines += [*_comment(reasons.get(f"unset {name}"), "  "), f"  - {name}"]
    if not settings:
        lines.append("# Nothing to change: no evidence speaks against NCCL's own choices.")
    return "\n".join(lines) + "\n"


def apply(profile: Profile, settings: Iterable[Setting]) -> Profile:
    """Return the profile with the settings in it."""
    changed = dataclasses.replace(profile, env=dict(profile.env), unset=list(profile.unset))
    for one in settings:
        if one.key in ("hcas", "socket_interface"):
            setattr(changed, one.key, one.value)
        elif one.key.startswith("unset "):
            name = one.key.removeprefix("unset ")
            changed.env.pop(name, None)
            changed.unset = list(dict.fromkeys([*changed.unset, name]))
        else:
            changed.env[one.key] = str(one.value)
    return changed


def _line(key: str, value: Any) -> str:
    """Write a key; strings in quotes, of which no reader of YAML makes a number."""
    return f"{key}: {json.dumps(value)}"


def _comment(reason: str | None, indent: str) -> list[str]:
    return [f"{indent}# {' '.join(reason.split())}"] if reason else []


def _adapters(topologies: Sequence[Topology]) -> Iterable[Setting]:
    """Leave out ports that are slower than the others: a ring runs at the pace of the slowest."""
    for topology in topologies:
        nets = [net for net in topology.nets if net.speed > 0]
        if not nets:
            continue
        best = max(net.speed for net in nets)
        fast = [net for net in nets if net.speed > 0.99 * best]
        slow = [net for net in nets if net.speed <= 0.99 * best]
        if slow and len(fast) >= len(slow):
            told = ", ".join(f"{net.name} {net.speed * 8 / 1e9:.0f}" for net in slow)
            reason = f"{len(fast)} ports run at {best * 8 / 1e9:.0f} Gbit/s, the others slower: {told}"
            yield Setting("hcas", [f"{net.name}:{net.port}" for net in fast], reason)


def _interface(logs: Sequence[Log]) -> Iterable[Setting]:
    """Name the interface for sockets where the hosts did not choose the same by themselves."""
    for log in logs:
        chosen = Counter(host.bootstrap for host in log.hosts.values() if host.bootstrap)
        if len(chosen) > 1:
            usual, count = chosen.most_common(1)[0]
            told = ", ".join(f"{name} on {number}" for name, number in chosen.items())
            reason = f"the hosts chose different interfaces ({told}); {usual} is what {count} of them took"
            yield Setting("socket_interface", usual, reason)


def _unset(logs: Sequence[Log], measurement: Measurement) -> Iterable[Setting]:
    variables = measurement.about.get("variables")
    for name, harm in _HARMFUL.items():
        if isinstance(variables, dict) and variables.get(name) == "1":
            yield Setting(f"unset {name}", None, f"it was 1 in this measurement: {harm}")
    for log in logs:
        values = [
            (host, name, value) for host in log.hosts.values() for name, value in host.variables.items()
        ]
        for _, name, value in values:
            if name in _HARMFUL and value == "1":
                yield Setting(f"unset {name}", None, f"it was set to 1 in the log: {_HARMFUL[name]}")
        adapters = any(host.adapters for host in log.hosts.values())
        if adapters and any(name == "NCCL_IB_DISABLE" and value == "1" for _, name, value in values):
            reason = "it was set to 1 on some hosts, while others have InfiniBand adapters"
            yield Setting("unset NCCL_IB_DISABLE", None, reason)


def _gpu_direct(evidence: Evidence) -> Iterable[Setting]:
    """Allow GPUDirect RDMA over the distance that the machine has, where NCCL said that it is too far."""
    refused = sorted(
        one
        for log in evidence.logs
        for host in log.hosts.values()
        for one in host.gdr_off
        if "distance" in one
    )
    if not refused:
        return
    distances = [
        min((topology.distance(gpu, net) for net in topology.nets), key=list(Distance).index)
        for topology in evidence.topologies
        for gpu in topology.gpus
        if topology.nets
    ]
    farthest = max(distances, key=list(Distance).index, default=Distance.phb)
    if farthest in (Distance.phb, Distance.pxb):
        reason = (
            f"NCCL left GPUDirect RDMA off ({refused[0]}); measure again with it: it is slower on some CPUs"
        )
        yield Setting("NCCL_NET_GDR_LEVEL", str(farthest), reason)


def _sharp(measurement: Measurement, logs: Sequence[Log]) -> Iterable[Setting]:
    hosts = max(len(measurement.nodes), *(len(log.hosts) for log in logs), 0) if logs else 0
    if hosts >= _LEAST_NODES_FOR_SHARP and any(offers_sharp(log) for log in logs):
        already = any(
            host.variables.get("NCCL_COLLNET_ENABLE") for log in logs for host in log.hosts.values()
        )
        if not already:
            reason = "the log shows that the network can reduce by itself (SHARP); it needs a job that SHARP accepts"
            yield Setting("NCCL_COLLNET_ENABLE", "1", f"{reason}: measure with and without it")
