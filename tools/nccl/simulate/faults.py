"""Faults that are planted in a simulated fabric, each with what the analysis should say of it."""

from dataclasses import dataclass

from tools.nccl.findings import Part, Symptom


@dataclass(frozen=True)
class Planted:
    """One fault. What a field does not say is healthy."""

    kind: str
    """As people call it: `slow node`, `missing NVLink`, ..."""
    part: Part
    """What the analysis should blame."""
    symptom: Symptom
    nodes: tuple[int, ...] = ()
    nic: int | None = None
    """The NIC of the node(s), or the rail's; a link: None means all NICs."""
    gpus: tuple[int, ...] = ()
    left: float = 1.0
    """Share of the speed that is left; for a late part, share of the latency that would be usual."""
    often: float = 1.0
    """Probability that a repetition (flaky) or an exchange (wrong values) shows it."""
