"""Does a job fit into what its partition and QOS allow, and if not, which others would take it?"""

from collections.abc import Sequence

from contract.errors import ConfigError
from slurm.sites.profile import Limit


def allows(limit: Limit, nodes: int, hours: float) -> bool:
    """Whether a job of that size and length is within a limit."""
    return (
        limit.min_nodes <= nodes
        and (limit.max_nodes is None or nodes <= limit.max_nodes)
        and (limit.max_hours is None or hours <= limit.max_hours)
    )


def applying(limits: Sequence[Limit], partition: str | None, qos: str | None) -> list[Limit]:
    """Return the limits of a partition and a QOS; none means that nothing is known of them.

    A job fits if one of them allows it: a site may let few nodes run longer than many.
    """
    return [limit for limit in limits if limit.partition in (None, partition) and limit.qos == qos]


def check_limits(
    limits: Sequence[Limit], partition: str | None, qos: str | None, nodes: int, hours: float
) -> None:
    """Raise ConfigError if the job is too large, too small or too long, naming what would take it."""
    ours = applying(limits, partition, qos)
    if not ours or any(allows(limit, nodes, hours) for limit in ours):
        return
    asked = f"{_count(nodes)} for {_hours(hours)}"
    where = _where(partition, qos)
    fitting = [limit for limit in limits if allows(limit, nodes, hours)]
    if fitting:
        advice = "give " + " or ".join(dict.fromkeys(_overrides(limit, partition, qos) for limit in fitting))
    else:
        advice = f"nothing here takes that, {_largest(limits, nodes, hours)}"
    raise ConfigError(
        f"{asked} is not within what {where} allows ({'; '.join(map(describe, ours))}): {advice}"
    )


def describe(limit: Limit) -> str:
    """Say a limit in words: `2-64 nodes, at most 24 h`."""
    if limit.max_nodes is None:
        nodes = f"{_count(limit.min_nodes)} or more" if limit.min_nodes > 1 else "any number of nodes"
    elif limit.min_nodes > 1:
        nodes = f"{limit.min_nodes}-{limit.max_nodes} nodes"
    else:
        nodes = f"at most {_count(limit.max_nodes)}"
    return f"{nodes}, {'any time' if limit.max_hours is None else f'at most {_hours(limit.max_hours)}'}"


def _where(partition: str | None, qos: str | None) -> str:
    named = [f"partition {partition}" if partition else "", f"QOS {qos}" if qos else ""]
    return " with ".join(name for name in named if name) or "the default partition"


def _overrides(limit: Limit, partition: str | None, qos: str | None) -> str:
    changes = []
    if limit.partition not in (None, partition):
        changes.append(f"job.partition={limit.partition}")
    if limit.qos != qos:
        # A null of the job's would take the profile's, so that both have to go.
        changes.append(f"job.qos={limit.qos}" if limit.qos else "job.qos=null cluster.qos=null")
    return " ".join(changes)


def _largest(limits: Sequence[Limit], nodes: int, hours: float) -> str:
    """Say how many nodes can be had for so long, and for how long so many; if neither, all that there is."""
    long_enough = [limit for limit in limits if allows(limit, limit.min_nodes, hours)]
    smaller = [(limit.max_nodes, limit) for limit in long_enough if limit.max_nodes is not None]
    of_size = [limit for limit in limits if allows(limit, nodes, 0)]
    shorter = [(limit.max_hours, limit) for limit in of_size if limit.max_hours is not None]
    parts = []
    if smaller and (most := max(smaller, key=lambda pair: pair[0]))[0] < nodes:
        parts.append(f"the most for {_hours(hours)} is {_count(most[0])} ({_name(most[1])})")
    if shorter:
        longest = max(shorter, key=lambda pair: pair[0])
        parts.append(f"the longest for {_count(nodes)} is {_hours(longest[0])} ({_name(longest[1])})")
    return " and ".join(parts) or "; ".join(f"{_name(limit)}: {describe(limit)}" for limit in limits)


def _name(limit: Limit) -> str:
    named = [
        f"job.partition={limit.partition}" if limit.partition else "",
        f"job.qos={limit.qos}" if limit.qos else "",
    ]
    return " ".join(name for name in named if name) or "the default"


def _count(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes} nodes"


def _hours(hours: float) -> str:
    return f"{hours:g} h" if hours >= 1 or hours == 0 else f"{hours * 60:g} min"
