"""What this host offers a lab: Slurm's commands, namespaces, a cgroup to track processes with."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from contract.errors import UserError
from slurm.lab.settings import Auth

FREEZER = Path("/sys/fs/cgroup/freezer")
COMMANDS = (
    *("slurmctld", "slurmd", "srun", "sbatch", "squeue", "sinfo", "scancel", "scontrol"),
    *("unshare", "mount", "setpriv", "hostname"),
)
_SYSTEM_FOLDERS = ("/usr/sbin", "/usr/local/sbin", "/sbin")  # daemons' place; often not in a user's PATH
_NAMESPACES = ("--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def missing_commands(auth: Auth = "munge") -> list[str]:
    """The commands that a lab needs and this host lacks."""
    wanted = COMMANDS + (("munged",) if auth == "munge" else ())
    return [name for name in wanted if shutil.which(name, path=search_path()) is None]


def require_commands(auth: Auth = "munge") -> None:
    """Raise UserError if this host lacks a command that a lab needs."""
    if missing := missing_commands(auth):
        raise UserError(
            f"The lab needs programs that this host lacks ({', '.join(missing)}): on Debian or Ubuntu run "
            f"`apt-get install slurm-wlm munge`, elsewhere see https://slurm.schedmd.com/download.html."
        )


def search_path() -> str:
    """PATH, and after it the folders where daemons are installed; an empty PATH stays empty."""
    path = os.environ.get("PATH", "")
    return os.pathsep.join([path, *_SYSTEM_FOLDERS] if path else [])


def namespace_command() -> list[str]:
    """The start of a command line that runs the rest in UTS, mount and PID namespaces of its own.

    Without root, a user namespace that keeps the caller's own id gives the right to make the others.
    Raises UserError if the kernel or the container refuses both.
    """
    user = () if os.geteuid() == 0 else ("--user", "--map-current-user", "--keep-caps")
    command = ["unshare", *user, *_NAMESPACES]
    refused = _failure([*command, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"])
    if refused is not None:
        who = "" if os.geteuid() == 0 else "as root, or "
        raise UserError(
            f"This host refuses the namespaces that the lab's nodes live in ({refused}): run it {who}"
            "in a container with the right to mount (docker: --privileged)."
        )
    return command


def _failure(command: Sequence[str]) -> str | None:
    """The last line of what a failing command said, or None if it succeeds."""
    try:
        done = subprocess.run(
            command,
            env=os.environ | {"PATH": search_path()},
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "no answer in 20 s"
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def has_freezer() -> bool:
    """Whether Slurm can track jobs' processes by freezer cgroups (version 1), the way that never leaks."""
    return os.geteuid() == 0 and os.access(FREEZER / "cgroup.procs", os.W_OK)
