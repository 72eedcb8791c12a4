"""A program for the tests of the launchers: join the world, sum the ranks, print both."""

import dataclasses
import json
import os
import sys

import torch
import torch.distributed as dist

from contract.errors import UserError
from train import bootstrap, roll_call


def main() -> int:
    """Print one line of JSON; return the exit code of a `UserError`, after its sentence."""
    timeout_s = float(os.environ.get("WHO_AM_I_TIMEOUT_S", "60"))
    try:
        joined = bootstrap.join(os.environ, timeout_s)
        roll_call.start_process_group(joined, timeout_s, timeout_s)
    except UserError as error:
        print(f"trierarch: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    # One write: lines of several ranks must not mix.
    line = json.dumps(
        dataclasses.asdict(joined.world) | {"total": total.item(), "mpi": "mpi4py.MPI" in sys.modules}
    )
    os.write(1, (line + "\n").encode())
    dist.barrier()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
