"""What a tensor is for, judged by its name in the checkpoint."""

from collections.abc import Collection

from tools.ckpt.dtypes import is_floating

WEIGHTS, FIRST, SECOND, MASTER, STEPS = "weights", "exp_avg", "exp_avg_sq", "master weights", "step counts"
OPTIMIZER, SCHEDULER, POSITION, RNG, PRECISION, OTHER = (
    "optimizer",
    "scheduler",
    "data position",
    "rng",
    "precision",
    "other",
)
_BY_WORD = {
    "exp_avg": FIRST,
    "exp_avg_sq": SECOND,
    "max_exp_avg_sq": SECOND,
    "fp32_param": MASTER,
    "fp32": MASTER,
    "fp32_groups": MASTER,
    "rng": RNG,
    "rng_state": RNG,
    "rng_states": RNG,
    "lr_scheduler": SCHEDULER,
    "scheduler": SCHEDULER,
    "opt_param_scheduler": SCHEDULER,
    "loss_scaler": PRECISION,
    "grad_scaler": PRECISION,
}
_OPTIMIZERS = ("optimizer", "optim", "optimizer_state_dict")


def role_of(name: str, dtype: str) -> str:
    """Return the role of a tensor."""
    words = name.replace("/", ".").split(".")
    for word in (words[0], words[-1], *words):
        if word in _BY_WORD:
            return _BY_WORD[word]
    if words[0] == "progress":
        return POSITION
    if words[0] == "precision":
        return PRECISION
    if words[0] in _OPTIMIZERS:
        return STEPS if words[-1] == "step" else OPTIMIZER
    return WEIGHTS if is_floating(dtype) else OTHER


def parameter_of(name: str, weights: Collection[str]) -> str | None:
    """Name the parameter that a tensor of an optimizer belongs to, or None where names do not tell.

    Raises `LookupError` when they do, and there is no such parameter in `weights`.
    """
    words = name.split(".")
    if words[0] not in _OPTIMIZERS or len(words) < 3:
        return None
    kind_first = words[1] == "state" and words[2] in _BY_WORD  # as Megatron has it
    own = words[3:] if kind_first else words[2:-1] if words[1] == "state" else words[1:-1]
    if not own or own[0].isdigit() or not own[-1].isidentifier():
        return None
    bare = ".".join(own)
    found = [known for known in (bare, f"model.{bare}") if known in weights]
    if not found:
        raise LookupError(bare)
    return found[0]
