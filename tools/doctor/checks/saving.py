"""Checkpoints: often enough for the failures that are to be expected, and room for them."""

import math
from collections.abc import Iterator

from slurm.client import parse_duration
from tools.bytes_shown import size
from tools.doctor.facts import Facts
from tools.doctor.finding import About, Finding, NotCheckedError, NoUseError, check, error, note, warning
from tools.plan.settings import GoalsConfig
from train.layout.memory import Role
from train.model.config import parameter_count

DAY_S = 86_400.0
MOST_LOST = 0.02
"""Share of the GPU hours that may be lost between checkpoints before it is worth a word."""
TIMES_BEST = 2.0
"""How far from the best interval an interval may be: there the loss is a quarter more than at best."""
SAVED_BYTES = 12
"""Of a parameter in a checkpoint at most: fp32, and two moments."""
FEWEST_FILES = 10_000


@check("checkpoints and failures", About.config)
def often_enough(facts: Facts) -> Iterator[Finding]:
    """The interval between checkpoints, against Young's (1974): sqrt(2 x time between failures x cost)."""
    facts.need_gpus()
    dims, saving = facts.dims, facts.config.checkpoint
    goals = GoalsConfig()  # what the planner assumes
    between_s = DAY_S / (goals.failures_per_gpu_day * dims.ranks)
    if _timed_interval(facts)[0] / 2 / between_s <= MOST_LOST:
        return  # without a prediction of the step's time
    every_s, keys = min(_timed_interval(facts), *_counted_intervals(facts))
    waits_s, written_s = _cost_s(facts, goals)
    # The next one cannot begin before this one is written.
    best_s = max(math.sqrt(2 * between_s * waits_s), written_s)
    lost = every_s / 2 / between_s
    if lost <= MOST_LOST or every_s <= TIMES_BEST * best_s:
        return
    from tools.table import duration  # with all that knows of runs

    minutes = float(f"{max(1.0, best_s / 60):.1g}")
    settings = f"checkpoint.every_minutes={minutes:g}"
    yield warning(
        "checkpoint.every_minutes" if saving.every_steps == 0 else "checkpoint.every_steps",
        f"{keys}, and on {dims.ranks:,} GPUs something fails about every {duration(between_s)}: each time half "
        f"an interval is computed again, {lost:.0%} of the run; the best interval is {duration(best_s)}",
        settings,
    )


@check("room for checkpoints", About.environment)
def room(facts: Facts) -> Iterator[Finding]:
    """Free space where checkpoints go, and free files."""
    facts.need_here()
    folder = facts.config.run_folder.checkpoints
    there = facts.host.room(folder)
    if there is None:
        raise NotCheckedError(f"{folder} cannot be looked at")
    if there.free_files is not None and there.free_files < FEWEST_FILES:
        yield warning(
            "run.root",
            f"the file system of {folder} has {there.free_files} files left: a checkpoint has several for each rank",
            "remove some, or another run.root",
        )
    one, count = checkpoint_bytes(facts), _kept(facts)
    budget = facts.config.checkpoint.disk_budget_gb
    # One more is there while it is written.
    wanted = one * (count + 1) if budget is None else min(one * (count + 1), int(budget * 1e9) + one)
    there_already = one * len(facts.config.run_folder.published_steps())
    if one > there.free_bytes:
        yield error(
            "run.root",
            f"a checkpoint takes {size(one)} and {folder} has {size(there.free_bytes)} free: none can be saved",
            "free some space, or another run.root",
        )
    elif wanted - there_already > there.free_bytes:
        yield warning(
            "run.root",
            f"{count:,} checkpoint{'s' * (count > 1)} of {size(one)}, and one more while it is written, take "
            f"{size(wanted)}, and {folder} has {size(there.free_bytes)} free",
            "free some space, another run.root, checkpoint.disk_budget_gb=N, or checkpoint.compress=each",
        )
    if facts.config.checkpoint.keep_last == 0 and count > 20:
        yield note(
            "checkpoint.keep_last",
            f"checkpoint.keep_last=0 keeps all {count:,} checkpoints, {size(one * count)}",
            "checkpoint.keep_last=2 checkpoint.keep_every_steps=N",
        )


@check("quota of the file system", About.environment)
def quota(facts: Facts) -> list[Finding]:
    """There is no way to ask that all file systems know."""
    raise NotCheckedError(
        "file systems tell it in ways of their own: ask yours (`quota -s`, `lfs quota -hu $USER DIR`, "
        f"`mmlsquota`), for {_wanted_text(facts)} and some thousand files"
    )


def checkpoint_bytes(facts: Facts) -> int:
    """Size of one checkpoint; what `checkpoint.compress` saves is not known before."""
    return SAVED_BYTES * parameter_count(facts.sized.model)


def _wanted_text(facts: Facts) -> str:
    try:
        return size(checkpoint_bytes(facts) * (min(_kept(facts), 1000) + 1))
    except NotCheckedError:
        return "the checkpoints"


def _kept(facts: Facts) -> int:
    """How many checkpoints are there at the end at most."""
    saving, steps = facts.config.checkpoint, facts.config.loop.steps
    if saving.keep_last == 0:
        if saving.every_steps:
            return max(1, steps // saving.every_steps)
        try:
            run_s = steps * facts.step_s
        except (NotCheckedError, NoUseError):
            return 2
        return max(1, int(run_s / 60 / saving.every_minutes)) if saving.every_minutes else 1
    more = steps // saving.keep_every_steps if saving.keep_every_steps else 0
    found = saving.keep_last + more + saving.keep_best
    return min(found, max(1, steps // saving.every_steps)) if saving.every_steps else found


def _timed_interval(facts: Facts) -> tuple[float, str]:
    """Seconds between two checkpoints by the clock, and the setting that says so."""
    every_minutes = facts.config.checkpoint.every_minutes
    ways: list[tuple[float, str]] = [(math.inf, "")]
    if every_minutes:
        ways.append((60 * every_minutes, f"checkpoint.every_minutes={every_minutes:g}"))
    limit_s = parse_duration(facts.settings.time_limit)
    if limit_s:
        ways.append((float(limit_s), f"a job saves at its time limit, {facts.settings.time_limit}"))
    return min(ways)


def _counted_intervals(facts: Facts) -> list[tuple[float, str]]:
    """The same by steps."""
    from tools.table import duration

    every, steps = facts.config.checkpoint.every_steps, facts.config.loop.steps
    ways = [(steps * facts.step_s, "the run saves at its end")]
    if every:
        every_s = every * facts.step_s
        ways.append((every_s, f"checkpoint.every_steps={every} is every {duration(every_s)}"))
    return ways


def _cost_s(facts: Facts, goals: GoalsConfig) -> tuple[float, float]:
    """For how long training waits for a save, and how long it takes in all."""
    rate_gb_s = min(goals.write_gb_s_per_node * facts.settings.job.nodes, goals.write_gb_s)
    written_s = checkpoint_bytes(facts) / (rate_gb_s * 1e9)
    copied = facts.memory[Role.checkpoint].host
    if facts.config.checkpoint.background and copied:
        return copied / (facts.gpu.host_gb_s * 1e9), written_s
    return written_s, written_s
