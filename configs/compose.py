"""Compose a typed configuration from a root file, its groups and the user's overrides.

Strict: a misspelt key, a bad value or an unknown group choice raises `ConfigError` with the closest valid
names. Imports no torch.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from contract.errors import ConfigError, closest

FOLDER = Path(__file__).parent
HOW_TO_WRITE = (
    "write KEY=VALUE, like optim.lr=3e-4; unusual characters go in quotes of their own: 'run.root=\"~/runs\"'"
)
# What OmegaConf says in words of its own, and what a user can do.
_PLAIN = (
    (re.compile(r"field '(.+)' is not Optional"), r"\1=null: it needs a value"),
    (re.compile(r"Invalid value assigned: .*\blist or tuple\b.*"), "give a list: KEY=[A,B]"),
    (re.compile(r"Invalid type assigned: .* is not a subclass of .*"), "this is a section: set keys in it"),
)
T = TypeVar("T")


def compose(root: str, schema: type[T], overrides: Sequence[str]) -> T:
    """Compose `configs/<root>.yaml` under `overrides` (Hydra syntax) into an instance of `schema`.

    The root file lists `<root>_schema` first in its defaults. `__post_init__` of the dataclasses may raise
    `ConfigError` for values that are wrong together.
    """
    return to_schema(compose_tree(root, schema, overrides)[0], schema)


def compose_tree(root: str, schema: type, overrides: Sequence[str]) -> tuple[DictConfig, dict[str, str]]:
    """Compose as `compose` does; return the tree, interpolations unresolved, and the choice of each group."""
    ConfigStore.instance().store(name=f"{root}_schema", node=schema)
    settings = spell_out(overrides, schema)
    settings += implied(settings, schema)
    for override in map(parse_setting, settings):
        check_override(override, schema)
    try:
        with initialize_config_dir(str(FOLDER), version_base="1.3"):
            tree = hydra_compose(root, overrides=settings, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from error
    chosen = {
        group: choice for group, choice in tree.hydra.runtime.choices.items() if (FOLDER / group).is_dir()
    }
    with flag_override(tree, ["struct", "readonly"], False):
        del tree["hydra"]
    return tree, chosen


def fill(schema: type[T], overrides: Sequence[str]) -> T:
    """Fill `schema` from its defaults, the files of chosen groups (`cluster=lab`) and the other overrides.

    A choice that ends in .yaml is the path of a file of the user's: `cluster=runs/n1/nccl/cluster.yaml`. For a root
    without a defaults list of its own: what `compose` would give, in a quarter of its time, which a login node waits
    for.
    """
    parsed = [parse_setting(text) for text in overrides]
    for override in parsed:
        check_override(override, schema, files=True)
    try:
        tree = OmegaConf.structured(schema)
        for override in (one for one in parsed if is_group(one)):
            group = override.key_or_group
            tree[group] = OmegaConf.merge(tree[group], load_choice(group, str(override.value())))
        for override in (one for one in parsed if not is_group(one)):
            OmegaConf.update(tree, override.key_or_group, override.value())
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error
    return to_schema(tree, schema)


def load_choice(group: str, choice: str) -> Any:
    """Return what a group's file has, unchecked; raises ConfigError for a file of the user's that is none."""
    if not choice.endswith(".yaml"):
        return OmegaConf.load(FOLDER / group / f"{choice}.yaml")
    path = Path(choice).expanduser()
    try:
        tree = OmegaConf.load(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"{group}={choice}: the file cannot be read ({reason}), give another") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{group}={choice}: {' '.join(str(error).split())}") from error
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{group}={choice}: the file has no keys of a {group}, see configs/{group}/*.yaml")
    return tree


def load(path: Path, schema: type[T], overrides: Sequence[str] = ()) -> T:
    """Read a resolved configuration that `to_yaml` printed, change it by dotted `overrides`, check it again."""
    try:
        tree = OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.load(path))
        return _changed(cast(DictConfig, tree), schema, overrides)
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist: give the config.yaml of a run folder") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {explain(error)}") from error


def change(config: T, overrides: Sequence[str]) -> T:
    """Return a resolved configuration changed by dotted `overrides`, checked again."""
    try:
        return _changed(OmegaConf.structured(config), type(config), overrides)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error


def _changed(tree: DictConfig, schema: type[T], overrides: Sequence[str]) -> T:
    settings = spell_out(overrides, schema)
    for text in settings + implied(settings, schema):
        override = parse_setting(text)
        check_override(override, schema, groups=False)
        OmegaConf.update(tree, override.key_or_group, override.value())
    return to_schema(tree, schema)


def to_schema(tree: DictConfig, schema: type[T]) -> T:
    """Turn a composed tree into dataclasses: interpolations resolved, nothing missing."""
    try:
        OmegaConf.resolve(tree)
        config = OmegaConf.to_object(tree)
    except MissingMandatoryValue as error:
        missing = ", ".join(sorted(OmegaConf.missing_keys(tree)))
        raise ConfigError(f"{missing}: a value is needed, give it as KEY=VALUE") from error
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error
    assert isinstance(config, schema)
    return config


def to_yaml(config: Any) -> str:
    """Print a resolved configuration of dataclasses as YAML; `load` reads it back."""
    return yaml.dump(to_tree(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.CSafeDumper):
    """Writes what OmegaConf reads: that takes more strings for numbers than YAML 1.1 does, 1e-4 for one."""


def _write_string(dumper: yaml.CSafeDumper, text: str) -> yaml.ScalarNode:
    style = "'" if _like_a_number(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _like_a_number(text: str) -> bool:
    try:
        float(text.replace("_", ""))
    except ValueError:
        return False
    return True


_Dumper.add_representer(str, _write_string)


def to_tree(config: Any) -> dict[str, Any]:
    """Turn dataclasses into plain nested dictionaries, enumerations into their names."""
    return cast(dict[str, Any], _plain(dataclasses.asdict(config)))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return value.name if isinstance(value, Enum) else value


def flatten_yaml(text: str) -> dict[str, Any]:
    """List the leaves of a printed configuration by dotted key."""
    return _flatten(OmegaConf.to_container(OmegaConf.create(text)), "")


def _flatten(tree: Any, prefix: str) -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix.removesuffix("."): tree}
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= _flatten(value, f"{prefix}{key}.")
    return leaves


def choices(group: str) -> list[str]:
    """List the choices of a group, `configs/<group>/*.yaml`."""
    return sorted(path.stem for path in (FOLDER / group).glob("*.yaml"))


def key_of(override: str) -> str:
    """Return the dotted key that an override sets: `optim.lr` of `optim.lr=3e-4`."""
    return parse_setting(override).key_or_group


@functools.lru_cache(maxsize=10_000)  # the tasks of a sweep share most of theirs
def parse_setting(text: str) -> Override:
    """Parse `KEY=VALUE`; raises ConfigError for anything else, a sweep too."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError(f"{text!r} is not a setting: {HOW_TO_WRITE}") from error
    if override.is_sweep_override():
        raise ConfigError(
            f"{text!r} names several values: one run takes one value (a comma in it goes in quotes of its own: "
            "'job.partition=\"a,b\"')"
        )
    if override.is_add() or override.is_delete():
        raise ConfigError(f"{text!r}: keys cannot be added or removed, write KEY=VALUE")
    return override


def spell_out(overrides: Iterable[str], schema: type) -> list[str]:
    """Replace synonyms, `schema.SYNONYMS`, by the keys that they stand for; the texts may sweep.

    Raises ConfigError where a key has got two values in this way.
    """
    synonyms: dict[str, str] = getattr(schema, "SYNONYMS", {})
    spelled: list[str] = []
    given: dict[str, list[str]] = {}
    for text in overrides:
        name, equals, value = text.partition("=")
        key = synonyms.get(name.strip(), name.strip())
        earlier = given.setdefault(key, [])
        if any(name.strip() != one.partition("=")[0].strip() for one in earlier):
            if any(value.strip() != one.partition("=")[2].strip() for one in earlier):
                raise ConfigError(f"{earlier[0]} and {text} set the same key, {key}: give one of them")
            continue  # the same value in other words
        earlier.append(text)
        spelled.append(f"{key}{equals}{value}" if name.strip() in synonyms else text)
    return spelled


def implied(overrides: Sequence[str], schema: type) -> list[str]:
    """Return the settings that come with `overrides`, by `schema.IMPLIED`: a key's value says something of another key.

    A setting does not come where its key is given, nor with null.
    """
    rules: dict[str, str] = getattr(schema, "IMPLIED", {})
    keys = {one.key_or_group for one in map(parse_setting, overrides) if one.value() is not None}
    return [setting for key, setting in rules.items() if key in keys and key_of(setting) not in keys]


def is_group(override: Override) -> bool:
    """Whether an override chooses a file of a group, as `model=llama_3m` does."""
    return (FOLDER / override.key_or_group).is_dir()


def check_override(override: Override, schema: type, groups: bool = True, files: bool = False) -> None:
    """Raise ConfigError, with the closest names, unless `schema` has the key and the group the choice.

    With `files` a choice may be the path of a .yaml file.
    """
    key = override.key_or_group
    if groups and is_group(override):
        options = choices(key)
        value = override.value()
        if files and isinstance(value, str) and value.endswith(".yaml"):
            return
        if not isinstance(value, str) or value not in options:
            raise ConfigError(f"{key}={value}: there is no such {key}, {closest(str(value), options)}")
        return
    valid = field_paths(schema)
    if key not in valid:
        names = [*valid, *getattr(schema, "SYNONYMS", {})]
        raise ConfigError(f"{key}: there is no such key, {closest_key(key, names)}")


def closest_key(key: str, valid: Iterable[str]) -> str:
    """Name the valid keys closest to a misspelt dotted key, looking into its section first."""
    names = list(valid)
    section, _, leaf = key.rpartition(".")
    siblings = [name for name in names if name.rpartition(".")[0] == section]
    same_leaf = [name for name in names if leaf and name.rpartition(".")[2] == leaf]
    if siblings and section:
        return closest(key, siblings)
    if same_leaf:
        return f"did you mean {' or '.join(same_leaf)}?"
    tops = [name for name in names if "." not in name]
    return closest(key, names if "." in key else tops)


def field_paths(schema: type, prefix: str = "") -> list[str]:
    """List every dotted key of a dataclass and the dataclasses in it, sections included."""
    paths: list[str] = []
    for field in dataclasses.fields(schema):
        path = f"{prefix}{field.name}"
        paths.append(path)
        if dataclasses.is_dataclass(field.type) and isinstance(field.type, type):
            paths += field_paths(field.type, f"{path}.")
    return paths


def explain(error: Exception) -> str:
    """Make one sentence of an error of Hydra or OmegaConf."""
    cause = error.__cause__ if isinstance(error, HydraException) and error.__cause__ else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    key = next((line.removeprefix("full_key: ") for line in lines if line.startswith("full_key: ")), "")
    first = re.sub(r"\s+", " ", lines[0] if lines else str(error))
    for theirs, ours in _PLAIN:
        first = theirs.sub(ours, first)
    return f"{key}: {first}" if key and key not in first else first
