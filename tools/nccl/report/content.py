"""What a report says, in the order in which a person wants to know it: the same for text, page and files."""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.bytes_shown import size as decimal_size
from tools.nccl.findings import Fault, Findings, Verdict
from tools.nccl.measurement import Collective, Measurement
from tools.nccl.parsers.remark import Remark
from tools.nccl.report.hostlist import compress
from tools.nccl.report.settings import Setting
from tools.nccl.route.advice import Advice

_ALL_REDUCE = "all_reduce"


@dataclass(frozen=True)
class AllReduceRow:
    """One size of all-reduce over all ranks."""

    size_bytes: int
    measured: Mapping[str, Collective]
    """By algorithm: flat, hierarchical, ordered."""
    recommended: str


@dataclass(frozen=True)
class Content:
    """All that is to be said of one measurement."""

    measurement: Measurement
    findings: Findings
    advice: Advice
    remarks: tuple[tuple[str, Remark], ...] = ()
    """What files of NCCL's say, each with the file's name."""
    settings: tuple[Setting, ...] = ()
    """What the machine's profile should say."""

    @property
    def verdict(self) -> Verdict:
        """OK, DEGRADED or BROKEN."""
        return self.findings.verdict

    @property
    def measured(self) -> bool:
        """Whether there are figures, not only what NCCL's own files say."""
        return self.measurement.has_figures

    @property
    def what(self) -> str:
        """The machine in a few words."""
        one = self.measurement
        singular, plural = ("process", "processes") if one.backend == "gloo" else ("GPU", "GPUs")
        nodes = f"{len(one.nodes)} node{'s' * (len(one.nodes) != 1)}"
        return (
            f"{nodes} of {one.gpus_per_node} {singular if one.gpus_per_node == 1 else plural} ({one.backend})"
        )

    @property
    def exclude_setting(self) -> str:
        """What to type so that the next job keeps away from them: quoted for the shell, and for Hydra."""
        names = compress(self.exclude).replace('"', r"\"")
        return shlex.quote(f'job.exclude="{names}"')

    @property
    def summary(self) -> str:
        """One sentence: the verdict and what it rests on."""
        faults = self.findings.faults
        if not faults or not self.measured:
            worse = next(
                (one for _, one in self.remarks if one.verdict is self.verdict is not Verdict.ok), None
            )
            if worse is None and not self.measured:
                return f"nothing was measured on {self.what}"
            return worse.text if worse else f"no fault was found on {self.what}"
        others = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        return f"{faults[0].name} {faults[0].symptom}{others}"

    @property
    def exclude(self) -> dict[str, str]:
        """Nodes that a job had better do without, and the fault that is the reason."""
        return {
            name: f"{fault.name} {fault.symptom}: {fault.evidence}"
            for fault in reversed(self.findings.faults)
            for name in fault.excludes
        }

    def collectives(self, operation: str | None = None) -> list[Collective]:
        """Return what was measured over all ranks, in place, else out of place."""
        every = [one for one in self.measurement.collectives if operation in (None, one.operation)]
        best: dict[tuple[Any, ...], Collective] = {}
        for one in every:
            key = (one.scope, one.operation, one.nodes, one.ranks, one.algorithm, one.size_bytes)
            if key not in best or one.in_place:
                best[key] = one
        return list(best.values())

    def all_reduce(self) -> list[AllReduceRow]:
        """Return the sizes of the largest all-reduce that was measured."""
        rows = [one for one in self.collectives(_ALL_REDUCE) if one.scope == "world"]
        ranks = max((one.ranks for one in rows), default=0)
        sizes = sorted({one.size_bytes for one in rows if one.ranks == ranks})
        return [
            AllReduceRow(
                bytes_,
                {one.algorithm: one for one in rows if one.ranks == ranks and one.size_bytes == bytes_},
                self.recommended(bytes_),
            )
            for bytes_ in sizes
        ]

    @property
    def all_reduce_basis(self) -> str:
        """What the choice of an all-reduce rests on."""
        sizes = [row.size_bytes for row in self.all_reduce()]
        if not sizes:
            return "by a model of the pairs' figures: no all-reduce was measured"
        return f"measured up to {size(max(sizes))}, above that by a model"

    def recommended(self, size_bytes: int) -> str:
        """Return the all-reduce that suits a size; nothing where there is no advice."""
        return next((name for start, name in reversed(self.advice.switches) if start <= size_bytes), "")


def size(nbytes: int) -> str:
    """Write a number of bytes for people: 64 MiB where it is a round number of these, else in units of 1000."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale and nbytes % scale == 0:
            return f"{nbytes // scale} {unit}"
    return decimal_size(nbytes)


def percent(share: float) -> str:
    """Write a share of 1 for people."""
    return f"{share:.0%}" if share >= 0.1 or share == 0 else f"{share:.1%}"


def speed(bandwidth: float) -> str:
    """Write bytes a second for people: `187.3 GB/s`, `4.08 MB/s`; nothing for what was not measured."""
    if not math.isfinite(bandwidth):
        return ""
    if 0 < bandwidth < 1e8:
        return f"{bandwidth / 1e6:.3g} MB/s"
    digits = 1 if bandwidth >= 1e10 else 2 if bandwidth >= 1e9 else 3
    return f"{bandwidth / 1e9:.{digits}f} GB/s"


def microseconds(seconds: float) -> str:
    """Write a time for people: `17.0 us`; nothing for what was not measured."""
    if not math.isfinite(seconds):
        return ""
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def range_of_sizes(switches: Sequence[tuple[int, str]]) -> list[str]:
    """Say from which size on which algorithm suits."""
    told = []
    for index, (start, name) in enumerate(switches):
        end = f" below {size(switches[index + 1][0])}" if index + 1 < len(switches) else ""
        begin = f" from {size(start)}" if start else ""
        told.append(f"{name}{begin}{end}" if begin or end else f"{name} at all sizes")
    return told


def fault_row(fault: Fault) -> tuple[str, ...]:
    """Return a fault as cells: part, what is wrong, share of what was to be expected, confidence, evidence."""
    share = percent(fault.share) if fault.share and math.isfinite(fault.share) else ""
    return (fault.name, str(fault.symptom), share, percent(fault.confidence), fault.evidence)
