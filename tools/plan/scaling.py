"""The same training on other numbers of nodes: with the same batch (strong scaling), and with one that grows (weak)."""

from collections.abc import Sequence
from dataclasses import dataclass

from contract.errors import ConfigError
from tools.plan.report import layout_words, percent, seconds
from tools.plan.request import Request
from tools.plan.search import Plan, search
from tools.table import table


@dataclass(frozen=True)
class Scaled:
    """One number of nodes."""

    nodes: int
    kind: str
    """strong or weak."""
    samples: int
    plan: Plan | None
    """None where no layout works or fits."""
    efficiency: float | None
    """Tokens/s of a GPU against those on the number of nodes that is planned for."""


def nodes_of(text: str) -> list[int]:
    """Read `nodes=8,16,32`; raises `ConfigError`."""
    key, equals, values = text.partition("=")
    try:
        if key.strip() not in ("nodes", "job.nodes") or not equals:
            raise ValueError
        found = [int(value) for value in values.strip().strip("[]").split(",")]
        if min(found) < 1:
            raise ValueError
    except ValueError:
        raise ConfigError(f"--what-if {text}: give numbers of nodes, like nodes=8,16,32") from None
    return sorted(set(found))


def scaling(request: Request, counts: Sequence[int], best: Plan) -> list[Scaled]:
    """Plan each number of nodes twice; `best`: the plan for the number asked for."""
    here, samples = request.machine.nodes, best.case.samples
    found = []
    for kind in ("strong", "weak"):
        for nodes in counts:
            batch = samples if kind == "strong" else samples * nodes // here
            exact = kind == "strong" or samples * nodes % here == 0
            plan = _best(request.on(nodes, batch)) if exact and batch else None
            share = None if plan is None else plan.tokens_per_s_per_gpu / best.tokens_per_s_per_gpu
            found.append(Scaled(nodes, kind, batch, plan, share))
    return found


def _best(request: Request) -> Plan | None:
    plans = search(request.config, request.machine, request.fixed, 1).plans
    return plans[0] if plans else None


def scaling_words(found: Sequence[Scaled]) -> str:
    """A table for each kind."""
    words = {
        "strong": "strong scaling: the same batch",
        "weak": "weak scaling: the batch grows with the nodes",
    }
    head = ("nodes", "samples", "step", "tokens/s", "per GPU", "MFU", "layout")
    parts = []
    for kind, title in words.items():
        lines = [
            (str(one.nodes), f"{one.samples:,}", "", "", "", "", "none works or fits")
            if one.plan is None
            else (
                str(one.nodes),
                f"{one.samples:,}",
                seconds(one.plan.step.total_s),
                f"{one.plan.case.tokens / one.plan.step.total_s:,.0f}",
                percent(one.efficiency or 0.0),
                percent(one.plan.mfu),
                layout_words(one.plan),
            )
            for one in found
            if one.kind == kind
        ]
        parts.append(f"{title}\n{table(head, lines, frozenset(head[:-1]), None)}")
    return "\n".join(parts)


def scaling_tree(found: Sequence[Scaled]) -> list[dict[str, object]]:
    """Plain data."""
    return [
        {
            "nodes": one.nodes,
            "kind": one.kind,
            "samples": one.samples,
            "step_s": None if one.plan is None else one.plan.step.total_s,
            "tokens_per_s": None if one.plan is None else one.plan.case.tokens / one.plan.step.total_s,
            "efficiency": one.efficiency,
            "layout": None if one.plan is None else layout_words(one.plan),
        }
        for one in found
    ]
