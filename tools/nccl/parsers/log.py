"""What NCCL says of itself under NCCL_DEBUG=INFO, of all ranks of a job: in numbers, then in words.

Source of the messages: NVIDIA, NCCL, src/init.cc, src/transport/net_ib.cc, net_socket.cc, p2p.cc, shm.cc, net.cc,
src/plugin/net.cc, of versions 2.4 to 2.27.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from contract.errors import UserError
from tools.nccl.parsers.lines import Message, lines, read_text

_VERSION = re.compile(r"NCCL version (\S+)")
_VIA = re.compile(r"(?:Channel|Ring|Tree|Collnet|CollNet)\b.*? via (\S+)")
_RING = re.compile(r"Channel (\d+)/(\d+) :((?:\s+\d+)+)$")
_ADAPTER = re.compile(r"\[\d+\](\S+?):(\d+)/(IB|RoCE)([^\s;]*)")
_INTERFACE = re.compile(r"\[\d+\]([^\s:]+):")
_COUNTS = re.compile(r"(\d+) (coll|collnet|nvls|p2p) channels(?! per)")
_RANK = re.compile(r"comm \S+ rank (\d+) n[rR]anks (\d+)")
_SET = re.compile(r"(NCCL_\w+) set by environment to (.*?)\.?$")
_GDR_OFF = re.compile(r"GPU Direct RDMA Disabled for (GPU \S+ / HCA \S+|HCA \S+(?: '[^']*')?)(.*)")
_GDR_ON = re.compile(r"GPU Direct RDMA(?: \(\w+\))? (?:Enabled|enabled)")
_PLUGIN = re.compile(r"Loaded (net|collnet) plugin (.+?)(?: \(v\d+\))?$")
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?:[:<]\d+>?)?|\b0x[0-9a-f]+\b")
_IPV4 = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")
_SYSTEM_ERROR = re.compile(
    r"unhandled (?:system|cuda) error|remote process exited|ncclSystemError|ncclInternalError|ncclRemoteError"
)


@dataclass
class Host:
    """One node, as its ranks tell."""

    name: str
    processes: set[int] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    version: str | None = None
    network: str | None = None
    """IB, Socket, or a plugin's: `Using network IB`."""
    plugins: set[str] = field(default_factory=set)
    collnet: set[str] = field(default_factory=set)
    """Plugins that reduce in the network: SHARP."""
    adapters: dict[str, str] = field(default_factory=dict)
    """InfiniBand ports in use, `mlx5_0:1`, and what they are: IB, RoCE, IB/SHARP."""
    interfaces: list[str] = field(default_factory=list)
    """What sockets use for data."""
    bootstrap: str | None = None
    """The interface of the start."""
    transports: Counter[str] = field(default_factory=Counter)
    """Connections by kind: `P2P/IPC`, `SHM`, `NET/IB`, `NET/IB/GDRDMA`, `NET/Socket`."""
    channels: dict[str, int] = field(default_factory=dict)
    """How many of `coll`, `collnet`, `nvls`, `p2p`."""
    gdr: bool | None = None
    """Whether adapters reach GPU memory themselves; None: it does not say."""
    gdr_off: set[str] = field(default_factory=set)
    """For which GPUs or adapters it is off, in NCCL's words."""
    variables: dict[str, str] = field(default_factory=dict)
    """NCCL_* that were set."""
    no_adapter: str | None = None
    """Why InfiniBand is not used, in NCCL's words."""


@dataclass
class Log:
    """A job's log."""

    hosts: dict[str, Host] = field(default_factory=dict)
    version: str | None = None
    ranks: int | None = None
    """Of the largest communicator."""
    rings: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The order of ranks in each channel, of the largest communicator."""
    warnings: dict[str, Counter[str]] = field(default_factory=dict)
    """NCCL WARN and the like, without addresses: how often on which host."""
    peers: dict[str, Counter[str]] = field(default_factory=dict)
    """The IPv4 addresses that a warning named."""

    @property
    def transports(self) -> Counter[str]:
        """Connections of all hosts by kind."""
        return sum((one.transports for one in self.hosts.values()), Counter())


def is_log(text: str) -> bool:
    """Whether a text has messages of NCCL in it."""
    return " NCCL INFO " in text or " NCCL WARN " in text


def parse(text: str, where: str) -> Log:
    """Read a log; raises UserError if NCCL has written nothing in it."""
    log = Log()
    for line in lines(text):
        if version := _VERSION.search(line.own):
            log.version = version[1]
        if line.message is not None:
            _read(log, line.message)
        elif found := _SYSTEM_ERROR.search(line.own):
            _warn(log, "", found[0])
    if not log.hosts:
        raise UserError(f"{where} has no message of NCCL's: run with NCCL_DEBUG=INFO")
    versions = {one.version for one in log.hosts.values() if one.version}
    log.version = log.version or next(iter(sorted(versions)), None)
    return log


def parse_file(path: Path) -> Log:
    """Read a file as `parse` does; raises UserError."""
    return parse(read_text(path), str(path))


def _read(log: Log, message: Message) -> None:
    host = log.hosts.setdefault(message.host, Host(message.host))
    host.processes.add(message.process)
    text = message.text
    if message.level in ("WARN", "ABORT"):
        _warn(log, host.name, text)
        if "libibverbs" in text:
            host.no_adapter = text.rstrip(".")
        return
    if " via " in text and (via := _VIA.match(text)):
        host.transports[_kind(via[1])] += 1
    elif text.startswith("Channel ") and (ring := _RING.match(text)):
        order = tuple(map(int, ring[3].split()))
        if len(order) >= len(log.rings.get(int(ring[1]), ())):
            log.rings[int(ring[1])] = order
    elif found := _RANK.search(text):
        host.ranks.add(int(found[1]))
        log.ranks = max(log.ranks or 0, int(found[2]))
    elif version := _VERSION.match(text):
        host.version = version[1]
    elif " channels" in text and (counts := _COUNTS.findall(text)):
        host.channels |= {kind: int(count) for count, kind in counts}
    elif found := _SET.search(text):
        host.variables[found[1]] = found[2]
    else:
        _read_network(host, text)


def _read_network(host: Host, text: str) -> None:
    """Read what NCCL says about how it gets out of the node."""
    if text.startswith("Using network "):
        host.network = text.removeprefix("Using network ").strip()
    elif text.startswith("Bootstrap") and "Using" in text:
        name = text.partition("Using")[2].strip().partition("]")
        host.bootstrap = (name[2] or name[0]).partition(":")[0]
    elif "GPU Direct RDMA" in text and not text.startswith("NET/Socket"):
        if off := _GDR_OFF.search(text):
            host.gdr_off.add(f"{off[1]}{off[2]}"[:200])
        elif _GDR_ON.search(text):
            host.gdr = True
    elif text.startswith("NET/Socket") and "Using" in text:
        host.interfaces = _INTERFACE.findall(text)
    elif text.startswith("NET/IB") and "Using" in text:
        host.adapters |= {
            f"{name}:{port}": f"{kind}{more}" for name, port, kind, more in _ADAPTER.findall(text)
        }
    elif "No device found" in text or "libibverbs" in text:
        host.no_adapter = text.rstrip(".")
    elif loaded := _PLUGIN.search(text):
        (host.plugins if loaded[1] == "net" else host.collnet).add(loaded[2])
    elif text.startswith("P2P plugin "):
        host.plugins.add(text.removeprefix("P2P plugin ").strip())


def _kind(via: str) -> str:
    """Return what a connection is, without the number of the adapter and ways of copying."""
    parts = via.split("/")
    if parts[0] == "NET":
        name = parts[1] if len(parts) > 1 else "?"
        return f"NET/{name}" + ("/GDRDMA" if "GDRDMA" in parts else "")
    if parts[0] in ("SHM", "direct"):
        return "SHM"
    return "/".join(parts[:2]) if parts[0] == "P2P" else parts[0]


def _warn(log: Log, host: str, text: str) -> None:
    short = " ".join(_ADDRESS.sub("...", text).split())[:300]
    if short:
        log.warnings.setdefault(short, Counter())[host] += 1
        log.peers.setdefault(short, Counter()).update(_IPV4.findall(text))
