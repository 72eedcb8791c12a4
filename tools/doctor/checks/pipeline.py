"""Stages of a pipeline: do they have equally much to do, and do they wait for each other?"""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tools.doctor.facts import Facts
from tools.doctor.finding import About, Finding, NoUseError, check, note, warning
from train.layout.memory import memory, total
from train.layout.stages import bubble, schedule_of, stage_layers, stages_of
from train.model.config import flops_per_token

if TYPE_CHECKING:
    from train.config import TrainConfig
    from train.layout.config import ParallelConfig

MOST_IMBALANCE = 0.15
"""More than this above the mean, and the slowest stage costs everyone."""
MOST_BUBBLE = 0.20
OFFERED = 3


@check("balance of the stages", About.config)
def imbalance(facts: Facts) -> Iterator[Finding]:
    """Work of the ranks of a pipeline."""
    parallel = _pipeline(facts)
    sized, found = facts.sized, imbalance_of(facts.sized, parallel)
    if found <= MOST_IMBALANCE:
        return
    counts = ", ".join(
        str(len(layers)) for layers in stage_layers(parallel, sized.model, sized.data.sequence_length)
    )
    yield warning(
        "parallel.split" if parallel.split else "parallel.pp",
        f"the busiest of {parallel.pp} pipeline ranks has {found:.0%} more to do than the mean (layers of the stages: "
        f"{counts}, and the head), and all wait for it",
        _better_balance(facts, found),
    )


@check("memory of the stages", About.config)
def memory_imbalance(facts: Facts) -> Iterator[Finding]:
    """Memory of the ranks of a pipeline: the early ones keep more micro-batches."""
    parallel = _pipeline(facts)
    dims, sized = facts.dims, facts.sized
    device = "cuda" if facts.on_gpus else "cpu"
    sizes = [
        total(memory(sized, dims, rank, device)).device for rank in range(0, dims.ranks, dims.ranks_per_stage)
    ]
    mean = sum(sizes) / len(sizes)
    most = max(range(len(sizes)), key=sizes.__getitem__)
    there = facts.gpu.usable_bytes
    if sizes[most] / mean - 1 > MOST_IMBALANCE and sizes[most] > 0.8 * there:
        yield note(
            "parallel.schedule",
            f"rank {most} of the pipeline keeps {sizes[most] / 1e9:.1f} GB and the mean is {mean / 1e9:.1f} GB: "
            f"it alone decides what fits in {there / 1e9:.0f} GB",
            "fewer layers there by parallel.split, or parallel.schedule=zbv, whose ranks keep equally much"
            if parallel.schedule != "zbv"
            else "fewer layers there by parallel.split",
        )


@check("bubble of the pipeline", About.config)
def bubbles(facts: Facts) -> Iterator[Finding]:
    """Share of a step in which ranks wait for the first micro-batch, and for the last."""
    parallel = _pipeline(facts)
    found, steps = bubble(parallel, facts.micro_batches), facts.micro_batches
    if found <= MOST_BUBBLE:
        return
    yield warning(
        "parallel",
        f"{steps} micro-batch{'es' * (steps > 1)} on {parallel.pp} pipeline ranks leave each of them idle for "
        f"{found:.0%} of a step (parallel.schedule={parallel.schedule})",
        " or ".join(_smaller_bubbles(facts)) or "fewer stages (parallel.pp), or a larger global batch",
    )


def imbalance_of(config: "TrainConfig", parallel: "ParallelConfig") -> float:
    """By how much the busiest rank of a pipeline is above the mean, as a share. Needs `model.vocab_size`."""
    model, length = config.model, config.data.sequence_length
    head = 6.0 * model.vocabulary * model.dim
    layer = (flops_per_token(model, length) - head) / model.layers
    stages = [layer * len(layers) for layers in stage_layers(parallel, model, length)]
    stages[-1] += head
    ranks = [sum(stages[stage] for stage in stages_of(parallel, rank)) for rank in range(parallel.pp)]
    return max(ranks) / (sum(ranks) / len(ranks)) - 1


def _pipeline(facts: Facts) -> "ParallelConfig":
    if facts.dims.pp == 1:
        raise NoUseError("parallel.pp=1")
    return facts.config.parallel


def _better_balance(facts: Facts, than: float) -> str:
    parallel, ranks = facts.config.parallel, facts.dims.ranks
    ideas = [dataclasses.replace(parallel, split=None)] if parallel.split else []
    degrees = sorted(
        (pp for pp in range(1, ranks + 1) if ranks % pp == 0 and pp != parallel.pp),
        key=lambda pp: max(pp, parallel.pp) / min(pp, parallel.pp),
    )
    ideas += [
        dataclasses.replace(parallel, split=None, pp=pp, schedule=parallel.schedule if pp > 1 else "1f1b")
        for pp in degrees
    ]
    for idea in ideas:
        if facts.instead(idea) is None:
            continue
        found = 0.0 if idea.pp == 1 else imbalance_of(facts.sized, idea)
        if found < than and (found <= MOST_IMBALANCE or idea is ideas[0]):
            settings = f"parallel.pp={idea.pp}" if idea.pp != parallel.pp else "parallel.split=null"
            return f"{settings} has {found:.0%}"
    return "no other number of stages is better here: take a model whose layers the stages divide"


def _smaller_bubbles(facts: Facts) -> list[str]:
    """Settings with which the bubble is small enough."""
    parallel, dims, steps = facts.config.parallel, facts.dims, facts.micro_batches
    samples = facts.config.loop.samples_per_step
    found = []
    if parallel.gradient_accumulation_steps is None:
        for micro in (size for size in range(parallel.micro_batch_size - 1, 0, -1)):
            idea = dataclasses.replace(parallel, micro_batch_size=micro)
            if samples % (micro * dims.dp) == 0 and _is_small(facts, idea, samples // (micro * dims.dp)):
                found.append(
                    f"parallel.micro_batch_size={micro} ({samples // (micro * dims.dp)} micro-batches)"
                )
                break
    for schedule in ("interleaved_1f1b", "interleaved_zero_bubble", "zbv"):
        idea = dataclasses.replace(parallel, schedule=schedule, stages_per_rank=None, split=None)
        if schedule != parallel.schedule and _is_small(facts, idea, steps):
            found.append(f"parallel.schedule={schedule} ({bubble(idea, steps):.0%})")
            break
    for more in range(steps + 1, 16 * parallel.pp + steps):
        batch = more * parallel.micro_batch_size * dims.dp
        given = parallel.gradient_accumulation_steps is not None
        idea = dataclasses.replace(parallel, gradient_accumulation_steps=more if given else None)
        if _is_small(facts, idea, more, batch):
            key = (
                f"parallel.gradient_accumulation_steps={more}" if given else f"loop.global_batch_size={batch}"
            )
            found.append(f"{key} ({more} micro-batches)")
            break
    return found[:OFFERED]


def _is_small(facts: Facts, idea: "ParallelConfig", steps: int, samples: int | None = None) -> bool:
    if steps < schedule_of(idea).fewest(idea.pp) or bubble(idea, steps) > MOST_BUBBLE:
        return False
    return facts.instead(idea, samples) is not None
