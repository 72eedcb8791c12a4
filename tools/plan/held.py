"""Which layers a rank of the pipeline has, and of how many micro-batches it keeps activations, by schedule."""

import functools
import math
from collections.abc import Sequence

from contract.errors import ConfigError
from tools.plan.activations import is_megatron
from tools.plan.case import Case, Layout, Recompute
from train.layout.config import ParallelConfig
from train.layout.config import Recompute as Chosen
from train.layout.in_flight import InFlight, in_flight
from train.layout.split import partition
from train.layout.stages import SCHEDULES, Placement

ZERO_BUBBLE = {"zb_h1": 1, "zb_1p": 1, "zb_h2": 2, "zb_2p": 2}
"""Schedules of Qi et al. 2023 with one stage for each rank. They keep as many micro-batches as ranks, or twice that."""


def layers_of(case: Case, rank: int) -> tuple[int, ...]:
    """Layers of each stage of a rank of the pipeline, as the layout says, or as trainers split them."""
    layout, last = case.layout, case.layout.pp * case.layout.vpp - 1
    own = stages_of(layout, rank)
    if layout.split is not None:
        return tuple(layout.split[stage] for stage in own)
    sizes = _usual_split(case)
    return tuple(sizes[0 if stage == 0 else 2 if stage == last else 1] for stage in own)


def _usual_split(case: Case) -> tuple[int, int, int]:
    """Layers of the first, of the fullest inner and of the last stage."""
    model, stages = case.model, case.layout.pp * case.layout.vpp
    layers = model.layers
    if stages == 1:
        return (layers,) * 3
    if not is_megatron(case) and stages - 2 <= layers:
        # By work, as our own trainer does.
        layer = 2 * model.layer_matrices + 4 * model.hidden * case.sequence
        work = (layer, 0, 2 * model.table_parameters)
        parameters = (model.layer_parameters, model.table_parameters, model.table_parameters)
        first, *inner, last = partition(layers, stages, [work, parameters])
        return first, max(inner, default=0), last
    if layers % stages == 0:
        return (layers // stages,) * 3
    if stages == 2:
        return layers // 2, 0, layers - layers // 2
    # The embedding and the head count as a layer each.
    most = math.ceil((layers + 2) / stages)
    return most - 1, most, most - 1


def stages_of(layout: Layout, rank: int) -> Sequence[int]:
    """Numbers of the stages of a rank of the pipeline, ascending."""
    if layout.vpp == 1:
        return (rank,)
    known = SCHEDULES.get(layout.schedule)
    if known is not None and known.placement is Placement.v:
        return rank, 2 * layout.pp - 1 - rank
    return range(rank, layout.pp * layout.vpp, layout.pp)


def splits_backward(layout: Layout) -> bool:
    """Whether gradients of weights are computed apart from those of the input."""
    known = SCHEDULES.get(layout.schedule)
    return layout.schedule in ZERO_BUBBLE if known is None else known.splits_backward


def under_way(layout: Layout, rank: int) -> list[InFlight]:
    """Times of a step at which a rank of the pipeline keeps most: micro-batches in each of its stages.

    Raises `ConfigError` for a schedule that there is not, or not with so many stages on a rank.
    """
    p, v, m = layout.pp, layout.vpp, layout.micro_batches
    if p == 1:
        return [InFlight((1,) * v, (0,) * v)]
    if layout.schedule not in {**SCHEDULES, **ZERO_BUBBLE}:
        raise ConfigError(f"schedule={layout.schedule}: choose {', '.join([*SCHEDULES, *ZERO_BUBBLE])}")
    several = layout.schedule in SCHEDULES and SCHEDULES[layout.schedule].placement is not Placement.single
    if v > 1 and not several:
        raise ConfigError(f"schedule={layout.schedule} has one stage on each rank, not vpp={v}: set vpp=1")
    if layout.schedule in ZERO_BUBBLE:
        # The same on each rank: where fewer are on their way back, more wait for the gradients of their weights.
        times = ZERO_BUBBLE[layout.schedule]
        return [InFlight((min(m, times * p - (times - 1)),), (0,))]
    again = Chosen.none if layout.recompute is Recompute.none else Chosen.full
    return _of_trainer(layout.schedule, p, v, m, rank, again)


@functools.cache  # a search asks for the same again and again
def _of_trainer(schedule: str, p: int, v: int, m: int, rank: int, again: Chosen) -> list[InFlight]:
    config = ParallelConfig(pp=p, schedule=schedule, stages_per_rank=v, recompute=again)
    return in_flight(config, rank, m)
