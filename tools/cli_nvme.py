"""`trierarch nvme-bench`: what a disk gives to offloading, and the settings that get most of it."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from contract.errors import ConfigError

if TYPE_CHECKING:
    from train.offload.nvme.measure import Figure

app = typer.Typer()

_UNITS = {"": 1} | {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)}


@app.command("nvme-bench")
def nvme_bench(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="Folders on local disks, as for offload.nvme_path."),
    ],
    size: Annotated[str, typer.Option(help="Bytes to use for files, over all paths: 2GB, 512MiB.")] = "2GB",
    seconds: Annotated[float, typer.Option(help="How long each of 45 measurements takes.")] = 0.5,
    write_settings: Annotated[
        Path | None, typer.Option(help="Where the best settings go. Default: nvme.json in the first PATH.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For a script.")] = False,
) -> None:
    """Measure reading, writing and both at once, by block size and threads; write the best settings to a file.

    Runs that offload to PATH, and to others after it, use the `nvme.json` there.
    """
    from contextlib import closing, suppress

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from train.offload.nvme.measure import best, combinations, measure
    from train.offload.nvme.settings import SETTINGS_FILE, NvmeSettings

    if not 0 < seconds <= 3600:
        raise ConfigError(f"--seconds {seconds:g}: give more than 0, and at most an hour")
    size_bytes = parse_bytes(size)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("measuring", total=len(combinations()))
        figures = []
        # Closed also on Ctrl-C: the files go.
        with closing(
            measure(paths, size_bytes, seconds, lambda line: errors.print(line, markup=False))
        ) as found:
            for figure in found:
                figures.append(figure)
                bar.advance(task)
    chosen = best(figures)
    file = write_settings or paths[0] / SETTINGS_FILE
    # What was measured is told first, in case that the settings can't be written.
    if as_json:
        facts = {"figures": [asdict(one) for one in figures], "best": asdict(chosen), "settings": str(file)}
        print(json.dumps(facts, indent=1), flush=True)
    else:
        _print(figures, chosen, len(paths))
    before = NvmeSettings()
    with suppress(ConfigError):
        before = NvmeSettings.load(file)
    chosen.as_settings(before).save(file)
    if not as_json:
        print(f"{file} has these settings now")


def parse_bytes(text: str) -> int:
    """Read a number of bytes with a unit, such as 2GB or 512MiB; raises `ConfigError` for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(|[KMGT]i?B)", text.strip())
    if found is None:
        raise ConfigError(f"--size {text}: give a number and a unit, such as 2GB or 512MiB")
    return int(float(found[1]) * _UNITS[found[2]])


def _print(figures: "list[Figure]", chosen: "Figure", paths: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("GB/s", box=None)
    for head in ("block", "threads", "read", "write", "mixed"):
        table.add_column(head, justify="right")
    table.add_column()
    for one in figures:
        speeds = (f"{speed / 1e9:.2f}" for speed in (one.read, one.write, one.mixed))
        mark = "<- best" if one is chosen else ""
        table.add_row("", _block(one.block_bytes), str(one.threads), *speeds, mark)
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    each = " for each path" if paths > 1 else ""
    console.print(
        f"best: blocks of {_block(chosen.block_bytes)}, {chosen.threads} thread{'s' * (chosen.threads > 1)}{each} "
        "(as many requests in a disk's queue), by mixed bandwidth"
    )


def _block(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
