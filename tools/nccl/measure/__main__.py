"""`python -m tools.nccl.measure SPEC.json`: one rank of a measurement; see `spec.Spec`.

Whoever starts it sets torchrun's variables, or those of an agent or of Slurm; see `train.bootstrap`.
"""

import sys
from pathlib import Path

from contract.errors import UserError
from contract.exit_codes import ExitCode
from tools.nccl.measure.run import run
from tools.nccl.measure.spec import Spec
from train.resilience.process import leave


def main(argv: list[str]) -> int:
    """Measure as one rank; return the exit code: 0, 76 when another rank failed, 78 for a wrong SPEC."""
    try:
        if len(argv) != 1:
            raise UserError("usage: python -m tools.nccl.measure SPEC.json")
        run(Spec.read(Path(argv[0])))
    except UserError as error:
        print(f"trierarch: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"trierarch: the measurement cannot be written: {error}", file=sys.stderr)
        return 1
    return ExitCode.FINISHED


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
