"""A copy of the code in the run folder: what was submitted is what runs, whatever happens to the checkout."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from contract.run_folder import RunFolder

PACKAGES = ("configs", "contract", "slurm", "tools", "train")
RECORD = "SNAPSHOT.json"
# Larger files are data or weights that lie in the wrong place, not code.
_LARGEST_BYTES = 5_000_000


def snapshot(run: RunFolder, checkout: Path | None = None) -> dict[str, object]:
    """Copy the code of `checkout` (default: where the running packages live) to `<run>/code`.

    The copy is made beside it and swapped in by rename, so a half copy is never run. Returns the record that
    it also leaves in `code/SNAPSHOT.json`: git commit, whether there were changes, files left out as too large.
    An OSError is the caller's to explain.
    """
    source = checkout or Path(__file__).parent.parent
    fresh = run.path / f".code.new.{os.getpid()}"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    left_out = []
    for name in _names(source):
        file = source / name
        if file.is_symlink() or not file.is_file():
            continue
        if file.stat().st_size > _LARGEST_BYTES:
            left_out.append(str(name))
            continue
        (fresh / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, fresh / name)
    record = {"source": str(source), "time": time.time(), **_git_state(source), "left_out": left_out}
    (fresh / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    _swap(fresh, run.code)
    return record


def _swap(fresh: Path, target: Path) -> None:
    old = target.with_name(f".code.old.{os.getpid()}")
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _names(source: Path) -> Iterator[Path]:
    """Yield the files to copy, relative to `source`: of a git checkout what git knows, and the packages' new files."""
    tracked = _git(source, "ls-files", "-z", "--cached")
    added = _git(source, "ls-files", "-z", "--others", "--exclude-standard", "--", *PACKAGES)
    if tracked is None or added is None:
        found = (path.relative_to(source) for package in PACKAGES for path in (source / package).rglob("*"))
        yield from (path for path in found if "__pycache__" not in path.parts)
        return
    for name in filter(None, (tracked + added).split("\0")):
        path = Path(name)
        # Names and passwords live in .env, and run folders are shared.
        if (len(path.parts) == 1 or path.parts[0] in PACKAGES) and path.name != ".env":
            yield path


def _git_state(source: Path) -> dict[str, object]:
    commit = _git(source, "rev-parse", "HEAD")
    changes = _git(source, "status", "--porcelain")
    return {"commit": commit.strip() if commit else None, "dirty": None if changes is None else bool(changes)}


def _git(source: Path, *arguments: str) -> str | None:
    """Return what git says in `source`, None if that is no checkout of its own or there is no git."""
    if not (source / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=source, capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
