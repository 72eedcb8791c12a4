"""What a supervisor and the ways of starting ranks have in common."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from contract.run_folder import RunFolder
from slurm.supervise.judge import End
from slurm.supervise.patience import read_patiently


@dataclass(frozen=True)
class Start:
    """One start of the training in a job."""

    run: RunFolder
    job: str
    restart: int
    """How often Slurm has started the job before."""
    number: int
    """How often this job has started the training before."""

    @property
    def attempt(self) -> str:
        """Names the start in logs: Slurm's restarts, then those in this job, so that no log is written twice."""
        return f"{self.restart}-{self.number}" if self.number else str(self.restart)

    def count_events(self) -> int:
        """How many events there are: `events_since` tells those that come after."""
        return len(read_patiently(self.run.read_events))

    def events_since(self, count: int) -> list[dict[str, Any]]:
        """Return the newer events, but those that an earlier life of the job tells late.

        Its node was cut off while Slurm started the job elsewhere, and has come back.
        """
        mine = {"job": self.job, "restart": self.restart}
        newer = read_patiently(self.run.read_events)[count:]
        return [one for one in newer if mine | one == one | mine]

    def fill(self, word: str) -> str:
        """Put the run, the job and the attempt in the place of the words in braces."""
        filled = word.replace("{run}", str(self.run.path)).replace("{job}", self.job)
        return filled.replace("{attempt}", self.attempt)


class Launcher(Protocol):
    """A way of starting all ranks of a run."""

    @property
    def hears_preemption(self) -> bool:
        """Whether it learns by itself that Slurm takes the nodes away; else Slurm has to be asked."""

    def run(self, begin: Start, should_stop: Callable[[], bool]) -> End:
        """Start all ranks, see them to their end, and say how that was; no rank is left then.

        `should_stop` is asked at least once a second; when it says yes the ranks are asked, once, to save and leave.
        """

    def idle(self, seconds: float) -> None:
        """Let time pass between two starts, at most until the next signal."""

    def close(self) -> None:
        """End whatever stands ready for another start."""
