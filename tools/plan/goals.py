"""What a plan comes to over a whole training: days, GPU hours, energy, checkpoints, and the share of time that counts.

Checkpoints by Young 1974 and Daly 2006: saving often costs time, saving rarely loses work when something fails.
"""

import math
from dataclasses import dataclass

from tools.plan.search import Plan
from tools.plan.settings import GoalsConfig
from train.layout.holding import holdings
from train.layout.memory import state_bytes

_DAY_S = 86_400.0
_GB = 1e9


@dataclass(frozen=True)
class Checkpoints:
    """How to save."""

    size_bytes: float
    """Of one: weights and the optimizer's state, once."""
    write_s: float
    """Until it is on the file system."""
    stall_s: float
    """Of that, what training waits for: all, or the copy to the host where the rest is written in the background."""
    failure_every_s: float
    """Mean time between two failures on all GPUs; infinite without any."""
    interval_s: float
    """Time between two saves that wastes least; infinite without failures."""
    goodput: float
    """Share of the time, 0 to 1, that is neither saving nor repeating lost work nor restarting."""


@dataclass(frozen=True)
class Totals:
    """Of a whole training."""

    tokens: float
    steps: int
    days: float
    """With the time that failures and checkpoints take."""
    gpu_hours: float
    gpu_watts: float
    """Of one GPU on average, an estimate."""
    energy_kwh: float
    """Of the site for this training, an estimate."""
    checkpoints: Checkpoints


def totals(plan: Plan, tokens: float | None, goals: GoalsConfig) -> Totals:
    """Reckon a training to `tokens`, or for `loop.steps` steps if that is None."""
    steps = plan.config.loop.steps if tokens is None else math.ceil(tokens / plan.case.tokens)
    saving = checkpoints(plan, goals)
    gpus = plan.dims.ranks
    seconds = steps * plan.step.total_s / saving.goodput
    hours = seconds / 3600
    watts = gpu_watts(plan)
    each = (watts + goals.host_watts_per_gpu) * goals.pue
    return Totals(
        tokens=float(steps) * plan.case.tokens,
        steps=steps,
        days=seconds / _DAY_S,
        gpu_hours=gpus * hours,
        gpu_watts=watts,
        energy_kwh=gpus * hours * each / 1000,
        checkpoints=saving,
    )


def gpu_watts(plan: Plan) -> float:
    """Power of a GPU, idle while it waits and at its limit while it computes: an estimate."""
    gpu, step = plan.case.machine.gpu, plan.step
    on_device = 0.0 if plan.case.layout.offload_optimizer else step.optimizer_s
    busy = min(1.0, (step.compute_s + on_device) / step.total_s)
    return gpu.idle_watts + (gpu.watts - gpu.idle_watts) * busy


def checkpoints(plan: Plan, goals: GoalsConfig) -> Checkpoints:
    """Reckon how often to save."""
    nodes, gpus = plan.case.machine.nodes, plan.dims.ranks
    size = checkpoint_bytes(plan)
    rate = min(goals.write_gb_s_per_node * nodes, goals.write_gb_s) * _GB
    write_s = size / rate
    config = plan.config
    stall_s = write_s
    if config.checkpoint.background and not config.has_masters and not config.precision.compact:
        # Each rank copies its share, those that hold the same share the work.
        stall_s = size / gpus / (plan.case.machine.gpu.host_gb_s * _GB)
    failures = goals.failures_per_gpu_day * gpus / _DAY_S
    every_s = math.inf if failures == 0 else 1 / failures
    interval_s = best_interval_s(stall_s, every_s)
    lost_s = 0.0 if math.isinf(every_s) else interval_s / 2 + write_s + goals.restart_s
    return Checkpoints(
        size, write_s, stall_s, every_s, interval_s, goodput(stall_s, interval_s, every_s, lost_s)
    )


def checkpoint_bytes(plan: Plan) -> float:
    """Size of a checkpoint, every shard of one copy of the state."""
    dims = plan.dims
    each = dims.ranks // dims.pp
    sharers = dims.dp_shard * dims.cp if plan.parallel.zero > 0 else 1
    firsts = holdings(plan.config, dims, range(0, dims.ranks, each))
    return float(sum(state_bytes(plan.config, dims, one) for one in firsts) * dims.tp * sharers)


def best_interval_s(stall_s: float, failure_every_s: float) -> float:
    """Time of work between two saves that wastes least, by Daly's higher-order estimate (2006, eq. 37)."""
    if math.isinf(failure_every_s):
        return math.inf
    if stall_s >= 2 * failure_every_s:
        return failure_every_s
    share = stall_s / (2 * failure_every_s)
    root = math.sqrt(2 * stall_s * failure_every_s)
    return max(root * (1 + math.sqrt(share) / 3 + share / 9) - stall_s, 0.0)


def goodput(stall_s: float, interval_s: float, failure_every_s: float, lost_s: float) -> float:
    """Share of the time that is work which stays; `lost_s`: for each failure, with the restart."""
    saving = 0.0 if math.isinf(interval_s) or interval_s == 0 else stall_s / (interval_s + stall_s)
    failing = 0.0 if math.isinf(failure_every_s) else lost_s / (failure_every_s + lost_s)
    return (1 - saving) * (1 - failing)
