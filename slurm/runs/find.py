"""Runs and sweeps on disk: which folders are some, and which one a user means by a name.

runs/<run>/             has a config.yaml or an events.jsonl
runs/<sweep>/<task>/    the sweep has a sweep.json, each of its tasks is a run
"""

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from contract.errors import UserError, closest
from contract.run_folder import RunFolder
from contract.sweep import SweepFolder

DEFAULT_ROOT = Path("runs")
SWEEP_MANIFEST = "sweep.json"
_OF_A_RUN = ("config.yaml", "events.jsonl")


@dataclass(frozen=True, slots=True)
class Found:
    """A run folder, the names of what lies in it, and the sweep that it is a task of."""

    path: str
    entries: frozenset[str]
    sweep: str | None = None
    """The sweep's folder as an absolute path."""

    @property
    def run(self) -> RunFolder:
        """The run folder."""
        return RunFolder(Path(self.path))


def find_runs(path: Path) -> list[Found]:
    """Return the run in `path`, the tasks of the sweep in it, or all runs and tasks of sweeps below it, by name.

    Raises UserError if the folder cannot be read. A folder `runs` that is not there yet has no runs.
    """
    try:
        return list(_runs_in(str(path), sweep_of(path)))
    except OSError as error:
        if path.name == DEFAULT_ROOT.name and not path.exists():
            return []
        raise UserError(
            f"{path} cannot be read ({error.strerror}): give a folder of runs, a sweep or one run"
        ) from error


def is_run(path: Path) -> bool:
    """Whether a folder holds a run."""
    return not is_sweep(path) and any((path / name).is_file() for name in _OF_A_RUN)


def is_sweep(path: Path) -> bool:
    """Whether a folder holds a sweep."""
    return (path / SWEEP_MANIFEST).is_file()


def sweep_of(path: Path) -> str | None:
    """Return the folder of the sweep that a run is a task of, None for a run of its own."""
    parent = path.absolute().parent
    return str(parent) if is_sweep(parent) else None


def resolve(name: str) -> Path:
    """Return the folder that a user means: a path, or a name below `runs`: RUN, SWEEP, SWEEP/TASK or SWEEP/INDEX.

    Raises UserError, with the closest names, if there is none.
    """
    given = Path(name)
    for path in (given, DEFAULT_ROOT / given):
        if is_run(path) or is_sweep(path):
            return path
        if (task := _task_by_index(path)) is not None:
            return task
    if given.is_dir() or given == DEFAULT_ROOT:
        return given
    folder = (DEFAULT_ROOT / given).parent
    names = _names(given.parent) or _names(folder)
    if not names:
        raise UserError(f"there is no run {name} and no other one in {folder}: give the path of a run folder")
    raise UserError(f"there is no run {name}, {closest(given.name, names)}")


def refuse_sweep(path: Path) -> None:
    """Raise UserError if a run is about to be written into a folder that is a sweep."""
    if is_sweep(path):
        raise UserError(f"{path} is a sweep and no run: give this one another run.name")


def title(path: Path) -> str:
    """Return what a run is called in sentences and tables: its name, of a sweep's task SWEEP/TASK."""
    sweep = sweep_of(path)
    return path.name if sweep is None else f"{Path(sweep).name}/{path.name}"


def address(path: Path) -> str:
    """Return what to call a run or a sweep on the command line, here: its name below `runs`, else its path."""
    absolute, root = path.absolute(), DEFAULT_ROOT.absolute()
    below = absolute.is_relative_to(root) and absolute != root
    return shlex.quote(str(absolute.relative_to(root) if below else absolute))


def resolve_run(name: str) -> RunFolder:
    """Return the run that a user means; raises UserError for what is a sweep, or no run."""
    path = resolve(name)
    if is_run(path):
        return RunFolder(path)
    tasks = [found.path for found in find_runs(path)]
    if not tasks:
        raise UserError(f"{path} is no run folder: it has neither a config.yaml nor an events.jsonl")
    kind = "a sweep" if is_sweep(path) else "a folder of runs"
    raise UserError(f"{path} is {kind} and this command takes one run: name one, for example {tasks[0]}")


def resolve_runs(names: Sequence[str]) -> list[Found]:
    """Return the runs that a user means, each once: a sweep's or a folder's name stands for all of its runs."""
    found = {Path(run.path).absolute(): run for name in names for run in find_runs(resolve(name))}
    return list(found.values())


def _runs_in(path: str, sweep: str | None) -> Iterator[Found]:
    entries = frozenset(os.listdir(path))  # noqa: PTH208
    if SWEEP_MANIFEST not in entries and not entries.isdisjoint(_OF_A_RUN):
        yield Found(path, entries, sweep)
        return
    if SWEEP_MANIFEST in entries:
        sweep = str(Path(path).absolute())
    for name in _folders(path):
        inner = f"{path}/{name}"
        try:
            below = frozenset(os.listdir(inner))  # noqa: PTH208
        except OSError:
            continue  # gone, or somebody else's: no reason to hide the others
        if SWEEP_MANIFEST in below:
            if sweep is None:
                yield from _runs_in(inner, None)
        elif not below.isdisjoint(_OF_A_RUN):
            yield Found(inner, below, sweep)


def _folders(path: str) -> list[str]:
    names = []
    with os.scandir(path) as entries:
        for entry in entries:
            with suppress(OSError):  # a link to itself
                if entry.is_dir():
                    names.append(entry.name)
    return sorted(names)


def _task_by_index(path: Path) -> Path | None:
    """Return the folder of a sweep's task that is named as `trierarch sweep status` numbers it: SWEEP/3."""
    if not path.name.isdecimal() or not is_sweep(path.parent):
        return None
    sweep = SweepFolder(path.parent)
    return next((sweep.run(task).path for task in sweep.read().tasks if str(task.index) == path.name), None)


def _names(folder: Path) -> list[str]:
    """List what a user may name in a folder."""
    try:
        return [path.name for path in folder.iterdir() if is_run(path) or is_sweep(path)]
    except OSError:
        return []
