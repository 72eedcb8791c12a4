"""What a file of NCCL's says beside figures."""

from dataclasses import dataclass

from tools.nccl.findings import Verdict


@dataclass(frozen=True)
class Remark:
    """One thing that was seen, in plain words."""

    text: str
    """One sentence with its evidence."""
    verdict: Verdict = Verdict.ok
    """What it alone makes of the machine; `ok` is a plain fact."""
    hosts: tuple[str, ...] = ()
    """Where it was seen; empty where it holds for all, or the file does not tell."""
    todo: str = ""
    """What to do about it."""
