"""`trierarch ckpt compress`, `delta` and `restore`: steps of ours in less room, and back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from contract.errors import ConfigError, closest
from tools.bytes_shown import bytes_bar, size
from train.checkpoint.config import DELTA_CHAIN, LEAST_LOSSY_ERROR, LOSSY_ERROR

if TYPE_CHECKING:
    from tools.ckpt.compress import Compressor, Done

Paths = Annotated[list[Path], typer.Argument(metavar="STEP|RUN...", help="Steps; of a run, all.")]
LOSSY = ("moments", "all")


def compress_steps(
    paths: Paths,
    lossy: Annotated[
        str | None,
        typer.Option(help="`moments` rounds those of the optimizer, `all` weights too; needs --out."),
    ] = None,
    largest_error: Annotated[
        float | None,
        typer.Option(metavar="X", help=f"With --lossy: of a moment, relative. Default: {LOSSY_ERROR}."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --lossy: write DIR/step_N, and leave STEP.")
    ] = None,
) -> None:
    """Store steps in less room, in place, each by itself and bit for bit.

    Ends with 1 if a step is damaged or the disk refuses, with 2 if one cannot be read at all: it is as it was then.
    """
    from tools.ckpt.chains import steps_in

    if lossy is None:
        for option, value in (("--largest-error", largest_error), ("--out", out)):
            if value is not None:
                raise ConfigError(
                    f"{option} does nothing without --lossy: leave it out, or add --lossy moments"
                )
    elif lossy not in LOSSY:
        raise ConfigError(f"--lossy {lossy}: there is no such way, {closest(lossy, LOSSY)}")
    elif out is None:
        raise ConfigError("--lossy rounds values for good: give --out DIR for the new step")
    if largest_error is not None and not LEAST_LOSSY_ERROR < largest_error <= 1:
        raise ConfigError(
            f"--largest-error is {largest_error}: must be above {LEAST_LOSSY_ERROR} and at most 1"
        )
    steps = [step for path in paths for step in steps_in(path)]
    done = []
    for step in steps:
        with _compressor(step) as compressor:
            if lossy is None or out is None:
                done.append(compressor.compress(step))
            else:
                from tools.ckpt.lossy import write_rounded
                from train.checkpoint.compress.rounding import Rounding

                rounding = Rounding(lossy == "all", largest_error or LOSSY_ERROR)
                done.append(write_rounded(step, _made(out) / _name_of(step), rounding, compressor))
        _tell(done[-1])
    _table(done)


def delta_steps(
    path: Annotated[Path, typer.Argument(metavar="STEP|RUN", help="A step; of a run, all.")],
    parent: Annotated[
        Path | None, typer.Option(metavar="STEP", help="Another step of the same run; not for a RUN.")
    ] = None,
    chain: Annotated[int, typer.Option(min=1, max=32, help="Most steps that a step may need.")] = DELTA_CHAIN,
) -> None:
    """Store a step as the difference to another one, in place and bit for bit; of a run, each to the one before.

    Ends as `compress` does.
    """
    from tools.ckpt.chains import NotOursError, steps_in
    from tools.ckpt.compress import delta_run

    steps = steps_in(path)
    done: list[Done] = []

    def told(one: "Done") -> None:
        done.append(one)
        _tell(one)

    with _compressor(path) as compressor:
        if steps == [path]:
            if parent is None:
                raise ConfigError(f"{path} is one step: give --parent STEP, of the same run")
            if steps_in(parent) != [parent]:
                raise NotOursError(f"--parent {parent} is a run: give a step of it")
            told(compressor.delta(path, parent, chain))
        elif parent is not None:
            raise ConfigError(f"--parent goes with one step, and {path} is a run: leave it out")
        else:
            delta_run(compressor, steps, chain, told)
    _table(done)


def restore_steps(
    paths: Paths,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write DIR/step_N, and leave STEP as it is.")
    ] = None,
) -> None:
    """Bring the plain files of steps back, in place: torch's `dcp.load` reads them again. Ends as `compress` does."""
    from tools.ckpt.chains import steps_in

    for step in [step for path in paths for step in steps_in(path)]:
        with _compressor(step) as compressor:
            if out is None:
                _tell(compressor.restore(step))
            else:
                _tell(compressor.restore_to(step, _made(out) / _name_of(step)))


def _made(out: Path) -> Path:
    """The folder for new steps, made where only it is missing."""
    if out.parent.is_dir() and not out.exists():
        out.mkdir()
    return out


def _name_of(step: Path) -> str:
    from tools.ckpt.chains import manifest_of

    return f"step_{manifest_of(step).step}"


@contextmanager
def _compressor(path: Path) -> "Iterator[Compressor]":
    from tools.ckpt.compress import Compressor

    with bytes_bar(path.name) as begin:
        yield Compressor(begin)


def _tell(one: "Done") -> None:
    if not one.changed:
        how = "" if one.parent is None else f", as the difference to {one.parent}"
        print(f"{one.folder}: nothing to do, {_sizes(one.plain_bytes, one.after_bytes)}{how}")
        return
    rate = f", {one.plain_bytes / max(one.seconds, 1e-9) / 1e6:.0f} MB/s"
    how = "" if one.parent is None else f", as the difference to {one.parent}"
    print(f"{one.folder}: {size(one.before_bytes)} -> {size(one.after_bytes)}{_ratio(one)}{how}{rate}")


def _ratio(one: "Done") -> str:
    return f" ({one.after_bytes / one.plain_bytes:.2f} of plain)" if one.plain_bytes else ""


def _sizes(plain: int, stored: int) -> str:
    return size(stored) if plain == stored else f"{size(stored)} in place of {size(plain)}"


def _table(done: "list[Done]") -> None:
    from tools.ckpt.compress import role_table
    from tools.table import table

    found = role_table(done)
    if not found:
        return
    rows = [
        (
            one["role"],
            size(one["before"]),
            size(one["after"]),
            f"{one['after'] / max(1, one['before']):.3f}",
            ", ".join(f"{count} {method}" for method, count in sorted(one["methods"].items())),
        )
        for one in found
    ]
    head = ("role", "before", "after", "ratio", "slices stored as")
    print("\n" + table(head, rows, frozenset({"before", "after", "ratio"}), None), end="")


COMMANDS: dict[str, Callable[..., None]] = {
    "compress": compress_steps,
    "delta": delta_steps,
    "restore": restore_steps,
}
"""By name."""
