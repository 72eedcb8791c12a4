"""The training loop. Read this first: everything else is called from here."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from contract.errors import ReportedError, SaveError, UserError
from contract.run_folder import Event, RunFolder
from train.checkpoint.store import CheckpointStore
from train.config import TrainConfig
from train.data.loader import Batch, TrainLoader
from train.evaluate import Evaluation, Evaluator
from train.mesh import Mesh
from train.model.config import flops_per_token
from train.monitor.clock import StepClock
from train.monitor.progress import ProgressLine
from train.monitor.recorder import Recorder
from train.optim.compact import CompactAdamW
from train.optim.schedule import learning_rate
from train.parallel.clip import clip_grad_norm
from train.parallel.engine import Engine, mean_loss
from train.parallel.tied import copied_heads
from train.precision.adapt import look, use_types
from train.precision.diagnose import diagnose
from train.resilience.pulse import Phase, beat
from train.resilience.stop import Agreement
from train.state import TrainState

RETRY_SAVE_S = 60.0
"""Pause before a save that the clock asked for is tried again."""


@dataclass
class Parts:
    """What the loop works with; `train/launch.py` puts it together."""

    config: TrainConfig
    run: RunFolder
    device: torch.device
    state: TrainState
    mesh: Mesh
    engine: Engine
    """Runs the parts of the model that `state` holds."""
    loader: TrainLoader
    evaluator: Evaluator
    checkpoints: CheckpointStore
    agreement: Agreement
    progress: ProgressLine
    recorder: Recorder | None
    """On rank 0 only."""
    peak_flops: float | None
    """Of all devices together, FLOP/s."""

    def close(self) -> None:
        """End the threads, free what lies on disks, and write out metrics."""
        self.loader.close()
        self.checkpoints.close()
        self.state.optimizer.close()
        if self.recorder is not None:
            self.recorder.close()


@dataclass(frozen=True)
class Outcome:
    """How training ended."""

    stopped: bool
    """A stop was requested and a checkpoint saved; else the last step is done."""
    evaluation: Evaluation | None = None


def train(parts: Parts) -> Outcome:
    """Train from where `parts.state` stands to the last step."""
    config, state, optimizer = parts.config, parts.state, parts.state.optimizer
    steps, global_batch_size = config.loop.steps, config.loop.samples_per_step
    copies = copied_heads(state.parts)
    scale, dynamic = state.precision.scale, state.precision.dynamic
    if dynamic is not None:
        use_types(state.parts, dynamic)
    clock = StepClock(state.step)
    first = state.step
    while state.step < steps:
        beat(Phase.FIRST_STEP if state.step == first else Phase.STEP, state.step + 1)
        parts.agreement.begin()
        lr = learning_rate(config.optim, state.step, steps)
        for group in optimizer.param_groups:
            group["lr"] = lr

        micro_batches = next(parts.loader).micro_batches
        loss = parts.engine.train(micro_batches, scale.value)
        grad_norm = clip_grad_norm(optimizer, config.loop.clip_norm, parts.mesh, copies, scale.value)
        parts.checkpoints.before_update()
        if scale.passes(grad_norm):
            optimizer.step()
        elif scale.exhausted:
            _give_up(parts, micro_batches)
        optimizer.zero_grad()
        state.step += 1
        state.samples += global_batch_size
        state.tokens += global_batch_size * config.data.sequence_length
        _follow_phase(parts, loss, copies)

        last = state.step == steps
        decision = parts.agreement.decide()
        logs = last or state.step % config.loop.log_every_steps == 0
        saves = last or decision.save or _every(config.checkpoint.every_steps, state.step)
        if logs or saves or decision.stop:
            _refuse_divergence(parts, float(grad_norm))  # waits for the device, so that the clock is right
        if logs:
            _log(parts, mean_loss(loss, parts.mesh), float(grad_norm), lr, clock.step_time_s(state.step))
            clock.restart(state.step)
        parts.progress.step(state.step)
        if parts.checkpoints.poll() is False:
            parts.agreement.postpone(RETRY_SAVE_S)

        if decision.stop and not last:
            return _stop(parts)
        if saves:
            _save(parts, required=last)
            clock.restart(state.step)
        if not last and _every(config.loop.eval_every_steps, state.step):
            evaluate(parts)
            clock.restart(state.step)

    evaluation = evaluate(parts)
    if evaluation is None and parts.evaluator.samples > 0:
        return _stop(parts)
    parts.checkpoints.settle(stopping=lambda: parts.agreement.signal is not None)
    return Outcome(stopped=False, evaluation=evaluation)


def evaluate(parts: Parts) -> Evaluation | None:
    """Evaluate and record; None when there is nothing to evaluate on or a stop was requested meanwhile."""
    parts.state.optimizer.finish()
    evaluation = parts.evaluator.run(parts.engine)
    if evaluation is not None and parts.recorder is not None:
        parts.recorder.log(parts.state.step, evaluation.as_metrics())
    return evaluation


def _refuse_divergence(parts: Parts, grad_norm: float) -> None:
    """End the run before weights that are no numbers reach a checkpoint; the norm is the same on all ranks."""
    if math.isfinite(grad_norm) or parts.state.precision.scale.active:  # which has skipped the step
        return
    parts.checkpoints.wait()
    steps = parts.run.published_steps()
    newest = f"continue from step_{steps[-1]}" if steps else "start again"
    sentence = (
        f"training has diverged, the gradient norm is {grad_norm} at step {parts.state.step}: {newest} with a lower "
        "optim.lr, a longer optim.warmup_steps or a smaller loop.clip_norm"
    )
    raise _on_all_ranks(parts, UserError(sentence))


def _give_up(parts: Parts, micro_batches: Sequence[Batch]) -> None:
    """End a run in which no loss scale gives gradients that float16 can hold."""
    state, config = parts.state, parts.config.precision
    state.optimizer.finish()
    where = diagnose(state.parts, state.optimizer, parts.engine, micro_batches)
    sentence = (
        f"{config.loss_scale_patience} steps in a row, up to step {state.step + 1}, have no finite gradients even at "
        f"the smallest loss scale, {config.loss_scale_min:g}: {where}: choose precision=bf16, or a lower optim.lr"
    )
    raise _on_all_ranks(parts, UserError(sentence))


def _follow_phase(parts: Parts, loss: Tensor, copies: Collection[Tensor]) -> None:
    """With precision.dynamic give gradients the types that suit this phase of the training."""
    state = parts.state
    dynamic = state.precision.dynamic
    if dynamic is None:
        return
    assert isinstance(state.optimizer, CompactAdamW)
    dynamic.observe(mean_loss(loss, parts.mesh))
    if not dynamic.due(state.step):
        return
    reason = look(state.precision, state.parts, state.optimizer, parts.config, parts.mesh, copies)
    if reason is None:
        return
    types = dynamic.types
    if parts.recorder is not None:
        parts.run.try_event(
            Event.PRECISION_CHANGED,
            step=state.step,
            accumulate=types.accumulate.value,
            reduce=types.reduce.value,
            reason=reason,
        )
    parts.progress.say(
        f"gradients add up in {types.accumulate.value} from step {state.step + 1} on: {reason}"
    )


def _on_all_ranks(parts: Parts, error: UserError) -> UserError:
    """Return what this rank raises for an error that all ranks know of: one of them tells the user.

    They are all there to finish a save in the background first.
    """
    parts.checkpoints.wait()
    if parts.recorder is not None:
        return error
    reported = ReportedError(str(error))
    reported.exit_code = error.exit_code
    return reported


def _stop(parts: Parts) -> Outcome:
    if parts.recorder is not None:
        parts.run.try_event(Event.STOP_REQUESTED, step=parts.state.step, signal=parts.agreement.signal)
    _save(parts, required=True, urgent=True)
    return Outcome(stopped=True)


def _save(parts: Parts, required: bool, urgent: bool = False) -> None:
    """Save, in the background where training goes on; a failure costs nothing then but the wait for the next try."""
    step = parts.state.step
    if parts.checkpoints.save(parts.state, background=not required, urgent=urgent):
        parts.agreement.saved()
        return
    parts.agreement.postpone(RETRY_SAVE_S)
    if required:
        newest = parts.checkpoints.newest_step
        raise _on_all_ranks(
            parts,
            SaveError(
                f"step {step} could not be saved (events.jsonl in {parts.run.path} says why), the newest whole "
                f"checkpoint is {'none' if newest is None else f'step_{newest}'}: free some space, then run again"
            ),
        )


def _log(parts: Parts, loss: float, grad_norm: float, lr: float, step_time_s: float) -> None:
    config = parts.config
    tokens_per_s = config.loop.samples_per_step * config.data.sequence_length / step_time_s
    parts.progress.logged(parts.state.step, loss, tokens_per_s)
    further = parts.engine.metrics() | parts.state.optimizer.metrics()
    if parts.recorder is None:
        return
    stall_s = parts.checkpoints.take_stall_s()
    values = {
        "loss": loss,
        **({"grad_norm": grad_norm} if math.isfinite(grad_norm) else {}),  # a skipped step has none
        "lr": lr,
        "tokens": parts.state.tokens,
        "tokens_per_s": tokens_per_s,
        "step_time_s": step_time_s,
        **({} if stall_s is None else {"save_stall_s": stall_s}),
        **further,
        **parts.state.precision.metrics(),
    }
    if parts.peak_flops is not None:
        flops = tokens_per_s * flops_per_token(config.model, config.data.sequence_length)
        values["mfu"] = flops / parts.peak_flops
    parts.recorder.log(parts.state.step, values)


def _every(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0
