"""A plan in words: the best layouts, the best one in detail, and why the next best lose."""

import math
from collections.abc import Sequence

from tools.bytes_shown import size
from tools.plan.goals import Totals
from tools.plan.memory import Memory
from tools.plan.search import Found, Plan
from tools.table import duration, table
from train.layout.config import ParallelConfig
from train.layout.memory import Role
from train.offload.config import Tier

GIB = 2**30
AXES = {
    "tp": "tp, activations of each layer",
    "cp": "cp, keys and values",
    "pp": "pp, from stage to stage",
    "dp": "dp_shard, weights and gradients",
    "copies": "dp_replicate, gradients",
}
HEAD = ("#", "step", "tokens/s/GPU", "MFU", "memory", "bubble", "exposed", "layout")
_SHOWN_FIRST = ("tp", "pp", "cp", "dp_replicate", "zero", "micro_batch_size")


def overrides(plan: Plan, base: ParallelConfig) -> list[str]:
    """Return the settings that make the layout of a plan out of a configuration whose layout is `base`."""
    parallel, defaults = plan.parallel, ParallelConfig()
    rest = [name for name in vars(parallel) if name not in _SHOWN_FIRST]
    found = [
        f"parallel.{name}={_value(getattr(parallel, name))}"
        for name in (*_SHOWN_FIRST, *rest)
        if getattr(parallel, name) != getattr(base, name)
        or getattr(parallel, name) != getattr(defaults, name)
    ]
    if plan.config.offload.optimizer is not Tier.none:
        found.append(f"offload.optimizer={plan.config.offload.optimizer.value}")
    return found


def layout_words(plan: Plan) -> str:
    """Write a layout in short: `tp 4 pp 8 dp 16, ZeRO 1, micro-batch 2, 1f1b`."""
    dims, parallel = plan.dims, plan.parallel
    degrees = [("tp", dims.tp), ("pp", dims.pp), ("cp", dims.cp), ("dp", dims.dp)]
    words = [" ".join(f"{axis} {degree}" for axis, degree in degrees if degree > 1) or "1 GPU"]
    if parallel.zero:
        sharers = plan.case.layout.sharers
        words.append(f"ZeRO {parallel.zero}" + f" over {sharers}" * (sharers != dims.dp * dims.cp))
    words.append(f"micro-batch {parallel.micro_batch_size}")
    if dims.pp > 1:
        stages = plan.case.layout.vpp
        words.append(parallel.schedule + f" x {stages}" * (stages > 1))
    if parallel.recompute.value != "none":
        words.append(f"recompute {parallel.recompute.value}")
    if plan.config.offload.optimizer is not Tier.none:
        words.append("optimizer offloaded")
    return ", ".join(words)


def text(
    found: Found, totals: Totals, base: ParallelConfig, width: int | None, notes: Sequence[str] = ()
) -> str:
    """The whole report."""
    best = found.plans[0]
    parts = [title(best), *(f"note:  {note}" for note in notes), "", rows(found.plans, width).rstrip()]
    lost = why(found.plans)
    if lost:
        parts += ["", "why the others are slower", *lost]
    parts += ["", "the best, a step", *step_lines(best)]
    parts += ["", f"memory of a GPU, of rank {best.room.rank}, which holds most", *memory_lines(best)]
    parts += ["", "to the end", *totals_lines(best, totals)]
    parts += ["", "write", "  " + " ".join(overrides(best, base))]
    searched = f"{found.shapes:,} ways to split the work, {found.predicted:,} steps predicted"
    return "\n".join([*parts, "", searched]) + "\n"


def title(plan: Plan) -> str:
    """Say what is trained on what."""
    case = plan.case
    machine = case.machine
    network = f"{machine.network * 8 / 1e9:,.0f} Gb/s between nodes" if machine.nodes > 1 else "one node"
    return (
        f"{case.model.name}, {case.model.parameters / 1e9:,.2f} G parameters, on {machine.nodes:,} x "
        f"{machine.gpus_per_node} {machine.gpu.name} ({network}): a step of {case.samples:,} samples of "
        f"{case.sequence:,} tokens"
    )


def rows(plans: Sequence[Plan], width: int | None = None) -> str:
    """Plans as a table."""
    lines = [
        (
            str(number),
            seconds(plan.step.total_s),
            f"{plan.tokens_per_s_per_gpu:,.0f}",
            percent(plan.mfu),
            f"{plan.room.device_bytes / GIB:.1f}",
            percent(plan.step.bubble_s / plan.step.total_s),
            percent(plan.step.exposed_s / plan.step.total_s),
            layout_words(plan),
        )
        for number, plan in enumerate(plans, 1)
    ]
    head = tuple(
        f"GiB of {plans[0].case.machine.gpu.memory_gb:g}" if name == "memory" else name for name in HEAD
    )
    return table(head, lines, frozenset(head[:-1]), width)


def why(plans: Sequence[Plan]) -> list[str]:
    """For each plan but the first: how much slower it is, and what of it, as shares of the first one's step."""
    first = plans[0]
    found = []
    for number, plan in enumerate(plans[1:], 2):
        more = plan.seconds_per_token / first.seconds_per_token - 1
        mine, theirs = causes(plan), causes(first)
        scale = first.seconds_per_token
        differences = sorted(
            ((mine[name] - theirs[name]) / scale, name) for name in mine if mine[name] - theirs[name] > 0
        )[::-1]
        words = [
            _against(name, mine[name] / plan.seconds_per_token, theirs[name] / scale, difference)
            for difference, name in differences[:2]
            if difference > max(0.002, 0.2 * more)
        ]
        found.append(f"  {number}: +{100 * more:.1f} %: {', '.join(words) or 'a little of everything'}")
    return found


def _against(name: str, mine: float, theirs: float, difference: float) -> str:
    """Shares of each one's own step; where that is no larger a share, how much of the first one's step it is more."""
    if mine > theirs:
        return f"{name} {percent(mine)} against {percent(theirs)}"
    return f"{name} takes {percent(difference)} of a step longer"


def causes(plan: Plan) -> dict[str, float]:
    """What a step takes by cause, seconds a token."""
    step = plan.step
    parts = {
        "computing": step.compute_s - step.recompute_s,
        "recompute": step.recompute_s,
        "bubble": step.bubble_s,
        "optimizer": step.optimizer_s,
        "waiting for the slowest": step.waiting_s,
        **{f"{axis} communication": lane.exposed_s for axis, lane in step.communication.items()},
    }
    names = {f"{axis} communication" for axis in AXES}
    return {name: parts.get(name, 0.0) / plan.case.tokens for name in {**parts, **dict.fromkeys(names)}}


def step_lines(plan: Plan) -> list[str]:
    """Where the time of a step goes."""
    step = plan.step
    lines = [
        ("computing", step.compute_s, f"{percent(_share(step.recompute_s, step.compute_s))} of it again"),
        ("bubble of the pipeline", step.bubble_s, ""),
        ("optimizer", step.optimizer_s, ""),
        ("waiting for the slowest", step.waiting_s, ""),
    ]
    shown = [
        f"  {name:34} {seconds(value):>9}  {percent(value / step.total_s):>6}  {words}".rstrip()
        for name, value, words in lines
        if value
    ]
    for axis, lane in step.communication.items():
        words = f"and {seconds(lane.hidden_s)} hidden, {size(int(lane.sent_bytes))} sent by a GPU"
        share = percent(lane.exposed_s / step.total_s)
        shown.append(f"  {AXES.get(axis, axis):34} {seconds(lane.exposed_s):>9}  {share:>6}  {words}")
    return [*shown, f"  {'in all':34} {seconds(step.total_s):>9}"]


def memory_lines(plan: Plan) -> list[str]:
    """Memory by part, on each tier."""
    room = plan.room
    tiers = [tier for tier in ("device", "host", "nvme") if tier == "device" or _of_tier(plan, tier)]
    lines = [f"  {'GiB':34} " + " ".join(f"{tier:>8}" for tier in tiers)]
    for role in Role:
        sizes = room.roles[role]
        if sizes.total:
            lines.append(
                f"  {role.value:34} " + " ".join(f"{getattr(sizes, tier) / GIB:8.2f}" for tier in tiers)
            )
    lines.append(f"  {'in a backward pass, for a while':34} {room.passing_bytes / GIB:8.2f}")
    lines.append(f"  {'between blocks of the allocator':34} {room.fragmentation_bytes / GIB:8.2f}")
    lines.append(f"  {'CUDA, NCCL':34} {room.context_bytes / GIB:8.2f}")
    sums = [room.device_bytes / GIB, room.host_bytes / GIB, room.nvme_bytes / GIB]
    lines.append(f"  {'in all':34} " + " ".join(f"{value:8.2f}" for value in sums[: len(tiers)]))
    lines.append(f"  {'there is':34} {room.capacity_bytes / GIB:8.2f}")
    if room.host_bytes:
        node = room.host_bytes * plan.case.machine.gpus_per_node
        lines.append(f"  memory of the host: {node / GIB:,.0f} GiB a node, if all ranks need as much")
    return lines


def totals_lines(plan: Plan, totals: Totals) -> list[str]:
    """Days, energy, checkpoints."""
    saving = totals.checkpoints
    lines = [
        f"  {totals.tokens:.3g} tokens, {totals.steps:,} steps: {days(totals.days)}, {totals.gpu_hours:,.0f} GPU hours",
        f"  {totals.energy_kwh:,.0f} kWh, an estimate: {totals.gpu_watts:.0f} W a GPU, its host and cooling besides",
        f"  checkpoint: {size(int(saving.size_bytes))}, written in {duration(saving.write_s)}; training waits "
        f"{seconds(saving.stall_s)}",
    ]
    if not math.isinf(saving.interval_s):
        minutes = max(1, round(saving.interval_s / 60))
        lines.append(
            f"  one every {duration(saving.interval_s)} (checkpoint.every_minutes={minutes}), for a failure every "
            f"{duration(saving.failure_every_s)} on {plan.dims.ranks:,} GPUs"
        )
    lines.append(f"  goodput {percent(saving.goodput)}: time that is not saving, lost work or restarts")
    return lines


def as_tree(plan: Plan, base: ParallelConfig, totals: Totals | None = None) -> dict[str, object]:
    """A plan as plain data."""
    step, room = plan.step, plan.room
    tree: dict[str, object] = {
        "layout": layout_words(plan),
        "overrides": overrides(plan, base),
        "degrees": {
            axis: getattr(plan.dims, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        },
        "step_s": step.total_s,
        "tokens_per_s": plan.case.tokens / step.total_s,
        "tokens_per_s_per_gpu": plan.tokens_per_s_per_gpu,
        "mfu": plan.mfu,
        "bubble": step.bubble_s / step.total_s,
        "exposed_communication": step.exposed_s / step.total_s,
        "parts_s": {
            name: getattr(step, name)
            for name in ("compute_s", "recompute_s", "bubble_s", "optimizer_s", "waiting_s")
        },
        "communication": {axis: vars(lane) for axis, lane in step.communication.items()},
        "memory_bytes": {
            "rank": room.rank,
            "device": room.device_bytes,
            "host": room.host_bytes,
            "nvme": room.nvme_bytes,
            "capacity": room.capacity_bytes,
            "passing": room.passing_bytes,
            "fragmentation": room.fragmentation_bytes,
            "context": room.context_bytes,
            "parts": {role.name: vars(sizes) for role, sizes in room.roles.items()},
        },
    }
    if totals is not None:
        saving = {
            name: None if isinstance(value, float) and math.isinf(value) else value
            for name, value in vars(totals.checkpoints).items()
        }
        tree["totals"] = {**vars(totals), "checkpoints": saving}
    return tree


def memory_of(plan: Plan) -> Memory:
    """Memory of a plan by the parts that a picture has."""
    roles = {role: plan.room.roles[role].device for role in Role}
    return Memory(
        weights=roles[Role.parameters],
        gradients=roles[Role.gradients] + roles[Role.accumulated],
        optimizer=roles[Role.optimizer],
        activations=roles[Role.activations],
        buffers=roles[Role.gathered]
        + roles[Role.under_way]
        + roles[Role.checkpoint]
        + plan.room.passing_bytes,
        fragmentation=plan.room.fragmentation_bytes,
        context=plan.room.context_bytes,
        host=plan.room.host_bytes,
        nvme=plan.room.nvme_bytes,
    )


def seconds(value: float) -> str:
    """Write a time: `12.3 ms`, `4.56 s`."""
    return f"{value:,.3g} s" if value >= 1 else f"{value * 1e3:,.3g} ms"


def days(value: float) -> str:
    """Write a long time."""
    return f"{value:,.1f} days" if value >= 1 else f"{24 * value:,.1f} hours"


def percent(share: float) -> str:
    """Write a share."""
    return f"{100 * share:.1f} %"


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _of_tier(plan: Plan, tier: str) -> int:
    return plan.room.host_bytes if tier == "host" else plan.room.nvme_bytes


def _value(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return str(value)
