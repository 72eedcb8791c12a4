"""What is installed, without importing it."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

# What reads metadata takes a tenth of the time that a login node has: it is imported where it is used.
if TYPE_CHECKING:
    from importlib.metadata import Distribution

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
NCCL = re.compile(r"nvidia-nccl(-cu\d+)?$")
Look = Callable[[str], "Distribution | None"]


def installed(name: str) -> "Distribution | None":
    """Find a distribution that this interpreter would import; None without."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


@dataclass
class Software:
    """The packages of one interpreter."""

    look: Look = installed
    project: Path = PROJECT

    def version(self, name: str) -> str | None:
        """Of a distribution; None where it is not installed."""
        found = self.look(name)
        return None if found is None else found.version

    @cached_property
    def nccl(self) -> str | None:
        """Version of the NCCL that came with torch; None without, or where torch has it built in."""
        required = (re.split(r"[\s;<>=!~\[(]", text, maxsplit=1)[0] for text in self.requirements("torch"))
        names = [name for name in required if NCCL.match(name)] or ["nvidia-nccl-cu12", "nvidia-nccl-cu13"]
        return next((version for name in names if (version := self.version(name))), None)

    @cached_property
    def cuda(self) -> str | None:
        """Version of CUDA that torch is built for; None for a build without, or without torch."""
        torch = self.look("torch")
        if torch is None:
            return None
        try:
            text = Path(str(torch.locate_file("torch/version.py"))).read_text()
        except OSError:
            return None
        found = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
        return found[1] if found else None

    @cached_property
    def wanted(self) -> list[str]:
        """What this project needs, as its own file says, or its metadata where that is not there."""
        import tomllib

        try:
            return list(tomllib.loads(self.project.read_text())["project"]["dependencies"])
        except (OSError, ValueError, KeyError):
            return self.requirements("trierarch")

    def requirements(self, name: str) -> list[str]:
        """What a distribution needs; empty where it is not installed."""
        found = self.look(name)
        return list(found.requires or ()) if found is not None else []
