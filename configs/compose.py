"""Compose a typed configuration from a root file, its groups and the user's overrides.

Strict: a misspelt key, a bad value or an unknown group choice raises `ConfigError` with the closest valid
names. Imports no torch.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from contract.errors import ConfigError, closest

FOLDER = Path(__file__).parent
T = TypeVar("T")


def compose(root: str, schema: type[T], overrides: Sequence[str]) -> T:
    """Compose `configs/<root>.yaml` under `overrides` (Hydra syntax) into an instance of `schema`.

    The root file lists `<root>_schema` first in its defaults. `__post_init__` of the dataclasses may raise
    `ConfigError` for values that are wrong together.
    """
    ConfigStore.instance().store(name=f"{root}_schema", node=schema)
    parsed = [_parse(text) for text in overrides]
    for override in parsed:
        _check_key(override, schema)
    try:
        with initialize_config_dir(str(FOLDER), version_base="1.3"):
            tree = hydra_compose(root, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error)) from error
    return to_schema(tree, schema)


def fill(schema: type[T], overrides: Sequence[str]) -> T:
    """Fill `schema` from its defaults, the files of chosen groups (`cluster=lab`) and the other overrides.

    For a root without a defaults list of its own: what `compose` would give, in a quarter of its time, which
    a login node waits for.
    """
    parsed = [_parse(text) for text in overrides]
    for override in parsed:
        _check_key(override, schema)
    try:
        tree = OmegaConf.structured(schema)
        for override in (one for one in parsed if _is_group(one)):
            group = override.key_or_group
            tree[group] = OmegaConf.merge(
                tree[group], OmegaConf.load(FOLDER / group / f"{override.value()}.yaml")
            )
        for override in (one for one in parsed if not _is_group(one)):
            OmegaConf.update(tree, override.key_or_group, override.value())
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(error)) from error
    return to_schema(tree, schema)


def load(path: Path, schema: type[T], overrides: Sequence[str] = ()) -> T:
    """Read a resolved configuration that `save` wrote, change it by dotted `overrides`, check it again."""
    parsed = [_parse(text) for text in overrides]
    for override in parsed:
        _check_key(override, schema, groups=False)
    try:
        tree = OmegaConf.merge(
            OmegaConf.structured(schema), OmegaConf.load(path), OmegaConf.from_dotlist(list(overrides))
        )
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist: give the config.yaml of a run folder") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_explain(error)}") from error
    return to_schema(cast(DictConfig, tree), schema)


def to_schema(tree: DictConfig, schema: type[T]) -> T:
    """Turn a composed tree into dataclasses: interpolations resolved, nothing missing."""
    try:
        OmegaConf.resolve(tree)
        missing = OmegaConf.missing_keys(tree)
        if missing:
            raise ConfigError(f"{', '.join(sorted(missing))}: a value is needed, give it as KEY=VALUE")
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(error)) from error
    assert isinstance(config, schema)
    return config


def to_yaml(config: Any) -> str:
    """Print a configuration of dataclasses as YAML; `load` reads it back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def to_tree(config: Any) -> dict[str, Any]:
    """Turn dataclasses into plain nested dictionaries, enumerations into their names."""
    tree = OmegaConf.to_container(OmegaConf.create(to_yaml(config)))
    assert isinstance(tree, dict)
    return cast(dict[str, Any], tree)


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
    return _parse(override).key_or_group


def _parse(text: str) -> Override:
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError(
            f"{text!r} is not a setting: write KEY=VALUE, like optim.lr=3e-4 (quote values with spaces)"
        ) from error
    if override.is_sweep_override():
        raise ConfigError(f"{text!r} names several values: one run takes one value")
    if override.is_add() or override.is_delete():
        raise ConfigError(f"{text!r}: keys cannot be added or removed, write KEY=VALUE")
    return override


def _is_group(override: Override) -> bool:
    return (FOLDER / override.key_or_group).is_dir()


def _check_key(override: Override, schema: type, groups: bool = True) -> None:
    key = override.key_or_group
    if groups and _is_group(override):
        options = choices(key)
        value = override.value()
        if not isinstance(value, str) or value not in options:
            raise ConfigError(f"{key}={value}: there is no such {key}, {closest(str(value), options)}")
        return
    valid = field_paths(schema)
    if key not in valid:
        raise ConfigError(f"{key}: there is no such key, {closest_key(key, valid)}")


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


def _explain(error: Exception) -> str:
    """Make one sentence of an error of Hydra or OmegaConf."""
    cause = error.__cause__ if isinstance(error, HydraException) and error.__cause__ else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    key = next((line.removeprefix("full_key: ") for line in lines if line.startswith("full_key: ")), "")
    first = re.sub(r"\s+", " ", lines[0] if lines else str(error))
    return f"{key}: {first}" if key and key not in first else first
