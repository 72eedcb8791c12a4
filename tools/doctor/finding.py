"""What a check says, and the list of checks: a new one is one function with `@check` above it in `checks/`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from contract.exit_codes import ExitCode

if TYPE_CHECKING:
    from tools.doctor.facts import Facts


class Severity(StrEnum):
    """How bad it is."""

    error = "error"
    """The submission is refused, or the run ends."""
    warning = "warning"
    """It runs, but loses time, GPU hours or work."""
    note = "note"
    """Good to know."""


class About(StrEnum):
    """What a check looks at."""

    config = "config"
    environment = "environment"


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be."""

    severity: Severity
    where: str
    """A setting, a variable, a file or a host."""
    what: str
    """One sentence with the figures that it rests on."""
    fix: str = ""
    """What to do; empty where `what` says it."""


class NotCheckedError(Exception):
    """A check cannot be made here; the message says why."""


class NoUseError(Exception):
    """A check has nothing to look at in such a run; the message says why."""


Find = Callable[["Facts"], Iterable[Finding]]
"""A check: a pure function of the facts. Raises `NotCheckedError`, `NoUseError`."""


@dataclass(frozen=True)
class Check:
    """A check and its name in the table."""

    name: str
    about: About
    find: Find


CHECKS: list[Check] = []
"""All checks, in the order in which they are made."""


def check(name: str, about: About) -> Callable[[Find], Find]:
    """Add a function to the list."""

    def add(find: Find) -> Find:
        assert all(name != one.name for one in CHECKS), name
        CHECKS.append(Check(name, about, find))
        return find

    return add


@dataclass(frozen=True)
class Outcome:
    """Of one check."""

    name: str
    about: About
    findings: tuple[Finding, ...] = ()
    not_checked: str = ""
    """Why it could not be made."""
    no_use: str = ""
    """Why it has nothing to look at."""


def error(where: str, what: str, fix: str = "") -> Finding:
    """The run ends because of it."""
    return Finding(Severity.error, where, what, fix)


def warning(where: str, what: str, fix: str = "") -> Finding:
    """It costs something."""
    return Finding(Severity.warning, where, what, fix)


def note(where: str, what: str, fix: str = "") -> Finding:
    """Good to know."""
    return Finding(Severity.note, where, what, fix)


def exit_code(findings: Iterable[Finding]) -> int:
    """0 for notes at most, 1 for warnings, 78 for errors."""
    worst = {one.severity for one in findings}
    if Severity.error in worst:
        return ExitCode.CONFIG
    return 1 if Severity.warning in worst else 0
