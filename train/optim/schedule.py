"""Learning rate as a pure function of the step: nothing to save, nothing to be off by one after a resume."""

import math

from train.config import Decay, OptimConfig


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Return the learning rate of optimizer step `step` (0-based) in a run of `steps`.

    Linear warm-up over `warmup_steps` (step 0 already moves), then `decay` down to `min_lr_ratio * lr`, which
    the last step reaches.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    floor = config.min_lr_ratio
    last = max(steps - 1, 1)
    match config.decay:
        case Decay.constant:
            share = 1.0
        case Decay.cosine:
            progress = min(1.0, (step - config.warmup_steps) / max(1, last - config.warmup_steps))
            share = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
        case Decay.wsd:
            decay_steps = max(1, round(steps * config.decay_fraction))
            progress = min(1.0, max(0.0, (step - (last - decay_steps)) / decay_steps))
            share = 1 - (1 - floor) * progress
    return config.lr * share
