"""A diff of two checkpoints for a terminal."""

import math
from collections.abc import Iterable, Iterator

from tools.ckpt.diff_result import Comparison, Diff, Group, State
from tools.ckpt.diff_tally import Tally
from tools.ckpt.source import Source
from tools.ckpt.stored import rounding_of
from tools.table import table

_MEASURES = (
    *("changed", "max abs", "mean abs", "max rel", "mean rel", "max ulp", "mean ulp"),
    *("|a-b|/|a|", "cosine"),
)
_GROUP = ("tensors", "differ", "changed", "max abs", "mean abs", "max rel", "max ulp", "|a-b|/|a|")
_RIGHT = frozenset({*_MEASURES, *_GROUP})


def text(diff: Diff, top: int) -> str:
    """Return the summary and tables of roles, places and tensors, of these the `top` most different."""
    same = not diff.differing and not diff.plain
    shown = f"{summary(diff)}\n" if same else "\n".join(_blocks(diff, top))
    # A name may hold what makes a terminal do things.
    shown = "".join(f"{one}\n" for one in rounded(diff)) + shown
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in shown)


def rounded(diff: Diff) -> list[str]:
    """Say what of the two was rounded before it was saved."""
    found = []
    for name, source in (("A", diff.a), ("B", diff.b)):
        errors = [f"{role} by up to {percent(error)}" for role, error in rounding_of(source).items()]
        found += [f"{name} was rounded: {', '.join(errors)}"] if errors else []
    return found


def summary(diff: Diff) -> str:
    """Say in a sentence or two what was found."""
    total, differing = len(diff.comparisons), len(diff.differing)
    matched = f"; {diff.by_bare_name} names matched without their prefix" if diff.by_bare_name else ""
    counts = ", ".join(f"{diff.count(state)} {state}" for state in State if diff.count(state))
    if differing:
        return f"{differing} of {total} tensors differ ({counts}{matched})"
    within = " within the tolerance" if diff.count(State.WITHIN) else ""
    also = f"; {len(diff.plain)} plain values differ" if diff.plain else ""
    return f"all {total} tensors are equal{within}{matched}{also}"


def side(source: Source) -> str:
    """Say which checkpoint one of the two is."""
    step = "" if source.step is None else f", step {source.step}"
    return f"{source.path} ({source.format}{step}, {len(source.entries)} tensors)"


def number(value: float | None) -> str:
    """Return three digits; nothing for None."""
    if value is None:
        return ""
    return "0" if value == 0 else f"{value:.3g}"


def percent(fraction: float) -> str:
    """Return a share; never 0 % for some, nor 100 % for less than all."""
    if fraction in (0.0, 1.0):
        return f"{fraction:.0%}"
    return "<0.01%" if fraction < 1e-4 else ">99.99%" if fraction > 0.9999 else f"{fraction:.2%}"


def _blocks(diff: Diff, top: int) -> Iterator[str]:
    yield f"A  {side(diff.a)}\nB  {side(diff.b)}\n{summary(diff)}\n"
    yield table(("role", *_GROUP), [_group(*item) for item in diff.by_role().items()], _RIGHT, None)
    places = [item for item in diff.by_place().items() if item[1].differing]
    places.sort(key=lambda item: -item[1].distance)
    if places:
        yield table(("place", *_GROUP), [_group(*item) for item in places[:top]], _RIGHT, None)
        yield from _left_out(len(places), top, "places")
    yield from _tensors(diff.differing, top)
    if diff.plain:
        rows = [(one.name, _plain(one.a), _plain(one.b)) for one in diff.plain[:top]]
        yield table(("value", "A", "B"), rows, frozenset(), None)
        yield from _left_out(len(diff.plain), top, "values")


def _group(name: str, group: Group) -> tuple[str, ...]:
    tally = group.tally
    shown = tally.compared + tally.nan + tally.infinite > 0
    return (
        name,
        str(group.tensors),
        str(group.differing),
        percent(group.changed_fraction) if shown else "",
        number(tally.absolute_max) if shown else "",
        number(tally.absolute_sum / group.elements) if shown else "",
        number(tally.relative_max) if shown else "",
        _ulp(tally),
        number(group.distance) if shown else "",
    )


def _tensors(differing: list[Comparison], top: int) -> Iterator[str]:
    if not differing:
        return
    head = ("tensor", "state", *_MEASURES, "")
    yield table(head, [_tensor(one) for one in differing[:top]], _RIGHT, None)
    yield from _left_out(len(differing), top, "tensors")


def _tensor(one: Comparison) -> tuple[str, ...]:
    if one.tally is None:
        return (one.entry.name, one.state, *[""] * len(_MEASURES), about(one))
    facts, tally = one.tally.facts(), one.tally
    return (
        one.entry.name,
        one.state,
        percent(tally.changed_fraction),
        number(facts["max_absolute"]),
        number(facts["mean_absolute"]),
        number(facts["max_relative"]),
        number(facts["mean_relative"]),
        _ulp(tally),
        number(facts["mean_ulp"]),
        number(tally.relative_norm),
        cosine(tally.cosine),
        about(one),
    )


def about(one: Comparison) -> str:
    """Say what numbers do not: other names, types and shapes, NaN, and what could not be read."""
    told = [one.error] if one.error else []
    if one.a is not None and one.b is not None:
        told += [f"{old} -> {new}" for old, new in _changes(one) if old != new]
    if one.tally is not None and one.tally.nan:
        told.append(f"{one.tally.nan} to or from NaN")
    if one.tally is not None and one.tally.infinite:
        told.append(f"{one.tally.infinite} to or from infinity")
    return ", ".join(told)


def _changes(one: Comparison) -> Iterable[tuple[str, str]]:
    a, b = one.a, one.b
    assert a is not None and b is not None
    if one.state is State.RENAMED:
        yield "", b.name
    yield a.dtype, b.dtype
    yield str(list(a.shape)), str(list(b.shape))


def cosine(value: float | None) -> str:
    """Return digits where they matter: 1 - 2e-9 is not 1, but 1 - 1e-15 may be."""
    if value is None:
        return ""
    return f"1-{1 - value:.1e}" if 1e-12 < 1 - value < 1e-3 else f"{value:.4g}"


def _ulp(tally: Tally) -> str:
    if tally.ulp_max is None:
        return ""
    return str(tally.ulp_max) if tally.ulp_max < 1e6 else f"{tally.ulp_max:.3g}"


def _left_out(total: int, top: int, what: str) -> Iterator[str]:
    if total > top:
        yield f"... {total - top} more {what} (--top)\n"


def _plain(value: object) -> str:
    return "-" if value is None else f"{value!r:.60}"


def shade(distance: float) -> float:
    """Return 0 for equal, and up to 1 for a relative norm of 1 and more: by its logarithm, from 1e-9 on."""
    if distance <= 0:
        return 0.0
    return 1.0 if not math.isfinite(distance) else min(1.0, max(0.05, 1 + math.log10(distance) / 9))
