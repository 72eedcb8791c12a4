"""`python -m train [--config FILE] [--cfg job] [key=value ...]`: one rank of a run."""

import argparse
import os
import signal
import sys
import traceback
from pathlib import Path

import configs.compose
from contract.errors import ReportedError, UserError
from contract.exit_codes import ExitCode
from contract.variables import AGENT, DIE_WITH_LAUNCHER
from train.config import TrainConfig, load_config, read_config
from train.resilience import pulse, stacks, watch
from train.resilience.process import CRASHED, die_with_parent, leave

RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")


def main(arguments: list[str]) -> int:
    """Run one rank, which an agent may have forked for it; return its exit code."""
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
    return train_rank(config)


def train_rank(config: TrainConfig) -> int:
    """Train as the rank that the environment says this process is; return its exit code."""
    if os.environ.get(DIE_WITH_LAUNCHER) == "1":
        die_with_parent()
    _show_life(config)
    try:
        # The signals before the imports that take seconds: a stop asked for meanwhile must not kill the rank.
        from train.resilience.stop import StopRequest

        request = StopRequest(config.resilience.stop_signal)
        # An agent forks its ranks with the signals blocked until there is somebody to take them.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
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


def _show_life(config: TrainConfig) -> None:
    """Begin to beat, watched by the agent, else by a thread of this process."""
    own = pulse.own()
    own.limits = pulse.limits(config.resilience)
    own.beat(pulse.Phase.START, 0)
    if os.environ.get(AGENT) != "1":
        stacks.install()
        watch.start(own, config.run_folder, int(_launched_rank() or 0))


def _launched_rank() -> str | None:
    return next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), None)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
