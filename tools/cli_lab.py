"""`trierarch lab`: a real multi-node Slurm on this machine, to try things on and to test with."""

from pathlib import Path
from typing import Annotated, cast

import typer

app = typer.Typer(no_args_is_help=True, help="A real multi-node Slurm on this machine.")

Folder = Annotated[
    Path | None, typer.Option(help="Where the lab lives. Default: a folder of yours in the temporary folder.")
]
Node = Annotated[str, typer.Argument(help="A node of the lab, for example n2.")]


@app.command()
def up(
    nodes: Annotated[int, typer.Option(min=1, help="Nodes n1, n2, ...")] = 4,
    cpus: Annotated[int, typer.Option(min=1, help="CPUs that each node claims to have.")] = 2,
    gpus: Annotated[
        int, typer.Option(min=0, help="GPUs that each node claims to have; they are not real.")
    ] = 0,
    grace_s: Annotated[
        int, typer.Option(min=0, help="Time that a pre-empted job is given, in seconds.")
    ] = 10,
    mpi: Annotated[str, typer.Option(help="How srun starts MPI programs: none, pmi2 or pmix.")] = "none",
    auth: Annotated[str, typer.Option(help="munge, or none where nobody else reaches this host.")] = "munge",
    folder: Folder = None,
) -> None:
    """Start the lab; `trierarch submit` uses it while it is up."""
    from slurm.lab import cluster
    from slurm.lab.settings import Auth, LabSettings

    settings = LabSettings(nodes=nodes, cpus=cpus, gpus=gpus, grace_s=grace_s, mpi=mpi, auth=cast(Auth, auth))
    _show(cluster.up(folder, settings))


@app.command()
def down(folder: Folder = None) -> None:
    """End its jobs and stop it."""
    from slurm.lab import cluster

    print("the lab is down" if cluster.down(folder) else "no lab was up")


@app.command()
def status(folder: Folder = None) -> None:
    """Show nodes and jobs, and how to talk to the lab with Slurm's own commands."""
    from slurm.lab import cluster

    _show(cluster.status(folder))


@app.command()
def crash(node: Node, folder: Folder = None) -> None:
    """Cut a node's power: its slurmd and every process on it end at once."""
    from slurm.lab.cluster import Lab

    Lab(folder).crash(node)
    print(f"{node} is off; `trierarch lab start {node}` switches it on again")


@app.command()
def start(node: Node, folder: Folder = None) -> None:
    """Switch a node on again."""
    from slurm.lab.cluster import Lab

    Lab(folder).start(node)
    print(f"{node} is on")


def _show(state: object) -> None:
    from slurm.lab.cluster import Lab, LabStatus

    assert isinstance(state, LabStatus)
    if not state.is_up:
        print(f"no lab is up in {state.folder}: start one with `trierarch lab up`")
        return
    for node, word in state.nodes.items():
        print(f"{node}  {word}")
    for job in state.jobs:
        print(job)
    for name, value in Lab(state.folder).environment().items():
        print(f"to use sinfo, squeue, sbatch here: export {name}={value}")
