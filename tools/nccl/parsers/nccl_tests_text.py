"""The output of nccl-tests as text, of old versions and new ones.

Source of the format: NVIDIA, nccl-tests, src/common.cu and src/util.cu (2016 to 2026).
"""

import re
from collections.abc import Iterator
from pathlib import Path

from contract.errors import UserError
from tools.nccl.busbw import FACTORS
from tools.nccl.parsers.lines import lines, read_text
from tools.nccl.parsers.nccl_tests import OPERATIONS, OTHERS, Benchmark, Device, Row, name_program

_PROGRAM = re.compile(r"\b([a-z]+(?:_[a-z]+)*)_perf(?:_mpi)?\b", re.IGNORECASE)
_DEVICE = re.compile(
    r"#?\s*Rank\s+(?P<rank>\d+)\s+(?:Group\s+\d+\s+)?Pid\s+\d+\s+on\s+(?P<host>\S+)\s+"
    r"device\s+(?P<device>\d+)\s+\[[^\]]*\]\s*(?P<model>.*)"
)
_AVERAGE = re.compile(r"#?\s*Avg bus bandwidth\s*:\s*(\S+)")
_BOUNDS = re.compile(r"#?\s*Out of bounds values\s*:\s*(\d+)\s*(\w*)")
_FAILURE = re.compile(r"(?:Test (?:NCCL|CUDA) failure|test failure|# error:|Invalid number of GPUs).*")
_VERSION = re.compile(r"#?\s*nccl-tests version (\S+)")
_START = re.compile(r"#?\s*nThreads?:?\s+\d+\s+nGpus:?\s+\d+")
_ROW = re.compile(r"\s*\d+\s+\d+\s+[a-z]\w*\s+\S")
_FIRST_COLUMNS = ("size", "count", "type")


def is_output(text: str) -> bool:
    """Whether a text is of nccl-tests: a table of theirs is in it."""
    return "busbw" in text and any(_header(line.own) is not None for line in lines(text))


def parse(text: str, where: str, operation: str | None = None) -> list[Benchmark]:
    """Read all tests that are in a log; raises UserError where there is none.

    `where` names the text in errors. `operation` says what to take the tests for that do not say it themselves.
    """
    if operation is not None and operation.lower() not in OPERATIONS:
        raise UserError(f"{operation}: nccl-tests have no such operation, give one of {', '.join(FACTORS)}")
    tests = list(_tests(text))
    if not any(test.rows or test.failures for test in tests):
        raise UserError(f"{where} has no results of nccl-tests: the table of sizes and times is missing")
    for test in tests:
        name_program(test, operation)
    return [test for test in tests if test.rows or test.failures]


def parse_file(path: Path, operation: str | None = None) -> list[Benchmark]:
    """Read a log of nccl-tests; raises UserError."""
    return parse(read_text(path), str(path), operation)


def _tests(text: str) -> Iterator[Benchmark]:
    test, columns = Benchmark(), list[str]()
    announced: str | None = None
    for own in _own_lines(text):
        stripped = own.strip()
        if "Collective test concluded" in own:
            test.program, announced = test.program or named(own), None
            continue
        announced = named(own) or announced
        if _START.match(own) or "Collective test starting" in own:
            if test.rows or test.failures:
                yield test
                test, columns = Benchmark(), []
            test.program = announced or test.program
        elif device := _DEVICE.match(own):
            if test.rows:  # a version that prints no line before its devices
                yield test
                test, columns = Benchmark(program=announced), []
            test.devices.append(
                Device(int(device["rank"]), device["host"], int(device["device"]), device["model"].strip())
            )
        elif (header := _header(own)) is not None:
            if test.rows:
                yield test
                test = Benchmark(program=announced, devices=test.devices)
            columns = header
        elif average := _AVERAGE.match(own):
            value = _number(average[1])
            test.average_busbw = None if value is None else value * 1e9
            # The next test in a log says its own name, or none.
            announced, test.program = None, test.program or announced
        elif bounds := _BOUNDS.match(own):
            test.out_of_bounds = _whole(bounds[1]) if bounds[2] != "OK" else 0
        elif failure := _FAILURE.search(own):
            if failure[0].strip(" #") != "error:":
                test.failures.append(" ".join(failure[0].split())[:300])
        elif _ROW.match(own):
            test.rows += _row(stripped.split(), columns)
        elif version := _VERSION.match(own):
            test.version = version[1]
    if test.program is None:
        test.program = announced
    yield test


def _own_lines(text: str) -> Iterator[str]:
    """Yield what nccl-tests printed; rows that NCCL's messages interrupted are put together."""
    half = ""
    for line in lines(text):
        if line.message is not None and (half or _ROW.match(line.own)):
            half += f"{line.own} "
            continue
        if half and not line.own.lstrip().startswith("#"):
            yield half + line.own
        else:
            yield from (one for one in (half, line.own) if one.strip())
        half = ""
    if half:
        yield half


def named(line: str) -> str | None:
    """Return the operation whose program a line names, such as a command line or nccl-tests' head."""
    names = [found.lower() for found in _PROGRAM.findall(line)]
    return next((name for name in names if name in OPERATIONS or name in OTHERS), None)


def _header(line: str) -> list[str] | None:
    """Return the names of a table's columns, if the line is its head."""
    words = line.strip().lstrip("#").split()
    if tuple(words[:3]) not in (_FIRST_COLUMNS, ("bytes", "N", "type")) or "busbw" not in words:
        return None
    return [{"bytes": "size", "N": "count", "op": "redop"}.get(word, word) for word in words]


def _row(words: list[str], columns: list[str]) -> Iterator[Row]:
    """Yield the halves of a row that are complete."""
    if columns[:3] != list(_FIRST_COLUMNS):
        columns = _usual_columns(words)
    named = dict(zip(columns[:5], words[:5], strict=False))
    size_bytes = _whole(named.get("size", ""))
    if not size_bytes:
        return  # too small for that many ranks
    starts = [index for index, name in enumerate(columns) if name in ("time", "cputime")]
    for half, (start, end) in enumerate(zip(starts, [*starts[1:], len(columns)], strict=True)):
        values = dict(zip(columns[start:end], words[start:end], strict=False))
        time, algbw, busbw = (_number(values.get(name, "")) for name in (columns[start], "algbw", "busbw"))
        if not time or algbw is None or busbw is None:
            continue
        wrong = next((values[name] for name in ("#wrong", "error", "res") if name in values), None)
        root = _number(named.get("root", ""))
        yield Row(
            size_bytes=size_bytes,
            redop=named.get("redop"),
            root=None if root is None else int(root),
            time_s=time * 1e-6,
            p99_s=(_number(values.get("i_p99", "")) or float("nan")) * 1e-6,
            algbw=algbw * 1e9,
            busbw=busbw * 1e9,
            wrong=_wrong(wrong, columns),
            in_place=half == 1,
        )


def _usual_columns(words: list[str]) -> list[str]:
    """Name the columns of a row whose head is missing, by its words."""
    columns = list(_FIRST_COLUMNS)
    if len(words) > 3 and _number(words[3]) is None:
        columns.append("redop")
        if len(words) in (9, 13):
            columns.append("root")
    measures = ["time", "algbw", "busbw", "#wrong"]
    return columns + measures * (1 if len(words) < 11 else 2)


def _wrong(word: str | None, columns: list[str]) -> int | None:
    """Return how many values were wrong; old versions print the largest error, of which rounding is no fault."""
    if word is not None and "nan" in word.lower():
        return 1
    value = _number(word or "")
    if value is None:
        return None
    if "#wrong" in columns:
        return int(value)
    return int(value > 1e-2)


def _number(word: str) -> float | None:
    """Read a finite, non-negative number (or a root of -1)."""
    try:
        value = float(word)
    except ValueError:
        return None
    return value if -2 < value < 1e18 else None


def _whole(word: str) -> int | None:
    return int(word) if word.isascii() and word.isdigit() and len(word) < 19 else None
