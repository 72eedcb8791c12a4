"""Make all checks, and write what they say."""

import json
import textwrap
from collections.abc import Sequence
from typing import Any

import tools.doctor.checks  # noqa: F401  (fills CHECKS)
from contract.errors import UserError
from tools.doctor.facts import Facts
from tools.doctor.finding import (
    CHECKS,
    About,
    Check,
    Finding,
    NotCheckedError,
    NoUseError,
    Outcome,
    Severity,
    error,
    exit_code,
)

_NARROWEST = 60


def examine(facts: Facts, checks: Sequence[Check] = CHECKS) -> list[Outcome]:
    """Return what each check says, in their order."""
    return [_made(one, facts) for one in checks]


def _made(one: Check, facts: Facts) -> Outcome:
    findings: list[Finding] = []
    try:
        # What was found before a check could go no further stays.
        for finding in one.find(facts):
            findings.append(finding)
    except NotCheckedError as reason:
        return Outcome(one.name, one.about, tuple(findings), not_checked=str(reason))
    except NoUseError as reason:
        return Outcome(one.name, one.about, tuple(findings), no_use=str(reason))
    except UserError as problem:
        findings.append(error(one.name, str(problem)))
    return Outcome(one.name, one.about, tuple(findings))


def found(outcomes: Sequence[Outcome]) -> list[Finding]:
    """All findings, the gravest first."""
    order = list(Severity)
    return sorted(
        (one for outcome in outcomes for one in outcome.findings), key=lambda one: order.index(one.severity)
    )


def render(outcomes: Sequence[Outcome], width: int | None) -> str:
    """Write for people; `width`: of the terminal, None for one line a sentence."""
    lines: list[str] = []
    findings = found(outcomes)
    for one in findings:
        # Many sentences begin with the setting itself.
        where = "" if one.what.startswith(one.where) else f"{one.where}: "
        lines += _wrapped(f"{one.severity + ':':9}{where}{one.what}", width)
        if one.fix:
            lines += _wrapped(f"{'':9}fix: {one.fix}", width)
    if not findings:
        lines.append("nothing is wrong, as far as can be seen from here")
    lines.append("")
    for about in About:
        names = [
            f"{one.name}{f' ({len(one.findings)})' if one.findings else ''}"
            for one in outcomes
            if one.about is about and not one.not_checked and not one.no_use
        ]
        if names:
            lines += _wrapped(f"{'checked, ' + about:22} {', '.join(names)}", width, 23)
    if idle := [one.name for one in outcomes if one.no_use]:
        lines += _wrapped(f"{'no use here':22} {', '.join(idle)}", width, 23)
    reasons: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.not_checked:
            reasons.setdefault(outcome.not_checked, []).append(outcome.name)
    for index, (why, names) in enumerate(reasons.items()):
        lines += _wrapped(f"{'' if index else 'not checked here':22} {', '.join(names)}: {why}", width, 23)
    lines += ["", _verdict(findings)]
    return "\n".join(lines) + "\n"


def as_tree(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Plain data, for a script."""
    by_finding = {id(one): outcome.name for outcome in outcomes for one in outcome.findings}
    findings = found(outcomes)
    return {
        "exit_code": int(exit_code(findings)),
        "findings": [
            {
                "severity": str(one.severity),
                "check": by_finding[id(one)],
                "where": one.where,
                "what": one.what,
                "fix": one.fix or None,
            }
            for one in findings
        ],
        "checks": [
            {
                "check": one.name,
                "about": str(one.about),
                "checked": not one.not_checked and not one.no_use,
                "no_use": one.no_use or None,
                "not_checked": one.not_checked or None,
            }
            for one in outcomes
        ],
    }


def to_json(outcomes: Sequence[Outcome]) -> str:
    """Write for a script."""
    return json.dumps(as_tree(outcomes), indent=1) + "\n"


def _verdict(findings: Sequence[Finding]) -> str:
    counts = [
        f"{number} {kind}{'s' * (number > 1)}"
        for kind in Severity
        if (number := sum(one.severity is kind for one in findings))
    ]
    return f"{', '.join(counts) or 'no findings'}; exit code {int(exit_code(findings))}"


def _wrapped(text: str, width: int | None, indent: int = 9) -> list[str]:
    if width is None or width < _NARROWEST:
        return [text.rstrip()]
    return textwrap.wrap(
        text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
