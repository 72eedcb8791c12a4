"""The nodes of a job: which there are, in which order ranks are placed on them, which ones train."""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from contract.errors import UserError
from slurm.client import ask
from slurm.supervise.agent_process import AgentProcess


@dataclass(eq=False)
class Node:
    """A node of the job, as its supervisor knows it."""

    name: str
    suspicion: int = 0
    """How often it was the first to fail; the least suspicious nodes train."""
    bad: str | None = None
    """Why it is not used any more in this job."""
    agent: AgentProcess | None = None
    ready: bool = False
    """Whether its agent can fork ranks."""
    been_ready: bool = False
    """Whether an agent of it ever could: the next one finds its files in the node's memory."""
    cpus: list[int] = field(default_factory=list)
    """What the agent may use."""
    failed_launches: int = 0
    """How many agents in a row ended before they were ready."""
    launched_s: float = 0.0
    heard_s: float = 0.0
    """When its agent was started and when it spoke last, by the monotonic clock."""


def allocation(environ: Mapping[str, str]) -> list[str]:
    """Name the nodes of the job in the order of their ranks: that of `SLURM_HOSTFILE` if it is set, else Slurm's.

    Without Slurm it is this host. Raises UserError when Slurm cannot say.
    """
    if environ.get("SLURM_HOSTFILE"):
        return _host_file("SLURM_HOSTFILE", Path(environ["SLURM_HOSTFILE"]), "unset it")
    if "SLURM_JOB_NODELIST" not in environ:
        return [socket.gethostname()]
    return hostnames(environ["SLURM_JOB_NODELIST"])


def arranged(names: Sequence[str], order: Path | None) -> list[str]:
    """Return `names` in the order of a file as `SLURM_HOSTFILE` takes it; those that are not in it come last.

    Raises UserError when it cannot be read. None leaves them as they are.
    """
    if order is None:
        return list(names)
    places = {name: place for place, name in enumerate(_host_file("job.node_order", order, "correct it"))}
    return sorted(names, key=lambda name: places.get(name, len(places)))


def place_tasks(names: Sequence[str], tasks_per_node: int, file: Path) -> dict[str, str]:
    """Have srun place its tasks on the nodes in this order: write the file, return what to add to its environment.

    Raises OSError.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{name}\n" * tasks_per_node for name in names))
    return {"SLURM_HOSTFILE": str(file), "SLURM_DISTRIBUTION": "arbitrary"}


def _host_file(key: str, file: Path, remedy: str) -> list[str]:
    """Read node names, one line a task or `node*tasks`."""
    try:
        names = [line.strip().partition("*")[0] for line in file.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UserError(f"{key}={file} cannot be read ({reason}): {remedy}") from None
    return list(dict.fromkeys(name for name in names if name))


def hostnames(text: str) -> list[str]:
    """Expand a node list in Slurm's short form (`n[1-3]`); raises UserError when Slurm cannot."""
    answer = ask(["scontrol", "show", "hostnames", text], os.environ)
    if answer.code != 0:
        raise UserError(f"Slurm cannot read the node list {text} ({answer.error.strip()}): look at the job")
    return answer.output.split()


def down(names: Sequence[str]) -> set[str]:
    """Name those that Slurm knows to have failed; none without Slurm, and none where it does not answer."""
    if not names or "SLURM_JOB_ID" not in os.environ:
        return set()
    command = ["sinfo", "--noheader", "--Node", f"--nodes={','.join(names)}", "--format=%N %T"]
    states = [line.split() for line in ask(command, os.environ).output.splitlines()]
    return {state[0] for state in states if state[-1].startswith(("down", "fail"))}


def choose(nodes: Sequence[Node], count: int) -> list[Node] | None:
    """Pick the `count` least suspicious of `nodes`, in their own order, or None if there are fewer.

    Neighbours in Slurm's order are near each other, so the order stays whatever is left out.
    """
    if len(nodes) < count:
        return None
    calm = sorted(range(len(nodes)), key=lambda index: (nodes[index].suspicion, index))[:count]
    return [nodes[index] for index in sorted(calm)]
