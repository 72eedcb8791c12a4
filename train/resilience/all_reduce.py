"""Do these nodes reach each other? The ranks meet as those of a run do and add numbers up."""

import os
import socket
import sys
import threading

import torch
import torch.distributed as dist

from contract.errors import UserError
from contract.exit_codes import ExitCode
from train import bootstrap, roll_call

SMALL, LARGE = 1, 2**18
"""Numbers of fp32 elements: the larger one, 1 MB, doesn't fit into what a connection takes without an answer."""


def all_reduce(timeout_s: float) -> int:
    """Return 0 when all sums are right within `timeout_s`, else 76, with a sentence on stderr."""
    who = f"{socket.gethostname()} (rank {os.environ.get('RANK', '?')})"

    def give_up() -> None:
        # Another thread may hold the lock of sys.stderr.
        os.write(2, f"trierarch: {who} did not finish the all-reduce test within {timeout_s:g} s\n".encode())
        os._exit(ExitCode.PEER_FAILED)

    alarm = threading.Timer(timeout_s, give_up)
    alarm.daemon = True
    alarm.start()
    try:
        joined = bootstrap.join(os.environ, timeout_s)
        device = roll_call.start_process_group(joined, timeout_s, timeout_s)
        problem = _problem(joined.world.rank, joined.world.size, device)
    except (UserError, RuntimeError) as error:
        problem = str(error).splitlines()[0]
    if problem is None:
        return ExitCode.FINISHED
    print(f"trierarch: {who} failed the all-reduce test: {problem}", file=sys.stderr)
    return ExitCode.PEER_FAILED


def _problem(rank: int, size: int, device: torch.device) -> str | None:
    for count in (SMALL, LARGE):
        numbers = torch.arange(count, dtype=torch.float32, device=device).remainder(7) + rank
        wanted = torch.arange(count, dtype=torch.float32, device=device).remainder(7) * size
        wanted += size * (size - 1) / 2
        dist.all_reduce(numbers)
        if wrong := int((numbers != wanted).sum()):
            return f"{wrong} of {count} sums over {size} ranks are wrong"
    return None
