"""Is there a Slurm, and would it take the job?"""

from collections.abc import Iterator, Mapping

from contract.errors import closest
from slurm.client import parse_duration
from tools.doctor.facts import Facts
from tools.doctor.finding import About, Finding, NotCheckedError, NoUseError, check, error, note, warning
from tools.doctor.host import Place
from tools.doctor.slurm_says import Record


@check("Slurm", About.environment)
def reachable(facts: Facts) -> Iterator[Finding]:
    """Its commands and its controller."""
    if facts.is_local:
        raise NoUseError("cluster=local needs none")
    if facts.host.place is Place.elsewhere:
        yield note(
            "sbatch",
            f"no Slurm of cluster={facts.cluster.name} is set up on this host: nothing can be submitted from here, and "
            "what a login node would tell is not checked",
            f"run `trierarch doctor` again on a login node of {facts.cluster.name}, after its Slurm module",
        )
        return
    if complaint := facts.slurm.complaint:
        yield error(
            "Slurm", f"its controller does not answer ({complaint})", "try again later, or ask the site"
        )


@check("partition", About.environment)
def partition(facts: Facts) -> Iterator[Finding]:
    """Of the job: is it there, is it up, does it take the size and the time?"""
    _need_slurm(facts)
    partitions = facts.slurm.partitions
    if partitions is None:
        raise NotCheckedError("Slurm does not answer")
    name, origin = facts.settings.origin("partition", facts.host.environ)
    if name is None:
        name = next((one for one, record in partitions.items() if record.get("Default") == "YES"), None)
        if name is None:
            yield warning(
                "job.partition",
                "Slurm has no default partition, and the job names none",
                "give job.partition=NAME",
            )
            return
    for one in name.split(","):
        if one not in partitions:
            yield error(origin, f"{origin}={name}: Slurm has no partition {one}", closest(one, partitions))
        else:
            yield from _judge(facts, one, partitions[one])


@check("account", About.environment)
def account(facts: Facts) -> Iterator[Finding]:
    """May the user charge it?"""
    _need_slurm(facts)
    name, origin = facts.settings.origin("account", facts.host.environ)
    if name is None:
        raise NoUseError("the job names none")
    known = facts.slurm.accounts
    if known is None:
        raise NotCheckedError("Slurm's accounting does not answer, or does not tell")
    if name.lower() in (one.lower() for one in known):
        return
    config = facts.slurm.config or {}
    enforced = "associations" in config.get("AccountingStorageEnforce", "").lower()
    say = error if enforced else note
    yield say(origin, f"{origin}={name} is none of your accounts ({', '.join(known)})", closest(name, known))


def _need_slurm(facts: Facts) -> None:
    if facts.is_local:
        raise NoUseError("cluster=local needs no Slurm")
    facts.need_here()


def _judge(facts: Facts, name: str, record: Record) -> Iterator[Finding]:
    """Hold the job against a partition."""
    settings = facts.settings
    state = record.get("State", "UP")
    if state != "UP":
        yield warning(
            "job.partition",
            f"partition {name} is {state}: the job would wait",
            "another job.partition, or wait",
        )
    most, least = _number(record, "MaxNodes"), _number(record, "MinNodes")
    total = _number(record, "TotalNodes")
    for bound, word in ((most, "allows"), (total, "has")):
        if bound is not None and settings.nodes > bound:
            yield error(
                "job.nodes",
                f"{settings.nodes} nodes (job.nodes and job.spares) are more than the {bound} that partition "
                f"{name} {word}",
                f"job.nodes={max(1, bound - settings.job.spares)}, or another job.partition",
            )
            break
    if least is not None and settings.nodes < least:
        yield error(
            "job.nodes", f"partition {name} takes no job of less than {least} nodes", "another job.partition"
        )
    limit_s, asked_s = parse_duration(record.get("MaxTime", "")), parse_duration(settings.time_limit)
    if limit_s and asked_s and asked_s > limit_s:
        yield error(
            "job.time_limit",
            f"the time limit {settings.time_limit} is above the {record['MaxTime']} of partition {name}",
            f"job.time_limit={record['MaxTime']}: a job that is not done is requeued and goes on",
        )
    yield from _allowed(facts, name, record)


def _allowed(facts: Facts, name: str, record: Record) -> Iterator[Finding]:
    for key, allow, deny in (("account", "AllowAccounts", "DenyAccounts"), ("qos", "AllowQos", "DenyQos")):
        value, origin = facts.settings.origin(key, facts.host.environ)
        if value is None:
            continue
        allowed, denied = _names(record, allow), _names(record, deny)
        if (allowed and value not in allowed) or value in denied:
            which = f"it takes {', '.join(allowed)}" if allowed else f"it does not take {', '.join(denied)}"
            yield error(
                origin,
                f"partition {name} does not take {origin}={value} ({which})",
                f"another job.partition or job.{key}",
            )


def _number(record: Mapping[str, str], key: str) -> int | None:
    value = record.get(key, "")
    return int(value) if value.isdigit() else None


def _names(record: Mapping[str, str], key: str) -> list[str]:
    value = record.get(key, "")
    return [] if value in ("ALL", "(null)", "NONE", "") else value.split(",")
