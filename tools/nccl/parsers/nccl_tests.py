"""What a run of nccl-tests (all_reduce_perf and its like) found, from whichever form of its output."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tools.nccl.busbw import FACTORS
from tools.nccl.findings import Verdict
from tools.nccl.measurement import Collective, Measurement
from tools.nccl.parsers.remark import Remark

OPERATIONS = {
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "sendrecv": "sendrecv",
}
"""nccl-tests' names of operations, in lower case, and ours."""
OTHERS = ("gather", "scatter", "hypercube", "alltoallv")


@dataclass(frozen=True)
class Device:
    """One rank as the test lists it."""

    rank: int
    host: str
    device: int
    model: str


@dataclass
class Benchmark:
    """One run of one program of nccl-tests."""

    program: str | None = None
    """`all_reduce` of all_reduce_perf, or what it can only have been by its figures; None: nothing tells."""
    guessed: bool = False
    """Whether the program is a conclusion from the figures."""
    version: str | None = None
    """nccl-tests' own."""
    devices: list[Device] = field(default_factory=list)
    rows: list["Row"] = field(default_factory=list)
    average_busbw: float | None = None
    """Bytes a second; None where the output ends before it."""
    out_of_bounds: int | None = None
    failures: list[str] = field(default_factory=list)

    @property
    def hosts(self) -> list[str]:
        """The nodes, in the order of their first ranks."""
        return list(dict.fromkeys(one.host for one in sorted(self.devices, key=lambda one: one.rank)))

    @property
    def ranks(self) -> int:
        """Ranks that took part; by the figures where the output does not list them, 0 where these don't tell."""
        return len(self.devices) or _ranks_by_factor(self)

    @property
    def operation(self) -> str | None:
        """Our name of the operation; None if it is none that has a bus bandwidth here."""
        return OPERATIONS.get(self.program or "")

    def collectives(self) -> list[Collective]:
        """The rows of an operation that is known, one for out-of-place and one for in-place each."""
        operation = self.operation
        if operation is None or self.ranks < 2:
            return []
        nodes = len(self.hosts) or 1
        return [
            Collective(
                operation=operation,
                ranks=self.ranks,
                nodes=nodes,
                size_bytes=row.size_bytes,
                time_s=row.time_s,
                p90_s=float("nan"),
                p99_s=row.p99_s,
                algbw=row.algbw,
                busbw=row.busbw,
                wrong=row.wrong or 0,
                in_place=row.in_place,
            )
            for row in self.rows
        ]

    def remarks(self) -> list[Remark]:
        """What is wrong with the test itself; an average bus bandwidth of 0 is a failure."""
        name = f"{self.program or 'a test'} on {self.ranks or 'unknown'} ranks"
        found = [
            Remark(
                f"{name} ended with: {one}",
                Verdict.broken,
                todo="read the log around it, with NCCL_DEBUG=INFO",
            )
            for one in dict.fromkeys(self.failures)
        ]
        wrong = sum(row.wrong or 0 for row in self.rows)
        if wrong or self.out_of_bounds:
            text = f"{name}: {wrong or self.out_of_bounds} values were wrong"
            found.append(Remark(text, Verdict.broken, todo="find the GPU: run it on fewer nodes"))
        if self.average_busbw == 0 and self.ranks == 1:
            text = f"{name}: the average bus bandwidth is 0, since one rank has no partner: it tested nothing"
            found.append(Remark(text, Verdict.broken, todo="start one rank for each GPU, as one MPI job"))
        elif self.average_busbw == 0:
            text = f"{name}: the average bus bandwidth is 0, which is a failure"
            found.append(
                Remark(text, Verdict.broken, todo="give sizes of a megabyte and more, and read the log")
            )
        elif self.average_busbw is None and not self.failures:
            found.append(Remark(f"{name}: the output ends before the test does", Verdict.degraded))
        if any(row.wrong is None for row in self.rows):
            found.append(Remark(f"{name}: values were not checked"))
        if self.guessed:
            found.append(Remark(f"the output names no program; by its figures it is {self.program}"))
        return found


@dataclass(frozen=True)
class Row:
    """One size, out-of-place or in-place."""

    size_bytes: int
    redop: str | None
    root: int | None
    time_s: float
    p99_s: float
    algbw: float
    busbw: float
    wrong: int | None
    """None: not checked."""
    in_place: bool


def to_measurement(tests: Sequence[Benchmark]) -> Measurement:
    """Put tests together as what was measured of one machine."""
    hosts = list(dict.fromkeys(host for test in tests for host in test.hosts))
    places = {(one.host, one.device) for test in tests for one in test.devices}
    each = Counter(host for host, _ in places)
    left_out = [
        f"{test.program} is left out: its bandwidths are not comparable"
        if test.program
        else "a test is left out: its output does not say which operation it was, give --operation"
        for test in tests
        if not test.operation
    ]
    left_out += [
        f"{test.program} is left out: its output does not say how many ranks it had"
        for test in tests
        if test.operation and not test.ranks
    ]
    if len(set(each.values())) > 1:
        least = min(each, key=lambda host: each[host])
        left_out.append(f"the nodes took part with different numbers of GPUs, {least} with {each[least]}")
    models = dict.fromkeys(one.model for test in tests for one in test.devices if one.model)
    about = {"gpu_model": next(iter(models))} if len(models) == 1 else {}
    ranks = max((test.ranks for test in tests), default=1)
    return Measurement(
        nodes=hosts or ["unknown"],
        gpus_per_node=max(each.values(), default=ranks or 1),
        backend="nccl-tests",
        collectives=[one for test in tests for one in test.collectives()],
        unmeasured=left_out,
        about=about,
    )


def name_program(test: Benchmark, operation: str | None = None) -> None:
    """Decide what a test without a name was: as told, else by the only operation that its columns allow."""
    if test.program is not None or not test.rows:
        return
    if operation is not None:
        test.program = operation.lower()
        return
    row = test.rows[0]
    ratio, ranks = _ratio(test), len(test.devices)
    if ratio is None:
        return
    if row.redop not in (None, "none"):
        if row.root is not None and row.root >= 0:
            test.program = "reduce"
        elif ratio > 1.04 or (ranks > 2 and abs(ratio - 2 * (ranks - 1) / ranks) < 0.02):
            test.program = "all_reduce"
        elif ratio < 0.97 or ranks > 64:
            test.program = "reduce_scatter"
    elif row.root is not None and row.root >= 0 and abs(ratio - 1) < 0.02:
        test.program = "broadcast"
    test.guessed = test.program is not None


def _ratio(test: Benchmark) -> float | None:
    """Return busbw / algbw of the fastest row, whose figures have the most digits."""
    best = max(test.rows, key=lambda row: row.algbw, default=None)
    return best.busbw / best.algbw if best is not None and best.algbw > 1e9 else None


def _ranks_by_factor(test: Benchmark) -> int:
    """Return the ranks that busbw / algbw tells of, for few ranks; 0 for many, whose factors are too near."""
    if test.operation not in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        return 0
    ratio = _ratio(test)
    if ratio is None:
        return 0
    factor = FACTORS[test.operation]
    best = min(range(2, 17), key=lambda ranks: abs(float(factor(ranks)) - ratio))
    return best if abs(float(factor(best)) - ratio) < 2e-3 else 0
