"""Read what may be stored anew meanwhile: fault is found only with what stayed as it was.

A run, or a command, compresses steps, has them need others, and restores them, in place: files that a reader knows of
are gone then. What counts is the manifest, which is replaced at once.
"""

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from tools.ckpt.findings import UnreadableError
from tools.ckpt.open import newest_step
from train.checkpoint.manifest import LONGEST_CHAIN, is_bare_name
from train.checkpoint.manifest import NAME as MANIFEST

_MOST_TIMES = 5
_Found = TypeVar("_Found")


def steadily(
    paths: Sequence[Path],
    work: Callable[[], _Found],
    is_wrong: Callable[[_Found], bool] = lambda found: False,
) -> _Found:
    """Return what `work` makes of the checkpoints at `paths`; it may be done several times.

    It is done anew where it raised, or `is_wrong` of what it found, and one of the checkpoints is stored in another way
    by now. Raises what `work` does, or `UnreadableError` where that goes on and on.
    """
    for _ in range(_MOST_TIMES):
        before = [_form(path) for path in paths]
        try:
            found = work()
        except Exception:  # whatever comes of files that are gone
            if [_form(path) for path in paths] == before:
                raise
        else:
            if not is_wrong(found) or [_form(path) for path in paths] == before:
                return found
    changed = next(path for path, form in zip(paths, before, strict=True) if _form(path) != form)
    raise UnreadableError(
        f"{changed} was stored anew each time that it was read, {_MOST_TIMES} times: wait until the run or the command "
        "that does so is done with it"
    )


def _form(path: Path) -> list[object]:
    """What tells how a step, and those that it needs, are stored; empty for what is no step of ours."""
    with suppress(UnreadableError):
        path = newest_step(path)
    folder = path.parent if path.is_file() else path
    found: list[object] = []
    for _ in range(LONGEST_CHAIN + 1):
        try:
            with (folder / MANIFEST).open("rb") as file:
                data, state = file.read(), os.fstat(file.fileno())
            # One that was compressed and restored meanwhile says what it said before.
            found.append((folder, data, state.st_ino, state.st_mtime_ns))
            parent = json.loads(data)["parent"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            break
        if not is_bare_name(parent):
            break
        folder = folder.with_name(parent)
    return found
