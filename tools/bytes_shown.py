"""Bytes for people: a bar for commands that read for long, and sizes."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

Begin = Callable[[int], Callable[[int], None]]
"""Is given the number of bytes in all; returns what is told how many were read since it was called last."""


@contextmanager
def bytes_bar(name: str) -> Iterator[Begin]:
    """Context of a progress bar on stderr; where that is no terminal, of none."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with ExitStack() as stack:

        def begin(total: int) -> Callable[[int], None]:
            if not console.is_terminal:
                return lambda nbytes: None
            bar = stack.enter_context(Progress(*columns, console=console, transient=True))
            task = bar.add_task(name.replace("[", "("), total=total)
            return lambda nbytes: bar.advance(task, nbytes)

        yield begin


def size(nbytes: int) -> str:
    """Write a number of bytes in units of 1000: `14.30 GB`."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} B"
