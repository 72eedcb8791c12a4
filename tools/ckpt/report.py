"""What was found in a checkpoint, for people and for scripts."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from tools.ckpt.findings import Finding, Severity


class Depth(StrEnum):
    """How closely to look."""

    QUICK = "quick"
    """Structure, and sizes of files."""
    FULL = "full"
    """Every byte against its hash or checksum."""
    DEEP = "deep"
    """What the values say, too."""


@dataclass
class Report:
    """What was found in one checkpoint."""

    path: Path
    depth: Depth
    format: str = ""
    step: int | None = None
    checked_by: str | None = None
    tensors: int = 0
    read_bytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    unreadable: str | None = None

    @property
    def errors(self) -> list[Finding]:
        """Findings that make it damaged."""
        return [one for one in self.findings if one.severity is Severity.ERROR]

    @property
    def exit_code(self) -> int:
        """0 whole, 1 damaged, 2 unreadable."""
        return 2 if self.unreadable is not None else int(bool(self.errors))

    @property
    def verdict(self) -> str:
        """In a word or a few."""
        if self.exit_code:
            return ("", "damaged", "unreadable")[self.exit_code]
        if self.depth is Depth.QUICK:
            return "complete, bytes not looked at"
        return "whole" if self.checked_by is not None else "complete, nothing to check its bytes against"

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "path": str(self.path),
            "depth": self.depth,
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "format": self.format,
            "step": self.step,
            "checked_by": self.checked_by,
            "tensors": self.tensors,
            "read_bytes": self.read_bytes,
            "unreadable": self.unreadable,
            "findings": [finding.facts() for finding in self.findings],
        }
