"""`trierarch plan`: which layout, how fast, in how much memory, before a single GPU hour is spent."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from contract.errors import ConfigError

if TYPE_CHECKING:
    from tools.plan.search import Found

_LAYOUTS = "layouts"


class PlanGroup(typer.core.TyperGroup):
    """Takes what is no subcommand for the settings of a plan: `trierarch plan model=deepseek_7b nodes=4`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `layouts` before what begins with a setting or one of its options."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [_LAYOUTS, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=PlanGroup,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Find the fastest layout that fits a machine, by arithmetic: nothing is queued.

    trierarch plan model=deepseek_7b cluster=juwels_booster nodes=4 data.sequence_length=4096 \
loop.global_batch_size=512

    Settings of the layout that are given, such as parallel.tp=4, stay. For the options: trierarch plan layouts \
--help""",
)


@app.command(_LAYOUTS)
def layouts(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Settings as for `trierarch submit`, and train.tokens=1e12, goals.KEY=VALUE.",
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Layouts to show, each with other degrees.")] = 5,
    what_if: Annotated[
        str | None, typer.Option("--what-if", help="Other numbers of nodes, nodes=8,16,32: how it scales.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Walk through the arithmetic of the best layout, with sources.")
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option("--png", help="Draw the step's timeline, communication and memory to this file."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For a script.")] = False,
) -> None:
    """Plan: the best layouts, the best one in detail, why the others lose, and the settings to write."""
    import json
    import os
    import shutil
    import sys

    from tools.plan import report
    from tools.plan.goals import totals
    from tools.plan.request import found_for, read
    from tools.plan.scaling import nodes_of, scaling, scaling_tree, scaling_words

    counts = [] if what_if is None else nodes_of(what_if)
    if picture is not None and not (picture.parent.is_dir() and os.access(picture.parent, os.W_OK)):
        # Told before the search, which takes a while.
        raise ConfigError(f"{picture} cannot be written: {picture.parent} is no folder that you can write to")
    request = read(overrides or [], os.environ)
    found = found_for(request, top)
    best = found.plans[0]
    reached = totals(best, request.goals.train.tokens, request.goals.goals)
    scaled = scaling(request, counts, best) if counts else []
    if picture is not None:
        _draw(picture, found)
    if as_json:
        tree = {
            "machine": {
                "gpu": request.machine.gpu.name,
                "gpus": request.machine.gpus,
                "gpus_per_node": request.machine.gpus_per_node,
                "network_bytes_s": request.machine.network,
                "network_known": request.machine.network_known,
            },
            "tokens_per_step": best.case.tokens,
            "plans": [
                report.as_tree(plan, request.base, reached if plan is best else None) for plan in found.plans
            ],
            "why": report.why(found.plans),
            "notes": list(request.notes),
            "scaling": scaling_tree(scaled),
            "searched": {"shapes": found.shapes, "predicted": found.predicted},
        }
        print(json.dumps(tree, indent=1))
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(report.text(found, reached, request.base, width, request.notes), end="")
    if scaled:
        print("\n" + scaling_words(scaled), end="")
    if explain:
        from tools.plan.explain import explain as explained

        print("\n" + explained(best, reached, request.goals.goals, request.known), end="")


@app.command()
def predict(
    rows: Annotated[Path, typer.Option(help="Training runs, in the form of tools/plan/published_runs.json.")],
    out: Annotated[Path, typer.Option(help="Where to write the predictions.")],
) -> None:
    """Predict step time and memory of published runs, by model, hardware and layout alone."""
    from tools.plan.predict import predict_rows, write
    from tools.plan.rows import read_rows

    found = predict_rows(read_rows(rows))
    write(out, found)
    print(f"{out}: {len(found)} predictions")


@app.command()
def calibrate(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="Folders of submitted runs of your own to fit to."),
    ] = None,
    rows: Annotated[
        Path | None,
        typer.Option(help="Published runs to fit to, in place of those that come with the planner."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Where to write the constants; use them by goals.constants=FILE.")
    ] = Path("plan-constants.json"),
) -> None:
    """Fit the planner's constants to published runs, or, from these on, to runs of your own."""
    from tools.plan.calibrate import calibrate as calibrated
    from tools.plan.rows import PUBLISHED
    from tools.plan.runs import measured_run

    if runs and rows is not None:
        raise ConfigError("--rows and folders of runs: give one of the two")
    about = calibrated(rows or PUBLISHED, [measured_run(run) for run in runs or []], out)
    print(f"{out}: " + ", ".join(f"{key} {value}" for key, value in about.items() if key != "rows"))


def _draw(path: Path, found: "Found") -> None:
    from tools.plan.picture import draw
    from tools.plan.report import layout_words, memory_of, title
    from tools.plan.timeline import timeline

    best = found.plans[0]
    memory = {layout_words(plan): memory_of(plan) for plan in found.plans}
    draw(
        path,
        timeline(best),
        best.step.communication,
        memory,
        title(best),
        capacity_gb=best.case.machine.gpu.memory_gb,
    )


def with_plan(overrides: list[str], nodes: int | None = None, ranks_per_node: int | None = None) -> list[str]:
    """Put the settings of the best plan in the place of `parallel=auto`, and say which it is and why on stderr.

    Without that, return `overrides` as they are.
    """
    if not any(one.partition("=")[0].strip() == "parallel" for one in overrides):
        return overrides
    import os
    import sys

    from configs.compose import key_of, spell_out
    from slurm.settings import FOR_PLANS
    from tools.plan import report
    from tools.plan.request import found_for, read, without_auto
    from tools.plan.settings import says_goal
    from train.config import TrainConfig

    asked = [f"job.nodes={nodes}"] if nodes is not None else []
    asked += [f"job.ranks_per_node={ranks_per_node}"] if ranks_per_node is not None else []
    request = read([*overrides, *asked], os.environ)
    found = found_for(request, 2)
    best = found.plans[0]
    line = (
        f"parallel=auto: {report.layout_words(best)}: {report.seconds(best.step.total_s)} a step, MFU "
        f"{report.percent(best.mfu)}, {best.room.device_bytes / report.GIB:.1f} of "
        f"{best.case.machine.gpu.memory_gb:g} GiB"
    )
    if len(found.plans) > 1:
        reason = report.why(found.plans)[0].partition(":")[2].strip()
        line += f"; the next best, {report.layout_words(found.plans[1])}: {reason}"
    for note in request.notes:
        print(f"note:  {note}", file=sys.stderr)
    print(line, file=sys.stderr)
    kept = [
        one for one in without_auto(overrides) if not says_goal(key_of(one)) and key_of(one) not in FOR_PLANS
    ]
    given = {key_of(one) for one in spell_out(kept, TrainConfig)}
    return [*kept, *(one for one in report.overrides(best, request.base) if key_of(one) not in given)]
