"""`trierarch status | logs | cancel | resubmit`: what a user does with runs that were submitted."""

import shutil
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from contract.errors import ConfigError, UserError

if TYPE_CHECKING:
    from slurm.runs.status import RunStatus

app = typer.Typer()

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RUN|SWEEP|FOLDER]...", help="Names below runs, or paths. Default: all in runs."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, also for several runs.")]


@app.command()
def status(
    names: Names = None,
    tasks: Annotated[bool, typer.Option("--tasks", help="Show the tasks of sweeps one by one.")] = False,
    state: Annotated[str | None, typer.Option(help="Only runs in these states: failed,lost")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again until Ctrl-C.")] = False,
    every: Annotated[
        float | None, typer.Option(min=0.2, help="Seconds between two looks of --watch. Default: 5.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts: a list of objects.")] = False,
) -> None:
    """Show every run: state, job, step, loss, checkpoint, and why it waits or failed."""
    wanted = _states(state)

    def look() -> str:
        return _look(names or [], wanted, tasks, as_json)

    if watch or every is not None:
        _repeat(look, every or 5.0)
    else:
        print(look(), end="")


def _states(text: str | None) -> set[str] | None:
    from contract.errors import closest
    from slurm.runs.status import RunState

    if text is None:
        return None
    names = {name.strip() for name in text.split(",")}
    for name in sorted(names - set(RunState)):
        raise ConfigError(f"--state {name}: there is no such state, {closest(name, list(RunState))}")
    return names


def _look(names: list[str], wanted: set[str] | None, tasks: bool, as_json: bool) -> str:
    from slurm.runs.find import DEFAULT_ROOT, find_runs, is_sweep, resolve, resolve_runs
    from slurm.runs.status import statuses
    from tools import table

    found = resolve_runs(names) if names else find_runs(DEFAULT_ROOT)
    shown = [one for one in statuses(found) if wanted is None or one.state in wanted]
    if as_json:
        return table.as_json(shown)
    # A sweep that is named, and one of which only some tasks are wanted, is looked at task by task.
    each = tasks or wanted is not None or any(is_sweep(resolve(name)) for name in names)
    return table.render(shown, _width(), tasks=each)


def _width() -> int | None:
    """Return the terminal's width, None where each run belongs in one line: a pipe, a file."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _repeat(look: Callable[[], str], every_s: float) -> None:
    """Show `look()` until Ctrl-C: in place on a terminal, else one after the other."""
    in_place = sys.stdout.isatty()
    try:
        while True:
            text = look()
            if in_place:
                lines = text.splitlines()
                room = shutil.get_terminal_size().lines - 2
                # The end has what goes on: of a long table the beginning is left out, but not its head.
                shown = lines if len(lines) <= room else [lines[0], *lines[-room + 1 :]]
                moment = time.strftime("%H:%M:%S")
                text = "\x1b[H\x1b[J" + "\n".join(
                    [*shown, f"{moment}, again every {every_s:g} s, Ctrl-C ends"]
                )
            print(text, end="" if in_place else "\n", flush=True)
            time.sleep(every_s)
    except KeyboardInterrupt:
        print(flush=True)


@app.command()
def logs(
    name: Annotated[str, typer.Argument(metavar="RUN", help="A name below runs, or a run folder.")],
    rank: Annotated[int | None, typer.Option(min=0, help="The log of this rank.")] = None,
    all_ranks: Annotated[bool, typer.Option("--all", help="The logs of all ranks.")] = False,
    batch: Annotated[
        bool, typer.Option("--batch", help="What the job itself and its supervisor said.")
    ] = False,
    attempt: Annotated[
        str | None, typer.Option(help="A start of the ranks by its name in the logs' names: 0, 0-1, 1.")
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines.")] = 50,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is added, over restarts and requeues.")
    ] = False,
) -> None:
    """Show the log that matters: of the rank that failed first, else of rank 0, from its newest start."""
    from slurm.runs.find import find_runs, resolve_run, title
    from slurm.runs.logs import Wish, choose, header, last_lines, until_over
    from slurm.runs.logs import follow as follow_logs
    from slurm.runs.status import RunState, statuses

    if sum([rank is not None, all_ranks, batch]) > 1:
        raise ConfigError("--rank, --all and --batch exclude each other: give one of them")
    if attempt is not None and (batch or follow):
        raise ConfigError(
            "--attempt names a start of the ranks that is over: give it without --batch and --follow"
        )
    run = resolve_run(name)
    wish = Wish(rank, all_ranks, batch, attempt)
    (seen,) = statuses(find_runs(run.path))
    print(f"run {title(run.path)}: {seen.state}" + (f": {seen.reason}" if seen.reason else ""), flush=True)
    if not follow:
        for path in choose(run, wish, failed=seen.state in (RunState.failed, RunState.lost)):
            print(header(path) + last_lines(path, lines), end="")
        return
    try:
        for text in follow_logs(run, wish, lines, until_over(run)):
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        print(flush=True)
        return
    (seen,) = statuses(find_runs(run.path))
    print(f"run {title(run.path)}: {seen.state}" + (f": {seen.reason}" if seen.reason else ""))


@app.command()
def cancel(
    names: Annotated[list[str], typer.Argument(metavar="RUN|SWEEP...", help="Names below runs, or paths.")],
    now: Annotated[bool, typer.Option("--now", help="At once, without a checkpoint.")] = False,
    yes: Yes = False,
) -> None:
    """End the jobs of runs: they save a checkpoint first, and do not come back."""
    from slurm.runs.cancel import cancel as end
    from slurm.runs.cancel import drop_waiting_tasks, refuse
    from slurm.runs.find import is_sweep, resolve, resolve_runs, title
    from slurm.runs.status import RunState, statuses

    shown = statuses(resolve_runs(names))
    if not shown:
        raise UserError(f"there are no runs in {', '.join(names)}")
    # Runs that are over, or never had a job, are left out of what a sweep's name stands for.
    over = (RunState.finished, RunState.failed)
    runs = [
        one.run for one in shown if one.state not in over and (one.job_id or one.state is not RunState.new)
    ]
    _confirm(f"end the jobs of {len(runs)} runs", len(runs), yes)
    for sweep in filter(is_sweep, map(resolve, names)):
        if waiting := drop_waiting_tasks(sweep):
            print(f"sweep {sweep.name}: {waiting} tasks that were not submitted yet will not be")
    results = end(runs, now=now)
    for one in results:
        if one.acted or one.failed or len(shown) == 1:
            print(f"run {title(one.run.path)}: {one.what}")
    idle = len(shown) - sum(one.acted or one.failed for one in results)
    if len(shown) > 1 and idle:
        print(f"{idle} of {len(shown)} runs have no live job")
    elif not results:
        print(f"run {title(shown[0].run.path)}: has no live job ({shown[0].state})")
    refuse(results)


@app.command()
def resubmit(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN|SWEEP]... [KEY=VALUE]...", help="Runs, and settings: job.time_limit=8:00:00"
        ),
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="All failed and lost runs of these folders. Default: of runs.")
    ] = False,
    yes: Yes = False,
) -> None:
    """Submit runs that failed, were lost or stopped once more: same training, same code, from the checkpoint."""
    from slurm.runs.find import DEFAULT_ROOT, find_runs, resolve_runs, title
    from slurm.runs.resubmit import failed_or_lost
    from slurm.runs.resubmit import resubmit as submit_again

    names = [word for word in words or [] if "=" not in word or _exists(word)]
    overrides = [word for word in words or [] if word not in names]
    if failed:
        shown = failed_or_lost(resolve_runs(names) if names else find_runs(DEFAULT_ROOT))
        if not shown:
            print("no failed or lost runs")
            return
        for one in shown:
            print(f"run {title(one.run.path)}: {one.state}" + (f": {one.reason}" if one.reason else ""))
    else:
        if not names:
            raise UserError(
                "name the runs to submit again, or give --failed for all that failed or were lost"
            )
        shown = [one for name in dict.fromkeys(names) for one in _meant(name)]
    _confirm(f"submit {len(shown)} runs again", len(shown), yes)
    for done in submit_again(shown, overrides):
        print(done)


def _meant(name: str) -> "list[RunStatus]":
    """Return the run of a name, of a sweep all tasks that ended without finishing."""
    from slurm.runs.find import find_runs, is_sweep, resolve, resolve_run
    from slurm.runs.resubmit import unfinished
    from slurm.runs.status import statuses

    if not is_sweep(resolve(name)):
        return statuses(find_runs(resolve_run(name).path))
    tasks = unfinished(find_runs(resolve(name)))
    if not tasks:
        raise UserError(
            f"sweep {name} has no task that ended without finishing: see `trierarch sweep status {name}`"
        )
    return tasks


def _exists(word: str) -> bool:
    """Whether a word with a = in it is a run's name: a sweep names its tasks so."""
    from slurm.runs.find import resolve

    try:
        resolve(word)
    except UserError:
        return False
    return True


def _confirm(what: str, count: int, yes: bool) -> None:
    if count < 2 or yes:
        return
    if not sys.stdin.isatty():
        raise UserError(f"this would {what}: give --yes if that is meant")
    typer.confirm(f"{what}?", abort=True)
