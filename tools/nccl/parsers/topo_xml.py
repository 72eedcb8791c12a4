"""A node as NCCL found it: NCCL_TOPO_DUMP_FILE, or a file for NCCL_TOPO_FILE.

Source of the format: NVIDIA, NCCL, src/graph/xml.cc and topo.cc.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import mode
from xml.etree.ElementTree import Element

from contract.errors import UserError
from tools.nccl.findings import Verdict
from tools.nccl.parsers.remark import Remark
from tools.nccl.parsers.xml_file import read_root, root_of, whole

_BRIDGE = "0x0604"
_TO_GPU = "0x03"
_TO_SWITCH = "0x0680"


class Distance(StrEnum):
    """How far a GPU is from an adapter, the nearest first, in NCCL's and nvidia-smi's words."""

    pix = "PIX"
    """One PCI switch between them."""
    pxb = "PXB"
    """Several PCI switches."""
    phb = "PHB"
    """The CPU."""
    sys = "SYS"
    """Two CPUs, or two NUMA nodes."""


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    number: int
    """As CUDA numbers it."""
    bus: str
    rank: int
    gdr: bool
    path: tuple[str, ...]
    """From the CPU down: the CPU, then PCI bridges."""
    links: dict[str, int] = field(hash=False)
    """NVLinks by what they lead to: another GPU's bus, or a switch's."""
    through_switches: bool = False
    """Whether its NVLinks end at NVSwitches, from which all GPUs are equally near."""

    @property
    def nvlinks(self) -> int:
        """All its NVLinks."""
        return sum(self.links.values())


@dataclass(frozen=True)
class Net:
    """One port of one adapter."""

    name: str
    number: int
    port: int
    speed: float
    """Nominal, bytes a second."""
    gdr: bool
    """Whether it reads and writes GPU memory itself."""
    path: tuple[str, ...]


@dataclass(frozen=True)
class Topology:
    """One node."""

    gpus: tuple[Gpu, ...]
    nets: tuple[Net, ...]
    cpus: int

    def nvlinks(self, first: Gpu, second: Gpu) -> int:
        """NVLinks between two GPUs; where they go through switches, as many as both have."""
        if first.through_switches and second.through_switches:
            return min(first.nvlinks, second.nvlinks)
        return max(first.links.get(second.bus, 0), second.links.get(first.bus, 0))

    def distance(self, gpu: Gpu, net: Net) -> Distance:
        """How far they are from each other."""
        if gpu.path[:1] != net.path[:1]:
            return Distance.sys
        common = sum(1 for _ in _common(gpu.path, net.path))
        if common < 2:
            return Distance.phb
        # Each bridge in the file is a whole switch: NCCL leaves out its ports.
        return Distance.pix if common == len(gpu.path) == len(net.path) else Distance.pxb

    def near(self, gpu: Gpu) -> list[Net]:
        """The adapters that are nearest to a GPU, by number."""
        order = list(Distance)
        ranked = [(order.index(self.distance(gpu, net)), net) for net in self.nets]
        least = min((rank for rank, _ in ranked), default=0)
        return [net for rank, net in ranked if rank == least]

    def missing_nvlinks(self) -> list[tuple[Gpu, Gpu, int, int]]:
        """Pairs of GPUs with fewer NVLinks than is usual in the node: both, how many there are, how many others have.

        Some machines have pairs of several kinds by construction; there only pairs are listed whose two GPUs have
        fewer links in all than other GPUs.
        """
        pairs = [(a, b, self.nvlinks(a, b)) for i, a in enumerate(self.gpus) for b in self.gpus[i + 1 :]]
        counts = [count for _, _, count in pairs]
        most = max(counts, default=0)
        if not most:
            return []
        if all(gpu.through_switches for gpu in self.gpus) or mode(counts) == most:
            return [(a, b, count, most) for a, b, count in pairs if count < most]
        full = max(gpu.nvlinks for gpu in self.gpus)
        return [
            (a, b, count, most)
            for a, b, count in pairs
            if count < most and a.nvlinks < full and b.nvlinks < full
        ]

    def remarks(self) -> list[Remark]:
        """What follows from it."""
        return [*_facts(self), *_nvlink_faults(self), *_net_faults(self), *_far(self)]


def parse(text: str, where: str) -> Topology:
    """Read a dump; raises UserError for anything else."""
    return _topology(root_of(text, where, "system"), where)


def parse_file(path: Path) -> Topology:
    """Read a dump's file; raises UserError for anything else."""
    return _topology(read_root(path, "system"), str(path))


def _topology(root: Element, where: str) -> Topology:
    found: list[Gpu | Net] = []
    cpus = root.findall("cpu")
    for index, cpu in enumerate(cpus):
        name = f"cpu {cpu.get('host_hash', '')}{cpu.get('numaid', index)}"
        # Not by recursion: a file may be as deep as it likes.
        todo: list[tuple[Element, tuple[str, ...], str]] = [(cpu, (name,), "")]
        while todo:
            element, path, bus = todo.pop()
            for child in element:
                if child.tag == "pci":
                    address = child.get("busid", "?").lower()
                    inside = child.get("class", "").startswith(_BRIDGE)
                    todo.append((child, (*path, address) if inside else path, address))
                elif child.tag == "nic":
                    todo.append((child, path, bus))
                elif child.tag == "gpu":
                    found.append(_gpu(child, path, bus))
                elif child.tag == "net":
                    found.append(_net(child, path))
    gpus = sorted((one for one in found if isinstance(one, Gpu)), key=lambda one: one.number)
    nets = sorted((one for one in found if isinstance(one, Net)), key=lambda one: one.number)
    if not gpus and not nets:
        raise UserError(f"{where} has neither GPUs nor adapters: dump it from a run that uses them")
    return Topology(tuple(gpus), tuple(nets), len(cpus))


def _gpu(element: Element, path: tuple[str, ...], bus: str) -> Gpu:
    links: dict[str, int] = defaultdict(int)
    switches = False
    for one in element.findall("nvlink"):
        count = whole(one, "count")
        if not one.get("tclass", "").startswith((_TO_GPU, _TO_SWITCH)) or count <= 0:
            continue  # to a CPU
        switches |= one.get("tclass", "").startswith(_TO_SWITCH)
        links[one.get("target", "?").lower()] += count
    return Gpu(
        number=whole(element, "dev"),
        bus=bus,
        rank=whole(element, "rank"),
        gdr=whole(element, "gdr") > 0,
        path=path,
        links=dict(links),
        through_switches=switches,
    )


def _net(element: Element, path: tuple[str, ...]) -> Net:
    return Net(
        name=element.get("name", "?"),
        number=whole(element, "dev"),
        port=whole(element, "port"),
        speed=max(0, whole(element, "speed")) * 1e6 / 8,  # Mbit/s in the file
        gdr=whole(element, "gdr") > 0,
        path=path,
    )


def _common(first: tuple[str, ...], second: tuple[str, ...]) -> Iterator[str]:
    for one, other in zip(first, second, strict=False):
        if one != other:
            return
        yield one


def _facts(topology: Topology) -> Iterator[Remark]:
    gpus, nets = topology.gpus, topology.nets
    speeds = Counter(f"{net.speed * 8 / 1e9:.0f} Gbit/s" for net in nets)
    told = ", ".join(f"{count} of {speed}" for speed, count in speeds.items())
    yield Remark(
        f"the node has {len(gpus)} GPUs and {len(nets)} network ports" + (f" ({told})" if told else "")
    )
    pairs = Counter(topology.nvlinks(a, b) for i, a in enumerate(gpus) for b in gpus[i + 1 :])
    if len(gpus) > 1:
        kind = "through NVSwitches" if any(gpu.through_switches for gpu in gpus) else "directly"
        if set(pairs) == {0}:
            yield Remark("its GPUs have no NVLink to each other")
        else:
            counts = ", ".join(
                f"{links} in {number} pairs" for links, number in sorted(pairs.items(), reverse=True)
            )
            yield Remark(f"NVLinks between its GPUs, {kind}: {counts}")


def _nvlink_faults(topology: Topology) -> Iterator[Remark]:
    missing = topology.missing_nvlinks()
    todo = "look at `nvidia-smi nvlink --status` on the node; it is a fault of the hardware, or a reset helps"
    if topology.gpus and all(gpu.through_switches for gpu in topology.gpus):
        usual = max(gpu.nvlinks for gpu in topology.gpus)
        for gpu in topology.gpus:
            if gpu.nvlinks < usual:
                text = f"GPU {gpu.number} has {gpu.nvlinks} NVLinks, others have {usual}"
                yield Remark(text, Verdict.degraded, todo=todo)
        return
    for a, b, count, usual in missing:
        text = f"GPUs {a.number} and {b.number} have {count or 'no'} NVLinks, other pairs have {usual}"
        yield Remark(text, Verdict.degraded, todo=todo)


def _net_faults(topology: Topology) -> Iterator[Remark]:
    usual = mode(net.speed for net in topology.nets) if topology.nets else 0.0
    for net in topology.nets:
        if net.speed < 0.99 * usual:
            text = f"{net.name} runs at {net.speed * 8 / 1e9:.0f} Gbit/s, others at {usual * 8 / 1e9:.0f}"
            yield Remark(
                text, Verdict.degraded, todo="a cable or a port, if it is of the same kind; else leave it out"
            )
    some = any(net.gdr for net in topology.nets)
    without = [net.name for net in topology.nets if not net.gdr]
    if without and topology.gpus:
        text = f"{', '.join(without)} cannot reach GPU memory itself (no GPUDirect RDMA)"
        yield Remark(
            text,
            Verdict.degraded if some else Verdict.ok,
            todo="the module nvidia_peermem, or DMA-BUF, is missing",
        )


def _far(topology: Topology) -> Iterator[Remark]:
    if not topology.nets or not topology.gpus:
        return
    near = [(gpu, topology.near(gpu)) for gpu in topology.gpus]
    told = (
        f"GPU {gpu.number} {'/'.join(net.name for net in nets)} ({topology.distance(gpu, nets[0])})"
        for gpu, nets in near
    )
    yield Remark(f"the nearest adapters: {', '.join(told)}")
