"""Versions: Python, torch, NCCL, and what this project needs, by the packages' own words."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from slurm.client import ask
from tools.doctor.facts import Facts
from tools.doctor.finding import About, Finding, NotCheckedError, check, error, warning

OLDEST_PYTHON = (3, 11)
OLDEST_NCCL = (2, 12)
"""It brought PXN (all-to-all through a rail's own GPU, NCCL_PXN_DISABLE) and SHARP by a plugin of its own."""


@check("Python", About.environment)
def python(facts: Facts) -> Iterator[Finding]:
    """The interpreter that runs the ranks."""
    _need_this_environment(facts)
    if sys.version_info[:2] < OLDEST_PYTHON:
        yield error(
            "python", f"this is Python {sys.version.split()[0]}, and 3.11 is needed", "make a new environment"
        )


@check("interpreter of the job", About.environment)
def interpreter(facts: Facts) -> Iterator[Finding]:
    """`cluster.python`, where it is not the one that submits."""
    path = facts.cluster.python
    if path is None or path == sys.executable:
        return
    if facts.settings.contained:
        raise NotCheckedError("it is in the container")
    facts.need_here()
    if path.startswith("/") and not Path(path).exists():
        yield warning(
            "cluster.python", f"cluster.python={path} is not there, seen from this host", "correct it"
        )
        return
    answer = ask([path, "-c", "import sys; print(*sys.version_info[:2])"], facts.host.environ)
    if answer.code != 0:
        raise NotCheckedError(f"{path} does not run here ({answer.sentence})")
    version = tuple(map(int, answer.output.split()[:2]))
    if version < OLDEST_PYTHON:
        yield error(
            "cluster.python",
            f"{path} is Python {'.'.join(map(str, version))}, and 3.11 is needed",
            "give another",
        )


@check("torch", About.environment)
def torch(facts: Facts) -> Iterator[Finding]:
    """Is it there, and built for GPUs where they are?"""
    _need_this_environment(facts)
    version = facts.software.version("torch")
    if version is None:
        yield error(
            "torch", "torch is not installed in this environment", "pip install -e . -c constraints.txt"
        )
    elif facts.on_gpus and facts.software.cuda is None:
        yield error(
            "torch",
            f"torch {version} is built without CUDA, and {facts.cluster.name} has GPUs: ranks would compute on CPUs",
            "install a build for CUDA, or give cluster.python=PATH of an environment that has one",
        )


@check("NCCL", About.environment)
def nccl(facts: Facts) -> Iterator[Finding]:
    """The version that came with torch."""
    facts.need_gpus()
    _need_this_environment(facts)
    version = facts.software.nccl
    if version is None:
        raise NotCheckedError("no package nvidia-nccl is installed: torch has its own, or none")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST_NCCL:
        yield warning(
            "NCCL",
            f"NCCL {version} is older than 2.12: without PXN, exchanges between nodes cross the rails' switches",
            "a newer torch, or pip install --upgrade nvidia-nccl-cu12",
        )


@check("packages", About.environment)
def packages(facts: Facts) -> Iterator[Finding]:
    """What this project and torch need, against what is installed."""
    _need_this_environment(facts)
    from packaging.requirements import InvalidRequirement, Requirement

    for name, wanted in (
        ("trierarch", facts.software.wanted),
        ("torch", facts.software.requirements("torch")),
    ):
        for text in wanted:
            try:
                need = Requirement(text)
            except InvalidRequirement:  # in a form of tomorrow's
                continue
            if need.marker is not None and not need.marker.evaluate({"extra": ""}):
                continue
            version = facts.software.version(need.name)
            if version is None:
                if name == "trierarch" and need.name == "torch":
                    continue  # told of above
                yield error(
                    need.name,
                    f"{name} needs {need.name} {need.specifier}, which is not installed",
                    _install(need.name),
                )
            elif not need.specifier.contains(version, prereleases=True):
                say = error if name == "trierarch" else warning
                yield say(
                    need.name,
                    f"{name} needs {need.name} {need.specifier}, and {version} is installed",
                    _install(need.name),
                )


def _install(name: str) -> str:
    return f"pip install -c constraints.txt {name}"


def _need_this_environment(facts: Facts) -> None:
    """Raise `NotCheckedError` where ranks run in another environment than this command."""
    if facts.settings.contained:
        raise NotCheckedError("ranks run in the container's environment")
    if facts.cluster.python not in (None, sys.executable):
        raise NotCheckedError(f"ranks run in the environment of cluster.python={facts.cluster.python}")
    facts.need_here()
