"""`ckpt ls`: the steps of a run."""

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from contract.errors import UserError
from contract.run_folder import STEP_FOLDER, RunFolder
from tools.ckpt.findings import UnreadableError
from tools.ckpt.open import open_source
from tools.ckpt.report import Depth, Report
from tools.ckpt.source import Source
from tools.ckpt.steady import steadily
from tools.ckpt.stored import form_of
from tools.ckpt.validate import check
from train.checkpoint.manifest import METADATA


@dataclass(frozen=True)
class Step:
    """One folder of a run's checkpoints."""

    name: str
    step: int | None
    age_s: float
    nbytes: int
    format: str
    layout: str
    state: str
    """whole: it was read back when it was saved, and is complete now; not verified: complete; damaged; unfinished."""
    reason: str = ""
    stored: str = ""
    """How, where not as plain files: see `stored.form_of`."""


def steps_of(run: Path) -> list[Step]:
    """List the steps of a run, oldest first; raises `UnreadableError` where there is no folder of a run."""
    folder = RunFolder(run).checkpoints
    if not folder.is_dir():
        raise UnreadableError(f"{run} is no run folder: it has no {folder.name}")
    found = []
    for path in folder.iterdir():
        if path.is_dir() and path.name.startswith("step_"):
            with suppress(FileNotFoundError):  # a run removes old steps
                found.append(_step(path))
    return sorted(found, key=lambda one: (-1 if one.step is None else one.step, one.name))


def _step(path: Path) -> Step:
    number = STEP_FOLDER.match(path.name)
    # The manifest is written anew when a step is stored in another way.
    written = path / METADATA if (path / METADATA).is_file() else path
    age_s = time.time() - written.stat().st_mtime
    if number is None:
        state = "set aside" if path.name.endswith(".damaged") else "unfinished"
        return Step(path.name, None, age_s, _bytes_in(path), "", "", state)
    layout = stored = ""
    try:
        report, layout, stored, nbytes = steadily([path], lambda: _looked_at(path), lambda found: True)
    except UserError as error:
        report, nbytes = Report(path, Depth.QUICK, unreadable=str(error)), _bytes_in(path)
    reason = report.unreadable or "; ".join(map(str, report.errors[:1]))
    verified = report.checked_by is not None and report.checked_by.startswith("xxh3")
    state = "damaged" if reason else "whole" if verified else "not verified"
    return Step(path.name, int(number[1]), age_s, nbytes, report.format, layout, state, reason, stored)


def _looked_at(path: Path) -> tuple[Report, str, str, int]:
    with open_source(path) as source:
        return check(source, Depth.QUICK), layout_of(source), form_of(source), _bytes_in(path)


def _bytes_in(folder: Path) -> int:
    nbytes = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # drafts come and go
            nbytes += path.stat().st_size if path.is_file() else 0
    return nbytes


def layout_of(source: Source) -> str:
    """Say in which layout a checkpoint was saved, as far as it is known: degrees above 1."""
    if not source.layout:
        return ""
    degrees = {name: degree for name, degree in source.layout.items() if name != "zero"}
    shown = [f"{name} {degree}" for name, degree in degrees.items() if degree != 1] or ["1 rank"]
    return ", ".join([*shown, *([f"zero {source.layout['zero']}"] if source.layout.get("zero") else [])])
