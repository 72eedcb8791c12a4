"""What the analysis concludes: which part is bad, by how much, on what evidence."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What the machine is like; the command's exit code follows from it."""

    ok = "OK"
    degraded = "DEGRADED"
    """It works, but a part is slower than its peers, than before, or than its class."""
    broken = "BROKEN"
    """Something does not answer, or gives wrong results."""

    @property
    def exit_code(self) -> int:
        """0, 1 or 2."""
        return list(Verdict).index(self)


class Part(StrEnum):
    """What can be at fault."""

    node = "node"
    """All of a node's paths to others."""
    nic = "nic"
    """One rail of one node: its adapter, its cable, its port."""
    rail = "rail"
    """One rail of all nodes: its switch."""
    link = "link"
    """One pair of nodes, whose ends are well with everybody else."""
    gpu = "gpu"
    """One GPU: slow with its peers in the node and outside."""
    nvlink = "nvlink"
    """One pair of GPUs in a node, whose ends are well with the others."""
    switch = "switch"
    """What a group of nodes shares on its way to all others, such as a leaf's uplinks."""
    machine = "machine"
    """All of it alike: slower than its baseline or its class."""


class Symptom(StrEnum):
    """What is wrong with it."""

    silent = "does not answer"
    wrong = "gives wrong values"
    slow = "is slow"
    late = "answers late"
    flaky = "works only sometimes"


@dataclass(frozen=True)
class Fault:
    """One part that is not as it should be."""

    part: Part
    symptom: Symptom
    nodes: tuple[str, ...]
    """The node; both ends of a link; all nodes of a group. Empty for a whole rail, and for the machine."""
    evidence: str
    """One sentence with the figures that it rests on."""
    rail: int | None = None
    gpus: tuple[int, ...] = ()
    """Local numbers: one for a GPU, two for an NVLink pair."""
    share: float = 0.0
    """Measured bandwidth (for `late`: expected latency / measured) as a share of what was to be expected."""
    confidence: float = 1.0
    """0 to 1."""
    excludes: tuple[str, ...] = ()
    """The nodes that a job had better do without because of it."""

    @property
    def name(self) -> str:
        """What to call the part: `node n3`, `nic n3 rail 2`, `rail of GPUs 0, 1`, `link n1 - n4`, `GPU 5 of n3`,
        `nvlink n3 GPU 0 - 1`, `switch of n1, n2 and 30 more`, `the machine`.
        """
        few = ", ".join(self.nodes[:3]) + (f" and {len(self.nodes) - 3} more" if len(self.nodes) > 3 else "")
        if self.part is Part.machine:
            return "the machine"
        if self.part is Part.gpu:
            return f"GPU {', '.join(map(str, self.gpus))} of {few}"
        if self.part is Part.nvlink:
            return f"nvlink {few} GPU {' - '.join(map(str, self.gpus))}"
        # One adapter may serve the rails of several GPUs.
        several = f"of GPUs {', '.join(map(str, self.gpus))}" if len(self.gpus) > 1 else ""
        rail = several or ("" if self.rail is None else f"rail {self.rail}")
        if self.part is Part.rail:
            return f"rail {rail}" if several else rail
        where = " - ".join(self.nodes) if self.part is Part.link else few
        return " ".join(f"{self.part} {'of ' if self.part is Part.switch else ''}{where} {rail}".split())


@dataclass(frozen=True)
class Level:
    """What is usual among the exchanges of one kind."""

    name: str
    """`inside` (GPUs of a node), `near` and `far` nodes, ..."""
    pairs: int
    bandwidth: float
    """Median, bytes a second."""
    bandwidth_mad: float
    latency_s: float
    latency_mad_s: float


@dataclass(frozen=True)
class Findings:
    """All that the analysis says of a measurement."""

    verdict: Verdict
    faults: tuple[Fault, ...]
    """The gravest first."""
    levels: tuple[Level, ...]
    groups: tuple[tuple[str, ...], ...]
    """Nodes that are nearer to each other than to the rest, found in the matrix; one group when there is no such."""
    notes: tuple[str, ...] = ()
    """Sentences: what was compared with what, what could not be told, where groups differ from Slurm's topology."""

    @property
    def exclude(self) -> tuple[str, ...]:
        """Nodes for `--exclude`, in the order of the faults."""
        return tuple(dict.fromkeys(name for fault in self.faults for name in fault.excludes))
