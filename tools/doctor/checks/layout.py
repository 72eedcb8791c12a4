"""Degrees of parallelism that work, and cost more than others would."""

import dataclasses
from collections.abc import Iterator

from tools.doctor.facts import Facts
from tools.doctor.finding import About, Finding, NoUseError, check, note, warning
from train.layout.notes import notes

MOST_ALONE = 128
"""GPUs beyond which data parallelism alone does not scale: the whole gradient travels in each step, and the batch
grows with every rank."""


@check("data parallelism alone", About.config)
def data_parallel_alone(facts: Facts) -> Iterator[Finding]:
    """Many replicas, and nothing that they share."""
    dims, parallel = facts.dims, facts.config.parallel
    facts.need_gpus()
    if dims.dp != dims.ranks or parallel.zero > 0 or dims.ranks <= MOST_ALONE:
        return
    inside = facts.settings.ranks_per_node
    ideas = [
        dataclasses.replace(parallel, zero=1, dp_replicate=dims.ranks // inside, dp_shard=inside),
        dataclasses.replace(parallel, zero=1, dp_replicate=None, dp_shard=None),
    ]
    works = next((one for one in ideas if facts.instead(one)), None)
    fix = "share the state or the model: parallel.zero=1"
    if works is not None and works.dp_replicate is not None and works.dp_replicate > 1:
        fix += f" parallel.dp_replicate={works.dp_replicate} shares it inside each node"
    yield warning(
        "parallel",
        f"{dims.ranks} GPUs are all copies of the whole model: beyond {MOST_ALONE} each waits longer for the gradients "
        "of the others, and holds all of the optimizer's state",
        f"{fix}; or parallel.tp={inside} and more samples for each rank",
    )


@check("groups inside nodes", About.config)
def groups(facts: Facts) -> Iterator[Finding]:
    """Groups that should stay inside a node, and settings of the layout that do nothing."""
    for sentence in notes(facts.config, facts.dims, facts.settings.ranks_per_node):
        costs = " spans " in sentence
        yield (warning if costs else note)("parallel" if costs else sentence.partition("=")[0], sentence)


@check("heads of keys and values", About.config)
def kv_heads(facts: Facts) -> Iterator[Finding]:
    """Ranks of a tensor-parallel group that compute the same keys and values."""
    tp, model = facts.dims.tp, facts.config.model
    if tp == 1:
        raise NoUseError("parallel.tp=1")
    heads = model.heads if model.kv_heads is None else model.kv_heads
    if heads % tp == 0:
        return
    matrices = 2 * model.dim**2 + 2 * model.kv_dim * model.dim + 3 * model.ffn_dim * model.dim
    # Each rank has all keys and values, where its share would be enough.
    more = 2 * model.kv_dim * model.dim * (tp - 1) / matrices
    best = max(degree for degree in range(1, tp + 1) if tp % degree == 0 and heads % degree == 0)
    yield (warning if more > 0.02 else note)(
        "parallel.tp",
        f"parallel.tp={tp} is no divisor of model.kv_heads={heads}: each rank computes and keeps all keys and values, "
        f"{more:.0%} more work in the layers' matrices",
        f"parallel.tp={best}, or a model with {tp} of them",
    )
