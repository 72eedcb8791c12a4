"""Exit codes of the trainer, read by the job script and by the supervisor."""

from enum import IntEnum


class ExitCode(IntEnum):
    """How a training process ended, and what its supervisor may do about it.

    Any code that is not listed here is a crash: bounded restarts.
    """

    FINISHED = 0
    STOPPED = 75
    """Stopped on request with a checkpoint saved: requeue me."""
    PEER_FAILED = 76
    """A peer or a node failed: restart me, the named node excluded."""
    CONFIG = 78
    """The configuration or the input is wrong: never requeue."""
    NO_PROGRESS = 93
    """No progress since the last restart: never requeue."""
