"""Files of any kind that a person has of a machine's network: told apart by what is in them, and put together."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from contract.errors import UserError
from tools.nccl.findings import Verdict
from tools.nccl.measurement import Measurement
from tools.nccl.parsers import graph_xml, log, log_words, nccl_tests_json, nccl_tests_text, topo_xml
from tools.nccl.parsers.lines import read_text
from tools.nccl.parsers.log import Log
from tools.nccl.parsers.nccl_tests import Benchmark, to_measurement
from tools.nccl.parsers.remark import Remark
from tools.nccl.parsers.topo_xml import Topology

_ZIP = b"PK\x03\x04"
_START = 4096


@dataclass
class Gathered:
    """What a list of files has."""

    measurement: Measurement
    """Without pairs and collectives where only files of NCCL's own were given."""
    remarks: list[tuple[str, Remark]] = field(default_factory=list)
    """Each with its file's name."""
    logs: list[Log] = field(default_factory=list)
    topologies: list[Topology] = field(default_factory=list)
    is_test: bool = False
    """Whether one of them is of a test, not only what NCCL itself has written down: then figures are due."""

    @property
    def has_figures(self) -> bool:
        """Whether anything in it was measured."""
        return self.measurement.has_figures

    @property
    def verdict(self) -> Verdict:
        """What the remarks alone make of the machine."""
        return max(
            (one.verdict for _, one in self.remarks), key=lambda one: one.exit_code, default=Verdict.ok
        )


def gather(paths: Sequence[Path], operation: str | None = None) -> Gathered:
    """Read files of any mix of kinds; raises UserError for one that is none of them.

    One may be a measurement of `trierarch nccl test`; collectives of nccl-tests' outputs are added to it.
    """
    found = Gathered(Measurement([], 0, "none"))
    measured: list[Measurement] = []
    tests: list[Benchmark] = []
    for path in paths:
        if _is_archive(path):
            measured.append(Measurement.load(path))
            continue
        text = read_text(path)
        here = list(_read(found, path.name, text, str(path), operation, tests))
        if not here:
            raise UserError(
                f"{path} is none of the files that are known: measurement.npz, output of nccl-tests (text or JSON), "
                "NCCL_TOPO_DUMP_FILE, NCCL_GRAPH_DUMP_FILE, a log with NCCL_DEBUG=INFO"
            )
    if len(measured) > 1:
        raise UserError(
            f"{len(measured)} measurements were given: analyse one, and give an earlier one as --baseline"
        )
    found.is_test = bool(measured or tests)
    found.measurement = _together(measured, tests, found)
    return found


def read_measurement(path: Path, operation: str | None = None) -> Measurement:
    """Read a file with figures: a measurement, or nccl-tests' output; raises UserError for another."""
    found = gather([path], operation)
    if not found.has_figures:
        raise UserError(
            f"{path} has no figures to compare with: give a measurement.npz, or nccl-tests' output"
        )
    return found.measurement


def _read(
    found: Gathered, name: str, text: str, where: str, operation: str | None, tests: list[Benchmark]
) -> Iterator[str]:
    """Read a text into `found` and `tests`; yield the kinds that it is of."""
    start = text.lstrip()[:_START]
    if start.startswith("<"):
        if "<graphs" in start:
            graphs = graph_xml.parse(text, where)
            found.remarks += [(name, one) for one in graph_xml.remarks(graphs)]
        else:
            topology = topo_xml.parse(text, where)
            found.topologies.append(topology)
            found.remarks += [(name, one) for one in topology.remarks()]
        yield "xml"
        return
    benchmarks: list[Benchmark] = []
    if start.startswith("{"):
        benchmarks = nccl_tests_json.parse(text, where, operation)
    elif nccl_tests_text.is_output(text):
        benchmarks = nccl_tests_text.parse(text, where, operation)
    tests += benchmarks
    found.remarks += [(name, one) for test in benchmarks for one in test.remarks()]
    if benchmarks:
        yield "nccl-tests"
    if log.is_log(text):
        found.logs.append(log.parse(text, where))
        found.remarks += [(name, one) for one in log_words.remarks(found.logs[-1])]
        yield "log"


def _together(measured: list[Measurement], tests: list[Benchmark], found: Gathered) -> Measurement:
    """Return one measurement of all that was read."""
    if measured and tests:
        added = to_measurement(tests)
        one = dataclasses.replace(
            measured[0],
            collectives=[*measured[0].collectives, *added.collectives],
            unmeasured=[*measured[0].unmeasured, *added.unmeasured],
        )
    elif measured:
        one = measured[0]
    elif tests:
        one = to_measurement(tests)
    else:
        hosts = list(dict.fromkeys(name for log_ in found.logs for name in log_.hosts))
        gpus = [len(host.ranks) for log_ in found.logs for host in log_.hosts.values()]
        gpus += [len(topology.gpus) for topology in found.topologies]
        one = Measurement(hosts or ["unknown"], max(gpus, default=1) or 1, "nccl")
    adapters = [net for topology in found.topologies for net in topology.nets]
    if adapters and "nics_per_node" not in one.about:
        one.about |= {"nics_per_node": len(found.topologies[0].nets), "nic_gbit": adapters[0].speed * 8 / 1e9}
    return one


def _is_archive(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_ZIP)) == _ZIP
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
