"""One rank of one run: put the parts together, train, and tell how it ended."""

import os
import socket

import torch
import torch.distributed as dist

from contract.errors import PeerError, UserError
from contract.exit_codes import ExitCode
from contract.run_folder import Event
from train import bootstrap, roll_call
from train.config import TrainConfig
from train.launch import Launch
from train.loop import Outcome, Parts, train
from train.monitor.progress import tell
from train.report import report
from train.resilience.process import keep_freed_memory
from train.resilience.pulse import Phase, beat
from train.resilience.stop import StopRequest


def run(config: TrainConfig, request: StopRequest) -> ExitCode:
    """Find the other ranks, then train `config` until it is finished or a stop is requested."""
    limits = config.resilience
    joined = bootstrap.join(os.environ, limits.start_timeout_s)
    beat(Phase.START)
    device = roll_call.start_process_group(joined, limits.start_timeout_s, limits.collective_timeout_s)
    if device.type == "cpu":
        keep_freed_memory()
    return run_rank(config, request, joined.world, device)


def run_rank(
    config: TrainConfig, request: StopRequest, world: bootstrap.World, device: torch.device
) -> ExitCode:
    """Train as one rank of a process group that exists already."""
    launch = Launch(config, request, world, device)
    try:
        parts = launch.set_up()
        try:
            outcome = train(parts)
        finally:
            parts.close()
        beat(Phase.END)
        _record_end(parts, outcome)
        dist.barrier()
    except torch.OutOfMemoryError as error:
        full = UserError(
            f"rank {world.rank} ran out of memory on {device} ({_first_sentence(error)}): lower "
            "parallel.micro_batch_size, or set parallel.recompute=full, or share more (parallel.zero, parallel.tp)"
        )
        launch.record_failure(full)
        raise full from error
    except BaseException as error:
        if _is_lost_peer(error):
            lost = PeerError(
                f"rank {world.rank} on {socket.gethostname()} waited for another rank in vain, which is gone or stuck: "
                "the first error in the other ranks' output says why"
            )
            launch.record_failure(lost)
            raise lost from error
        launch.record_failure(error)
        raise
    finally:
        launch.owner.release()
    if parts.recorder is not None and not outcome.stopped:
        # The run is complete and recorded: whatever goes wrong in telling about it does not change that.
        try:
            report(parts, outcome.evaluation)
        except Exception as error:
            tell(f"the closing report failed ({type(error).__name__}: {error}), the run itself is complete")
    return ExitCode.STOPPED if outcome.stopped else ExitCode.FINISHED


def _record_end(parts: Parts, outcome: Outcome) -> None:
    """On rank 0 leave the last event and the marker."""
    if parts.recorder is None:
        return
    if outcome.stopped:
        saved = parts.checkpoints.newest_step
        parts.run.append_event(Event.STOPPED, step=saved)
        parts.progress.say(
            f"stopped after step {parts.state.step}, checkpoint step_{saved} is saved: the same command continues"
        )
        return
    metrics = {} if outcome.evaluation is None else outcome.evaluation.as_metrics()
    parts.run.append_event(Event.FINISHED, step=parts.state.step, **metrics)
    parts.run.mark_finished()


def _is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone or too late."""
    types = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
    # gloo's errors have no type of their own; their text names its source files.
    return isinstance(error, types) or (isinstance(error, RuntimeError) and "gloo/" in str(error))


def _first_sentence(error: BaseException) -> str:
    return str(error).split(". ")[0]
