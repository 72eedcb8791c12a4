"""A plan's step played chunk by chunk, for a picture."""

from dataclasses import replace

from tools.plan.case import Recompute
from tools.plan.pipeline.simulate import Timeline, simulate
from tools.plan.search import Plan
from train.layout.stages import SCHEDULES


def timeline(plan: Plan) -> Timeline:
    """Return the step of a plan with what each rank computes when."""
    layout, stages = plan.case.layout, plan.step.stages
    splits = SCHEDULES[layout.schedule].splits_backward and layout.recompute is Recompute.none
    if not splits:
        stages = tuple(
            replace(one, backward_s=one.backward_s + one.weights_s, weights_s=0.0) for one in stages
        )
    schedule = layout.schedule if layout.pp > 1 else "gpipe"
    return simulate(schedule, layout.pp, stages, layout.micro_batches, plan.step.handover_s, spans=True)
