"""`python -m tools.nccl.measure SPEC.json`: one rank of a measurement; see `spec.Spec`.

Whoever starts it sets torchrun's variables, or those of an agent or of Slurm; see `train.bootstrap`.
"""

import sys
from contextlib import suppress
from pathlib import Path

from contract.errors import UserError
from contract.exit_codes import ExitCode
from contract.network_test import cannot_write
from tools.nccl.measure.run import run
from tools.nccl.measure.spec import Spec
from train.resilience.process import leave


def main(argv: list[str]) -> int:
    """Measure as one rank; return the exit code.

    0, 1 when the folder cannot be written, 76 when another rank failed, 78 for a wrong SPEC.
    """
    spec = None
    try:
        if len(argv) != 1:
            raise UserError("usage: python -m tools.nccl.measure SPEC.json")
        spec = Spec.read(Path(argv[0]))
        run(spec)
    except UserError as error:
        tell(str(error))
        return error.exit_code
    except OSError as error:
        tell(cannot_write("the measurement" if spec is None else spec.folder, error))
        return 1
    return ExitCode.FINISHED


def tell(sentence: str) -> None:
    """Write a sentence into the rank's log, which may lie on the same full disk."""
    with suppress(OSError):
        print(f"trierarch: {sentence}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
