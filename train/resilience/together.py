"""A step of the set-up that any rank may fail: then all ranks stop, with one account of it."""

import socket
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from contract.errors import ReportedError, UserError

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
    failures = torch.tensor([error is not None], dtype=torch.int32)
    dist.all_reduce(failures, group=group)
    if not failures.item():
        return result  # type: ignore[return-value]
    mine = None if error is None else (str(error), int(error.exit_code), socket.gethostname())
    everyone: list[tuple[str, int, str] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    failed = [(rank, entry) for rank, entry in enumerate(everyone) if entry is not None]
    first_rank, (sentence, code, host) = failed[0]
    if dist.get_rank(group) != first_rank:
        reported = ReportedError(sentence)
        reported.exit_code = code
        raise reported
    assert error is not None
    if len(failed) < len(everyone):
        ranks = ", ".join(str(rank) for rank, _ in failed)
        error.args = (f"rank {ranks} (rank {first_rank} on {host}): {sentence}",)
    raise error
