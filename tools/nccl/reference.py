"""What healthy machines of a class reach, from published measurements; the figures and sources are in reference.json.

Only large messages are listed, and only what others measured on a machine like it: where nothing fits, nothing is
expected. A bandwidth between two nodes above what the adapters carry is an artefact of NCCL's tree and is not listed.
"""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from tools.nccl.measurement import Measurement

_FILE = Path(__file__).with_name("reference.json")


@dataclass(frozen=True)
class Point:
    """One published bus bandwidth."""

    operation: str
    least_nodes: int
    most_nodes: int | None
    size_bytes: int
    """It holds for this size and larger ones."""
    busbw: float
    """Bytes a second."""
    source: str


@dataclass
class Reference:
    """A class of machines."""

    name: str
    gpu: str
    gpus_per_node: int
    nics_per_node: int | None
    """None: what holds inside a node, with any adapters."""
    nic_gbit: int | None
    points: tuple[Point, ...]

    @property
    def adapters_bandwidth(self) -> float | None:
        """What all adapters of a node carry in one direction, bytes a second."""
        if self.nics_per_node is None or self.nic_gbit is None:
            return None
        return self.nics_per_node * self.nic_gbit * 1e9 / 8

    def point(self, operation: str, nodes: int, gpus_per_node: int, size_bytes: int) -> Point | None:
        """The published figure that fits best: of the largest message that is not larger than `size_bytes`."""
        if gpus_per_node != self.gpus_per_node:
            return None
        fitting = [
            one
            for one in self.points
            if one.operation == operation
            and one.least_nodes <= nodes <= (one.most_nodes or nodes)
            and one.size_bytes <= size_bytes
        ]
        return max(fitting, key=lambda one: one.size_bytes, default=None)

    def expected(self, operation: str, nodes: int, gpus_per_node: int, size_bytes: int) -> float | None:
        """The bus bandwidth that a healthy machine reaches, bytes a second; None where nothing was published."""
        found = self.point(operation, nodes, gpus_per_node, size_bytes)
        return None if found is None else found.busbw


@cache
def classes() -> tuple[Reference, ...]:
    """All classes that the file has."""
    tree: dict[str, Any] = json.loads(_FILE.read_text())
    return tuple(
        Reference(
            name=one["name"],
            gpu=one["gpu"],
            gpus_per_node=one["gpus_per_node"],
            nics_per_node=one["nics_per_node"],
            nic_gbit=one["nic_gbit"],
            points=tuple(
                Point(
                    operation=point["operation"],
                    least_nodes=point["nodes"][0],
                    most_nodes=point["nodes"][1],
                    size_bytes=point["size_bytes"],
                    busbw=point["busbw_gb_s"] * 1e9,
                    source=point["source"],
                )
                for point in one["points"]
            ),
        )
        for one in tree["classes"]
    )


def choose(
    gpu_model: str | None, gpus_per_node: int, nics_per_node: int | None = None, nic_gbit: float | None = None
) -> Reference | None:
    """Return the class of a machine, None where none fits.

    Without the number and speed of the adapters only what holds inside a node is in it.
    """
    model = (gpu_model or "").upper()
    fitting = [one for one in classes() if one.gpu in model and one.gpus_per_node == gpus_per_node]
    inside = next((one for one in fitting if one.nics_per_node is None), None)
    outside = next(
        (
            one
            for one in fitting
            if one.nics_per_node is not None
            and one.nics_per_node == nics_per_node
            and one.nic_gbit is not None
            and nic_gbit is not None
            and abs(nic_gbit - one.nic_gbit) < 0.1 * one.nic_gbit
        ),
        None,
    )
    if outside is None or inside is None:
        return outside or inside
    return replace(outside, points=inside.points + outside.points)


def of(measurement: Measurement) -> Reference | None:
    """Return the class of a measured machine, by `gpu_model` or `device`, `nics_per_node`, `nic_gbit` of its `about`.

    None for processors and for what the measurement does not tell.
    """
    if measurement.backend not in ("nccl", "nccl-tests"):
        return None
    about = measurement.about
    nics, gbit = about.get("nics_per_node"), about.get("nic_gbit")
    return choose(
        str(about.get("gpu_model") or about.get("device") or ""),
        measurement.gpus_per_node,
        nics if isinstance(nics, int) else None,
        float(gbit) if isinstance(gbit, int | float) else None,
    )
