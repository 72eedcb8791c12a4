"""The rings and trees that NCCL chose: NCCL_GRAPH_DUMP_FILE.

Source of the format: NVIDIA, NCCL, src/graph/search.cc.
"""

from dataclasses import dataclass
from pathlib import Path
from xml.etree.ElementTree import Element

from contract.errors import UserError
from tools.nccl.findings import Verdict
from tools.nccl.parsers.remark import Remark
from tools.nccl.parsers.xml_file import read_root, real, root_of, whole

PATTERNS = {1: "balanced tree", 2: "split tree", 3: "tree", 4: "ring", 5: "NVLS", 6: "CollNet direct"}
KINDS = {0: "ring", 1: "tree", 2: "CollNet", 3: "NVLS", 4: "CollNet direct", 5: "NVLS tree"}
"""What each graph of a file is for, by its id."""
_SLOW_INSIDE = ("PHB", "SYS", "NODE")


@dataclass(frozen=True)
class Channel:
    """One path through the node."""

    gpus: tuple[int, ...]
    """In their order; numbers as CUDA has them."""
    nets: tuple[int, ...]
    """The adapters at the ends, if it leaves the node."""


@dataclass(frozen=True)
class Graph:
    """All channels for one kind of algorithm."""

    number: int
    pattern: int
    cross_nic: bool
    bandwidth_inside: float
    """What NCCL expects of one channel in the node, bytes a second."""
    bandwidth_between: float
    inside: str
    """The worst link between its GPUs: NVL, PIX, PXB, PHB, SYS."""
    between: str
    """The worst link from a GPU to its adapter: PIX, PXB, PXN, PHB, SYS."""
    channels: tuple[Channel, ...]

    @property
    def kind(self) -> str:
        """ring, tree, ..."""
        return KINDS.get(self.number, PATTERNS.get(self.pattern, f"graph {self.number}"))


def parse(text: str, where: str) -> list[Graph]:
    """Read a dump; raises UserError for anything else."""
    return _graphs(root_of(text, where, "graphs"), where)


def parse_file(path: Path) -> list[Graph]:
    """Read a dump's file; raises UserError for anything else."""
    return _graphs(read_root(path, "graphs"), str(path))


def remarks(graphs: list[Graph]) -> list[Remark]:
    """Say in words what was chosen."""
    found = []
    for graph in graphs:
        if not graph.channels:
            found.append(Remark(f"{graph.kind}: not used"))
            continue
        count, outside = len(graph.channels), any(one.nets for one in graph.channels)
        speed = count * graph.bandwidth_inside / 1e9
        text = f"{graph.kind}: {count} channels, {speed:.0f} GB/s expected in the node over {graph.inside}"
        if outside:
            speed = count * graph.bandwidth_between / 1e9
            used = sorted({net for one in graph.channels for net in one.nets})
            text += f", {speed:.0f} GB/s between nodes over {graph.between} by adapters {', '.join(map(str, used))}"
        found.append(Remark(text))
        if graph.kind == "ring" and graph.inside in _SLOW_INSIDE:
            text = f"the rings cross the CPU ({graph.inside}) inside the node: GPUs without NVLink, or hidden from NCCL"
            todo = "see whether the container shows all of /sys, and NCCL_P2P_DISABLE is not set"
            found.append(Remark(text, Verdict.degraded, todo=todo))
        if graph.kind == "ring" and outside and graph.between == "SYS":
            text = "the rings reach their adapters through another CPU (SYS)"
            todo = "see whether NCCL_IB_HCA names the adapters near the GPUs"
            found.append(Remark(text, Verdict.degraded, todo=todo))
    return found


def _graphs(root: Element, where: str) -> list[Graph]:
    graphs = [_graph(one) for one in root.findall("graph")]
    if not graphs:
        raise UserError(f"{where} has no graph in it: dump it again, from rank 0")
    return graphs


def _graph(element: Element) -> Graph:
    channels = tuple(
        Channel(
            gpus=tuple(whole(one, "dev") for one in channel.findall("gpu")),
            nets=tuple(whole(one, "dev") for one in channel.findall("net")),
        )
        for channel in element.findall("channel")
    )
    return Graph(
        number=whole(element, "id"),
        pattern=whole(element, "pattern"),
        cross_nic=whole(element, "crossnic") > 0,
        bandwidth_inside=real(element, "speedintra") * 1e9,
        bandwidth_between=real(element, "speedinter") * 1e9,
        inside=element.get("typeintra", "?"),
        between=element.get("typeinter", "?"),
        channels=channels,
    )
