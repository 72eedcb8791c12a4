"""A DeepSpeed configuration as settings of ours: every key becomes a setting, nothing for a reason, or an error."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from configs.compose import closest_key
from contract.errors import ConfigError
from tools.deepspeed import optim, precision, rest, zero
from tools.deepspeed.batch import MICRO, STEPS, TRAIN, Batch, settle
from tools.deepspeed.file import AUTO, File, show
from tools.deepspeed.rule import Context, Facts, Here, Rule, setting, whole

RULES: dict[str, Rule] = {**precision.RULES, **optim.RULES, **zero.RULES, **rest.RULES}
"""Dotted key of DeepSpeed's -> what becomes of it. The sizes of the batch are settled together."""
BATCH = {
    TRAIN: "loop.global_batch_size",
    MICRO: "parallel.micro_batch_size",
    STEPS: "parallel.gradient_accumulation_steps",
}
KEYS = (*BATCH, *RULES)
_SECTIONS = {key.rsplit(".", depth)[0] for key in RULES for depth in range(1, key.count(".") + 1)}
# A setting of the file goes too when the command line gives one of these, for it is only of use beside the file's own.
_GOES_WITH = {
    "offload.gradients": ("offload.optimizer",),
    "offload.nvme_path": ("offload.optimizer", "offload.parameters"),
    "optim.deepspeed_steps": ("optim.decay",),
    "optim.min_lr_ratio": ("optim.decay",),
    "precision": ("precision.compute",),
}


@dataclass(frozen=True)
class Row:
    """What becomes of one key."""

    key: str
    value: str
    """As the file has it; empty where it has none, and DeepSpeed's default counts."""
    here: str
    """Settings, or why there is none."""


@dataclass(frozen=True)
class Translation:
    """Settings to put before those of the command line, and how they came about."""

    settings: tuple[str, ...]
    rows: tuple[Row, ...]


def translate(file: File, given: Mapping[str, str], look: Callable[[Sequence[str]], Facts]) -> Translation:
    """Translate `file` for a command line that gives the settings `given`, key -> value.

    `look` finds what the resolved configuration says under settings of the file, which it gets. Raises `ConfigError`
    for the first key that cannot be had here.
    """
    _check_names(file.tree, "", file.name)
    first = _rows(Context(file, given))
    facts = look(_settings(first, given))
    context = Context(file, given, facts)
    found = sorted(_batch(context, facts) + _rows(context), key=lambda one: _order(one[0]))
    rows = tuple(
        Row(key, value, _tell(here, given)) for key, value, here in found if here.settings or here.why
    )
    return Translation(tuple(_settings(found, given)), rows)


def _order(key: str) -> int:
    """Where a row stands: beside its section's."""
    return next((index for index, one in enumerate(KEYS) if one.startswith(key.partition(",")[0])), len(KEYS))


# Other rules look at these: what is wrong with them is told of them.
_DECIDE = ("fp16.enabled", "bf16.enabled", "torch_autocast.enabled", "scheduler.type")
_FOLLOWS = "follows from the layout, which does not divide the ranks yet"
_Found = list[tuple[str, str, Here]]


def _check_names(tree: Mapping[str, Any], prefix: str, name: str) -> None:
    """Raise `ConfigError` for a key that DeepSpeed does not have, and for a section that is none."""
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if path in _SECTIONS:
            if isinstance(value, dict):
                _check_names(value, f"{path}.", name)
            elif value is not None:
                inner = next(one for one in RULES if one.startswith(f"{path}."))
                raise ConfigError(
                    f"{name}: {path}={show(value)}: this is a section, write an object with keys such as "
                    f"{inner.removeprefix(path + '.')} in it"
                )
        elif path not in RULES and path not in BATCH:
            known = sorted(_names_below(prefix))
            hint = closest_key(path, [f"{prefix}{one}" for one in known])
            raise ConfigError(f"{name}: {path}: DeepSpeed has no such key, {hint}")


def _names_below(prefix: str) -> set[str]:
    return {key.removeprefix(prefix).split(".")[0] for key in KEYS if key.startswith(prefix)}


def _rows(context: Context) -> _Found:
    """Apply the rules to what the file has, then to DeepSpeed's defaults of what it lacks."""
    file = context.file
    found: _Found = []

    def apply(key: str, value: Any, shown: str) -> None:
        try:
            found.append((key, shown, RULES[key](context, value)))
        except ValueError as error:
            raise file.refuse(key, str(error)) from error

    for key in [*_DECIDE, *(key for key in RULES if key not in _DECIDE)]:
        if file.has(key):
            apply(key, file.get(key), show(file.get(key)))
        elif file.is_null(key):
            found.append((key, "null", Here(why="as if it were not there")))
    found += [(key, "null", Here(why="as if it were not there")) for key in _SECTIONS if file.is_null(key)]
    for key, value in [*precision.absent_scaling(context), *optim.absent(context)]:
        apply(key, value, "")
    try:
        alone = (("fp16, bf16", precision.absent(context)), ("scheduler", optim.absent_scheduler(context)))
    except ValueError as error:
        raise ConfigError(f"{file.name}: {error}") from error
    found += [(key, "", here) for key, here in alone if here is not None]
    if (note := precision.absent_reduce(context)) is not None:
        found.append(("communication_data_type", "", note))
    if not file.has("optimizer.type"):
        found.append(("optimizer", "", Here(why="DeepSpeed has no default: optim as it is set here")))
    if not file.has("zero_optimization.stage"):
        found.append(("zero_optimization.stage", "", Here((setting("parallel.zero", 0),))))
    return found


def _batch(context: Context, facts: Facts) -> _Found:
    """Settle the sizes of the batch; those of the command line stand in for those of the file."""
    file = context.file
    sizes: dict[str, int | None] = {}
    for key, ours in BATCH.items():
        value = _number(context.given[ours]) if ours in context.given else file.get(key)
        try:
            sizes[key] = None if value in (None, AUTO) else whole(value)
        except ValueError as error:
            if ours in context.given:
                raise ConfigError(f"{ours}={value}: {error}") from error
            raise file.refuse(key, str(error)) from error
    autos = [key for key in BATCH if file.get(key) == AUTO and BATCH[key] not in context.given]
    settled, is_ours = None, False
    if facts.ranks is not None:
        asked = dict(sizes)
        if asked[MICRO] is None and autos and not (asked[TRAIN] and asked[STEPS]):
            asked[MICRO], is_ours = facts.micro_batch_size, True
        try:
            settled = settle(asked[TRAIN], asked[MICRO], asked[STEPS], facts.ranks)
        except ValueError as error:
            raise ConfigError(f"{file.name}: {error}") from error
    return _of_sizes(context, facts, sizes, settled, is_ours)


def _number(text: str) -> int | str | None:
    """Of the command line, where all is text."""
    return int(text) if text.isdecimal() else None if text == "null" else text


def _of_sizes(
    context: Context, facts: Facts, sizes: Mapping[str, int | None], settled: Batch | None, is_ours: bool
) -> _Found:
    """Settings for sizes: what follows from others by itself here is left to follow, on other ranks too.

    `is_ours`: the micro-batch is that of the configuration here.
    """
    file = context.file
    values = dict(sizes)
    why = dict.fromkeys(BATCH, "")
    if settled is not None:
        ranks = f"{facts.ranks} data-parallel rank{'s' * (facts.ranks != 1)}"
        for key, value in ((TRAIN, settled.train), (MICRO, settled.micro), (STEPS, settled.steps)):
            if sizes[key] is None:
                why[key] = f"{value}, by the others and {ranks}"
        if is_ours:
            why[MICRO] = f"auto: {BATCH[MICRO]} as it is set here, {settled.micro}"
        else:
            values[MICRO] = settled.micro
        if sizes[TRAIN] is None:
            values[STEPS] = settled.steps
    if values[STEPS] is None and facts.sets_accumulation:
        why[STEPS] += ", in place of the recipe's"
    found: _Found = []
    for key, ours in BATCH.items():
        settings: tuple[str, ...] = ()
        if values[key] is not None:
            settings = (setting(ours, values[key]),)
        elif key == STEPS and facts.sets_accumulation:
            settings = (setting(ours, None),)
        value = file.get(key)
        if value is None and not file.is_null(key):
            found.append((key, "", Here(settings, why[key])))
        else:
            found.append((key, show(value), Here(settings, why[key] if settings or why[key] else _FOLLOWS)))
    return found


def _settings(found: _Found, given: Mapping[str, str]) -> list[str]:
    """What is left beside the settings of the command line, each key once."""
    kept: dict[str, str] = {}
    for _, _, here in found:
        for one in here.settings:
            if not _loses(one, given):
                kept[one.partition("=")[0]] = one
    return list(kept.values())


def _loses(one: str, given: Mapping[str, str]) -> str | None:
    """The setting of the command line that takes the place of this one."""
    key = one.partition("=")[0]
    for other in (key, *_GOES_WITH.get(key, ())):
        if other in given:
            return f"{other}={given[other]}"
    return None


def _tell(here: Here, given: Mapping[str, str]) -> str:
    """A row's last column."""
    parts = []
    for one in here.settings:
        winner = _loses(one, given)
        parts.append(one if winner is None else f"{winner} of the command line wins over {one}")
    return "; ".join([", ".join(parts), here.why] if parts and here.why else parts or [here.why])
