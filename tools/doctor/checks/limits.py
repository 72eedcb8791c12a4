"""Limits of a process: memory that stays where it is, and open files."""

from collections.abc import Iterator

from tools.bytes_shown import size
from tools.doctor.facts import Facts
from tools.doctor.finding import About, Finding, NoUseError, check, error, note, warning
from tools.doctor.host import Place

LOCKED_BYTES = 2**30
"""Of memory that an adapter reads and writes by itself: less ends in errors of ibv_reg_mr."""
FILES_OF_A_RANK = 512
"""That a rank has open: data, checkpoints, sockets to its neighbours."""
FILES_FOR_A_RANK = 2
"""That the first rank has open for each other one."""


@check("locked memory", About.environment)
def locked(facts: Facts) -> Iterator[Finding]:
    """`ulimit -l`, which Slurm hands on to a job unless told otherwise."""
    has_adapters = bool(facts.host.adapters or facts.cluster.hcas or facts.on_gpus)
    if facts.settings.job.nodes == 1 or not has_adapters:
        raise NoUseError("one node, or no adapters that are known")
    facts.need_here()
    there = facts.host.limits.locked_bytes
    if there is None or there >= LOCKED_BYTES or not _handed_on(facts, "MEMLOCK"):
        return
    yield warning(
        "ulimit -l",
        f"a process may lock {size(there)} of memory (ulimit -l), and InfiniBand wants to without limit"
        + ("; Slurm hands the limit on to jobs" if facts.host.place is Place.login else ""),
        "ulimit -l unlimited before you submit, or ask the site for PropagateResourceLimitsExcept=MEMLOCK",
    )


@check("open files", About.environment)
def files(facts: Facts) -> Iterator[Finding]:
    """`ulimit -n`, which Slurm hands on to a job unless told otherwise."""
    facts.need_here()
    ranks = max(1, facts.settings.job.nodes * facts.settings.ranks_per_node)
    wanted, there = FILES_OF_A_RANK + FILES_FOR_A_RANK * ranks, facts.host.limits.open_files
    if there is None or there >= wanted or not _handed_on(facts, "NOFILE"):
        return
    most = facts.host.limits.most_open_files
    if most is not None and most < wanted:
        yield error(
            "ulimit -n",
            f"a process may open {there} files and at most {most} (ulimit -Hn), and the first of {ranks:,} "
            f"ranks needs about {wanted:,}",
            "ask the site to raise it",
        )
    else:
        say = warning if there < wanted // 2 or ranks > 1 else note
        yield say(
            "ulimit -n",
            f"a process may open {there} files (ulimit -n), and the first of {ranks:,} ranks needs about {wanted:,}",
            f"ulimit -n {max(4096, 2 * wanted)} before you submit",
        )


def _handed_on(facts: Facts, limit: str) -> bool:
    """Whether a job has the limits of the shell that submits it."""
    if facts.host.place is not Place.login:
        return True
    config = facts.slurm.config or {}
    handed, kept = (
        config.get("PropagateResourceLimits", "ALL"),
        config.get("PropagateResourceLimitsExcept", "(null)"),
    )
    if kept not in ("(null)", ""):
        return limit not in kept.split(",") and "ALL" not in kept.split(",")
    return handed == "ALL" or limit in handed.split(",")
