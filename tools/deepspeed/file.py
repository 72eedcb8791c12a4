"""A DeepSpeed JSON configuration as it lies on the disk."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract.errors import ConfigError

AUTO = "auto"
"""Hugging Face's word for a value that the trainer's own arguments give."""
Tree = dict[str, Any]


@dataclass(frozen=True)
class File:
    """What a configuration says."""

    name: str
    """Of the file, for errors."""
    tree: Tree

    @classmethod
    def of(cls, name: str, tree: Tree) -> "File":
        """A configuration, in today's words where it has old ones; raises `ConfigError` where it has both."""
        return cls(name, _in_new_words(name, tree))

    def get(self, path: str, default: Any = None) -> Any:
        """Return the value at a dotted path, `default` where there is none or null."""
        found: Any = self.tree
        for part in path.split("."):
            if not isinstance(found, dict) or found.get(part) is None:
                return default
            found = found[part]
        return found

    def has(self, path: str) -> bool:
        """Whether there is a value at a dotted path, other than null."""
        return self.get(path) is not None

    def is_null(self, path: str) -> bool:
        """Whether null is written at a dotted path."""
        section, _, key = path.rpartition(".")
        inside = self.get(section, {}) if section else self.tree
        return isinstance(inside, dict) and key in inside and inside[key] is None

    def refuse(self, path: str, sentence: str) -> ConfigError:
        """Return the error for what stands at `path`."""
        value = self.get(path)
        shown = "" if value is None else f"={show(value)}"
        return ConfigError(f"{self.name}: {path}{shown}: {sentence}")


def read(path: Path) -> File:
    """Read a configuration; raises `ConfigError` for what is no JSON object, and for a key that is given twice."""
    try:
        text = path.expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"--deepspeed {path}: the file cannot be read ({reason}), give another") from error
    try:
        tree = json.loads(text, object_pairs_hook=_refuse_doubles)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path.name}, line {error.lineno}, column {error.colno}: this is no JSON ({error.msg}): mend it there; "
            "comments and commas at the end of a list are none"
        ) from error
    except RecursionError as error:
        raise ConfigError(
            f"{path.name}: objects lie in each other too deeply, this is no configuration"
        ) from error
    except ConfigError as error:
        raise ConfigError(f"{path.name}: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path.name}: this is no JSON object, write {{...}} with DeepSpeed's keys in it")
    return File.of(path.name, tree)


def _refuse_doubles(pairs: list[tuple[str, Any]]) -> Tree:
    found: Tree = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"{key} is given twice, drop one of them")
        found[key] = value
    return found


def _in_new_words(name: str, tree: Tree) -> Tree:
    """Replace what DeepSpeed still reads and no longer writes."""
    if "bfloat16" in tree:
        if "bf16" in tree:
            raise ConfigError(f"{name}: bf16 and bfloat16 are the same section, drop one of them")
        tree = {("bf16" if key == "bfloat16" else key): value for key, value in tree.items()}
    if isinstance(tree.get("zero_optimization"), bool):
        tree = {**tree, "zero_optimization": {"stage": int(tree["zero_optimization"])}}
    return tree


def show(value: Any) -> str:
    """Write a value as JSON does, not too long."""
    short = isinstance(value, float) and float(f"{value:g}") == value
    text = f"{value:g}" if short else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_on(value: Any) -> bool:
    """Whether the section of a feature, free in its form, switches something on."""
    if not isinstance(value, dict):
        return bool(value)
    if "enabled" in value:
        return bool(value["enabled"])
    inner = [one for one in value.values() if isinstance(one, dict)]
    return any(map(is_on, inner)) if inner else bool(value)


def integer(value: Any, least: int) -> int:
    """Return a whole number; raises ValueError, a sentence, for anything else. DeepSpeed's files write 5e8 too."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"give a whole number of at least {least}")
    return value


def number(value: Any) -> float:
    """Return a number that is not below 0; raises ValueError, a sentence, for anything else."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or value < 0
    ):
        raise ValueError("give a number that is not below 0, without quotation marks")
    return float(value)


def boolean(value: Any) -> bool:
    """Return true or false; raises ValueError, a sentence, for anything else."""
    if not isinstance(value, bool):
        raise ValueError("write true or false")
    return value
