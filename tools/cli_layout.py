"""`trierarch layout`: what a layout would be, drawn in the terminal."""

import dataclasses
import json
import shutil
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from contract.errors import ConfigError
from tools.cli_deepspeed import DeepSpeedFile, with_deepspeed
from tools.cli_plan import with_plan

if TYPE_CHECKING:
    from tools.layout_picture import Group, Picture, Place
    from train.config import TrainConfig
    from train.layout.dims import ParallelDims
    from train.layout.holding import Holding

app = typer.Typer()

WIDTH = 100
"""Columns where there is no terminal."""
SHARED = {
    "pp": "layers",
    "dp_replicate": "samples",
    "dp_shard": "samples, state",
    "cp": "sequences",
    "tp": "matrices",
}
"""What the ranks of an axis share."""


@app.command()
def layout(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings: model=deepseek_7b parallel.tp=8"),
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes. Default: job.nodes, or 1.")] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks on each. Default: the cluster's, or 8.")
    ] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Show this rank alone, with its groups.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For a script.")] = False,
    deepspeed: DeepSpeedFile = None,
) -> None:
    """Show a layout: which rank holds what, which group spans nodes, and how much each sends in a step."""
    from configs.compose import key_of
    from slurm.recipe import split
    from slurm.settings import says_where
    from train.config import load_config
    from train.data.vocabulary import with_vocabulary
    from train.layout.check import lay_out
    from train.layout.memory import as_tree, check_host_budget, heaviest, lines, memory

    overrides = with_plan(overrides or [], nodes, ranks_per_node)
    where, what = split(overrides)
    is_told = any(says_where(key_of(override)) for override in overrides)
    nodes, ranks_per_node = _machine(where, is_told, nodes, ranks_per_node)
    what = with_deepspeed(deepspeed, what, nodes * ranks_per_node)
    config = with_vocabulary(load_config(what, reads_data=False))
    dims = lay_out(config, nodes * ranks_per_node, ranks_per_node)
    if rank is not None and rank >= dims.ranks:
        raise ConfigError(f"--rank {rank}: the ranks are 0 to {dims.ranks - 1}")
    picture = draw(config, dims, ranks_per_node, rank)
    check_host_budget(config, dims, "cuda")
    fullest, kept = (
        heaviest(config, dims, "cuda") if rank is None else (rank, memory(config, dims, rank, "cuda"))
    )
    if as_json:
        facts = {**dataclasses.asdict(picture), "memory": {"rank": fullest, **as_tree(kept)}}
        print(json.dumps(facts, indent=1))
        return
    from tools.layout_picture import render

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
    print(render(picture, width), end="")
    print("Memory on a GPU" + ", of the rank that keeps most" * (rank is None))
    print("\n".join(lines(fullest, kept, config.offload)))


def _machine(
    where: list[str], is_told: bool, nodes: int | None, ranks_per_node: int | None
) -> tuple[int, int]:
    """Nodes and ranks on each: as given, else as a submission with the settings `where` would have.

    Where nothing `is_told` but the recipe's job, nodes have 8 unless that says more.
    """
    if not where:
        return nodes or 1, ranks_per_node or 8
    import os
    import socket

    import configs.compose
    from slurm.settings import SubmitConfig
    from slurm.sites.detect import detect

    where = configs.compose.spell_out(where, SubmitConfig)

    if not is_told:
        job = configs.compose.fill(SubmitConfig, where).job
        return nodes or job.nodes, ranks_per_node or job.ranks_per_node or 8
    if not any(configs.compose.key_of(override) == "cluster" for override in where):
        where = [f"cluster={detect(socket.gethostname(), os.environ)}", *where]
    settings = configs.compose.fill(SubmitConfig, where)
    return nodes or settings.job.nodes, ranks_per_node or settings.ranks_per_node


def draw(config: "TrainConfig", dims: "ParallelDims", ranks_per_node: int, rank: int | None) -> "Picture":
    """Collect what there is to see of a layout that `lay_out` has passed; of `rank` alone if one is given."""
    from tools.layout_picture import Picture, count
    from train.layout.batch import micro_batches
    from train.layout.holding import holdings
    from train.layout.memory import state_bytes
    from train.layout.notes import notes
    from train.model.config import parameter_count

    found = notes(config, dims, ranks_per_node)
    if config.model.vocab_size is None:
        config.model.vocab_size = 0
        found.append(
            "the embedding and the head are left out, since model.vocab_size is null and there is no data at "
            f"data.prefix={config.data.prefix} to take it from"
        )
    shown = range(dims.ranks) if rank is None else [rank]
    steps = micro_batches(config, dims)
    samples, length = config.loop.samples_per_step, config.data.sequence_length
    nodes = -(-dims.ranks // ranks_per_node)
    return Picture(
        title=(
            f"{config.model.name}, {count(parameter_count(config.model))} parameters, on {nodes} node"
            f"{'s' * (nodes > 1)} of {ranks_per_node}: {dims}, ZeRO {config.parallel.zero}"
        ),
        step=(
            f"a step: {samples:,} samples of {length:,} tokens = {dims.dp} data-parallel x {steps} micro-batch"
            f"{'es' * (steps > 1)} x {config.parallel.micro_batch_size} samples"
        ),
        sizes=dict(zip(dims.coordinates(0), dims.shape, strict=True)),
        ranks=dims.ranks,
        ranks_per_node=ranks_per_node,
        seen_from=rank or 0,
        places=[
            _place(one, ranks_per_node, state_bytes(config, dims, one))
            for one in holdings(config, dims, shown)
        ],
        groups=_groups(config, dims, ranks_per_node, rank or 0),
        notes=found,
    )


def _place(one: "Holding", ranks_per_node: int, state_bytes: int) -> "Place":
    from tools.layout_picture import Place

    return Place(
        rank=one.rank,
        node=one.rank // ranks_per_node,
        coordinates=one.coordinates,
        layers=[_range(stage.layers) for stage in one.stages],
        has_embedding=one.has_embedding,
        has_head=one.has_head,
        query_heads=one.query_heads,
        kv_heads=one.kv_heads,
        hidden_units=one.hidden_units,
        vocabulary=one.vocabulary,
        positions=one.positions,
        parameters=one.parameters,
        sharers=one.sharers,
        state_bytes=state_bytes,
    )


def _groups(config: "TrainConfig", dims: "ParallelDims", ranks_per_node: int, rank: int) -> "list[Group]":
    """Every axis that there is, and axes that exchange as one."""
    from tools.layout_picture import Exchange, Group
    from train.layout.traffic import traffic

    exchanges: dict[tuple[str, ...], list[Exchange]] = {
        (axis,): [] for axis, size in zip(dims.coordinates(0), dims.shape, strict=True) if size > 1
    }
    for one in traffic(config, dims, rank):
        axes = tuple(axis for axis in one.axes if getattr(dims, axis) > 1)
        exchanges.setdefault(axes, []).append(
            Exchange(str(one.operation), one.what, one.times, one.sent_bytes)
        )
    return [
        Group(
            name=" x ".join(axes),
            ranks=dims.group(axes, rank),
            nodes=_spread(dims, axes, ranks_per_node),
            shares=SHARED[axes[0]] if len(axes) == 1 else "state",
            exchanges=found,
        )
        for axes, found in exchanges.items()
    ]


def _spread(dims: "ParallelDims", axes: tuple[str, ...], ranks_per_node: int) -> int:
    """Nodes that a group of `axes` has ranks on, the most of all such groups."""
    seen: set[int] = set()
    most = 1
    for rank in range(dims.ranks):
        if rank not in seen:
            group = dims.group(axes, rank)
            seen.update(group)
            most = max(most, len({member // ranks_per_node for member in group}))
    return most


def _range(layers: range) -> str:
    if len(layers) < 2:
        return str(layers[0]) if layers else "none"
    return f"{layers[0]}-{layers[-1]}"
