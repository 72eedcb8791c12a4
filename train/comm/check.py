"""What a choice of communication must fulfil, checked before anything is queued or started. Imports no torch."""

from pathlib import Path
from typing import TYPE_CHECKING

from contract.allreduce_plan import FILE, AllReducePlan
from contract.errors import ConfigError, UserError
from contract.run_folder import Event
from train.comm.config import AllReduce
from train.layout.dims import ParallelDims, is_sharded

if TYPE_CHECKING:
    from train.config import TrainConfig


def check_comm(config: "TrainConfig", dims: ParallelDims, ranks_per_node: int | None) -> None:
    """Raise `UserError` for an all-reduce that the layout does not have, and for a plan that it cannot go by.

    `ranks_per_node`: None where it is not known how nodes look.
    """
    if config.comm.plan is not None:
        _load(Path(config.comm.plan), ranks_per_node)
    if config.comm.allreduce is not AllReduce.hierarchical:
        return
    if reason := no_use(config, dims, ranks_per_node):
        raise ConfigError(f"comm.allreduce=hierarchical does nothing: {reason}")


def no_use(config: "TrainConfig", dims: ParallelDims, ranks_per_node: int | None) -> str:
    """Why there is nothing to choose for an all-reduce of gradients, and what to do; empty if there is."""
    if dims.dp * dims.cp == 1:
        return "no two ranks average gradients, leave comm.allreduce out"
    if is_sharded(config, dims):
        nodes = 1 if ranks_per_node is None else dims.ranks // ranks_per_node
        instead = (
            f"parallel.zero=1 parallel.dp_replicate={nodes}" if nodes > 1 else "parallel.dp_replicate=NODES"
        )
        return (
            f"with parallel.zero={config.parallel.zero}, tp={dims.tp}, pp={dims.pp} gradients travel as the mesh says, "
            f"leave comm.allreduce out (with ZeRO {instead} reduces inside nodes first)"
        )
    if ranks_per_node is not None and (ranks_per_node == 1 or ranks_per_node == dims.ranks):
        where = "there is one node" if ranks_per_node > 1 else "there is one rank on each node"
        return f"{where}, leave comm.allreduce out"
    return ""


def check_plan(config: "TrainConfig", dims: ParallelDims, ranks_per_node: int) -> None:
    """Raise `UserError` where `comm.allreduce=auto` has a choice, and nothing to choose by."""
    if config.comm.allreduce is AllReduce.auto and not no_use(config, dims, ranks_per_node):
        find_plan(config, ranks_per_node)


def find_plan(config: "TrainConfig", ranks_per_node: int) -> AllReducePlan | None:
    """Return the plan that `comm.allreduce=auto` goes by; None where the run's own network test has left none.

    Raises `UserError` if there is none that fits.
    """
    given, run = config.comm.plan, config.run_folder
    path = run.nccl / FILE if given is None else Path(given)
    if given is None and not path.exists():
        if any(event.get("event") == Event.NETWORK_TESTED for event in run.read_events()):
            return None
        raise ConfigError(
            "comm.allreduce=auto knows nothing of this machine: give comm.plan=FILE, the plan.json of `trierarch nccl "
            "test`, or job.preflight=nccl at submission"
        )
    return _load(path, ranks_per_node)


def _load(path: Path, ranks_per_node: int | None) -> AllReducePlan:
    plan = AllReducePlan.load(path)
    if ranks_per_node is not None and plan.ranks_per_node != ranks_per_node:
        raise UserError(
            f"{path} was measured with {plan.ranks_per_node} ranks a node and there are {ranks_per_node}: measure "
            "again with as many, or leave comm.allreduce out"
        )
    return plan
