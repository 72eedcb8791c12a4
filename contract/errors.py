"""Errors that are meant for a user: one sentence, no traceback."""

import difflib
from collections.abc import Iterable

from contract.exit_codes import ExitCode


class UserError(Exception):
    """A fault that the user can mend.

    The message is one sentence: what is wrong, where, and what to do. `exit_code` is what the process
    ends with; the default says that trying again would not help.
    """

    exit_code: int = ExitCode.CONFIG


class ConfigError(UserError):
    """A key or a value of the configuration is wrong."""


class PeerError(UserError):
    """Another rank or its node failed or could not be reached: a restart may help."""

    exit_code: int = ExitCode.PEER_FAILED


class NodeError(UserError):
    """This rank's own node lacks what the others have: a crash, since another node may do better."""

    exit_code: int = 1


class SaveError(UserError):
    """What had to be written could not be: a crash, since another try may help."""

    exit_code: int = 1


class ReportedError(UserError):
    """A fault that another process tells the user about; this one just ends with the code."""


def closest(name: str, valid: Iterable[str]) -> str:
    """Name the valid choices, the closest match first: the tail of an error sentence about `name`.

    Returns `did you mean X?` when something is close, else a list of the valid names.
    """
    names = sorted(valid)
    matches = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if matches:
        return f"did you mean {' or '.join(matches)}?"
    return f"valid names are: {', '.join(names)}"
