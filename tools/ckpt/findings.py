"""What is wrong with a checkpoint, in a form for people and for scripts."""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from contract.errors import UserError


class Severity(StrEnum):
    """How much a finding matters."""

    ERROR = "error"
    """Not what was saved, or not usable as a whole."""
    WARNING = "warning"
    """Possible, and worth a look."""
    NOTE = "note"
    """What could not be checked."""


@dataclass(frozen=True)
class Finding:
    """One fault, and where it is as far as that is known."""

    severity: Severity
    text: str
    """A clause without a place."""
    tensor: str | None = None
    file: str | None = None
    """Relative to the checkpoint."""
    offset: int | None = None
    """Of the first byte concerned, in the file."""
    rank: int | None = None
    """Who wrote it."""

    def __str__(self) -> str:
        places = [
            *([f"tensor {self.tensor}"] if self.tensor is not None else []),
            *([f"file {self.file}"] if self.file is not None else []),
            *([f"byte {self.offset}"] if self.offset is not None else []),
            *([f"written by rank {self.rank}"] if self.rank is not None else []),
        ]
        text = f"{self.severity}: {self.text}" + (f" ({', '.join(places)})" if places else "")
        return "".join(letter if letter.isprintable() else "?" for letter in text)

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class DamageError(Exception):
    """Bytes of a checkpoint are not what its format wants; carries the finding."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


class UnreadableError(UserError):
    """Nothing can be said of what a path holds: it is missing, of no known format, or its directory is damaged."""

    exit_code = 2


def error(text: str, **where: Any) -> Finding:
    """Make a finding of what is not as it was saved; `where` has its other fields."""
    return Finding(Severity.ERROR, text, **where)


def warning(text: str, **where: Any) -> Finding:
    """Make a finding of what is worth a look."""
    return Finding(Severity.WARNING, text, **where)


def note(text: str, **where: Any) -> Finding:
    """Make a finding of what could not be checked."""
    return Finding(Severity.NOTE, text, **where)
