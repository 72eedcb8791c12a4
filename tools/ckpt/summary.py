"""`ckpt show`: what is in a checkpoint, from its metadata."""

from typing import Any

from tools.ckpt.dtypes import BITS
from tools.ckpt.findings import DamageError
from tools.ckpt.pieces import Entry
from tools.ckpt.roles import POSITION, WEIGHTS
from tools.ckpt.source import Source
from tools.ckpt.stored import form_of, rounding_of


def position(source: Source) -> dict[str, int]:
    """Read the position in the run and in the data: names and numbers of our checkpoints, else empty."""
    found = {}
    for entry in source.entries:
        if entry.role == POSITION and entry.elements == 1 and entry.dtype.startswith("int"):
            try:
                found[entry.name.rpartition(".")[2]] = int(source.rows(entry, 0, 1).reshape(-1)[0])
            except DamageError:
                continue
    return found


def summary(source: Source, tensors: bool) -> dict[str, Any]:
    """Return everything as plain values, for JSON; `tensors` adds a list of all of them."""
    problems = source.problems()
    facts: dict[str, Any] = {
        "path": str(source.path),
        "format": source.format,
        "checked_by": source.checked_by,
        "step": source.step,
        "layout": source.layout,
        "position": position(source),
        "parameters": sum(
            one.elements for one in source.entries if one.role == WEIGHTS and one.tied_to is None
        ),
        "bytes": sum(one.nbytes for one in source.entries if one.tied_to is None),
        "files": sorted(source.files),
        "roles": roles(source.entries),
        "stored": form_of(source),
        "rounded": rounding_of(source),
        "tied": {one.name: one.tied_to for one in source.entries if one.tied_to is not None},
        "facts": {name: value for name, value in source.facts.items() if name not in ("sizes", "steps")},
        "findings": [finding.facts() for finding in problems],
    }
    if tensors:
        facts["tensors"] = [_tensor(entry) for entry in source.entries]
    return facts


def roles(entries: list[Entry]) -> list[dict[str, Any]]:
    """Sum up by role, in the order in which roles come first."""
    by_role: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.tied_to is None:
            by_role.setdefault(entry.role, []).append(entry)
    return [
        {
            "role": role,
            "tensors": len(found),
            "dtypes": sorted({entry.dtype for entry in found}),
            "elements": sum(entry.elements for entry in found),
            "bytes": sum(entry.nbytes for entry in found),
        }
        for role, found in by_role.items()
    ]


def _tensor(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "role": entry.role,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "bytes": entry.elements * BITS[entry.dtype].itemsize,
        "pieces": len(entry.pieces),
        "tied_to": entry.tied_to,
    }
