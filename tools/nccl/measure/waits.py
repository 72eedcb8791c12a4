"""Who waited for whom in vain: one small file of each rank, so that who wrote none is known as well. Imports no torch.

`<folder>/waited.<rank>.json` has the fields of `Wait`. The supervisor leaves out the nodes in `silent_nodes`, and
starts the measurement again; it goes on where it was, without the pair or the operation that nobody is to blame for:
of those `hung.<rank>.json` keeps the same for the next start (see `hung`).
"""

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

WAITED, HUNG = "waited", "hung"


@dataclass(frozen=True)
class Wait:
    """What a rank waited for in vain."""

    rank: int
    node: str
    gpu: int
    """Number on its node."""
    kind: str
    """What it was in: start, round (of exchanges), collective, plan (waiting for what rank 0 says)."""
    what: str
    """The same in words: the operation, or the round."""
    reason: str
    """How it noticed, in words."""
    waited_s: float
    peers: list[list[str | int]]
    """Whom it directly waited for: [node, gpu] of each; empty where all wait for all."""
    silent: list[int] | None = None
    """Ranks that wrote no such note, though all others did; None: not known yet."""
    silent_nodes: list[str] | None = None
    """Their nodes."""

    def write(self, folder: Path, name: str = WAITED) -> None:
        """Write it, whole; raises OSError."""
        path = folder / f"{name}.{self.rank}.json"
        fresh = folder / f".{name}.{self.rank}.new"
        fresh.write_text(json.dumps(asdict(self)) + "\n")
        fresh.rename(path)

    def found(self, silent: Sequence[int], nodes: Sequence[str]) -> "Wait":
        """The same, with who is silent and where."""
        return replace(self, silent=list(silent), silent_nodes=list(nodes))


def who_wrote(folder: Path, name: str = WAITED) -> set[int]:
    """Return the ranks that wrote a note of this name."""
    pattern = re.compile(rf"{name}\.(\d+)\.json")
    names = (pattern.fullmatch(found) for found in os.listdir(folder))  # noqa: PTH208  (no path for each of thousands)
    return {int(found[1]) for found in names if found}


def read_waits(folder: Path, name: str = WAITED) -> list[Wait]:
    """Return all notes in the order of the ranks; those that cannot be read are left out."""
    found = []
    for rank in sorted(who_wrote(folder, name)):
        with suppress(OSError, ValueError, TypeError):
            found.append(Wait(**json.loads((folder / f"{name}.{rank}.json").read_text())))
    return found


def remove_waits(folder: Path) -> None:
    """Forget all notes."""
    for name in (WAITED, HUNG):
        for rank in who_wrote(folder, name):
            (folder / f"{name}.{rank}.json").unlink(missing_ok=True)
