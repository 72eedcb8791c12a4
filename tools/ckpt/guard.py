"""What guards a step that is stored anew: locks, room, side by side and all or nothing, faults told in a sentence."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import TypeVar

from contract.errors import SaveError, UserError
from tools.bytes_shown import size
from tools.ckpt.chains import manifest_of
from tools.ckpt.convert_read import DamagedSourceError
from tools.ckpt.findings import DamageError
from tools.ckpt.report import Report
from train.checkpoint.compress.lock import locked_folder
from train.checkpoint.compress.step import remove_leftovers
from train.checkpoint.errors import DamagedError
from train.checkpoint.manifest import Manifest, parse_manifest

HOLD_WAIT_S = 1.0
"""For who only looks whether a step is held."""
COMMIT_WAIT_S = 60.0
"""For another process that replaces or removes steps: moments."""
_MOST_THREADS = 8

Check = Callable[[], None]
"""Is called every now and then; what it raises ends a job."""
_Made = TypeVar("_Made")


@contextmanager
def held(folder: Path) -> Iterator[Manifest]:
    """Keep other commands away from a step; what one that was ended has left is removed before and after."""
    with told(folder):
        try:
            with locked_folder(folder, HOLD_WAIT_S):
                manifest = _clean(folder)
                try:
                    yield manifest
                except BaseException:
                    with suppress(UserError, OSError):  # what ended it is what is to be told
                        _clean(folder)
                    raise
        except TimeoutError as reason:
            raise UserError(f"another command works on {folder}: wait until it has ended") from reason


def _clean(folder: Path) -> Manifest:
    with _alone(folder.parent):
        manifest = manifest_of(folder)
        remove_leftovers(folder, manifest)
        return manifest


@contextmanager
def _alone(checkpoints: Path) -> Iterator[None]:
    """Keep away who removes or replaces steps."""
    try:
        with locked_folder(checkpoints, COMMIT_WAIT_S):
            yield
    except TimeoutError as reason:
        raise UserError(
            f"steps in {checkpoints} are being removed or replaced by another process: try again"
        ) from reason


@contextmanager
def told(folder: Path) -> Iterator[None]:
    """Tell what happens to a step in a sentence."""
    try:
        yield
    except (DamagedError, DamageError) as reason:
        raise DamagedSourceError(
            f"{folder} cannot be read ({reason}): look at it with `trierarch ckpt validate`"
        ) from reason
    except OSError as reason:
        raise SaveError(
            f"{folder} could not be stored anew ({reason.strerror or reason}): it is as it was"
        ) from reason


@contextmanager
def committing(folder: Path, manifest: Manifest) -> Iterator[None]:
    """Keep away who removes or replaces steps; raises `UserError` where that has happened meanwhile."""
    with _alone(folder.parent):
        try:
            same = parse_manifest(folder) == manifest
        except ValueError:
            same = False
        if not same:
            raise UserError(f"{folder} was removed or replaced meanwhile: look at it, and try again")
        yield


def refuse(folder: Path, report: Report) -> None:
    """Raise `DamagedSourceError` for a step that is damaged, by what was found in it."""
    if report.exit_code:
        wrong = report.unreadable or str(report.errors[0])
        raise DamagedSourceError(
            f"{folder} is damaged ({wrong}): look at it with `trierarch ckpt validate`, it stays as it is"
        )


def refuse_full(folder: Path, nbytes: int) -> None:
    """Raise `SaveError` where a file system has less room than `nbytes`."""
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise SaveError(
            f"{folder} may need {size(nbytes)} for new files beside the old ones, and its file system has "
            f"{size(free)}: make room first"
        )


def in_threads(jobs: Sequence[Callable[[Check], _Made]]) -> list[_Made]:
    """Do jobs side by side, each with what it calls now and then; when one fails, that ends the others."""
    threads = max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)), len(jobs)))
    ended = Event()

    def check() -> None:
        if ended.is_set():
            raise DamagedError("another file could not be stored")

    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(job, check) for job in jobs]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            return [future.result() for future in futures]
        except BaseException:
            ended.set()
            raise
