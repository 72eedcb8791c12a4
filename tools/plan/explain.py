"""The arithmetic of a plan, step by step: numbers in, number out, and where the formula is from."""

import math

from tools.bytes_shown import size
from tools.plan.case import Case, Recompute
from tools.plan.constants import Constants, constants
from tools.plan.goals import Totals
from tools.plan.links import group
from tools.plan.report import GIB, percent, seconds
from tools.plan.search import Plan, peak_flops
from tools.plan.settings import GoalsConfig
from train.layout.holding import holdings


def explain(plan: Plan, totals: Totals, goals: GoalsConfig, known: Constants | None = None) -> str:
    """Walk through a plan."""
    known = known or constants()
    parts = [
        ("work", _work(plan.case)),
        ("computing", _computing(plan, known)),
        ("pipeline", _pipeline(plan)),
        ("communication", _communication(plan, known)),
        ("a step", _step(plan)),
        ("memory", _memory(plan)),
        ("checkpoints", _checkpoints(totals, goals)),
        ("energy", _energy(plan, totals, goals)),
    ]
    lines = ["how these numbers come about; constants are those of tools/plan/constants.json"]
    for head, found in parts:
        if found:
            lines += ["", head, *(f"  {line}" for line in found)]
    return "\n".join(lines) + "\n"


def _work(case: Case) -> list[str]:
    model = case.model
    weights = model.layers * model.layer_matrices + model.table_parameters
    per_token = model.flops_per_token(case.sequence)
    return [
        f"tokens of a step = {case.samples:,} samples x {case.sequence:,} = {case.tokens:,}",
        f"FLOPs of a token = 6 x {weights:,} weights in matrix products + 12 x {model.layers} layers x "
        f"{model.hidden:,} x {case.sequence:,} positions = {per_token:.4g}  [Chowdhery et al. 2022, appendix B; "
        "Narayanan et al. 2021]",
        f"of a GPU in a step = {per_token:.4g} x {case.tokens:,} / {case.layout.ranks:,} = {case.model_flops:.4g}",
        f"at the peak of {peak_flops(case) / 1e12:,.0f} TFLOP/s: {seconds(case.model_flops / peak_flops(case))}",
    ]


def _computing(plan: Plan, known: Constants) -> list[str]:
    step, case = plan.step, plan.case
    again = {
        Recompute.none: "nothing is computed again",
        Recompute.between: "operations on each element are computed again [Korthikanti et al. 2022]",
        Recompute.half: "half of the layers are computed again [Chen et al. 2016]",
        Recompute.full: "each layer is computed again [Chen et al. 2016]",
        Recompute.attention: "attention is computed again [Korthikanti et al. 2022]",
    }[case.layout.recompute]
    return [
        f"matrix products at {percent(known.matmul)} of the peak, less what tiles lose, on the rank that computes "
        f"longest: {seconds(step.matmul_s)}",
        f"attention, the causal half, at {percent(known.attention)} of the peak [Dao 2023]: "
        f"{seconds(step.attention_s)}",
        f"operations on each element at {percent(known.memory)} of {case.machine.gpu.memory_gb_s:,.0f} GB/s: "
        f"{seconds(step.elementwise_s)}",
        f"{again}: {seconds(step.recompute_s)} of the above",
        f"optimizer: {seconds(step.optimizer_s)}"
        + ", on the host" * case.layout.offload_optimizer
        + "  [moments and weights are read and written once]",
    ]


def _pipeline(plan: Plan) -> list[str]:
    layout, step = plan.case.layout, plan.step
    if layout.pp == 1:
        return []
    ideal = (layout.pp - 1) / (layout.vpp * layout.micro_batches)
    return [
        f"1F1B idles (pp - 1) / (stages of a rank x micro-batches) of the time = ({layout.pp} - 1) / ({layout.vpp} x "
        f"{layout.micro_batches}) = {percent(ideal)} of computing  [Narayanan et al. 2021]",
        f"{layout.schedule} with these stages: {seconds(step.bubble_s)}, {percent(step.bubble_s / step.total_s)} of "
        "the step",
    ]


def _communication(plan: Plan, known: Constants) -> list[str]:
    case, step, layout = plan.case, plan.step, plan.case.layout
    found = []
    if "tp" in step.communication:
        tokens = layout.micro_batch * case.sequence // layout.cp
        bytes_ = tokens * case.model.hidden * case.item_bytes
        ranks = group(case.machine, known, layout.tp, 1)
        found += [
            f"tp: of each layer and micro-batch 4 sums of {tokens:,} tokens x {case.model.hidden:,} x "
            f"{case.item_bytes} bytes = {size(bytes_)}, each 2 (n-1)/n of that at {ranks.rate / 1e9:,.0f} GB/s = "
            f"{seconds(ranks.all_reduce_s(bytes_))}  [Korthikanti et al. 2022; ring: Patarasuk and Yuan 2009]",
        ]
    if layout.dp * layout.cp > 1:
        volumes = {
            0: "gradients are reduced once",
            1: "gradients are scattered, weights gathered once",
            2: "gradients are scattered for each micro-batch, weights gathered once",
            3: "weights are gathered for forward and backward, gradients scattered, for each micro-batch",
        }
        found.append(f"data parallel, ZeRO {layout.zero}: {volumes[layout.zero]}  [Rajbhandari et al. 2020]")
    for axis, lane in step.communication.items():
        found.append(
            f"{axis}: {size(int(lane.sent_bytes))} sent by a GPU, {seconds(lane.exposed_s)} waited for, "
            f"{seconds(lane.hidden_s)} beside computing"
        )
    if case.machine.nodes > 1:
        given = "by the profile" if case.machine.network_known else "assumed"
        found.append(
            f"between nodes {case.machine.network / 1e9:,.0f} GB/s a node ({given}), of which {percent(known.network)} "
            "is reached"
        )
    return found


def _step(plan: Plan) -> list[str]:
    step, case = plan.step, plan.case
    return [
        f"computing {seconds(step.compute_s)} + communication {seconds(step.exposed_s)} + bubble "
        f"{seconds(step.bubble_s)} + optimizer {seconds(step.optimizer_s)} + waiting "
        f"{seconds(step.waiting_s)} = {seconds(step.total_s)}",
        f"waiting: {percent(known_share(plan))} for {case.machine.nodes:,} nodes, of which the slowest is waited for",
        f"tokens/s of a GPU = {case.tokens:,} / {seconds(step.total_s)} / {case.layout.ranks:,} = "
        f"{plan.tokens_per_s_per_gpu:,.0f}",
        f"MFU = {case.model_flops:.4g} / ({seconds(step.total_s)} x {peak_flops(case):.4g}) = {percent(plan.mfu)}  "
        "[Chowdhery et al. 2022]",
    ]


def known_share(plan: Plan) -> float:
    """What waiting adds to a step, as a share."""
    return plan.step.waiting_s / (plan.step.total_s - plan.step.waiting_s)


def _memory(plan: Plan) -> list[str]:
    (held,) = holdings(plan.config, plan.dims, [plan.room.rank])
    layers = sum(len(stage.layers) for stage in held.stages)
    room, sharers = plan.room, plan.case.layout.sharers
    lines = [
        f"rank {room.rank} has {layers} layers, {held.parameters:,} parameters, "
        + (f"whose state {sharers} ranks share" if sharers > 1 else "whose state is its own")
        + "  [Rajbhandari et al. 2020]",
    ]
    for role, sizes in room.roles.items():
        if sizes.device:
            each = sizes.device / held.parameters
            lines.append(f"{role.value}: {sizes.device / GIB:.2f} GiB ({each:.2f} bytes for each of them)")
    lines += [
        "activations: what the backward pass of each operation needs, of all micro-batches under way "
        "[train/layout/activations.py; Korthikanti et al. 2022]",
        f"in all, with {room.passing_bytes / GIB:.2f} GiB in a backward pass for a while, "
        f"{room.fragmentation_bytes / GIB:.2f} between the allocator's blocks and "
        f"{room.context_bytes / GIB:.2f} of CUDA and NCCL: {room.device_bytes / GIB:.2f} of "
        f"{room.capacity_bytes / GIB:.0f} GiB",
    ]
    return lines


def _checkpoints(totals: Totals, goals: GoalsConfig) -> list[str]:
    saving = totals.checkpoints
    if math.isinf(saving.failure_every_s):
        return ["no failures are assumed (goals.failures_per_gpu_day=0)"]
    return [
        f"a failure every {saving.failure_every_s / 3600:,.1f} hours = 1 / ({goals.failures_per_gpu_day:.3g} a GPU and "
        "day x GPUs)  [Llama Team 2024: 419 in 54 days on 16,384]",
        f"best interval for saves that stop training for {seconds(saving.stall_s)}: "
        f"{saving.interval_s / 60:,.1f} min, about sqrt(2 x {saving.stall_s:.3g} s x {saving.failure_every_s:.3g} s) = "
        f"{math.sqrt(2 * saving.stall_s * saving.failure_every_s) / 60:,.1f} min  [Young 1974; Daly 2006]",
        f"goodput = (1 - saving) x (1 - lost work and restarts of {goals.restart_s:g} s) = {percent(saving.goodput)}",
    ]


def _energy(plan: Plan, totals: Totals, goals: GoalsConfig) -> list[str]:
    gpu = plan.case.machine.gpu
    busy = (totals.gpu_watts - gpu.idle_watts) / (gpu.watts - gpu.idle_watts)
    return [
        f"a GPU draws {gpu.idle_watts:g} W idle and {gpu.watts:g} W at its limit [{gpu.source}]; it computes "
        f"{percent(busy)} of the time: {totals.gpu_watts:.0f} W",
        f"({totals.gpu_watts:.0f} + {goals.host_watts_per_gpu:g} W of its host) x PUE {goals.pue:g} x "
        f"{totals.gpu_hours:,.0f} GPU hours = {totals.energy_kwh:,.0f} kWh  [an estimate; PUE: Luccioni et al. 2022]",
    ]
