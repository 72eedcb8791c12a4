"""fp16, bf16 and what else says which numbers DeepSpeed computes with."""

from collections.abc import Callable
from typing import Any

from tools.deepspeed.file import AUTO, boolean, integer, number
from tools.deepspeed.rule import Context, Here, Rule, choice, nothing, off, setting, whole

LARGEST_POWER = 24
"""Of a loss scale here: 2**24."""
SCALE_POWER, WINDOW, HYSTERESIS, LEAST = 16, 1000, 2, 1
"""DeepSpeed's defaults."""
NEVER = 10**9
TYPES = {"fp32": "float32", "bf16": "bfloat16"}
AUTOCAST = {"bfloat16": "bf16", "bf16": "bf16", "torch.bfloat16": "bf16"}


def _enabled(context: Context, section: str) -> Any:
    """true, false, or auto where the command line decides."""
    value = context.file.get(f"{section}.enabled", False)
    return value if value == AUTO else boolean(value)


def kind(context: Context) -> str:
    """fp16, bf16, fp32 or auto; raises ValueError where several are enabled."""
    fp16, bf16, autocast = (_enabled(context, one) for one in ("fp16", "bf16", "torch_autocast"))
    if [fp16, bf16, autocast].count(True) > 1:
        raise ValueError("fp16, bf16 and torch_autocast cannot be enabled together, choose one of them")
    if autocast is True:
        return choice(AUTOCAST, context.file.get("torch_autocast.dtype", "bfloat16"))
    for name, enabled in (("fp16", fp16), ("bf16", bf16)):
        if enabled is True:
            return name
    return AUTO if AUTO in (fp16, bf16, autocast) else "fp32"


def enabled(section: str) -> Rule:
    """The row of the section that decides sets the precision."""

    def rule(context: Context, value: Any) -> Here:
        if value != AUTO and not boolean(value):
            return Here(why="off")
        found = kind(context)
        if value == AUTO:
            return Here(
                why="auto: precision as it is set here" if found == AUTO else f"auto, and {found} is enabled"
            )
        note = "weights and moments in fp32 are the optimizer's" if found != "fp32" else ""
        return Here((setting("precision", found),), note)

    return rule


def absent(context: Context) -> Here | None:
    """DeepSpeed computes in fp32 unless the file says otherwise."""
    if kind(context) != "fp32":
        return None
    return Here((setting("precision", "fp32"),), "neither is enabled: DeepSpeed computes in fp32")


def absent_reduce(context: Context) -> Here | None:
    """DeepSpeed sends gradients in the type that computes."""
    if context.file.has("communication_data_type") or kind(context) not in ("bf16", "fp16"):
        return None
    return Here(
        why="gradients add up in precision.reduce, fp32 here; DeepSpeed sends them in the type that is enabled"
    )


def _scales(context: Context) -> bool:
    """Whether there is a loss scale; a precision of the command line wins."""
    if "precision.compute" in context.given:
        return context.given["precision.compute"] == "float16"
    return context.given.get("precision", kind(context)) in ("fp16", "four_level")


def _static(context: Context) -> bool:
    return context.file.get("fp16.loss_scale", 0) not in (0, AUTO)


def scaling(take: Callable[[Any], Here], static: bool = False) -> Rule:
    """A key of the loss scale; `static` for that of a scale which stays."""

    def rule(context: Context, value: Any) -> Here:
        if value != AUTO:
            found = take(value)
        if not _scales(context):
            return Here(why="no product is in float16, so that no loss is scaled")
        if value == AUTO:
            return Here(why="auto: as precision is set here")
        if _static(context) and not static:
            return Here(why="the scale stays at fp16.loss_scale")
        return found

    return rule


def loss_scale(value: Any) -> Here:
    """0 lets the scale move; another one stays."""
    scale = number(value)
    if not scale:
        return Here(why="0: the scale moves, see the keys beside it")
    return Here(
        (
            setting("precision.loss_scale", scale),
            setting("precision.loss_scale_min", scale),
            setting("precision.loss_scale_growth_steps", NEVER),
        ),
        "it stays",
    )


def initial_power(value: Any) -> Here:
    """At the start of a run; 2**24 at most here."""
    power = integer(value, 0)
    capped = setting("precision.loss_scale", float(2 ** min(power, LARGEST_POWER)))
    if power <= LARGEST_POWER:
        return Here((capped,))
    return Here(
        (capped,), f"2**{LARGEST_POWER} is the largest here; from 2**{power} every first step overflows"
    )


def window(value: Any) -> Here:
    """Good steps before the scale doubles."""
    return Here((setting("precision.loss_scale_growth_steps", whole(value)),))


def least(value: Any) -> Here:
    """The scale goes no lower."""
    return Here((setting("precision.loss_scale_min", float(whole(value))),))


def hysteresis(value: Any) -> Here:
    """Overflows before the scale halves."""
    return Here((setting("precision.loss_scale_hysteresis", whole(value)),))


def absent_scaling(context: Context) -> list[tuple[str, Any]]:
    """DeepSpeed's defaults of keys that are not there; of fp16.* -> value."""
    if not _scales(context) or _static(context):
        return []
    defaults = {
        "fp16.initial_scale_power": SCALE_POWER,
        "fp16.loss_scale_window": WINDOW,
        "fp16.hysteresis": HYSTERESIS,
        "fp16.min_loss_scale": LEAST,
    }
    return [(key, value) for key, value in defaults.items() if not context.file.has(key)]


def dtype(key: str) -> Rule:
    """A type of gradients."""

    def rule(_: Context, value: Any) -> Here:
        if value == AUTO:
            return Here(why=f"auto: {key} as it is set here")
        return Here((setting(key, choice(TYPES, value)),))

    return rule


def fp32_allreduce(_: Context, value: Any) -> Here:
    """Before there was communication_data_type."""
    return Here((setting("precision.reduce", "float32"),)) if boolean(value) else Here(why="off")


def param_dtype(context: Context, value: Any) -> Here:
    """DeepSpeed takes nothing but the type that is enabled."""
    found = kind(context)
    if value not in (AUTO, found):
        raise ValueError(f"DeepSpeed refuses another type than the enabled one, {found}: drop the key")
    return Here(why="the type that is enabled")


_MASTERS = "weights and gradients of the optimizer are in fp32 here: drop the key, or set it to false"

RULES: dict[str, Rule] = {
    "fp16.enabled": enabled("fp16"),
    "fp16.auto_cast": nothing("tokens are all that goes into a model here, nothing to cast"),
    "fp16.loss_scale": scaling(loss_scale, static=True),
    "fp16.initial_scale_power": scaling(initial_power),
    "fp16.loss_scale_window": scaling(window),
    "fp16.hysteresis": scaling(hysteresis),
    "fp16.consecutive_hysteresis": off(
        "hysteresis is filled up again when the scale grows, not after each good step: set it to false"
    ),
    "fp16.min_loss_scale": scaling(least),
    "fp16.fp16_master_weights_and_grads": off(_MASTERS),
    "bf16.enabled": enabled("bf16"),
    "bf16.immediate_grad_update": nothing("gradients add up as they are made"),
    "bf16.check_grad_overflow": nothing("gradients that are not finite end a run with a sentence, see docs"),
    "bf16.check_overflow": nothing("gradients that are not finite end a run with a sentence, see docs"),
    "bf16.bf16_master_weights_and_grads": off(_MASTERS),
    "bf16.bf16_optimizer_states": off(
        "moments are in fp32, or in 8 bits with precision.optimizer_state=int8: set it to false"
    ),
    "torch_autocast.enabled": enabled("torch_autocast"),
    "torch_autocast.dtype": nothing("read with torch_autocast.enabled"),
    "torch_autocast.lower_precision_safe_modules": nothing(
        "matrix products of all layers are of one type here"
    ),
    "communication_data_type": dtype("precision.reduce"),
    "fp32_allreduce": fp32_allreduce,
    "seq_parallel_communication_data_type": nothing("keys and values travel in the type that computes"),
    "data_types.grad_accum_dtype": dtype("precision.accumulate"),
    "data_types.param_dtype": param_dtype,
    "data_types.buffer_dtype": nothing("models here have no buffers that training changes"),
    "data_types.keep_in_fp32_modules": nothing("the model says itself what needs fp32"),
    "amp": off("there is no Apex here, nor in DeepSpeed since 0.19: write bf16 or fp16"),
}
