"""`trierarch sweep`: many runs as one array job, what became of them, and how to go on."""

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from contract.errors import ConfigError, UserError

if TYPE_CHECKING:
    from contract.sweep import SweepFolder
    from slurm.settings import SubmitConfig

_START = "start"
_DATA = "data.prefix"


class SweepGroup(typer.core.TyperGroup):
    """Takes what is no subcommand for the settings of a sweep to start: `trierarch sweep optim.lr=1e-4,3e-4`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `start` before what begins with a setting or one of its options."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [_START, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=SweepGroup,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Train many runs that differ in a few settings, as one Slurm array job.

    trierarch sweep optim.lr=1e-4,3e-4 seed=1,2,3 --parallel 4

    starts one and returns at once; each task is a run below runs/SWEEP/. The same command with more values adds \
what is new. Values: `a,b`, `range(1,4)`, `range(0.1,0.5,0.1)`, `choice(a,b)`, `model=glob(llama_*)`.

    For the options of a new sweep: trierarch sweep start --help""",
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE[,VALUE]...]...",
        help="Settings; those with several values are swept over, in all combinations. cluster=NAME and job.KEY=VALUE"
        " say where the tasks run.",
    ),
]
Name = Annotated[
    str, typer.Argument(metavar="SWEEP", help="A sweep's name below runs, or the path of its folder.")
]
JobSettings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="cluster.* and job.* settings that change: job.time_limit=4:00:00"
    ),
]
NewCode = Annotated[
    bool,
    typer.Option("--new-code", help="Take a fresh snapshot of the code; nothing of the sweep may be live."),
]


@app.command(_START)
def start(
    overrides: Overrides = None,
    name: Annotated[
        str | None,
        typer.Option(help="The sweep's folder in run.root. Default: of the run's name and swept keys."),
    ] = None,
    parallel: Annotated[
        int | None, typer.Option(help="Tasks that may run at the same time. Default: all.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="A file of overrides: one set a line, each may sweep itself.")
    ] = None,
    new_code: NewCode = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", "--render", help="Print the tasks and the batch script, submit nothing."),
    ] = False,
) -> None:
    """Start a sweep, or add to the one of that name what it has not yet (the word `start` can be left out)."""
    from slurm.sweeps.sweep import preview
    from slurm.sweeps.sweep import start as start_sweep
    from tools.cli_sweep_plan import Request, make_plan
    from tools.data_check import missing_data

    plan, settings = make_plan(Request(overrides or [], name, file, parallel))
    for note in missing_data(str(task.values.get(_DATA, plan.settings.get(_DATA))) for task in plan.tasks):
        print(f"note:  {note}", file=sys.stderr)
    if dry_run:
        added, script = preview(plan, settings, dict(os.environ))
        if len(added) < len(plan.tasks):
            print(
                f"# {len(plan.tasks) - len(added)} of {len(plan.tasks)} tasks known already, or given twice"
            )
        for task in added:
            print(f"# {plan.folder.name}/{task.run}: {' '.join(task.overrides)}")
        print(script, end="")
        return
    print(start_sweep(plan, settings, new_code=new_code).summary())


@app.command()
def status(
    name: Name,
    as_json: Annotated[
        bool, typer.Option("--json", help="For scripts: an object with a list of tasks.")
    ] = False,
) -> None:
    """Show how many tasks wait, run, have finished or failed, and each of them."""
    from slurm.runs.status import status as states
    from tools.sweep_status import as_json_text, render

    folder = _folder(name)
    manifest = folder.read()
    found = {one.run.name: one for one in states(folder.path)}
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(
        as_json_text(manifest, found) if as_json else render(manifest, found, name.rstrip("/"), width), end=""
    )


@app.command()
def results(
    name: Name,
    metric: Annotated[
        str, typer.Option(help="A key of metrics.jsonl: eval_loss, loss, tokens_per_s, ...")
    ] = "eval_loss",
    highest: Annotated[
        bool, typer.Option("--highest", help="The highest value is the best, not the lowest.")
    ] = False,
    csv: Annotated[Path | None, typer.Option(help="Write the table to this file.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the metric over the swept keys: a .png, .svg or .pdf.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts: a list of objects.")] = False,
) -> None:
    """Show the final and the best value of a metric by the swept keys, the best task first."""
    from slurm.runs.status import status as states
    from tools.sweep_results import collect, render, to_csv, to_json

    folder = _folder(name)
    found = {one.run.name: str(one.state) for one in states(folder.path)}
    table = collect(folder, found, metric, highest)
    if csv:
        _write(csv, to_csv(table))
    if plot:
        from tools.sweep_plot import draw

        draw(table, plot)
    print(to_json(table) if as_json else render(table), end="")


@app.command()
def retry(
    name: Name,
    tasks: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TASK]... [KEY=VALUE]...",
            help="Tasks by folder name or index (default: all that ended without finishing), and cluster.* and job.*"
            " settings that change: job.time_limit=4:00:00",
        ),
    ] = None,
    new_code: NewCode = False,
) -> None:
    """Send tasks again that failed, were lost or cancelled; they continue from their checkpoints."""
    from slurm.sweeps.sweep import retry as retry_tasks

    folder = _folder(name)
    changes = [word for word in tasks or [] if word.startswith(("cluster.", "job."))]
    chosen = [word for word in tasks or [] if word not in changes]
    outcome = retry_tasks(folder.path, chosen, _settings(folder, changes), new_code=new_code)
    if not outcome.added and not outcome.arrays:
        print(f"sweep {folder.name}: no task ended without finishing")
        return
    print(outcome.summary())


@app.command()
def submit(name: Name, changes: JobSettings = None) -> None:
    """Send the tasks that still wait for room in the queue (see cluster.max_submit_jobs)."""
    from slurm.sweeps.sweep import submit_rest

    folder = _folder(name)
    if folder.read().is_sent:
        print(f"sweep {folder.name}: no task waits")
        return
    print(submit_rest(folder.path, _settings(folder, changes)).summary())


@app.command()
def cancel(
    name: Name,
    now: Annotated[bool, typer.Option("--now", help="At once, without a checkpoint.")] = False,
) -> None:
    """End all tasks that wait or run: they save a checkpoint first. `retry` continues them."""
    from tools.cli_runs import cancel as cancel_runs

    cancel_runs([str(_folder(name).path)], now=now, yes=True)


def _folder(name: str) -> "SweepFolder":
    from contract.sweep import SweepFolder
    from slurm.runs.find import resolve

    folder = SweepFolder(resolve(name).absolute())
    if not folder.is_sweep:
        raise UserError(f"{name} is no sweep, it has no sweep.json: name a sweep")
    return folder


def _settings(folder: "SweepFolder", changes: list[str] | None) -> "SubmitConfig | None":
    """Return the settings of the last submission with `changes`, None without any."""
    import configs.compose
    from slurm.settings import SubmitConfig, says_where

    if not changes:
        return None
    for change in changes:
        if not says_where(configs.compose.key_of(change)):
            raise ConfigError(f"{change}: only cluster.* and job.* can change, the tasks' own settings stay")
    settings = configs.compose.load(folder.submit_settings, SubmitConfig, changes)
    settings.validate(os.environ)
    return settings


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): give another file") from error
