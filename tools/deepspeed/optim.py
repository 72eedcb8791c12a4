"""The optimizer, its schedule and clipping."""

from typing import Any

from contract.errors import closest
from tools.deepspeed.file import AUTO, boolean, number
from tools.deepspeed.rule import Context, Here, Rule, nothing, only, refused, sets, setting, whole

LR, BETAS, EPS, DECAY, TORCH_DECAY = 1e-3, [0.9, 0.999], 1e-8, 0.0, 0.01
"""Defaults of DeepSpeed's Adam; TORCH_DECAY is what `torch_adam` takes from torch's AdamW."""
WARMUP_STEPS, WARMUP_TYPE, COS_MIN = 1000, "log", 1e-4
CLIPPING = 1.0
OTHERS = (
    "OneBitAdam",
    "ZeroOneAdam",
    "OneBitLamb",
    "Lamb",
    "Adagrad",
    "Lion",
    "Muon",
    "MuAdam",
    "MuAdamW",
    "MuSGD",
)
SHAPES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
OTHER_SHAPES = ("OneCycle", "LRRangeTest")
_BY_TYPE = {
    "warmup_min_lr": ("WarmupLR", "WarmupDecayLR"),
    "warmup_max_lr": ("WarmupLR", "WarmupDecayLR"),
    "warmup_min_ratio": ("WarmupCosineLR",),
    "cos_min_ratio": ("WarmupCosineLR",),
    "total_num_steps": ("WarmupDecayLR", "WarmupCosineLR"),
}
OF_ONE_CYCLE = (
    "cycle_min_lr",
    "cycle_max_lr",
    "decay_lr_rate",
    "cycle_first_step_size",
    "cycle_second_step_size",
    "cycle_first_stair_count",
    "cycle_second_stair_count",
    "decay_step_size",
    "cycle_momentum",
    "cycle_min_mom",
    "cycle_max_mom",
    "decay_mom_rate",
    "lr_range_test_min_lr",
    "lr_range_test_step_size",
    "lr_range_test_step_rate",
    "lr_range_test_staircase",
)
"""Parameters of those."""


def optimizer_type(_: Context, value: Any) -> Here:
    """Adam is AdamW, as in DeepSpeed."""
    name = value.lower() if isinstance(value, str) else value
    if name in ("adam", "adamw"):
        return Here(
            why="AdamW is the optimizer here" + (", as DeepSpeed takes it for Adam" * (name == "adam"))
        )
    if name in (other.lower() for other in OTHERS):
        raise ValueError(
            "there is no such optimizer here: write AdamW, with its params, or leave the section out"
        )
    raise ValueError(
        f"DeepSpeed's own optimizers are Adam, AdamW, {', '.join(OTHERS)}, and AdamW is the one here"
    )


def betas(_: Context, value: Any) -> Here:
    """Both of Adam's."""
    if value == AUTO:
        return Here(why="auto: optim.beta1 and optim.beta2 as they are set here")
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("give a list of two numbers, like [0.9, 0.95]")
    one, two = map(number, value)
    return Here((setting("optim.beta1", one), setting("optim.beta2", two)))


def learning_rate(context: Context, value: Any) -> Here:
    """The scheduler's own wins, as in DeepSpeed."""
    if value == AUTO:
        return Here(why="auto: optim.lr as it is set here")
    lr = number(value)
    if _largest(context) not in (None, AUTO):
        return Here(why="the scheduler sets its own rates, up to warmup_max_lr")
    return Here((setting("optim.lr", lr),))


def _largest(context: Context) -> Any:
    """What the scheduler has for the largest rate: a number, auto, or None where it takes the optimizer's."""
    default = LR if kind(context) == "WarmupDecayLR" else None
    return context.file.get("scheduler.params.warmup_max_lr", default)


def weight_decay(_: Context, value: Any) -> Here:
    """Of matrices alone here."""
    if value == AUTO:
        return Here(why="auto: optim.weight_decay as it is set here")
    decay = number(value)
    note = "on matrices; DeepSpeed decays norms too, unless a script groups them apart" if decay else ""
    return Here((setting("optim.weight_decay", decay),), note)


def adam_w_mode(context: Context, value: Any) -> Here:
    """Without it Adam adds the decay to the gradients."""
    if boolean(value):
        return Here(why="on, as everywhere here")
    name = str(context.file.get("optimizer.type", "")).lower()
    decay = context.file.get("optimizer.params.weight_decay", DECAY)
    if name == "adamw":
        return Here(why="DeepSpeed's AdamW does not look at it")
    if decay != 0:
        raise ValueError(
            "decay that is added to gradients there is none here: set weight_decay to 0, or this to true"
        )
    return Here(why="without weight decay it changes nothing")


def kind(context: Context) -> str | None:
    """The type of the scheduler; raises ValueError for one that there is not."""
    name = context.file.get("scheduler.type")
    if name is None:
        return None
    if isinstance(name, str) and name in SHAPES:
        return name
    if name in OTHER_SHAPES:
        raise ValueError(
            f"there is no such schedule here: choose one of {', '.join(SHAPES)}, or drop the section"
        )
    raise ValueError(f"DeepSpeed has no such scheduler, {closest(str(name), [*SHAPES, *OTHER_SHAPES])}")


def scheduler_type(context: Context, value: Any) -> Here:
    """The shape; warm-up has keys of its own."""
    name = kind(context)
    assert name is not None, value
    settings = [setting("optim.decay", SHAPES[name]), setting("optim.deepspeed_steps", True)]
    if name != "WarmupLR" and not context.file.has("scheduler.params.total_num_steps"):
        raise ValueError("DeepSpeed wants scheduler.params.total_num_steps too: add it, a number or auto")
    if name == "WarmupDecayLR":
        settings.append(setting("optim.min_lr_ratio", _lowest(context)))
    facts = context.facts
    if facts is not None and name != "WarmupLR" and facts.steps < max(2, facts.warmup_steps):
        raise ValueError(
            f"its warm-up of {facts.warmup_steps} steps is longer than the {facts.steps} steps in all, loop.steps: "
            "shorten it, or raise total_num_steps"
        )
    return Here(tuple(settings), "step by step as DeepSpeed's")


def _of_type(name: str, rule: Rule) -> Rule:
    """A parameter that only some schedulers have."""

    def checked(context: Context, value: Any) -> Here:
        found = kind(context)
        if found is None:
            raise ValueError("there is no scheduler.type, name one or drop the section")
        if name in _BY_TYPE and found not in _BY_TYPE[name]:
            raise ValueError(f"{found} has no such parameter, {' and '.join(_BY_TYPE[name])} have: drop it")
        return rule(context, value)

    return checked


def _peak(context: Context) -> float:
    """Largest learning rate."""
    if "optim.lr" not in context.given:
        for value in (_largest(context), context.file.get("optimizer.params.lr")):
            if value not in (None, AUTO):
                return number(value)
    return context.facts.lr if context.facts is not None else 1.0


def _lowest(context: Context) -> float:
    """Where warm-up begins, and WarmupDecayLR ends, as a share of the largest."""
    value = context.file.get("scheduler.params.warmup_min_lr", 0)
    lowest = 0.0 if value == AUTO else number(value)
    peak = _peak(context)
    if lowest > peak:
        raise ValueError(f"warmup_min_lr={lowest:g} is above the largest learning rate, {peak:g}: lower it")
    return lowest / peak if peak else 0.0


def warmup_min_lr(context: Context, _: Any) -> Here:
    """As a share of the largest."""
    return Here((setting("optim.warmup_min_ratio", _lowest(context)),))


def warmup_type(_: Context, value: Any) -> Here:
    """log or linear."""
    if value not in ("log", "linear", AUTO):
        raise ValueError("choose log or linear")
    return Here((setting("optim.warmup", WARMUP_TYPE if value == AUTO else value),))


def warmup_steps(_: Context, value: Any) -> Here:
    """DeepSpeed takes at least 2."""
    if value == AUTO:
        return Here(why="auto: optim.warmup_steps as it is set here")
    steps = max(2, whole(value))
    return Here(
        (setting("optim.warmup_steps", steps),), "2 at least, as in DeepSpeed" if steps != value else ""
    )


def absent(context: Context) -> list[tuple[str, Any]]:
    """DeepSpeed's defaults of keys that are not there -> value."""
    file = context.file
    found: list[tuple[str, Any]] = []
    if file.has("optimizer.type"):
        decay = TORCH_DECAY if file.get("optimizer.params.torch_adam") is True else DECAY
        found += [("lr", LR), ("betas", BETAS), ("eps", EPS), ("weight_decay", decay)]
        found = [(f"optimizer.params.{name}", value) for name, value in found]
    name = kind(context)
    if name is not None:
        found += [
            ("scheduler.params.warmup_num_steps", WARMUP_STEPS),
            ("scheduler.params.warmup_type", WARMUP_TYPE),
        ]
        if name == "WarmupCosineLR":
            found += [("scheduler.params.warmup_min_ratio", 0), ("scheduler.params.cos_min_ratio", COS_MIN)]
        else:
            found += [("scheduler.params.warmup_min_lr", 0)]
        if name == "WarmupDecayLR":
            found += [("scheduler.params.warmup_max_lr", LR)]
    if not file.has("gradient_clipping"):
        found.append(("gradient_clipping", CLIPPING))
    return [(key, value) for key, value in found if not file.has(key)]


def absent_scheduler(context: Context) -> Here | None:
    """An optimizer whose rate is a number, and no scheduler: the rate stays what it is."""
    file = context.file
    if file.has("scheduler.type") or not file.has("optimizer.type"):
        return None
    if file.get("optimizer.params.lr") == AUTO:
        return Here(why="optim.warmup_steps and optim.decay as they are set here, for lr is auto")
    return Here(
        (setting("optim.decay", "constant"), setting("optim.warmup_steps", 0)),
        "without one the rate never changes",
    )


def _of_optimizer(rule: Rule) -> Rule:
    """A parameter of an optimizer: without one DeepSpeed reads none."""

    def checked(context: Context, value: Any) -> Here:
        if not context.file.has("optimizer.type"):
            raise ValueError("there is no optimizer.type, name one or drop the section")
        return rule(context, value)

    return checked


_BUILD = "how a kernel goes about it, not what it computes"

RULES: dict[str, Rule] = {
    "optimizer.type": optimizer_type,
    "optimizer.params.lr": learning_rate,
    "optimizer.params.betas": betas,
    "optimizer.params.eps": sets("optim.eps", number),
    "optimizer.params.weight_decay": weight_decay,
    "optimizer.params.adam_w_mode": adam_w_mode,
    "optimizer.params.torch_adam": nothing("the optimizer here is torch's AdamW in any case"),
    "optimizer.params.bias_correction": only(
        True, "Adam corrects the bias here: set it to true", "on, as here"
    ),
    "optimizer.params.amsgrad": only(False, "there is no AMSGrad here: set it to false", "off"),
    "optimizer.params.fp32_optimizer_states": only(
        True,
        "moments are in fp32, or in 8 bits with precision.optimizer_state=int8: set it to true",
        "on, as here",
    ),
    "optimizer.params.max_grad_norm": refused(
        "DeepSpeed refuses it here: write gradient_clipping at the top"
    ),
    **{
        f"optimizer.params.{name}": nothing(_BUILD)
        for name in ("set_grad_none", "foreach", "fused", "capturable")
    },
    "optimizer.legacy_fusion": nothing(_BUILD),
    "scheduler.type": scheduler_type,
    **{
        f"scheduler.params.{name}": _of_type(name, rule)
        for name, rule in {
            "warmup_min_lr": warmup_min_lr,
            "warmup_max_lr": sets("optim.lr", number),
            "warmup_num_steps": warmup_steps,
            "warmup_type": warmup_type,
            "total_num_steps": sets("loop.steps", whole, "the schedule ends with the run"),
            "warmup_min_ratio": sets("optim.warmup_min_ratio", number),
            "cos_min_ratio": sets("optim.min_lr_ratio", number),
            "last_batch_iteration": only(
                -1, "a run that continues knows its step: drop it", "a run that continues knows its step"
            ),
            **{name: refused("it is not a parameter of this scheduler: drop it") for name in OF_ONE_CYCLE},
        }.items()
    },
    "gradient_clipping": sets("loop.clip_norm", number),
}
RULES |= {name: _of_optimizer(rule) for name, rule in RULES.items() if name.startswith("optimizer.params.")}
