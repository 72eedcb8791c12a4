"""Stop requests: a signal sets a flag, the ranks agree on it at a step boundary, then they save together.

Nothing is done inside the handler: it can run in the middle of a backward pass, on some ranks only.
"""

import signal
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Decision:
    """What all ranks do at this step boundary."""

    stop: bool = False
    save: bool = False


class StopRequest:
    """The one owner of the stop signals of this process."""

    def __init__(self, stop_signal: str) -> None:
        """Take over the signal of this name, SIGTERM and SIGINT."""
        self.received: str | None = None
        self.replaced: list[str] = []
        """Signals that somebody else had a handler for, for a warning."""
        wanted = {signal.Signals[stop_signal], signal.SIGTERM, signal.SIGINT}
        for number in sorted(wanted):
            previous = signal.signal(number, self._note)
            if previous not in (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler):
                self.replaced.append(signal.Signals(number).name)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name


class Agreement:
    """Ranks agree, once a step, on whether to stop and whether to save.

    The collective (two numbers over gloo, on a group of its own) is started before a step's work and
    looked at after it, so that its latency hides behind the step. A wish that a rank has during step k is
    thus granted at the end of step k + 1 at the latest.
    """

    def __init__(self, group: dist.ProcessGroup, request: StopRequest, save_every_s: float) -> None:
        """`save_every_s`: rank 0 asks for a checkpoint that often, 0 for never."""
        self._group = group
        self._request = request
        self._save_every_s = save_every_s
        self._last_save_s = time.monotonic()
        self._wishes = torch.zeros(2, dtype=torch.int32)
        self._work: Any = None

    def begin(self) -> None:
        """Start to agree; call it at the start of a step."""
        overdue = self._save_every_s > 0 and time.monotonic() - self._last_save_s >= self._save_every_s
        self._wishes[0] = self._request.received is not None
        self._wishes[1] = overdue and dist.get_rank(self._group) == 0
        self._work = dist.all_reduce(self._wishes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def decide(self) -> Decision:
        """Return what was agreed on; call it at the end of the step that `begin` began."""
        self._work.wait()
        stop, save = self._wishes.tolist()
        return Decision(stop=bool(stop), save=bool(save))

    @property
    def signal(self) -> str | None:
        """The signal by which this rank was asked to stop; None where another rank was asked."""
        return self._request.received

    def saved(self) -> None:
        """Start the clock of the next checkpoint."""
        self._last_save_s = time.monotonic()

    def postpone(self, seconds: float) -> None:
        """Have the clock ask again in so many seconds: the last save failed."""
        self._last_save_s = time.monotonic() - max(0.0, self._save_every_s - seconds)
