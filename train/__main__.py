"""`python -m train [--config FILE] [--cfg job] [key=value ...]`: one rank of a run."""

import argparse
import ctypes
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

import configs.compose
from contract.errors import ReportedError, UserError
from contract.exit_codes import ExitCode
from contract.variables import DIE_WITH_LAUNCHER
from train.config import load_config, read_config

RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
CRASHED = 1


def main(arguments: list[str]) -> int:
    """Run one rank; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m train", description=__doc__)
    parser.add_argument("--config", type=Path, metavar="FILE", help="a run's config.yaml to start from")
    parser.add_argument("--cfg", choices=["job"], help="print the resolved configuration and end")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, in Hydra's syntax")
    options = parser.parse_args(arguments)
    try:
        overrides = options.overrides
        config = read_config(options.config, overrides) if options.config else load_config(overrides)
    except UserError as error:
        # Wrong on one rank is wrong on all: one tells.
        if _launched_rank() in (None, "0"):
            print(f"trierarch: {error}", file=sys.stderr)
        return error.exit_code
    if options.cfg:
        print(configs.compose.to_yaml(config), end="")
        return ExitCode.FINISHED

    if os.environ.get(DIE_WITH_LAUNCHER) == "1":
        _die_with_launcher()
    try:
        # The signals before the imports that take seconds: a stop asked for meanwhile must not kill the rank.
        from train.resilience.stop import StopRequest

        request = StopRequest(config.resilience.stop_signal)
        from train.run import run

        return run(config, request)
    except ReportedError as error:
        return error.exit_code
    except UserError as error:
        print(f"trierarch: {error}", file=sys.stderr)
        return error.exit_code
    except BaseException:  # torch's CheckpointException is no Exception
        traceback.print_exc()
        return CRASHED


def _die_with_launcher() -> None:
    """Have the kernel end this process with its parent: an orphan would train on, unseen, on the user's GPU."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() == 1:  # the parent was quicker
        _leave(CRASHED)


def _launched_rank() -> str | None:
    return next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), None)


def _leave(code: int) -> NoReturn:
    """End the process without running exit handlers: gloo's can abort after a correct run."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(main(sys.argv[1:]))
