"""`trierarch ckpt`: look into checkpoints of any format, and check them."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from contract.errors import ConfigError, UserError
from tools.bytes_shown import bytes_bar, size
from tools.cli_ckpt_compress import COMMANDS
from tools.cli_ckpt_convert import convert_checkpoint
from tools.cli_ckpt_diff import diff_two

if TYPE_CHECKING:
    from tools.ckpt.findings import Finding
    from tools.ckpt.report import Depth, Report

app = typer.Typer(no_args_is_help=True, help="Look into checkpoints of any format, and check them.")
app.command("convert")(convert_checkpoint)
app.command("diff")(diff_two)
for _name, _command in COMMANDS.items():
    app.command(_name)(_command)

AsJson = Annotated[bool, typer.Option("--json", help="For a script.")]


@app.command("ls")
def list_steps(
    run: Annotated[Path, typer.Argument(help="A run folder, for example runs/first-run.")],
    as_json: AsJson = False,
) -> None:
    """List the steps of a run: when, how large, in which layout, and whether they are whole."""
    from tools.ckpt.listing import steps_of
    from tools.table import duration, table

    steps = steps_of(run)
    if as_json:
        print(json.dumps([asdict(one) for one in steps], indent=1))
        return
    if not steps:
        print("no checkpoints")
        return
    head = ("step", "age", "size", "format", "layout", "state", "stored", "")
    rows = [
        (
            str(one.step) if one.step is not None else one.name,
            duration(one.age_s),
            size(one.nbytes),
            one.format,
            one.layout,
            one.state,
            one.stored,
            one.reason,
        )
        for one in steps
    ]
    print(table(head, rows, frozenset({"age", "size"}), None), end="")


@app.command("show")
def show(
    path: Annotated[Path, typer.Argument(help="A checkpoint of any format; a run folder: its newest step.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what is in a checkpoint: format, step, layout, parameters, types, shapes, bytes."""
    from tools.ckpt.diff_text import percent
    from tools.ckpt.findings import Severity
    from tools.ckpt.listing import layout_of
    from tools.ckpt.open import open_source
    from tools.ckpt.steady import steadily
    from tools.ckpt.summary import summary
    from tools.table import table

    def look() -> "tuple[dict[str, Any], str, list[Finding]]":
        with open_source(path) as source:
            problems = [one for one in source.problems() if one.severity is not Severity.NOTE]
            return summary(source, tensors), layout_of(source), problems

    facts, layout, problems = steadily([path], look, lambda found: True)
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    told = {
        "path": facts["path"],
        "format": facts["format"],
        "checked by": facts["checked_by"] or "nothing",
        "step": "" if facts["step"] is None else str(facts["step"]),
        "layout": layout,
        "position": ", ".join(f"{name} {value:,}" for name, value in facts["position"].items()),
        "parameters": f"{facts['parameters']:,}",
        "size": f"{size(facts['bytes'])} of tensors in {len(facts['files'])} files",
        "stored": facts["stored"],
        "rounded": ", ".join(f"{role} by up to {percent(error)}" for role, error in facts["rounded"].items()),
        "tied": ", ".join(f"{name} = {other}" for name, other in facts["tied"].items()),
    }
    print("".join(f"{name:12}{value}\n" for name, value in told.items() if value))
    rows = [
        (
            one["role"],
            str(one["tensors"]),
            f"{one['elements']:,}",
            size(one["bytes"]),
            ", ".join(one["dtypes"]),
        )
        for one in facts["roles"]
    ]
    right = frozenset({"tensors", "elements", "bytes", "parts"})
    print(table(("role", "tensors", "elements", "bytes", "types"), rows, right, None), end="")
    if tensors:
        listed = [
            (
                one["name"],
                one["dtype"],
                str(one["shape"]),
                size(one["bytes"]),
                str(one["pieces"]),
                one["role"],
            )
            for one in facts["tensors"]
        ]
        print()
        print(table(("tensor", "type", "shape", "bytes", "parts", "role"), listed, right, None), end="")
    for problem in problems:
        print(problem, file=sys.stderr)


@app.command("validate")
def validate_paths(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[PATH]...", help="Checkpoints of any format; of a run folder, its newest step."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Structure and sizes, no bytes.")] = False,
    deep: Annotated[bool, typer.Option("--deep", help="What the values say, too.")] = False,
    newest: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Print the newest step of RUN that is whole.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check every byte against its hash or checksum, and that nothing is missing, left over or mixed up.

    Ends with 0 if all are whole, 1 if one is damaged, 2 if one cannot be read at all.
    """
    from tools.ckpt.report import Depth

    if quick and deep:
        raise ConfigError("--quick and --deep are opposites: give one of the two")
    depth = Depth.QUICK if quick else Depth.DEEP if deep else Depth.FULL
    if newest is not None:
        if paths:
            raise ConfigError("--newest RUN looks for the checkpoint itself: leave out the paths")
        _newest(newest, depth, as_json)
        return
    if not paths:
        raise ConfigError("nothing to validate: give a path, or --newest RUN")
    reports = []
    for path in paths:
        reports.append(_validate(path, depth))
        if not as_json:
            _print(reports[-1])
    if as_json:
        print(json.dumps([report.facts() for report in reports], indent=1))
    raise typer.Exit(max(report.exit_code for report in reports))


def _newest(run: Path, depth: "Depth", as_json: bool) -> None:
    """Print the newest whole step; what is said of those passed over goes to stderr."""
    from tools.ckpt.findings import UnreadableError
    from tools.ckpt.listing import steps_of

    steps = [one for one in steps_of(run) if one.step is not None]
    if not steps:
        raise UnreadableError(f"run {run} has no checkpoint yet")
    for one in reversed(steps):
        report = _validate(run / "checkpoints" / one.name, depth)
        if report.exit_code == 0:
            print(json.dumps(report.facts(), indent=1) if as_json else report.path)
            return
        _print(report, sys.stderr)
    print(f"trierarch: no checkpoint of run {run} is whole", file=sys.stderr)
    raise typer.Exit(1)


def _validate(path: Path, depth: "Depth") -> "Report":
    from tools.ckpt.validate import validate

    with bytes_bar(path.name) as begin:
        return validate(path, depth, _shapes_of, begin)


def _shapes_of(model: dict[str, Any]) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes that the model of a manifest has; None for one that this version cannot build."""
    from train.model.config import ModelConfig, parameter_shapes

    try:
        config = ModelConfig(**model)
        config.validate()
        return parameter_shapes(config)
    except (TypeError, ValueError, ZeroDivisionError, UserError):
        return None


def _print(report: "Report", file: Any = None) -> None:
    from tools.ckpt.findings import Severity

    step = "" if report.step is None else f", step {report.step}"
    kind = f" ({report.format}{step}, {report.tensors} tensors)" if report.format else ""
    print(f"{report.path}: {report.verdict}{kind}", file=file)
    if report.unreadable is not None:
        print(f"  {report.unreadable}", file=file)
    order = list(Severity)
    for finding in sorted(report.findings, key=lambda one: order.index(one.severity)):
        print(f"  {finding}", file=file)
