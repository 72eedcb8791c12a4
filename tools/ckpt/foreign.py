"""Names that a pickle asks for and that are no part of a training checkpoint."""

from collections.abc import Collection
from typing import Any

from tools.ckpt.findings import Finding, error, warning

_RUNS_THINGS = frozenset(
    [
        *("os", "posix", "nt", "subprocess", "sys", "builtins", "__builtin__", "runpy", "importlib", "pip"),
        *("shutil", "socket", "ctypes", "pty", "code", "pickle", "marshal", "operator", "asyncio"),
        *("multiprocessing", "webbrowser", "tempfile", "io", "timeit", "pdb", "bdb", "cProfile", "profile"),
    ]
)
"""Modules through which a pickle can do something to the machine that loads it."""


def foreign_names(names: Collection[str], **where: Any) -> list[Finding]:
    """Say which are there: an error for those that can do harm, a warning for classes of other libraries."""
    harmful = sorted(name for name in names if name.split(".")[0] in _RUNS_THINGS)
    others = sorted(set(names) - set(harmful))
    found = []
    if harmful:
        text = f"asks for {', '.join(harmful)} when it is loaded, which no checkpoint needs: do not load it"
        found.append(error(text, **where))
    if others:
        text = f"holds objects of {', '.join(others)}, which are not read here"
        found.append(warning(text, **where))
    return found
