"""The report for a terminal: the verdict first, then what is guilty, then what to do."""

import textwrap
from collections.abc import Iterator

from tools.nccl.report.content import (
    Content,
    fault_row,
    microseconds,
    range_of_sizes,
    size,
    speed,
)
from tools.nccl.report.hostlist import compress
from tools.table import table

_WIDTH = 100
_MOST_FAULTS = 30
_MOST_ROWS = 30


def text(content: Content) -> str:
    """Return the report as plain text."""
    return "\n".join(block.rstrip("\n") + "\n" for block in _blocks(content) if block)


def _blocks(content: Content) -> Iterator[str]:
    yield f"{content.verdict}: {content.summary}\n{content.what}"
    yield _faults(content)
    yield _act(content)
    yield _all_reduce(content)
    yield _others(content)
    yield _levels(content)
    yield _remarks(content)
    notes = [*content.findings.notes, *content.advice.notes]
    yield _list("Notes", notes)
    yield _list("Not measured", content.measurement.unmeasured)


def _faults(content: Content) -> str:
    faults = content.findings.faults
    if not faults:
        return ""
    rows = [fault_row(one) for one in faults[:_MOST_FAULTS]]
    more = f"and {len(faults) - _MOST_FAULTS} more\n" if len(faults) > _MOST_FAULTS else ""
    head = ("guilty", "what", "left of it", "sure", "evidence")
    return table(head, rows, frozenset({"left of it", "sure"}), _WIDTH) + more


def _act(content: Content) -> str:
    advice = content.advice
    lines = [f"setting:      {one.text} (cluster=.../cluster.yaml): {one.reason}" for one in content.settings]
    if not content.measured:
        return _hanging(lines)
    if content.exclude:
        lines.append(f"leave out:    {content.exclude_setting} (exclude.txt)")
    lines.append(
        f"node order:   {advice.order_text}" + (": job.node_order=.../hostfile" if advice.order else "")
    )
    if advice.switches:
        lines.append(
            f"all-reduce:   {', '.join(range_of_sizes(advice.switches))} ({content.all_reduce_basis})"
        )
        if any(name == "hierarchical" for _, name in advice.switches):
            lines[-1] += ": comm.allreduce=auto comm.plan=.../plan.json"
    lines += [f"mesh:         {one}" for one in advice.mesh]
    lines += [f"relay:        {one}" for one in advice.relays]
    return _hanging(lines)


def _hanging(lines: list[str]) -> str:
    return "\n".join(_wrap(line, " " * 14) for line in lines)


def _all_reduce(content: Content) -> str:
    rows = content.all_reduce()
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row.measured))
    head = ("all-reduce", "time", "algbw", *(f"busbw {name}" for name in names), "wrong", "suits")
    cells = []
    for row in rows[-_MOST_ROWS:]:
        flat = row.measured.get("flat") or next(iter(row.measured.values()))
        wrong = sum(one.wrong for one in row.measured.values())
        cells.append(
            (
                size(row.size_bytes),
                microseconds(flat.time_s),
                speed(flat.algbw),
                *(speed(row.measured[name].busbw) if name in row.measured else "" for name in names),
                str(wrong) if wrong else "",
                row.recommended,
            )
        )
    return table(head, cells, frozenset(head) - {"suits"}, None)


def _others(content: Content) -> str:
    """Return the other operations, each at its largest size."""
    best = {}
    for one in sorted(content.collectives(), key=lambda one: one.size_bytes):
        if one.operation != "all_reduce" and one.scope == "world":
            best[one.operation, one.ranks] = one
    cells = [
        (
            one.operation,
            str(one.ranks),
            size(one.size_bytes),
            microseconds(one.time_s),
            speed(one.busbw),
            str(one.wrong or ""),
        )
        for one in best.values()
    ]
    head = ("operation", "ranks", "size", "time", "busbw", "wrong")
    return table(head, cells, frozenset(head[1:]), None) if cells else ""


def _levels(content: Content) -> str:
    cells = [
        (
            one.name,
            str(one.pairs),
            speed(one.bandwidth),
            speed(one.bandwidth_mad),
            microseconds(one.latency_s),
        )
        for one in content.findings.levels
    ]
    head = ("pairs", "number", "bandwidth", "+-", "latency")
    groups = content.findings.groups
    told = ""
    if len(groups) > 1:
        shown = "; ".join(compress(group) for group in groups[:8]) + ("; ..." if len(groups) > 8 else "")
        told = f"nodes near each other, {len(groups)} groups: {shown}\n"
    return (table(head, cells, frozenset(head[1:]), None) if cells else "") + told


def _remarks(content: Content) -> str:
    lines = []
    last = None
    for name, one in content.remarks:
        if name != last:
            lines.append(f"{name}:")
            last = name
        hosts = f" [{compress(one.hosts)}]" if one.hosts else ""
        todo = f" -> {one.todo}" if one.todo else ""
        mark = "  " if one.verdict.exit_code == 0 else "! "
        lines.append(_wrap(f"{mark}{one.text}{hosts}{todo}", "  "))
    return "\n".join(lines)


def _list(title: str, lines: list[str]) -> str:
    return "\n".join([f"{title}:", *(_wrap(f"- {one}", "  ") for one in lines)]) if lines else ""


def _wrap(line: str, indent: str) -> str:
    return textwrap.fill(
        line, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
