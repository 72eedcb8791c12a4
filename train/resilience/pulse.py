"""The pulse of a rank: what it is doing, since when, and how long that may take, in a few bytes of shared memory.

A rank beats at each step and at each longer piece of work; whoever watches (the agent that forked the rank, else
a thread of its own) reads the record without the rank's help, so also when the rank is stopped or stuck.
"""

import math
import mmap
import struct
import time
from dataclasses import dataclass
from enum import StrEnum

from train.config import WATCH_MARGIN_S, ResilienceConfig

RECORD_BYTES = 64
"""A record of its own cache line for each rank."""

# The time comes first and the limit last: a rank that is stopped between the two was never silent for too long.
_RECORD = struct.Struct("=dqqd")


class Phase(StrEnum):
    """What a rank is doing."""

    START = "start"
    LOAD = "load"
    FIRST_STEP = "first_step"
    """May compile, and make connections that the later ones use."""
    STEP = "step"
    SAVE = "save"
    EVALUATE = "evaluate"
    END = "end"


_PHASES = list(Phase)
_NUMBERS = {phase: number for number, phase in enumerate(_PHASES)}

Memory = mmap.mmap | bytearray


@dataclass(frozen=True)
class Beat:
    """The last sign of life of a rank."""

    phase: Phase
    step: int
    """The step that it works on."""
    time_s: float
    """By `time.monotonic`, which all processes of a host share."""
    limit_s: float
    """How long it may be silent."""


def limits(config: ResilienceConfig) -> dict[Phase, float]:
    """Return how long a rank may be silent in each phase, s."""
    first_step_s = max(config.start_timeout_s, config.step_timeout_s)
    return {
        # Ranks that wait for a missing one at the start give up first: their error names it.
        Phase.START: config.start_timeout_s + WATCH_MARGIN_S,
        Phase.LOAD: config.checkpoint_timeout_s,
        Phase.FIRST_STEP: first_step_s,
        Phase.STEP: config.step_timeout_s,
        Phase.SAVE: config.checkpoint_timeout_s,
        Phase.EVALUATE: first_step_s,
        Phase.END: config.checkpoint_timeout_s,
    }


class Pulse:
    """One rank's record, seen from either side."""

    def __init__(self, memory: Memory, index: int = 0) -> None:
        """`memory`: that of `shared_memory`, or a process's own where it alone watches; `index`: which record."""
        self._memory = memory
        self._offset = index * RECORD_BYTES
        self.limits = dict.fromkeys(Phase, math.inf)
        self._step = 0

    def beat(self, phase: Phase, step: int | None = None) -> None:
        """Write down that the rank has now come to this phase and step (None: still the same one).

        Takes about a microsecond.
        """
        step = self._step = self._step if step is None else step
        _RECORD.pack_into(
            self._memory, self._offset, time.monotonic(), _NUMBERS[phase], step, self.limits[phase]
        )

    def last(self) -> Beat:
        """Read the record."""
        while True:
            fields = _RECORD.unpack_from(self._memory, self._offset)
            # Two equal readings are no mixture of two beats.
            if fields == _RECORD.unpack_from(self._memory, self._offset):
                time_s, number, step, limit_s = fields
                return Beat(_PHASES[number], step, time_s, limit_s)


def shared_memory(ranks: int) -> mmap.mmap:
    """Make the memory for the records of so many ranks; processes forked after this share it."""
    return mmap.mmap(-1, ranks * RECORD_BYTES)


_own = Pulse(bytearray(RECORD_BYTES))


def own() -> Pulse:
    """The pulse of this process."""
    return _own


def adopt(pulse: Pulse) -> None:
    """Make `pulse` that of this process."""
    global _own
    _own = pulse


def beat(phase: Phase, step: int | None = None) -> None:
    """Beat for this process; see `Pulse.beat`."""
    _own.beat(phase, step)
