"""Sweeps: the combinations of settings that Hydra's sweep syntax names, and the configuration of each of them.

    optim.lr=1e-4,3e-4   seed=range(1,4)   model=glob(llama_*)   optim.warmup_steps=choice(10,20)

The combinations come in the order of Hydra's own sweeper: the last key changes fastest. Imports no torch.
"""

import copy
import dataclasses
import hashlib
import itertools
import math
import shlex
import string
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, RangeSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.compose import (
    HOW_TO_WRITE,
    check_override,
    choices,
    compose_tree,
    explain,
    implied,
    is_group,
    parse_setting,
    spell_out,
    to_schema,
    to_tree,
)
from contract.errors import ConfigError

T = TypeVar("T")
_SAFE = frozenset(string.ascii_letters + string.digits + "._+-")
_LONGEST_NAME = 100
MOST_COMBINATIONS = 10_000
"""Of one sweep's command: composing them takes a minute, and a slip in a range has no end."""


@dataclass(frozen=True)
class Sweep:
    """What a sweep was asked to be."""

    base: list[str]
    """Overrides that all combinations share."""
    keys: list[str]
    """The keys that differ between combinations, in the order in which they were given."""
    combinations: list[list[str]]
    """The overrides of each, one for a key: `optim.lr=0.0001`."""


def parse_sweep(
    overrides: Sequence[str], schema: type, lines: Sequence[str] = (), swept: Collection[str] = ()
) -> Sweep:
    """Read overrides that may sweep, and `lines` of more overrides, each a set of its own that may sweep too.

    Every key of a line counts as swept, and so do those in `swept` and those of a `choice(...)` of one value.
    Raises ConfigError for what no sweep can do.
    """
    common = _expand_all(overrides, schema)
    base = [one.settings[0] for key, one in common.items() if not one.sweeps and key not in swept]
    varied = {key: one.settings for key, one in common.items() if one.sweeps or key in swept}
    sets = [
        {key: one.settings for key, one in _expand_all(_words(line), schema).items()} for line in lines
    ] or [{}]
    keys = list(dict.fromkeys([*varied, *(key for one in sets for key in one)]))
    found: dict[tuple[str, ...], None] = {}
    for one in sets:
        for key in one:
            if key in common:
                raise ConfigError(f"{key} is set in the file and on the command line: leave one of them out")
        _refuse_too_many(math.prod(map(len, (*varied.values(), *one.values()))) + len(found))
        found |= dict.fromkeys(itertools.product(*varied.values(), *one.values()))
    return Sweep(base, keys, [list(combination) for combination in found])


@dataclass(frozen=True)
class _Expanded:
    """What one override says: `KEY=VALUE` for each of its values."""

    key: str
    settings: list[str]
    sweeps: bool


def _expand_all(overrides: Sequence[str], schema: type) -> dict[str, _Expanded]:
    """Return the settings of every key, in the order of the keys."""
    expanded: dict[str, _Expanded] = {}
    for text in spell_out(overrides, schema):
        one = _expand(text)
        if one.key in expanded:
            raise ConfigError(
                f"{text}: {one.key} is set twice, give all of its values at once: {one.key}=A,B"
            )
        for setting in one.settings:
            check_override(parse_setting(setting), schema)
        expanded[one.key] = one
    return expanded


def sweeps(text: str) -> bool:
    """Whether an override names several values; raises ConfigError for one that cannot be read."""
    return _expand(text).sweeps


def _expand(text: str) -> _Expanded:
    try:
        override = OverridesParser.create().parse_override(text)
        if not override.is_sweep_override():
            return _Expanded(parse_setting(text).key_or_group, [text], sweeps=False)
        key = override.get_key_element()
        values = _values(override)
    except HydraException as error:
        raise ConfigError(f"{text!r} cannot be read{_cause(error)}: {HOW_TO_WRITE}") from error
    if not values:
        raise ConfigError(f"{text!r} names no value: give at least one")
    settings = list(dict.fromkeys(f"{key}={value}" for value in values))
    return _Expanded(override.key_or_group, settings, sweeps=True)


def _cause(error: HydraException) -> str:
    """Say what is wrong in the call of a function; what else the parser says is about its grammar."""
    called, _, cause = str(error).partition(" while evaluating ")
    return f" ({explain(error)})" if called and cause else ""


def _refuse_too_many(count: float) -> None:
    if count > MOST_COMBINATIONS:
        raise ConfigError(
            f"these are more than {MOST_COMBINATIONS:,} combinations: give fewer values, more with the next command"
        )


def _values(override: Override) -> list[str]:
    if not override.is_discrete_sweep():
        raise ConfigError(
            f"{override.input_line}: an interval has no end of values, write choice(...) or range(first, stop, step)"
        )
    pattern = override.value()
    if isinstance(pattern, RangeSweep):
        if not pattern.step:
            raise ConfigError(f"{override.input_line}: a range with the step 0 has no end, give another step")
        _refuse_too_many((float(pattern.stop or 0) - float(pattern.start or 0)) / float(pattern.step))
    if not isinstance(pattern, Glob):
        return list(override.sweep_string_iterator())
    group = override.key_or_group
    if not is_group(override):
        raise ConfigError(
            f"{override.input_line}: glob() chooses files of a group such as model, name the values"
        )
    found = sorted(pattern.filter(choices(group)))
    if not found:
        raise ConfigError(f"{override.input_line} matches no {group}, there are: {', '.join(choices(group))}")
    return found


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise ConfigError(f"{line!r} cannot be read ({error}): write it as on a command line") from error


def read_lines(text: str) -> list[str]:
    """Return the lines of a file of overrides: one set a line; empty ones and those after # say nothing."""
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


class Composer(Generic[T]):
    """Composes many configurations that differ in a few keys: Hydra itself runs once for each choice of groups."""

    def __init__(self, root: str, schema: type[T], base: Sequence[str]) -> None:
        """`base` are the overrides that all of them share, of `configs/<root>.yaml`."""
        self.base = list(base)
        self._root = root
        self._schema = schema
        self._trees: dict[tuple[str, ...], tuple[DictConfig, dict[str, str]]] = {}

    def compose(self, overrides: Sequence[str] = ()) -> T:
        """Return the configuration under `base` and `overrides`, as Hydra would give it; raises ConfigError."""
        tree = copy.deepcopy(self._tree(overrides)[0])
        settings = [*overrides, *implied([*self.base, *overrides], self._schema)]
        try:
            for override in map(parse_setting, settings):
                if not is_group(override):
                    OmegaConf.update(tree, override.key_or_group, override.value(), merge=True)
        except OmegaConfBaseException as error:
            raise ConfigError(explain(error)) from error
        return to_schema(tree, self._schema)

    def choices(self, overrides: Sequence[str] = ()) -> dict[str, str]:
        """Return what is chosen of each group."""
        return self._tree(overrides)[1]

    def _tree(self, overrides: Sequence[str]) -> tuple[DictConfig, dict[str, str]]:
        """Return the tree before dotted overrides, unresolved."""
        groups = tuple(text for text in overrides if is_group(parse_setting(text)))
        if groups not in self._trees:
            self._trees[groups] = compose_tree(self._root, self._schema, [*self.base, *groups])
        return self._trees[groups]


def value_at(config: Any, key: str) -> Any:
    """Return the value of a dotted key in a configuration of dataclasses, plain: a section as a dictionary."""
    for name in key.split("."):
        config = getattr(config, name)
    if dataclasses.is_dataclass(config):
        return to_tree(config)
    return config.name if isinstance(config, Enum) else config


def folder_names(
    combinations: Sequence[Sequence[str]], keys: Collection[str], taken: Collection[str] = ()
) -> list[str]:
    """Return a folder name for each combination: `lr=0.0001_seed=1`, from its settings alone.

    `keys` are all swept keys: of each the last part is written, and more where two would look the same. Names
    that would be long, or hold characters that are trouble in a path, end in a digest.
    """
    short = short_keys(keys)
    names: list[str] = []
    used = set(taken)
    for combination in combinations:
        name = _folder_name(combination, short)
        if name in used:
            name = _with_digest(name, combination)
        used.add(name)
        names.append(name)
    return names


def _folder_name(combination: Sequence[str], short: dict[str, str]) -> str:
    parts = []
    changed = False
    for setting in combination:
        key, _, value = setting.partition("=")
        # Of a path the end says most.
        plain = value.strip("'\"").rstrip("/").rpartition("/")[2]
        safe = "".join(char if char in _SAFE else "-" for char in plain)
        changed |= safe != value
        parts.append(f"{short[key]}={safe}")
    name = "_".join(parts)
    return _with_digest(name, combination) if changed or len(name) > _LONGEST_NAME else name


def _with_digest(name: str, combination: Sequence[str]) -> str:
    digest = hashlib.sha256("\0".join(combination).encode()).hexdigest()[:8]
    return f"{name[: _LONGEST_NAME - 9]}-{digest}"


def short_keys(keys: Collection[str]) -> dict[str, str]:
    """Return the shortest endings of dotted keys that tell them apart: `lr` of `optim.lr`."""
    short = {}
    for key in keys:
        parts = key.split(".")
        for count in range(1, len(parts) + 1):
            end = ".".join(parts[-count:])
            if sum(other == end or other.endswith(f".{end}") for other in keys) == 1:
                break
        short[key] = end
    return short
