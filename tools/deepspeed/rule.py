"""What becomes of a key of DeepSpeed's: settings of ours, nothing for a reason, or a refusal."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tools.deepspeed.file import AUTO, File, integer, is_on


@dataclass(frozen=True)
class Facts:
    """What the settings that surround the file say; values are those of the resolved configuration."""

    ranks: int | None
    """Data-parallel ranks; None where the layout does not divide the ranks."""
    micro_batch_size: int
    steps: int
    lr: float
    warmup_steps: int
    sets_accumulation: bool
    """Whether a recipe sets parallel.gradient_accumulation_steps."""


@dataclass(frozen=True)
class Context:
    """What a rule may look at beside its value."""

    file: File
    given: Mapping[str, str]
    """Settings of the command line, key -> value: they win."""
    facts: Facts | None = None
    """None in a first round, which finds the settings that the facts depend on."""


@dataclass(frozen=True)
class Here:
    """What a key becomes."""

    settings: tuple[str, ...] = ()
    """KEY=VALUE, each."""
    why: str = ""
    """Where there is no setting: why not; else what there is to know about it."""


Rule = Callable[[Context, Any], Here]
"""Raises ValueError, a sentence that says what to do, for a value that cannot be had here."""


def setting(key: str, value: Any) -> str:
    """Write KEY=VALUE as the command line takes it."""
    return f"{key}={_text(value)}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ",".join(map(_quoted, value)) + "]"
    return "null" if value is None else str(value)


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def sets(key: str, take: Callable[[Any], Any], why: str = "", auto: str = "") -> Rule:
    """The value goes to `key` as `take` reads it; "auto" leaves that as it is set here."""

    def rule(_: Context, value: Any) -> Here:
        if value == AUTO:
            return Here(why=auto or f"auto: {key} as it is set here")
        return Here((setting(key, take(value)),), why)

    return rule


def nothing(why: str) -> Rule:
    """Known, and of no consequence here."""
    return lambda _context, _value: Here(why=why)


def off(sentence: str, why: str = "off") -> Rule:
    """A feature that there is not: `sentence` refuses it where it is switched on."""

    def rule(_: Context, value: Any) -> Here:
        if value != AUTO and is_on(value):
            raise ValueError(sentence)
        return Here(why=why)

    return rule


def refused(sentence: str) -> Rule:
    """Known, and never to be had here."""

    def rule(_: Context, value: Any) -> Here:
        raise ValueError(sentence)

    return rule


def only(allowed: Any, sentence: str, why: str) -> Rule:
    """One value alone can be had here."""

    def rule(_: Context, value: Any) -> Here:
        if value != AUTO and value != allowed:
            raise ValueError(sentence)
        return Here(why=why)

    return rule


def choice(valid: Mapping[str, str], value: Any) -> str:
    """Return what a name stands for; raises ValueError with the valid ones."""
    found = valid.get(value.lower()) if isinstance(value, str) else None
    if found is None:
        raise ValueError(f"choose {' or '.join(valid)}")
    return found


def whole(value: Any) -> int:
    """Return a number of at least 1."""
    return integer(value, 1)
