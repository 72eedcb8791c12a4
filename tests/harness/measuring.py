"""Live ranks of a network test: forks of a process that has imported torch, on this host or in network namespaces."""

import os
import signal
import socket
import time
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from harness.netns import INTERFACE, Fabric, enter
from harness.pool import start_fork_server
from tools.nccl.measure.spec import Spec
from tools.nccl.measurement import Measurement

LIMIT_S = 90


class Ranks:
    """The processes of one measurement."""

    def __init__(
        self,
        spec: Spec,
        nodes: int,
        per_node: int = 1,
        fabric: Fabric | None = None,
        order: list[int] | None = None,
        missing: tuple[int, ...] = (),
    ) -> None:
        """Start them; without `fabric` all are on the loopback interface.

        `order`: which node of the fabric is the measurement's first, second, ...; `missing`: ranks that never come.
        """
        start_fork_server()
        self.folder = Path(spec.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        spec.write(self.folder / "spec.json")
        order = order or list(range(nodes))
        port = _free_port()
        self.processes: list[BaseProcess] = []
        for rank in range(nodes * per_node):
            node, gpu = divmod(rank, per_node)
            variables = {
                "RANK": rank,
                "WORLD_SIZE": nodes * per_node,
                "LOCAL_RANK": gpu,
                "LOCAL_WORLD_SIZE": per_node,
                "GROUP_RANK": node,
                "GROUP_WORLD_SIZE": nodes,
                "MASTER_ADDR": fabric.address(order[0]) if fabric else "127.0.0.1",
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": INTERFACE if fabric else "lo",
            }
            namespace = fabric.namespace(order[node]) if fabric else None
            process = get_context("forkserver").Process(
                target=_be_rank, args=(self.folder, {k: str(v) for k, v in variables.items()}, namespace)
            )
            self.processes.append(process)
            if rank not in missing:
                process.start()

    def pid(self, rank: int) -> int:
        """The process of a rank."""
        found = self.processes[rank].pid
        assert found is not None
        return found

    def wait(self, timeout_s: float = 60.0, but: tuple[int, ...] = ()) -> list[int | None]:
        """Return the exit codes when all have ended but those; whoever has not by then is killed: None."""
        deadline = time.monotonic() + timeout_s
        codes = []
        for rank, process in enumerate(self.processes):
            if rank not in but and process.pid is not None:
                process.join(max(0.0, deadline - time.monotonic()))
            codes.append(process.exitcode)
        self.kill()
        return codes

    def wait_for(self, rank: int, timeout_s: float) -> int | None:
        """Return the exit code of one rank; None if it has not ended by then."""
        self.processes[rank].join(timeout_s)
        return self.processes[rank].exitcode

    def kill(self) -> None:
        """End all."""
        for process in self.processes:
            if process.pid is not None:
                process.kill()
                process.join(5.0)

    def output(self) -> str:
        """What all have printed."""
        return (self.folder / "output").read_text()


def measure(spec: Spec, nodes: int, per_node: int = 1, **where: Any) -> Measurement:
    """Measure, and return what was found."""
    ranks = Ranks(spec, nodes, per_node, **where)
    codes = ranks.wait(LIMIT_S)
    assert codes == [0] * len(codes), ranks.output()
    return Measurement.load(ranks.folder / "measurement.npz")


def _be_rank(folder: Path, variables: dict[str, str], namespace: Path | None) -> None:
    from tools.nccl.measure.__main__ import main
    from train.resilience.process import leave

    # Not with pytest's own end: a test that was killed leaves nobody behind.
    signal.alarm(LIMIT_S + 10)
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for name in ("RANK", "WORLD_SIZE", "SLURM_JOB_ID"):
        os.environ.pop(name, None)
    os.environ.update(variables, OMP_NUM_THREADS="1")
    if namespace is not None:
        enter(namespace)
        # Else a message waits for other work of this host, and a node looks late.
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    leave(main([str(folder / "spec.json")]))


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
