"""`trierarch ckpt diff`: what two checkpoints of any format differ in."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from contract.errors import ConfigError, SaveError
from tools.bytes_shown import bytes_bar

if TYPE_CHECKING:
    from tools.ckpt.diff_result import Diff
    from tools.ckpt.diff_tally import Tolerance


def diff_two(
    a: Annotated[
        Path, typer.Argument(metavar="A", help="A checkpoint of any format; a run folder: its newest step.")
    ],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another, of any format.")],
    tolerance: Annotated[
        float, typer.Option(metavar="X", help="Let pass |a - b| up to X. Types may differ, then.")
    ] = 0.0,
    relative_tolerance: Annotated[
        float, typer.Option(metavar="X", help="Let pass |a - b| up to X times the larger magnitude, too.")
    ] = 0.0,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="ROLE", help="Compare tensors of this role: weights, exp_avg, ... Repeatable."),
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read tensors whose saved hashes are the same, too.")
    ] = False,
    top: Annotated[int, typer.Option(min=0, help="How many tensors, places and values to list.")] = 20,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with a heat map of layers by roles.")
    ] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Write that heat map as an image.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For a script.")] = False,
) -> None:
    """Compare two checkpoints tensor by tensor, across formats, layouts and numbers of ranks.

    Ends with 0 if they are equal within the tolerance, 1 if they differ, 2 if something cannot be read.
    """
    from tools.ckpt.diff_tally import Tolerance

    for name, value in (("--tolerance", tolerance), ("--relative-tolerance", relative_tolerance)):
        if not 0 <= value < float("inf"):
            raise ConfigError(f"{name} is {value}: give a number from 0 on")
    found = _diff(a, b, Tolerance(tolerance, relative_tolerance), deep, only)
    if html is not None:
        _write("--html", html, lambda path: _write_html(found, path, top))
    if png is not None:
        _write("--png", png, lambda path: _write_png(found, path))
    if as_json:
        print(json.dumps(found.facts(top), indent=1))
    else:
        from tools.ckpt.diff_text import text

        print(text(found, top), end="")
    _warn(found)
    raise typer.Exit(found.exit_code)


def _write(option: str, path: Path, write: Callable[[Path], None]) -> None:
    try:
        write(path)
    except OSError as reason:
        raise SaveError(
            f"{option} {path} cannot be written ({reason.strerror}): choose another place"
        ) from reason


def _write_html(found: "Diff", path: Path, top: int) -> None:
    from tools.ckpt.diff_html import write_html

    write_html(found, path, top)


def _write_png(found: "Diff", path: Path) -> None:
    from tools.ckpt.diff_png import write_png

    write_png(found, path)


def _warn(found: "Diff") -> None:
    """Tell what the directories of both leave out or have wrong: a tensor may be missing for that."""
    from tools.ckpt.findings import Severity

    for source in (found.a, found.b):
        told = [one for one in source.findings if one.severity is not Severity.NOTE or one.tensor]
        for finding in told:
            print(f"{source.path}: {finding}", file=sys.stderr)


def _diff(a: Path, b: Path, tolerance: "Tolerance", deep: bool, only: list[str] | None) -> "Diff":
    from tools.ckpt.diff import diff

    with bytes_bar("diff") as begin:
        return diff(a, b, tolerance, only=only, deep=deep, begin=begin)
