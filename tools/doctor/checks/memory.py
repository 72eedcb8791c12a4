"""Does a rank's part fit its GPU, and if not, what would?"""

import copy
import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from contract.errors import UserError
from tools.bytes_shown import size
from tools.doctor.facts import Facts
from tools.doctor.finding import About, Finding, check, error, note, warning
from train.layout.config import Recompute
from train.layout.dims import ParallelDims
from train.layout.memory import STATE, Memory, Role, heaviest, total
from train.offload.check import check_offload
from train.offload.config import Tier

if TYPE_CHECKING:
    from train.config import TrainConfig

SURE = 1.1
"""So much more than there is, and it does not fit, for all that is uncertain in what activations take."""
CLOSE = 0.95
"""So much of what there is, and it may not fit."""
SMALL = 0.03
SHORTEST = 64
OFFERED = 3


@check("memory of the GPUs", About.config)
def fits_gpu(facts: Facts) -> Iterator[Finding]:
    """Weights, gradients, optimizer, activations and buffers, against what a GPU has."""
    facts.need_gpus()
    room = room_bytes(facts, facts.dims)
    kept = facts.memory
    state, needed = total(kept, STATE).device, needed_bytes(kept)
    gpu = facts.gpu
    if state > room:
        yield error(
            "parallel",
            f"the state of a rank takes {size(state)} ({_parts(kept, STATE)}), and of "
            f"{gpu.name}'s {gpu.memory_gb:g} GiB there are {size(int(room))}",
            _fixes(facts),
        )
    elif needed > CLOSE * room:
        activations = kept[Role.activations].device
        say = error if needed > SURE * room else warning if needed > room else note
        longest = longest_sequence(facts)
        length = facts.config.data.sequence_length
        where = "parallel"
        what = (
            f"a rank needs about {size(int(needed))} ({_parts(kept, Role)}; recompute="
            f"{facts.config.parallel.recompute}), and of {gpu.name}'s {gpu.memory_gb:g} GiB there are {size(int(room))}"
        )
        if needed > room and longest and activations > needed / 3 and length > 1024:
            where = "data.sequence_length"
            what = (
                f"sequences of {length} tokens are too long for the memory: {what}; the longest that fit "
                f"have {longest}"
            )
        yield say(where, what, _fixes(facts))


def room_bytes(facts: Facts, dims: ParallelDims) -> float:
    """What a GPU has for the trainer, without what CUDA and NCCL take: as the planner has it."""
    from tools.plan.constants import constants
    from tools.plan.room import Rooms

    return Rooms(facts.gpu.usable_bytes, constants()).available_bytes(dims)


def needed_bytes(kept: Memory) -> float:
    """What a rank takes of it, with what the allocator holds besides."""
    from tools.plan.constants import constants

    moving = kept[Role.activations].device + kept[Role.under_way].device
    return total(kept).device + constants().fragmentation * moving


def longest_sequence(facts: Facts) -> int:
    """Longest sequence that fits as all else is, in steps of what the layout divides it by; 0 if none does."""
    dims, length = facts.dims, facts.config.data.sequence_length
    step = max(SHORTEST, 2 * dims.cp * dims.tp)
    below, above = 0, length // step
    while above - below > 1:
        middle = (below + above) // 2
        trial = copy.copy(facts.sized)
        trial.data = dataclasses.replace(trial.data, sequence_length=middle * step)
        if _fits(facts, trial, dims):
            below = middle
        else:
            above = middle
    return below * step


def _fits(facts: Facts, config: "TrainConfig", dims: ParallelDims) -> bool:
    return needed_bytes(heaviest(config, dims, "cuda")[1]) <= CLOSE * room_bytes(facts, dims)


def _fixes(facts: Facts) -> str:
    """Settings with which it would fit: those that cost least first."""
    parallel, samples = facts.config.parallel, facts.config.loop.samples_per_step
    inside = facts.settings.ranks_per_node
    ideas: list[dict[str, object]] = []
    if parallel.recompute in (Recompute.none, Recompute.selective):
        ideas += [{"recompute": Recompute.selective}, {"recompute": Recompute.full}]
    if parallel.micro_batch_size > 1 and parallel.gradient_accumulation_steps is None:
        ideas += [{"micro_batch_size": 1}, {"micro_batch_size": 1, "recompute": Recompute.selective}]
    shards: list[dict[str, object]] = [
        {"zero": stage, "dp_replicate": None, "dp_shard": None}
        for stage in (1, 2, 3)
        if stage > parallel.zero
    ]
    ideas += shards
    ideas += [{"tp": inside}, {"tp": inside, "zero": max(1, parallel.zero)}, {"cp": 2 * parallel.cp}]
    ideas += [
        {**shard, "recompute": Recompute.full, **_micro(parallel.gradient_accumulation_steps)}
        for shard in shards
    ]
    ideas += [
        {"tp": inside, "zero": 3, "recompute": Recompute.full, **_micro(parallel.gradient_accumulation_steps)}
    ]
    found: list[str] = []
    for idea in ideas:
        changes = {key: value for key, value in idea.items() if getattr(parallel, key) != value}
        if not changes or len(found) == OFFERED:
            continue
        changed = facts.instead(dataclasses.replace(parallel, **changes), samples)  # type: ignore[arg-type]
        if changed is None:
            continue
        if _fits(facts, changed, ParallelDims.of(changed.parallel, facts.dims.ranks)):
            said = " ".join(
                f"parallel.{key}={'null' if value is None else value}" for key, value in changes.items()
            )
            if not any(set(said.split()) >= set(one.split()) for one in found):
                found.append(said)
    if len(found) < OFFERED and (offloaded := _offloaded(facts)):
        found.append(offloaded)
    if found:
        return " or ".join(found)
    return (
        "take more nodes, or a smaller model: nothing near fits on so many GPUs (`trierarch plan` searches "
        "all layouts)"
    )


def _parts(kept: Memory, roles: Iterable[Role]) -> str:
    """The largest ones first."""
    sizes = sorted(((kept[role].device, role.value) for role in roles if kept[role].device), reverse=True)
    return ", ".join(f"{name} {size(taken)}" for taken, name in sizes if taken > SMALL * sizes[0][0])


def _micro(accumulation: int | None) -> dict[str, object]:
    """The smallest micro-batch, where it changes no batch."""
    return {"micro_batch_size": 1} if accumulation is None else {}


def _offloaded(facts: Facts) -> str:
    """Settings that move the optimizer to the host, if that is enough."""
    if facts.config.offload.is_used:
        return ""
    changed = copy.copy(facts.sized)
    changed.offload = dataclasses.replace(changed.offload, optimizer=Tier.cpu, gradients=Tier.cpu)
    try:
        check_offload(changed)
    except UserError:
        return ""
    if not _fits(facts, changed, facts.dims):
        return ""
    return "offload.optimizer=cpu offload.gradients=cpu"
