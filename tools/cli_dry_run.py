"""`trierarch train --dry-run`: what a rank of a layout holds, without the machine that it is for."""

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from contract.errors import ConfigError
from tools.cli_deepspeed import with_deepspeed

if TYPE_CHECKING:
    from train.dry_run import DryRun
    from train.offload.config import OffloadConfig


def show_dry_run(
    overrides: Sequence[str],
    ranks: int | None,
    nodes: int | None,
    ranks_per_node: int | None,
    rank: int,
    as_json: bool,
    deepspeed: Path | None = None,
) -> None:
    """Build one rank of a layout and print what it holds.

    The number of ranks is `ranks` or `nodes` times `ranks_per_node`; raises `ConfigError` for both and for neither.
    `deepspeed`: a configuration of DeepSpeed's, whose settings come first.
    """
    count = _count(ranks, nodes, ranks_per_node)
    if not 0 <= rank < count:
        raise ConfigError(f"--rank {rank}: with {count} ranks choose 0 to {count - 1}")
    from train.config import load_config
    from train.dry_run import dry_run

    config = load_config(with_deepspeed(deepspeed, overrides, count), reads_data=False)
    found = dry_run(config, count, rank, ranks_per_node)
    if as_json:
        print(json.dumps(found.as_tree(), indent=2))
        return
    _print(found, config.offload, count)


def _count(ranks: int | None, nodes: int | None, ranks_per_node: int | None) -> int:
    for option, value in (("--ranks", ranks), ("--nodes", nodes), ("--ranks-per-node", ranks_per_node)):
        if value is not None and value < 1:
            raise ConfigError(f"{option} {value}: give at least 1")
    if nodes is None:
        if ranks is None:
            raise ConfigError(
                "--dry-run needs the size of the layout: give --ranks, or --nodes and --ranks-per-node"
            )
        return ranks
    if ranks is not None or ranks_per_node is None:
        raise ConfigError(
            "--nodes goes with --ranks-per-node, and not with --ranks: give those two, or --ranks"
        )
    return nodes * ranks_per_node


def _print(found: "DryRun", offload: "OffloadConfig", ranks: int) -> None:
    from rich.console import Console
    from rich.table import Table

    from train.layout.memory import Role, lines

    place = ", ".join(f"{axis} {index}" for axis, index in found.coordinates.items())
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"rank {found.rank} of {ranks} ({found.layout}) at {place}", markup=False)
    console.print(f"holds {_layers(found.layers)} and {found.parameters:,} parameters", markup=False)
    console.print(found.recompute, markup=False)
    table = Table("GB", box=None)
    for head in ("built here", "by formula", "by formula, on a GPU"):
        table.add_column(head, justify="right")
    rows = {one.name: Role[one.name].value for one in fields(found.built)}
    for name, words in {**rows, "total": "in all"}.items():
        sizes = (getattr(one, name) for one in (found.built, found.reckoned, found.reckoned_on_gpu))
        table.add_row(words, *(f"{size / 1e9:.3f}" for size in sizes))
    console.print(table)
    console.print("by formula, on a GPU, with what single layers need for a while:")
    console.print("\n".join(lines(found.rank, found.on_gpu, offload)), markup=False)
    count = found.micro_batches_in_flight
    if count > 1:
        console.print(f"activations are those of {count} micro-batches, which are under way at once")


def _layers(numbers: Sequence[int]) -> str:
    if not numbers:
        return "no layer"
    return f"{len(numbers)} layer{'s' * (len(numbers) > 1)} ({numbers[0]} to {numbers[-1]})"
