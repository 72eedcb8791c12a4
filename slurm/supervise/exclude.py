"""Which nodes a run should keep away from, for how long, and how many it can afford to."""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from contract.run_folder import Event

FORGET_AFTER_H = 24.0


def excluded_nodes(
    events: Iterable[Mapping[str, Any]], now: float | None = None, for_s: float = FORGET_AFTER_H * 3600
) -> list[str]:
    """Name the nodes that failed within the last `for_s` seconds, the one that failed last first."""
    now = time.time() if now is None else now
    failed: dict[str, float] = {}
    for event in events:
        node, when = event.get("node"), event.get("time")
        if (
            event.get("event") == Event.NODE_FAILED
            and isinstance(node, str)
            and isinstance(when, int | float)
        ):
            failed[node] = max(failed.get(node, when), when)
    recent = [node for node, when in failed.items() if now - when < for_s]
    return sorted(recent, key=lambda node: (-failed[node], node))


def affordable(excluded: Sequence[str], usable: Collection[str], needed: int) -> list[str]:
    """Cut an exclude list, newest failure first, so that `needed` of the usable nodes are left.

    A job that excludes too many would wait for ever; what failed longest ago is tried again first.
    """
    spare = max(0, len(set(usable)) - needed)
    kept: list[str] = []
    for node in excluded:
        if node not in usable:
            kept.append(node)
        elif spare > 0:
            spare -= 1
            kept.append(node)
    return kept
