"""Learning rate as a pure function of the step: nothing to save, nothing to be off by one after a resume."""

import math

from train.config import Decay, OptimConfig, Warmup


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Return the learning rate of optimizer step `step` (0-based) in a run of `steps`.

    Warm-up over `warmup_steps` (linear: step 0 already moves), then `decay` down to `min_lr_ratio * lr`, which
    the last step reaches.
    """
    if config.deepspeed_steps:
        return config.lr * _share_in_deepspeed(config, step - 1, steps)
    warmup = config.warmup_steps
    if step < warmup:
        if config.warmup is Warmup.log:
            return config.lr * _rise(config, math.log(step + 1) / math.log(max(2, warmup)))
        return config.lr * _rise(config, (step + 1) / warmup)
    floor = config.min_lr_ratio
    last = max(steps - 1, 1)
    match config.decay:
        case Decay.constant:
            share = 1.0
        case Decay.cosine | Decay.linear:
            progress = min(1.0, (step - warmup) / max(1, last - warmup))
            share = floor + (1 - floor) * _fall(config.decay, progress)
        case Decay.wsd:
            decay_steps = max(1, round(steps * config.decay_fraction))
            progress = min(1.0, max(0.0, (step - (last - decay_steps)) / decay_steps))
            share = 1 - (1 - floor) * progress
    return config.lr * share


def _share_in_deepspeed(config: OptimConfig, iteration: int, steps: int) -> float:
    """Share of `lr` that DeepSpeed's schedulers give after `iteration` + 1 steps.

    The scheduler is stepped after the optimizer and begins at -1, so that the first two steps have the lowest rate.
    """
    warmup = max(2, config.warmup_steps)
    if iteration < 0 and config.decay is Decay.cosine:
        return 0.0
    if iteration < warmup:
        done = max(0, iteration)
        risen = math.log(done + 1) / math.log(warmup) if config.warmup is Warmup.log else done / warmup
        return _rise(config, risen)
    if config.decay is Decay.constant:
        return 1.0
    # Of the two that decay only the cosine counts the first step after warm-up.
    gone = iteration - warmup + (config.decay is Decay.cosine)
    progress = min(1.0, max(0.0, gone / max(1, steps - warmup)))
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * _fall(config.decay, progress)


def _rise(config: OptimConfig, progress: float) -> float:
    """Share of `lr` in warm-up."""
    return config.warmup_min_ratio + (1 - config.warmup_min_ratio) * progress


def _fall(decay: Decay, progress: float) -> float:
    """What is left of the way down, from 1 to 0."""
    return 0.5 * (1 + math.cos(math.pi * progress)) if decay is Decay.cosine else 1 - progress
