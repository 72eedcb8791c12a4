"""What a compute node has, read on the node itself: `python -m slurm.sites.probe` prints it as JSON.

Standard library only, and nothing that needs rights: nvidia-smi, /proc and /sys.
"""

import json
import re
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

# Kinds of network interface, see include/uapi/linux/if_arp.h.
_INFINIBAND = "32"


@dataclass
class Node:
    """GPUs in their own order; `gpu_cpus` has the cores near each, "" where that is not known."""

    gpu_models: list[str] = field(default_factory=list)
    gpu_memory_bytes: list[int] = field(default_factory=list)
    gpu_cpus: list[str] = field(default_factory=list)
    hcas: list[str] = field(default_factory=list)
    """Adapters with an active InfiniBand port."""
    infiniband_interfaces: list[str] = field(default_factory=list)
    """Network interfaces over InfiniBand that are up."""


def probe(root: Path = Path("/")) -> Node:
    """Look at this node; `root` is where /proc and /sys are."""
    node = Node()
    for model, memory_bytes, bus in _nvidia_smi() or _proc_gpus(root):
        node.gpu_models.append(model)
        if memory_bytes:
            node.gpu_memory_bytes.append(memory_bytes)
        node.gpu_cpus.append(_read(root / "sys/bus/pci/devices" / bus / "local_cpulist"))
    for port in sorted(root.glob("sys/class/infiniband/*/ports/*")):
        active = "ACTIVE" in _read(port / "state") and _read(port / "link_layer") == "InfiniBand"
        name = port.parent.parent.name
        if active and name not in node.hcas:
            node.hcas.append(name)
    for interface in sorted(root.glob("sys/class/net/*")):
        if _read(interface / "type") == _INFINIBAND and _read(interface / "operstate") == "up":
            node.infiniband_interfaces.append(interface.name)
    return node


def _nvidia_smi() -> list[tuple[str, int, str]]:
    command = ["nvidia-smi", "--query-gpu=name,memory.total,pci.bus_id", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_nvidia_smi(said)


def parse_nvidia_smi(said: str) -> list[tuple[str, int, str]]:
    """Return (model, memory in bytes, PCI address) of each line of `name, MiB, bus`."""
    gpus = []
    for line in said.splitlines():
        model, _, rest = line.rpartition(",")[0].partition(",")
        memory, bus = rest.strip(), line.rpartition(",")[2].strip()
        gpus.append((model.strip(), int(memory) * 2**20 if memory.isdigit() else 0, _pci_address(bus)))
    return gpus


def _proc_gpus(root: Path) -> list[tuple[str, int, str]]:
    """Return what the driver tells without nvidia-smi; it does not tell the memory."""
    gpus = []
    for folder in sorted(root.glob("proc/driver/nvidia/gpus/*")):
        model = re.search(r"^Model:\s*(.+)$", _read(folder / "information"), re.MULTILINE)
        gpus.append((model[1].strip() if model else "", 0, _pci_address(folder.name)))
    return gpus


def _pci_address(bus: str) -> str:
    """Write `00000000:07:00.0` as /sys does: `0000:07:00.0`."""
    domain, _, rest = bus.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


if __name__ == "__main__":
    json.dump(asdict(probe()), sys.stdout)
