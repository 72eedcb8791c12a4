"""Lines of a job's log as the program wrote them: without what launchers and terminals put around them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from contract.errors import UserError

MOST_BYTES = 2_000_000_000
"""A log of a thousand ranks has some hundred megabytes; more than this would not fit a login node's memory."""

# Open MPI's --tag-output, srun --label, torchrun's and MPICH's rank, NCCL's own time stamp.
_TAG = re.compile(r"\[\d+,\d+\]<std(?:out|err|diag)>: ?")
_LABEL = re.compile(r"(?:\[(?:default|rank)?\d+\]:? ?|\d+: )+")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b\x0c\x0e-\x1f]")
_NCCL = re.compile(
    r"(?P<host>[^\s:\[\]<>]+):(?P<pid>\d+):(?P<thread>\d+) \[(?P<device>-?\d+)\] (?:\S+:\d+ )?"
    r"NCCL (?P<level>INFO|WARN|TRACE|VERSION|ABORT|CALL) ?(?P<text>.*)"
)
_ROW = re.compile(r"\s*\d+\s+\d+\s+[a-z]\w*\s")
_FIGURES = re.compile(r"(?:\s*\d[\d.]*(?:e[+-]\d+)?){2,}\s*$")
_END_OF_ROW = re.compile(r"(?:-1|\d+|N/A)(?=[A-Za-z_])")


class Message(NamedTuple):
    """One line of NCCL's log."""

    host: str
    process: int
    device: int
    level: str
    text: str


class Line(NamedTuple):
    """A line: what is the program's own, and NCCL's message that it ends with."""

    own: str
    message: Message | None


def read_text(path: Path) -> str:
    """Return a file's text, odd bytes replaced; raises UserError."""
    try:
        if path.is_dir():
            raise UserError(f"{path} is a folder: give the files in it")
        if path.stat().st_size > MOST_BYTES:
            raise UserError(f"{path} has more than {MOST_BYTES / 1e9:.0f} GB: give a part of it")
        return path.read_bytes().decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error})") from error


def lines(text: str) -> Iterator[Line]:
    """Yield the lines of a log.

    NCCL's messages are split from what stands before them, which may be the first half of a row of nccl-tests: that
    prints a row's beginning before an operation, and its figures after it.
    """
    for raw in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        line = raw if raw.isprintable() else _ESCAPES.sub("", raw)
        if "]<std" in line:
            line = _TAG.sub("", line)
        if label := _LABEL.match(line):
            line = line[label.end() :]
        found = _NCCL.search(line) if " NCCL " in line else None
        if found is None:
            yield Line(line, None)
            continue
        own, host = line[: found.start()], found["host"]
        if (_ROW.match(own) or _FIGURES.match(own)) and (end := _END_OF_ROW.match(host)):
            own, host = own + end[0], host[end.end() :]
        message = Message(
            host, int(found["pid"]), int(found["device"]), found["level"], found["text"].strip()
        )
        yield Line(own, message)
