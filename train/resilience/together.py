"""A step of the set-up that any rank may fail: then all ranks stop, with one account of it."""

import socket
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from contract.errors import ReportedError, UserError
from contract.exit_codes import ExitCode

T = TypeVar("T")


def together(group: dist.ProcessGroup, action: Callable[[], T]) -> T:
    """Run `action` on every rank; when it raises a `UserError` on some, raise on all.

    Without this the ranks that are well would wait in the next collective until its time limit. The lowest
    failing rank raises the sentence, with the ranks it holds for; the others raise `ReportedError`.
    """
    error: UserError | None = None
    result: T | None = None
    try:
        result = action()
    except UserError as caught:
        error = caught
    mine = None if error is None else (str(error), int(error.exit_code), socket.gethostname())
    everyone: list[tuple[str, int, str] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    failed = [(rank, entry) for rank, entry in enumerate(everyone) if entry is not None]
    if not failed:
        return result  # type: ignore[return-value]
    first_rank, (sentence, code, host) = failed[0]
    if dist.get_rank(group) != first_rank:
        raise _with_code(ReportedError(sentence), code)
    if len(failed) < len(everyone):
        ranks = ", ".join(str(rank) for rank, _ in failed)
        sentence = f"rank {ranks} (rank {first_rank} on {host}): {sentence}"
    raise _with_code(UserError(sentence), code) from error


def _with_code(error: UserError, code: int) -> UserError:
    error.exit_code = ExitCode(code)
    return error
