"""An NCCL log in plain words: what was used, what fell back, what failed and what to do."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

from tools.nccl.findings import Verdict
from tools.nccl.parsers.log import Host, Log
from tools.nccl.parsers.remark import Remark

_TRANSPORTS = {
    "P2P/IPC": "from GPU to GPU over NVLink or PCI (P2P/IPC)",
    "P2P/CUMEM": "from GPU to GPU over NVLink or PCI (P2P/CUMEM)",
    "P2P/direct": "from GPU to GPU in one process (P2P/direct)",
    "P2P/indirect": "from GPU to GPU through a third one (P2P/indirect)",
    "SHM": "through the host's memory (SHM)",
    "NVLS": "reduced in the NVSwitch (NVLS)",
    "COLLNET": "reduced in the network (COLLNET)",
    "NET/Socket": "over TCP sockets (NET/Socket)",
    "NET/IB": "over InfiniBand through the host's memory (NET/IB)",
    "NET/IB/GDRDMA": "over InfiniBand from GPU memory (NET/IB/GDRDMA)",
}
_MOST_WARNINGS = 20

_REMEDIES = (
    (
        r"ibv_(reg_mr|create_qp|create_cq).*(Cannot allocate memory|-12)|ibv_reg_mr|Unable to register",
        "the limit of locked memory is too low: `ulimit -l` must say unlimited on the nodes",
    ),
    (
        r"completion .*status=12|Got completion .*status 12|retry exceeded",
        "a link lost packets or its other end died: look for the first node that failed, then at the cable and port",
    ),
    (
        r"Got completion|async event",
        "an adapter or its port had an error: look at `ibstat` and the port's counters",
    ),
    (r"ibv_modify_qp", "the ports do not reach each other: see NCCL_IB_HCA, on RoCE NCCL_IB_GID_INDEX"),
    (
        r"Connection refused|[Cc]onnect to .*(failed|timed out)|No route to host|Connection timed out",
        "a rank could not be reached: it had died, or NCCL_SOCKET_IFNAME names an interface that others cannot reach",
    ),
    (
        r"no socket interface found|Bootstrap : no",
        "no interface of that name: correct NCCL_SOCKET_IFNAME (cluster.socket_interface)",
    ),
    (
        r"closed by remote peer|Socket recv failed|socketProgress|remote process exited",
        "another rank ended first: look there",
    ),
    (
        r"shared memory segment|/dev/shm|posix_fallocate|No space left",
        "/dev/shm is full or small: give a container more, or remove old nccl-* files",
    ),
    (r"out of memory", "a GPU's memory is full: another process is on it, or the buffers are too large"),
    (r"Duplicate GPU", "two ranks chose one GPU: see CUDA_VISIBLE_DEVICES and the ranks a node"),
    (r"Could not find NET with id|Invalid NET|invalid.*HCA", "NCCL_IB_HCA names adapters that are not there"),
    (r"Too many open files|EMFILE", "raise `ulimit -n`"),
    (r"Mismatched collective|mismatch", "the ranks run different versions, or call different operations"),
    (r"[Cc]uda failure|unhandled cuda error", "a CUDA call failed: look at dmesg for Xid errors of that GPU"),
    (r"libibverbs", "InfiniBand's libraries are missing: in a container install rdma-core"),
    (r"NUMA auto balancing|iommu|ACS", "it costs speed only: ask the site"),
)
_HARMLESS = re.compile(
    r"retrying|NUMA auto balancing|iommu=pt|Failed to open libibverbs|is deprecated", re.IGNORECASE
)


def remarks(log: Log) -> list[Remark]:
    """Say what a log tells, what is common to all hosts once, and hosts by name only where they differ."""
    found = [_head(log), *_networks(log), *_connections(log), *_channels(log), *_collnet(log), *_gdr(log)]
    return [*found, *_variables(log), *_warnings(log)]


def _head(log: Log) -> Remark:
    version = f"NCCL {log.version}" if log.version else "NCCL of an unknown version"
    ranks = f"{log.ranks} ranks" if log.ranks else "an unknown number of ranks"
    return Remark(f"{version}, {ranks}, {_count(len(log.hosts), 'host')} in the log")


def _networks(log: Log) -> Iterator[Remark]:
    by_network = _groups(log, lambda host: host.network)
    for network, hosts in by_network.items():
        names = () if len(by_network) == 1 else hosts
        if network == "Socket":
            why = next((log.hosts[name].no_adapter for name in hosts if log.hosts[name].no_adapter), None)
            disabled = any(log.hosts[name].variables.get("NCCL_IB_DISABLE") == "1" for name in hosts)
            text = "TCP sockets carry the data between nodes"
            if disabled:
                yield Remark(f"{text}: NCCL_IB_DISABLE=1 is set", Verdict.degraded, names, "unset it")
            elif why or len(by_network) > 1:
                reason = f": {why}" if why else ""
                todo = "see whether the nodes have adapters, and the container has libibverbs and /dev/infiniband"
                yield Remark(f"{text}{reason}", Verdict.degraded, names, todo)
            else:
                yield Remark(text, hosts=names)
        else:
            yield Remark(f"{network} carries the data between nodes", hosts=names)
    yield from _several(log, lambda host: _listed(host), "adapters", Verdict.degraded)
    yield from _several(log, lambda host: ", ".join(sorted(host.plugins)), "network plugins", Verdict.ok)
    yield from _several(
        log, lambda host: host.version or "", "NCCL versions", Verdict.broken, only_differing=True
    )


def _listed(host: Host) -> str:
    kinds = sorted(set(host.adapters.values()))
    return f"{', '.join(sorted(host.adapters))} ({', '.join(kinds)})" if host.adapters else ""


def _connections(log: Log) -> Iterator[Remark]:
    total = log.transports
    for kind, count in total.most_common():
        hosts = [name for name, host in log.hosts.items() if host.transports[kind]]
        silent = [name for name, host in log.hosts.items() if host.transports and not host.transports[kind]]
        text = f"{_count(count, 'connection')} {_TRANSPORTS.get(kind, f'over {kind}')}"
        others = any(other.startswith("NET/") and other != "NET/Socket" for other in total)
        if kind == "NET/Socket" and others:
            todo = "see why on these hosts: their adapters, the container, NCCL_IB_HCA"
            yield Remark(f"{text}, while others use InfiniBand", Verdict.degraded, tuple(hosts), todo)
        else:
            yield Remark(text, hosts=tuple(hosts) if silent else ())
    if total["SHM"] and not any(kind.startswith("P2P") for kind in total):
        todo = "see `nvidia-smi topo -m`; NCCL_P2P_DISABLE must not be set, the container must see all GPUs"
        yield Remark("no GPU reaches another one directly", Verdict.degraded, todo=todo)


def _channels(log: Log) -> Iterator[Remark]:
    by_counts = _groups(log, lambda host: host.channels.get("coll"))
    if len(by_counts) == 1:
        yield Remark(f"{_count(int(next(iter(by_counts))), 'channel')} for collectives")
    for count, hosts in by_counts.items() if len(by_counts) > 1 else ():
        yield Remark(f"{_count(int(count), 'channel')} for collectives", Verdict.degraded, hosts)
    if not log.rings:
        return
    orders = set(log.rings.values())
    first = log.rings[min(log.rings)]
    shown = " ".join(map(str, first[:16])) + (" ..." if len(first) > 16 else "")
    kinds = "all in the same order" if len(orders) == 1 else f"in {len(orders)} different orders"
    yield Remark(f"{_count(len(log.rings), 'ring')} {kinds}, the first: {shown}")


def _collnet(log: Log) -> Iterator[Remark]:
    offered = sorted({name for host in log.hosts.values() for name in host.collnet})
    used = any(host.channels.get("collnet") for host in log.hosts.values()) or log.transports["COLLNET"]
    if used:
        yield Remark("reductions are done in the network (CollNet, SHARP)")
    elif offers_sharp(log):
        text = f"the network offers reductions ({', '.join(offered) or 'SHARP'}), which are not used"
        yield Remark(text, todo="try NCCL_COLLNET_ENABLE=1, and measure with and without it")


def offers_sharp(log: Log) -> bool:
    """Whether SHARP is there: its plugin is loaded, or adapters say so."""
    plugins = any("SHARP" in name.upper() for host in log.hosts.values() for name in host.collnet)
    return plugins or any("SHARP" in kind for host in log.hosts.values() for kind in host.adapters.values())


def _gdr(log: Log) -> Iterator[Remark]:
    through_host = log.transports["NET/IB"]
    off = {name for name, host in log.hosts.items() if host.gdr_off or host.transports["NET/IB"]}
    if not off or not any(
        host.adapters or host.network not in ("Socket", None) for host in log.hosts.values()
    ):
        return
    reasons = sorted({one for name in off for one in log.hosts[name].gdr_off})
    too_far = next((one for one in reasons if "distance" in one), None)
    text = "GPUDirect RDMA is off"
    if through_host and log.transports["NET/IB/GDRDMA"]:
        text = f"GPUDirect RDMA is off for {through_host} of the connections between nodes"
    if too_far:
        todo = "the adapter is farther than NCCL allows: NCCL_NET_GDR_LEVEL=PHB or SYS may help, measure it"
        text = f"{text}: {too_far}"
    else:
        todo = "the kernel module nvidia_peermem (or DMA-BUF support) is missing on the node: ask the site"
    yield Remark(text, Verdict.degraded, tuple(sorted(off)) if len(off) < len(log.hosts) else (), todo)


def _variables(log: Log) -> Iterator[Remark]:
    names = sorted({name for host in log.hosts.values() for name in host.variables})
    settings = []
    for name in names:
        values = {host.variables[name] for host in log.hosts.values() if name in host.variables}
        settings += [f"{name}={value}" for value in sorted(values)]
        if len(values) > 1:
            by = _groups(log, lambda host, name=name: host.variables.get(name))  # type: ignore[misc]
            told = "; ".join(f"{value} on {few(hosts)}" for value, hosts in by.items())
            yield Remark(f"{name} differs: {told}", Verdict.degraded, todo="set it alike for all ranks")
    if settings:
        yield Remark(f"set from outside: {', '.join(settings)}")


def _warnings(log: Log) -> Iterator[Remark]:
    order = sorted(log.warnings.items(), key=lambda item: -item[1].total())
    for text, hosts in order[:_MOST_WARNINGS]:
        harmless = _HARMLESS.search(text)
        todo = next((remedy for pattern, remedy in _REMEDIES if re.search(pattern, text)), "")
        names = tuple(name for name in hosts if name)
        everywhere = len(names) == len(log.hosts)
        peers = [address for address, _ in log.peers.get(text, Counter[str]()).most_common(4)]
        about = f", of {', '.join(peers)}" if peers else ""
        times = "" if hosts.total() == 1 else f" ({hosts.total()} times)"
        verdict = Verdict.ok if harmless else Verdict.broken
        yield Remark(f"{text}{about}{times}", verdict, () if everywhere and len(names) > 1 else names, todo)
    if len(order) > _MOST_WARNINGS:
        yield Remark(f"and {len(order) - _MOST_WARNINGS} more kinds of warnings", Verdict.broken)


def _several(
    log: Log, value: Callable[[Host], str], what: str, verdict: Verdict, only_differing: bool = False
) -> Iterator[Remark]:
    """Say a value once if all hosts have it, else for each group of hosts; the usual one is no fault."""
    by = _groups(log, value)
    if len(by) == 1 and not only_differing:
        yield Remark(f"{what}: {next(iter(by))}")
    if len(by) < 2:
        return
    usual = max(by, key=lambda one: len(by[one]))
    for one, hosts in by.items():
        yield Remark(f"{what}: {one}", Verdict.ok if one == usual else verdict, hosts)


def _groups(log: Log, value: Callable[[Host], str | int | None]) -> dict[str, tuple[str, ...]]:
    """Return hosts by what they have; those that say nothing are left out."""
    found: dict[str, list[str]] = defaultdict(list)
    for host in log.hosts.values():
        if (one := value(host)) not in (None, ""):
            found[str(one)].append(host.name)
    return {one: tuple(hosts) for one, hosts in found.items()}


def few(names: Sequence[str]) -> str:
    """Name some hosts, and count the others."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
