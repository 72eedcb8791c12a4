"""What is unfortunate in a layout that works: said at submission and at the start of a run. Imports no torch."""

import dataclasses
from typing import TYPE_CHECKING

from train.comm.check import no_use
from train.comm.config import AllReduce
from train.layout.check import fits, largest_degrees
from train.layout.config import ParallelConfig
from train.layout.dims import ParallelDims
from train.layout.nearest import nearest_layouts, write

if TYPE_CHECKING:
    from train.config import TrainConfig


def notes(config: "TrainConfig", dims: ParallelDims, ranks_per_node: int) -> list[str]:
    """Say, a sentence each, where a group that should stay inside a node spans several, and what does nothing."""
    parallel, found = config.parallel, []
    degrees = f"parallel.tp={dims.tp}"
    nodes = f"nodes of {ranks_per_node} rank{'s' * (ranks_per_node > 1)}"
    if dims.spans_nodes("tp", ranks_per_node):
        found.append(
            f"{degrees} spans {nodes}, so that each layer waits for the network four times a "
            "micro-batch" + _instead(config, dims, ranks_per_node, ("tp",))
        )
    elif dims.spans_nodes("cp", ranks_per_node):
        found.append(
            f"parallel.cp={dims.cp} with {degrees} spans {nodes}, so that each layer's "
            "attention crosses the network" + _instead(config, dims, ranks_per_node, ("tp", "cp"))
        )
    if dims.dp_replicate > 1 and dims.spans_nodes("dp_shard", ranks_per_node):
        copies = _copies_in_nodes(dims, ranks_per_node)
        if copies is not None:
            found.append(
                f"parallel.dp_shard={dims.dp_shard} spans {nodes} although there are "
                f"{dims.dp_replicate} copies of the state, so that what ZeRO gathers crosses the network: "
                f"parallel.dp_replicate={copies} would keep each copy inside a node"
            )
    if parallel.zero > 0 and dims.dp_shard * dims.cp == 1:
        found.append(
            f"parallel.zero={parallel.zero} shares nothing: it needs several ranks on dp_shard or cp, and there is one"
        )
    if config.comm.allreduce is AllReduce.auto and (reason := no_use(config, dims, ranks_per_node)):
        found.append(f"comm.allreduce=auto has nothing to choose: {reason}")
    return found


def _instead(config: "TrainConfig", dims: ParallelDims, ranks_per_node: int, inside: tuple[str, ...]) -> str:
    """Name the nearest layout with the axes `inside` within nodes; empty if there is none."""
    ranks = dims.ranks

    def stays(parallel: ParallelConfig) -> bool:
        if not fits(config, parallel, ranks):
            return False
        other = ParallelDims.of(parallel, ranks)
        return not any(other.spans_nodes(axis, ranks_per_node) for axis in inside)

    better = nearest_layouts(config.parallel, ranks, largest_degrees(config), stays, ranks_per_node)
    return f": {write(better[0], config.parallel)} would stay inside" if better else ""


def _copies_in_nodes(dims: ParallelDims, ranks_per_node: int) -> int | None:
    """Fewest copies of the state of which none spans nodes; None if each would be one rank."""
    for shard in range(min(dims.dp, ranks_per_node), 1, -1):
        if dims.dp % shard == 0:
            other = dataclasses.replace(dims, dp_replicate=dims.dp // shard, dp_shard=shard)
            if not other.spans_nodes("dp_shard", ranks_per_node):
                return other.dp_replicate
    return None
