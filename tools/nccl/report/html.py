"""The report as one page that needs no other file and no network."""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tools.nccl.measurement import Measurement
from tools.nccl.report.content import Content, fault_row, microseconds, range_of_sizes, size, speed
from tools.nccl.report.hostlist import compress

_TEMPLATE = "report.html.j2"
_MOST_PAIRS = 50
_MOST_PICTURES = 12
_ABOUT = ("date", "cluster", "job", "nccl", "torch", "gpu_model", "device", "seconds")


@dataclass(frozen=True)
class Cell:
    """A cell of a table: what is shown, and what it is sorted by."""

    text: str
    value: float = 0.0


@dataclass(frozen=True)
class Grid:
    """A table that can be sorted."""

    head: Sequence[str]
    numbers: Sequence[bool]
    """Which columns are numbers."""
    rows: Sequence[Sequence[Cell]]


def write(path: Path, content: Content, pictures: Sequence[Path] = (), settings: str = "") -> None:
    """Write the page; raises OSError."""
    path.write_text(page(content, pictures, settings), encoding="utf-8")


def page(content: Content, pictures: Sequence[Path] = (), settings: str = "") -> str:
    """Return the page, PNG files inlined."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["compress"] = compress
    findings = content.findings
    about = content.measurement.about
    return environment.get_template(_TEMPLATE).render(
        content=content,
        about=[(key, about[key]) for key in _ABOUT if about.get(key) not in (None, "")],
        faults=_faults(content),
        ranges=range_of_sizes(content.advice.switches),
        order="\n".join(content.advice.order),
        settings=settings,
        collectives=_collectives(content),
        pictures=[
            (one.name, base64.b64encode(one.read_bytes()).decode()) for one in pictures[:_MOST_PICTURES]
        ],
        levels=_levels(content),
        groups=[compress(group) for group in findings.groups] if len(findings.groups) > 1 else [],
        slowest=_slowest(content.measurement),
        lists=[
            ("Notes", [*findings.notes, *content.advice.notes]),
            ("Not measured", content.measurement.unmeasured),
        ],
    )


def _faults(content: Content) -> Grid:
    return Grid(
        ("part", "what", "left of it", "sure", "evidence"),
        (False, False, True, True, False),
        [
            [
                Cell(text, value)
                for text, value in zip(fault_row(one), (0, 0, one.share, one.confidence, 0), strict=True)
            ]
            for one in content.findings.faults
        ],
    )


def _collectives(content: Content) -> Grid:
    rows = sorted(
        content.collectives(), key=lambda one: (one.operation, one.scope, one.algorithm, one.size_bytes)
    )
    shown = [one for one in rows if one.scope == "world"]
    return Grid(
        ("operation", "how", "ranks", "size", "median", "99 %", "algbw", "busbw", "wrong", "suits"),
        (False, False, True, True, True, True, True, True, True, False),
        [
            [
                Cell(one.operation),
                Cell(one.algorithm),
                Cell(str(one.ranks), one.ranks),
                Cell(size(one.size_bytes), one.size_bytes),
                Cell(microseconds(one.time_s), _value(one.time_s)),
                Cell(microseconds(one.p99_s), _value(one.p99_s)),
                Cell(speed(one.algbw), _value(one.algbw)),
                Cell(speed(one.busbw), _value(one.busbw)),
                Cell(str(one.wrong), one.wrong),
                Cell(content.recommended(one.size_bytes) if one.operation == "all_reduce" else ""),
            ]
            for one in shown
        ],
    )


def _levels(content: Content) -> Grid:
    return Grid(
        ("pairs", "number", "bandwidth", "spread (MAD)", "latency", "spread (MAD)"),
        (False, True, True, True, True, True),
        [
            [
                Cell(one.name),
                Cell(str(one.pairs), one.pairs),
                Cell(speed(one.bandwidth), _value(one.bandwidth)),
                Cell(speed(one.bandwidth_mad), _value(one.bandwidth_mad)),
                Cell(microseconds(one.latency_s), _value(one.latency_s)),
                Cell(microseconds(one.latency_mad_s), _value(one.latency_mad_s)),
            ]
            for one in content.findings.levels
        ],
    )


def _slowest(measurement: Measurement) -> Grid:
    """Return the pairs between nodes with the least bandwidth, each as it was tested last."""
    exchanges, gpus = measurement.exchanges, measurement.gpus_per_node
    low, high = np.minimum(exchanges.first, exchanges.second), np.maximum(exchanges.first, exchanges.second)
    keys = low.astype(np.int64) * measurement.ranks + high
    _, reversed_index = np.unique(keys[::-1], return_index=True)
    last = len(keys) - 1 - reversed_index
    last = last[(low[last] // gpus != high[last] // gpus) & np.isfinite(exchanges.bandwidth[last])]
    order = last[np.argsort(exchanges.bandwidth[last], kind="stable")][:_MOST_PAIRS]
    rows = []
    for index in order.tolist():
        first, second = int(low[index]), int(high[index])
        bandwidth, latency_s = float(exchanges.bandwidth[index]), float(exchanges.latency_s[index])
        names = [
            f"{measurement.nodes[measurement.node_of(rank)]} GPU {rank % gpus}" for rank in (first, second)
        ]
        rows.append(
            [
                *map(Cell, names),
                Cell(speed(bandwidth), bandwidth),
                Cell(speed(float(exchanges.slowest[index])), _value(float(exchanges.slowest[index]))),
                Cell(microseconds(latency_s), _value(latency_s)),
                Cell(str(exchanges.round[index]), float(exchanges.round[index])),
            ]
        )
    head = ("one end", "other end", "bandwidth", "slowest", "latency", "round")
    return Grid(head, (False, False, True, True, True, True), rows)


def _value(number: float) -> float:
    """Return what a script can sort by: what was not measured comes first."""
    return number if math.isfinite(number) else -1.0
