"""How long a step takes, and what of: computation, communication beside it or waited for, the pipeline's bubble."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import add

from tools.plan import links
from tools.plan.case import Case, Layout, Recompute
from tools.plan.constants import Constants, constants
from tools.plan.held import stages_of
from tools.plan.pipeline.simulate import total_s
from tools.plan.stage import Stage
from tools.plan.work import Chunk, head, layer, optimizer_s

FILLS = ("gpipe", "1f1b", "looped_bfs", "interleaved_1f1b")
"""Schedules whose bubble is filling and emptying the pipeline; others are played."""
SETTLED = 3
"""Rounds of as many micro-batches as ranks after which a pipeline is in its steady state."""
QUIET = 0.03
"""Of `Constants.chunk_s`, what a hand-over takes where the host runs ahead of the GPU."""


@dataclass(frozen=True)
class Lane:
    """Communication of one axis in a step, of the rank that has most."""

    exposed_s: float
    """What the step is longer for it."""
    hidden_s: float
    """What passes beside computation."""
    sent_bytes: float
    """By a rank, in all."""

    def __add__(self, other: "Lane") -> "Lane":
        """Both."""
        return Lane(
            self.exposed_s + other.exposed_s,
            self.hidden_s + other.hidden_s,
            self.sent_bytes + other.sent_bytes,
        )

    def times(self, factor: float) -> "Lane":
        """As often."""
        return Lane(factor * self.exposed_s, factor * self.hidden_s, factor * self.sent_bytes)


NOTHING = Lane(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Step:
    """A predicted step; the parts of `total_s` are `compute_s`, `exposed_s`, `bubble_s`, `optimizer_s`, `waiting_s`."""

    total_s: float
    compute_s: float
    """Of the rank that computes longest, all micro-batches."""
    matmul_s: float
    attention_s: float
    elementwise_s: float
    recompute_s: float
    """The share of `compute_s` that is computed again (contained in the three above)."""
    bubble_s: float
    optimizer_s: float
    waiting_s: float
    """For the slowest of many ranks, and what a step takes outside all of this."""
    communication: Mapping[str, Lane]
    """By axis: tp, cp, pp, dp (the ranks that share the state), copies (the others of data parallelism)."""
    stages: tuple[Stage, ...]
    handover_s: float
    """Of one micro-batch from stage to stage."""

    @property
    def exposed_s(self) -> float:
        """Communication that the step waits for."""
        return sum(lane.exposed_s for lane in self.communication.values())


def predict_step(case: Case, known: Constants | None = None) -> Step:
    """Predict a step of `case`; a pure function of it and of the constants."""
    known = known or constants()
    layout, times = case.layout, case.layout.micro_batches
    counts = layers_of_stages(case)
    alone = _alone(case)
    each = layer(alone, known)
    # Most stages have equally many layers.
    of_count = {count: each.times(count) for count in set(counts)}
    parts = [of_count[count] for count in counts]
    parts[-1] += head(alone, known)
    in_layer = {"tp": _tensor(case, known), "cp": _context(case, known, each)}
    waited_s = sum(sum(lane.exposed_s for lane in lanes) for lanes in in_layer.values())
    alike = {count: _stage(part, count, in_layer, known) for count, part in of_count.items()}
    stages = [alike[count] for count in counts[:-1]] + [_stage(parts[-1], counts[-1], in_layer, known)]
    ranks = [stages_of(layout, rank) for rank in range(layout.pp)]
    busy_s = [sum(stages[stage].total_s for stage in own) for own in ranks]
    slowest = max(range(layout.pp), key=busy_s.__getitem__)
    own = ranks[slowest]
    work = reduce(add, (parts[stage] for stage in own))
    layers = sum(counts[stage] for stage in own)
    host_s = 3 * known.launch_s * layers
    communication = {axis: reduce(add, lanes).times(layers * times) for axis, lanes in in_layer.items()}
    handover_s, communication["pp"] = _handing_over(case, known)
    parameters = layers * case.model.layer_parameters + _tables(case)
    communication |= _data(case, known, parameters / layout.tp, [stages[stage] for stage in own])
    bubble_s = _bubble_s(case, stages, busy_s)
    update_s = optimizer_s(case, known, parameters / layout.tp / (layout.sharers if layout.zero else 1))
    compute_s = times * (busy_s[slowest] - waited_s * layers)
    total_s = compute_s + bubble_s + update_s + sum(lane.exposed_s for lane in communication.values())
    waiting_s = total_s * known.straggler * math.log2(case.machine.nodes) + known.step_s
    return Step(
        total_s=total_s + waiting_s,
        compute_s=compute_s,
        matmul_s=times * work.all.matmul_s,
        attention_s=times * work.all.attention_s,
        elementwise_s=times * (work.all.elementwise_s + host_s),
        recompute_s=times * work.again.total_s,
        bubble_s=bubble_s,
        optimizer_s=update_s,
        waiting_s=waiting_s,
        communication={axis: lane for axis, lane in communication.items() if lane != NOTHING},
        stages=tuple(stages),
        handover_s=handover_s,
    )


def _alone(case: Case) -> Case:
    """The same as far as what a layer computes goes, so that layouts share what is counted once."""
    layout = case.layout
    return case.on(
        Layout(
            tp=layout.tp,
            cp=layout.cp,
            micro_batch=layout.micro_batch,
            micro_batches=min(2, layout.micro_batches),
            recompute=layout.recompute,
            sequence_parallel=layout.sequence_parallel,
        )
    )


def layers_of_stages(case: Case) -> list[int]:
    """Layers of each stage, first to last: as given, else evenly, with those in the middle taking what is left over."""
    layout = case.layout
    if layout.split is not None:
        return list(layout.split)
    stages = layout.pp * layout.vpp
    each, more = divmod(case.model.layers, stages)
    # The first stage has the embedding, the last one the head.
    order = [*range(1, stages - 1), 0, stages - 1]
    return [each + (stage in order[:more]) for stage in range(stages)]


Lanes = tuple[Lane, Lane, Lane]
"""Of one layer and micro-batch: forward, backward, computed again."""


def _stage(part: Chunk, layers: int, in_layer: Mapping[str, Lanes], known: Constants) -> Stage:
    forward, backward, again = (
        sum(lanes[index].exposed_s for lanes in in_layer.values()) + host * known.launch_s
        for index, host in ((0, 1), (1, 2), (2, 0))
    )
    return Stage(
        part.forward.total_s + layers * forward,
        part.backward.total_s + part.again.total_s + layers * (backward + again),
        part.weights.total_s,
    )


def _repeated(case: Case) -> float:
    """How often communication of a layer's forward pass is done again."""
    return {Recompute.full: 1.0, Recompute.half: 0.5}.get(case.layout.recompute, 0.0)


def _tensor(case: Case, known: Constants) -> Lanes:
    """Two sums over tp after attention and MLP, forward and backward; by sequence parallelism the same in halves."""
    if case.layout.tp == 1:
        return NOTHING, NOTHING, NOTHING
    ranks = links.group(case.machine, known, case.layout.tp, 1)
    size = case.tokens_of_rank * case.model.hidden * case.item_bytes
    both = Lane(2 * (ranks.all_reduce_s(size) + known.sync_s), 0.0, 4 * ranks.sent_bytes(size))
    return both, both, both.times(_repeated(case))


def _context(case: Case, known: Constants, each: Chunk) -> Lanes:
    """Keys and values travel beside attention, backward their gradients too."""
    layout = case.layout
    if layout.cp == 1:
        return NOTHING, NOTHING, NOTHING
    ranks = links.group(case.machine, known, layout.cp, layout.tp)
    size = case.tokens_of_rank * layout.cp * 2 * max(1, case.model.kv_width / layout.tp) * case.item_bytes
    forward = _beside(ranks.gather_s(size), each.forward.attention_s, known, ranks.sent_bytes(size))
    backward = _beside(2 * ranks.gather_s(size), each.backward.attention_s, known, 2 * ranks.sent_bytes(size))
    return forward, backward, forward.times(_repeated(case))


def _beside(communication_s: float, computing_s: float, known: Constants, sent_bytes: float) -> Lane:
    """Communication beside computation, for which some of it is slower."""
    room_s = known.overlap * computing_s
    inside_s = min(communication_s, room_s)
    felt_s = known.interference * inside_s
    return Lane(communication_s - inside_s + felt_s, inside_s - felt_s, sent_bytes)


def _handing_over(case: Case, known: Constants) -> tuple[float, Lane]:
    """From stage to stage: each time, and all of it; ranks of a tp group share the sending."""
    layout = case.layout
    if layout.pp == 1:
        return 0.0, NOTHING
    size = case.tokens_of_rank * case.model.hidden * case.item_bytes / layout.tp
    rate = links.neighbour_rate(case.machine, known, layout.tp * layout.cp * layout.dp)
    host_s = known.chunk_s * (1.0 if case.waits_for_host else QUIET)
    each_s = size / rate + known.network_latency_s
    times = 2 * layout.vpp * layout.micro_batches
    # Those on the way to the last stage and back, before and after the steady state.
    ends_s = 2 * (layout.pp - 1) * (each_s + host_s)
    return each_s, Lane(times * (known.handover * each_s + host_s) + ends_s, 0.0, times * size)


def _tables(case: Case) -> int:
    """Parameters outside the layers, of the rank that has most: with a pipeline one end's."""
    both = case.layout.pp == 1 and not case.model.tied
    return case.model.table_parameters * (2 if both else 1)


def _data(case: Case, known: Constants, parameters: float, own: list[Stage]) -> dict[str, Lane]:
    """Gradients and weights of data parallelism; `parameters`: of the rank, before ZeRO shares them."""
    layout = case.layout
    everyone = layout.dp * layout.cp
    if everyone == 1:
        return {}
    sharers = layout.sharers if layout.zero else 1
    inner = links.group(case.machine, known, sharers, layout.tp)
    outer = links.group(case.machine, known, everyone // sharers, layout.tp * sharers)
    forward_s = sum(stage.forward_s for stage in own)
    backward_s = sum(stage.backward_s + stage.weights_s for stage in own)
    # In a pipeline other micro-batches are under way until the end.
    last_s = backward_s if layout.pp == 1 else 0.0
    weights, gradients = parameters * case.item_bytes, parameters * case.gradient_bytes
    gather_s, scatter_s = inner.gather_s(weights), inner.gather_s(gradients)
    sent, back = inner.sent_bytes(weights), inner.sent_bytes(gradients)
    if layout.zero == 3:
        shared = _beside(gather_s, forward_s, known, sent) + _beside(
            gather_s + scatter_s, backward_s, known, sent + back
        )
        shared = shared.times(layout.micro_batches)
    else:
        times = layout.micro_batches if layout.zero == 2 else 1
        shared = _beside(scatter_s, last_s, known, back).times(times) + Lane(gather_s, 0.0, sent)
    copied = outer.all_reduce_s(gradients / sharers)
    copies = _beside(copied, last_s, known, 2 * outer.sent_bytes(gradients / sharers))
    return {"dp": shared if sharers > 1 else NOTHING, "copies": copies}


def _bubble_s(case: Case, stages: Sequence[Stage], busy_s: Sequence[float]) -> float:
    """What the slowest rank waits for the others in one step."""
    layout = case.layout
    if layout.pp == 1:
        return 0.0
    if layout.schedule in FILLS:
        # It waits for the first micro-batch to come through the others, and the last to come back, turn by turn; with
        # fewer micro-batches than ranks, in each turn for the first one to come round.
        again = max(0, layout.pp - layout.micro_batches) * (layout.vpp - 1) / (layout.pp - 1)
        return (sum(busy_s) - max(busy_s)) / layout.vpp * (1 + again)
    if layout.recompute is not Recompute.none:
        # Computing again undoes the split of the backward pass.
        stages = [Stage(stage.forward_s, stage.backward_s + stage.weights_s, 0.0) for stage in stages]
    # From some rounds on a further micro-batch takes what the slowest rank takes: the bubble does not change.
    few, rest = SETTLED * layout.pp, layout.micro_batches % layout.pp
    times = few if layout.micro_batches > few and rest == 0 else layout.micro_batches
    return max(0.0, _played_s(layout.schedule, layout.pp, tuple(stages), times) - times * max(busy_s))


@lru_cache(maxsize=4096)
def _played_s(schedule: str, ranks: int, stages: tuple[Stage, ...], micro_batches: int) -> float:
    return total_s(schedule, ranks, stages, micro_batches)
