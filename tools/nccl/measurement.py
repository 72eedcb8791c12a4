"""What was measured of a fabric: the one form that ranks, the simulator and parsers write and the analysis reads.

A rank is a GPU (or a process in its place): rank = node * gpus_per_node + gpu, nodes in the order of `nodes`. Rail r
is the path that the r-th GPU of every node takes to the others.
"""

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.errors import UserError

FORMAT = 1

Floats = NDArray[np.float64]
Integers = NDArray[np.int32]


@dataclass(frozen=True)
class Exchange:
    """Two ranks that sent to each other at the same time; NaN: not measured, bandwidth 0: no answer."""

    first: int
    second: int
    latency_s: float
    """Median time one way of a few bytes."""
    bandwidth: float
    """Bytes a second in each direction at once, by the median repetition."""
    slowest: float
    """The same by the slowest repetition: far below `bandwidth` where a link works only sometimes."""
    round: int = 0
    """Exchanges of one round ran at the same time."""
    wrong: int = 0
    """Elements that did not arrive as they were sent."""


@dataclass
class Exchanges:
    """All exchanges as parallel arrays, in the order in which they were made; a pair may occur again, tested anew."""

    first: Integers
    second: Integers
    latency_s: Floats
    bandwidth: Floats
    slowest: Floats
    round: Integers
    wrong: Integers

    @classmethod
    def of(cls, exchanges: Iterable[Exchange]) -> "Exchanges":
        """Collect single exchanges."""
        rows = list(exchanges)
        columns: dict[str, Any] = {
            one.name: np.array(
                [getattr(row, one.name) for row in rows],
                dtype=np.float64 if one.name in ("latency_s", "bandwidth", "slowest") else np.int32,
            )
            for one in fields(Exchange)
        }
        return cls(**columns)

    def __len__(self) -> int:
        return len(self.first)

    def __add__(self, other: "Exchanges") -> "Exchanges":
        names = [one.name for one in fields(self)]
        return Exchanges(**{n: np.concatenate([getattr(self, n), getattr(other, n)]) for n in names})


@dataclass(frozen=True)
class Collective:
    """One collective operation at one size, over some ranks."""

    operation: str
    """A key of `tools.nccl.busbw.FACTORS`: all_reduce, all_gather, ..."""
    ranks: int
    nodes: int
    size_bytes: int
    """As nccl-tests count it: the whole buffer, for all-gather and reduce-scatter that of all ranks together."""
    time_s: float
    """Median of the repetitions, each the slowest rank's."""
    p90_s: float
    p99_s: float
    algbw: float
    """Bytes a second: size_bytes / time_s."""
    busbw: float
    wrong: int = 0
    """Elements with a wrong value, over all ranks."""
    algorithm: str = "flat"
    """flat: as the library does it; hierarchical: in the node, between nodes, in the node; ordered: flat, in the
    order that was computed."""
    in_place: bool = True
    scope: str = "world"
    """Who took part: `world`, or the name of a node."""


@dataclass
class Measurement:
    """A machine as it was seen by one job."""

    nodes: list[str]
    gpus_per_node: int
    backend: str
    """nccl, gloo, simulated, or the tool whose output was parsed."""
    exchanges: Exchanges = field(default_factory=lambda: Exchanges.of([]))
    collectives: list[Collective] = field(default_factory=list)
    silent: dict[str, str] = field(default_factory=dict)
    """Nodes that did not answer and took no part in the rest, and why: {name: reason}."""
    unmeasured: list[str] = field(default_factory=list)
    """Sentences: what was left out, and why."""
    about: dict[str, Any] = field(default_factory=dict)
    """When, where, with which versions, variables and sizes: exchange_bytes, date, cluster, job, nccl, seconds, ..."""

    @property
    def ranks(self) -> int:
        """All ranks."""
        return len(self.nodes) * self.gpus_per_node

    @property
    def has_figures(self) -> bool:
        """Whether anything was measured: a bandwidth (0 of a pair without an answer too), or that a node is silent."""
        return bool(np.isfinite(self.exchanges.bandwidth).any() or self.collectives or self.silent)

    def node_of(self, rank: int) -> int:
        """Index of a rank's node."""
        return rank // self.gpus_per_node

    def save(self, path: Path) -> None:
        """Write one .npz file, whole or not at all; raises OSError."""
        text = {
            "format": FORMAT,
            "nodes": self.nodes,
            "gpus_per_node": self.gpus_per_node,
            "backend": self.backend,
            "collectives": [asdict(one) for one in self.collectives],
            "silent": self.silent,
            "unmeasured": self.unmeasured,
            "about": self.about,
        }
        columns = {one.name: getattr(self.exchanges, one.name) for one in fields(Exchanges)}
        fresh = path.with_name(f".{path.name}.new")
        try:
            with fresh.open("wb") as file:
                np.savez_compressed(file, header=np.array(json.dumps(text)), **columns)
                file.flush()
                os.fsync(file.fileno())
            fresh.rename(path)
        except BaseException:
            # On a full disk it takes the room in which to say so.
            with suppress(OSError):
                fresh.unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: Path) -> "Measurement":
        """Read what `save` wrote; raises UserError for anything else."""
        try:
            with np.load(path, allow_pickle=False) as stored:
                header = json.loads(str(stored["header"]))
                columns = {one.name: stored[one.name] for one in fields(Exchanges)}
        except OSError as error:
            if error.strerror:
                raise UserError(f"{path} cannot be read ({error.strerror})") from error
            raise UserError(_no_measurement(path)) from error
        except Exception as error:  # a damaged archive raises whatever its part does
            raise UserError(_no_measurement(path)) from error
        if header.pop("format", None) != FORMAT:
            raise UserError(f"{path} was written by another version: measure again")
        try:
            collectives = [Collective(**one) for one in header.pop("collectives")]
            found = cls(exchanges=Exchanges(**columns), collectives=collectives, **header)
            found._check()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path} is damaged ({error}): measure again") from error
        return found

    def _check(self) -> None:
        """Raise ValueError for what no measurement has: a file may come from anywhere."""
        if odd := [name for name in (*self.nodes, *self.silent) if name.split() != [name]]:
            raise ValueError(f"{odd[0]!a} is no name of a node")
        rows = self.exchanges
        if {one.shape for one in vars(rows).values()} != {(len(rows),)}:
            raise ValueError("its columns differ in length")
        ends = np.concatenate([rows.first, rows.second])
        if self.gpus_per_node < 1 or (len(ends) and not 0 <= ends.min() <= ends.max() < self.ranks):
            raise ValueError(f"it has other ranks than the {self.ranks} of its nodes")
        if (rows.first == rows.second).any():
            raise ValueError("a rank exchanges with itself")
        if any(one.nodes < 1 or one.ranks < 1 for one in self.collectives):
            raise ValueError("an operation had no ranks")


def matrix(
    measurement: Measurement, ranks: Sequence[int], value: str, *, missing: float = float("nan")
) -> Floats:
    """Return a square matrix of `value` ("bandwidth", "latency_s" or "slowest") between `ranks`.

    Symmetric; of a pair that was tested several times the last; `missing` where there is none and on the diagonal.
    """
    found = np.full((len(ranks), len(ranks)), missing)
    places = np.full(measurement.ranks, -1)
    places[np.asarray(ranks, dtype=np.int64)] = np.arange(len(ranks))
    first, second = places[measurement.exchanges.first], places[measurement.exchanges.second]
    inside = (first >= 0) & (second >= 0)
    low, high = np.minimum(first, second)[inside], np.maximum(first, second)[inside]
    # numpy keeps the last of equal indices.
    found[low, high] = getattr(measurement.exchanges, value)[inside]
    found[high, low] = found[low, high]
    return found


def _no_measurement(path: Path) -> str:
    return f"{path} holds no measurement of `trierarch nccl test`: give its measurement.npz, or nccl-tests' output"
