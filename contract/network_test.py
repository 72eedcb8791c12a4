"""What a network test leaves in a run's folder `nccl`, for the supervisor of the job and for people.

The ranks that measure are told what to do by `SPEC` and write `MEASUREMENT`; rank 0 of them writes the report, of
which `VERDICT` is what a program reads. Whoever waited in vain leaves a note, `waited.<rank>.json`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract.errors import UserError

PROGRAM = "tools.nccl.job"
"""The module whose `main` measures, run in every rank with the path of the spec as its only argument."""
SPEC = "spec.json"
MEASUREMENT = "measurement.npz"
TOPOLOGY = "topology.txt"
"""What `scontrol show topology` prints; not there where Slurm says nothing."""
VERDICT = "verdict.json"
REPORT = "report.txt"
BROKEN = "BROKEN"
BROKEN_CODE = 2
_LAST_BYTES = 65_536


@dataclass(frozen=True)
class NetworkVerdict:
    """What a job does something about."""

    verdict: str
    """OK, DEGRADED or BROKEN."""
    exit_code: int
    """0, 1 or 2."""
    summary: str
    """One sentence."""
    exclude: dict[str, str]
    """Nodes that a job had better do without, and why."""
    order: list[str]
    """Nodes in the order that suits; empty where none is better than the given one."""

    @classmethod
    def load(cls, path: Path) -> "NetworkVerdict":
        """Read a report's `VERDICT`; raises UserError if there is none."""
        try:
            text: dict[str, Any] = json.loads(path.read_text())
            return cls(
                verdict=str(text["verdict"]),
                exit_code=int(text["exit_code"]),
                summary=str(text["summary"]),
                exclude={str(name): str(reason) for name, reason in text["exclude"].items()},
                order=[str(name) for name in text["order"]],
            )
        except OSError as error:
            raise UserError(
                f"{path} cannot be read ({error.strerror}): the network test did not end"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is no verdict of a network test ({error})") from error


def cannot_write(folder: Path | str, error: OSError) -> str:
    """Say that a file of a test could not be written, and what to do."""
    why = error.strerror or str(error)
    return f"{folder} cannot be written ({why}): free some space there, or give a folder that can be written"


def logs_of(run_logs: Path, job: str = "*", rank: int | str = "*") -> str:
    """Return the name of a rank's log of a network test, or a pattern of several."""
    return str(run_logs / f"{job}.network.{rank}.log")


def last_words(log: Path, start: int = 0) -> str:
    """Return the sentence with which a rank has left, from the byte `start` of its log on; empty if it said none."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, file.seek(0, 2) - _LAST_BYTES))
            text = "\n" + file.read().decode(errors="replace")
    except OSError:
        return ""
    _, found, rest = text.rpartition("\ntrierarch: ")
    return rest.partition("\n")[0].strip() if found and "\nTraceback (" not in rest else ""


def blamed(folder: Path) -> dict[str, str]:
    """Return the nodes that most ranks which waited in vain have missed, and what they waited for."""
    votes: dict[str, list[str]] = {}
    notes = 0
    for note in folder.glob("waited.*.json"):
        try:
            text = json.loads(note.read_text())
            names, what = text["silent_nodes"] or [], f"{text['what']}: {text['reason']}"
        except (OSError, ValueError, KeyError, TypeError):
            continue
        notes += 1
        for name in names:
            votes.setdefault(str(name), []).append(what)
    return {
        name: f"it did not answer in the network test ({reasons[0]})"
        for name, reasons in votes.items()
        if 2 * len(reasons) > notes
    }
