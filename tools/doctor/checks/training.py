"""Learning rate, loss scale, types of numbers, and time limits."""

from collections.abc import Iterator

from tools.doctor.facts import Facts
from tools.doctor.finding import About, Finding, NoUseError, check, note, warning
from train.model.config import flops_per_token
from train.precision.config import Compute, Moments

LARGEST_COLD_LR = 1e-4
"""A learning rate that Adam takes from the first step, as for fine-tuning; from random weights more diverges."""
EARLY = 0.01
"""Share of a run that counts as its beginning, where warm-up is shorter."""
LEAST_SCALE = 256.0
"""Below it most gradients of a language model fall out of float16 at the start of a run."""
SLOW = 0.05
"""Share of its peak that a GPU reaches in any layout that is worth its name."""
TIMES_LIMIT = 0.5
"""Share of its time limit that a step may be predicted to take."""


@check("warm-up", About.config)
def warmup(facts: Facts) -> Iterator[Finding]:
    """Adam's first steps, in which its second moments know nothing."""
    optim, steps = facts.config.optim, facts.config.loop.steps
    if optim.warmup_steps >= steps:
        yield warning(
            "optim.warmup_steps",
            f"optim.warmup_steps={optim.warmup_steps} is not over when the run is (loop.steps={steps}): the "
            "learning rate never gets to optim.lr",
            f"optim.warmup_steps={max(1, steps // 100)}, or more steps",
        )
    if optim.warmup_steps or optim.lr <= LARGEST_COLD_LR or facts.continues_at:
        return
    yield warning(
        "optim.warmup_steps",
        f"optim.warmup_steps=0 with optim.lr={optim.lr:g}: AdamW's first steps are as large as any and its "
        "estimates come from a few samples, so that the loss may jump and not come back",
        f"optim.warmup_steps={min(2000, max(1, steps // 50))}, or optim.lr={LARGEST_COLD_LR:g}",
    )


@check("loss scale", About.config)
def loss_scale(facts: Facts) -> Iterator[Finding]:
    """float16 without a scale of the loss."""
    precision = facts.config.precision
    if not precision.scales_loss:
        raise NoUseError("no product is in float16")
    if precision.loss_scale >= LEAST_SCALE or facts.continues_at:
        return
    doublings, scale = 0, precision.loss_scale
    while scale < LEAST_SCALE:
        scale, doublings = 2 * scale, doublings + 1
    yield warning(
        "precision.loss_scale",
        f"precision.loss_scale={precision.loss_scale:g} is no scale to speak of: gradients below 6e-8 are lost "
        f"in float16 until it has doubled {doublings} times, after {doublings * precision.loss_scale_growth_steps} "
        "steps",
        "leave precision.loss_scale at 65536, or precision=bf16",
    )


@check("8 bits early in training", About.config)
def static_quantisation(facts: Facts) -> Iterator[Finding]:
    """Numbers of 8 bits from the first step on: their types do not follow the phase of training."""
    config, precision = facts.config, facts.config.precision
    used = [
        name
        for name, is_used in (
            ("precision.float8=true", precision.float8),
            ("precision.embedding=int8", precision.embedding is not None),
            ("precision.optimizer_state=int8", precision.optimizer_state is Moments.int8),
        )
        if is_used
    ]
    if not used:
        raise NoUseError("nothing is kept or computed in 8 bits")
    early = max(config.optim.warmup_steps, round(EARLY * config.loop.steps))
    if facts.continues_at >= early or config.run.init_from is not None:
        return
    which = " ".join(used)
    yield warning(
        used[0].partition("=")[0],
        f"{which} holds from step {facts.continues_at} on, and before step {early} weights and their ranges change "
        "fastest: what is rounded to 8 bits then is lost",
        f"begin without {which}, and give it when the run continues after step {early}: a checkpoint holds fp32 "
        "whatever the types",
    )


@check("types that the GPU has", About.config)
def types(facts: Facts) -> Iterator[Finding]:
    """Types that these GPUs compute slowly, or not at all."""
    gpu, precision = facts.gpu, facts.config.precision
    if precision.float8 and gpu.fp8_tflops <= gpu.bf16_tflops:
        yield warning(
            "precision.float8",
            f"precision.float8=true, and {gpu.name} has no units for 8 bits",
            "leave it out",
        )
    old = gpu.name.startswith("v100")
    if old and Compute.bfloat16 in (precision.compute, precision.backward):
        yield warning(
            "precision.compute",
            f"{gpu.name} has no units for bfloat16: products take many times as long",
            "precision=fp16",
        )
    if precision.tf32 and old:
        yield warning(
            "precision.tf32", f"precision.tf32=true, and {gpu.name} has no units for it", "precision=fp16"
        )
    elif precision.compute is Compute.float32 and not precision.tf32 and not old:
        yield note(
            "precision.compute",
            f"precision.compute=float32: matrix units of {gpu.name} are {gpu.bf16_tflops / gpu.fp32_tflops:.0f} "
            "times as fast in bfloat16",
            "precision=bf16, or tf32",
        )


@check("time limit of a step", About.config)
def step_time(facts: Facts) -> Iterator[Finding]:
    """A step that takes long is taken for one that hangs."""
    limit = facts.config.resilience.step_timeout_s
    if _slow_step_s(facts) <= TIMES_LIMIT * limit:
        return
    step_s = facts.step_s
    if step_s <= TIMES_LIMIT * limit:
        return
    from tools.table import duration  # with all that knows of runs

    more = float(f"{3 * step_s:.1g}")
    yield warning(
        "resilience.step_timeout_s",
        f"a step is predicted to take {duration(step_s)}, and one that takes "
        f"resilience.step_timeout_s={limit:g} is taken "
        "for hung: the run would be restarted again and again",
        f"resilience.step_timeout_s={more:g} resilience.start_timeout_s={more:g} "
        f"resilience.collective_timeout_s={2 * more:g} resilience.checkpoint_timeout_s={max(2 * more, 1800):g}",
    )


def _slow_step_s(facts: Facts) -> float:
    """A step at a small share of what the GPUs can: to predict it takes longer, and seldom matters."""
    sized, precision, gpu = facts.sized, facts.config.precision, facts.gpu
    tokens = sized.loop.samples_per_step * sized.data.sequence_length
    flops = flops_per_token(sized.model, sized.data.sequence_length) * tokens / facts.dims.ranks
    in_fp32 = precision.compute is Compute.float32 and not precision.tf32
    return flops / (SLOW * 1e12 * (gpu.fp32_tflops if in_fp32 else gpu.bf16_tflops))
