"""Compare two checkpoints tensor by tensor, whatever their formats and however their tensors were cut."""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from contract.errors import ConfigError
from tools.ckpt.diff_names import match, pair_by_content
from tools.ckpt.diff_result import Comparison, Diff, PlainChange, State
from tools.ckpt.diff_tally import EXACT, Meter, Tally, Tolerance
from tools.ckpt.dtypes import Bits
from tools.ckpt.findings import DamageError, Severity
from tools.ckpt.open import open_source
from tools.ckpt.pieces import Entry
from tools.ckpt.source import Source, Window
from tools.ckpt.steady import steadily
from tools.ckpt.threads import cores, taken_from, work_off

_WINDOW_ELEMENTS = 1 << 18

Advance = Callable[[int], None]
"""Is told how many bytes were read since it was called last."""
Pair = tuple[Entry, Entry]


def diff(
    path_a: Path,
    path_b: Path,
    tolerance: Tolerance = EXACT,
    only: Collection[str] | None = None,
    deep: bool = False,
    threads: int | None = None,
    begin: Callable[[int], Advance] = lambda total: lambda nbytes: None,
) -> Diff:
    """Compare two checkpoints (of a run folder, its newest step), or the tensors of some roles, `only`.

    Tensors with the same saved hash are equal without being read, unless `deep`. Holds a few MiB per thread
    (default: one for each core that this process may use, 8 at most). `begin` is given the number of bytes to read,
    for a progress bar. Raises `UnreadableError` if one cannot be opened or decoded, `ConfigError` for a role that
    neither has; a tensor that cannot be read is in the result.
    """
    return steadily(
        [path_a, path_b],
        lambda: _diff(path_a, path_b, tolerance, only, deep, threads or cores(), begin),
        lambda found: _is_suspicious(found, deep),
    )


def _is_suspicious(found: Diff, deep: bool) -> bool:
    """Whether something was not read, or not as it was saved: tensors with other hashes do differ."""
    told = [one for one in (*found.a.findings, *found.b.findings) if one.severity is not Severity.NOTE]
    return bool(told or found.unreadable) or any(
        deep if one.a is None or one.b is None else one.a.xxh3 == one.b.xxh3 for one in found.differing
    )


def _diff(
    path_a: Path,
    path_b: Path,
    tolerance: Tolerance,
    only: Collection[str] | None,
    deep: bool,
    threads: int,
    begin: Callable[[int], Advance],
) -> Diff:
    with open_source(path_a) as a, open_source(path_b) as b:
        a.refuse_undecodable()
        b.refuse_undecodable()
        matches = match(_chosen(a, b, only), _chosen(b, a, only))
        pair_by_content(matches, lambda one: _hash(a, one, deep), lambda one: _hash(b, one, deep))
        found = {
            one.name: Comparison(one, other, State.EQUAL if one.shape == other.shape else State.SHAPE)
            for one, other in matches.pairs
        }
        jobs = [pair for pair in matches.pairs if _is_to_read(*pair, deep)]
        read_bytes = sum(one.nbytes + other.nbytes for one, other in jobs)
        found |= _compare_all(a, b, jobs, tolerance, threads, begin(read_bytes))
        comparisons = [
            *found.values(),
            *(Comparison(one, other, State.RENAMED) for one, other in matches.renamed),
            *(Comparison(one, None, State.REMOVED) for one in matches.removed),
            *(Comparison(None, one, State.ADDED) for one in matches.added),
        ]
        plain = [] if only else _plain_changes(a.facts.get("values"), b.facts.get("values"), tolerance)
        return Diff(a, b, tolerance, comparisons, matches.by_bare_name, plain, read_bytes)


def _chosen(source: Source, other: Source, only: Collection[str] | None) -> list[Entry]:
    """Return the tensors of `source` that are to be compared."""
    if not only:
        return source.entries
    known = {entry.role for entry in (*source.entries, *other.entries)}
    for role in only:
        if role not in known:
            raise ConfigError(f"no tensor has the role {role!r}: choose among {', '.join(sorted(known))}")
    return [entry for entry in source.entries if entry.role in only]


def _hash(source: Source, entry: Entry, deep: bool) -> str:
    """Return the hash of a tensor's bytes in row-major order: the saved one, or one made now."""
    if entry.xxh3 is not None and not deep:
        return entry.xxh3
    made = xxhash.xxh3_128()
    try:
        for window in source.windows(entry):
            made.update(window.values.view(np.uint8))  # type: ignore[arg-type]
    except DamageError:
        return f"unreadable {source.path} {entry.name}"  # like nothing else
    return made.hexdigest()


def _is_to_read(a: Entry, b: Entry, deep: bool) -> bool:
    if a.shape != b.shape:
        return False
    return deep or a.dtype != b.dtype or a.xxh3 is None or a.xxh3 != b.xxh3


def _compare_all(
    a: Source, b: Source, pairs: list[Pair], tolerance: Tolerance, threads: int, advance: Advance
) -> dict[str, Comparison]:
    """Compare pairs, the largest first, so that threads end at about the same time."""
    waiting = deque(sorted(pairs, key=lambda pair: -pair[0].nbytes))
    found: dict[str, Comparison] = {}

    def work() -> None:
        with a.twin() as own_a, b.twin() as own_b:
            for pair in taken_from(waiting):
                found[pair[0].name] = _compare(own_a, own_b, *pair, tolerance)
                advance(pair[0].nbytes + pair[1].nbytes)

    work_off(waiting, work, threads)
    return found


@dataclass(frozen=True)
class _Side:
    """A tensor in one of the two; damage is told with its name."""

    name: str
    source: Source
    entry: Entry

    def located(self) -> "_Side":
        """Return it with the places of its bytes, which need not be looked up again."""
        with self._told():
            return replace(self, entry=self.source.located(self.entry))

    def windows(self) -> Iterator[Window]:
        """Yield its values; both of one shape come in the same windows."""
        with self._told():
            yield from self.source.windows(self.entry, _WINDOW_ELEMENTS)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except DamageError as damage:
            finding = damage.finding
            raise DamageError(replace(finding, text=f"{self.name} {finding.text}")) from damage


def _compare(a: Source, b: Source, one: Entry, other: Entry, tolerance: Tolerance) -> Comparison:
    """Compare two tensors of one shape."""
    try:
        sides = _Side("A", a, one).located(), _Side("B", b, other).located()
        if one.dtype == other.dtype and all(map(_same_bytes, *(side.windows() for side in sides))):
            return Comparison(one, other, State.EQUAL)
        tally = _measure(*sides, tolerance) if _are_numbers(one, other) else None
    except DamageError as damage:
        return Comparison(one, other, State.UNREADABLE, error=str(damage))
    return Comparison(one, other, _state(one, other, tally, tolerance), tally)


def _state(one: Entry, other: Entry, tally: Tally | None, tolerance: Tolerance) -> State:
    if one.dtype != other.dtype:
        # Whoever names a tolerance asks for values, and these are what it says.
        return State.WITHIN if tolerance.given and tally is not None and tally.beyond == 0 else State.DTYPE
    if tally is None or tally.beyond > 0:
        return State.VALUES
    return State.WITHIN if tally.changed else State.EQUAL


def _are_numbers(one: Entry, other: Entry) -> bool:
    return "object" not in (one.dtype, other.dtype) and (
        one.dtype.startswith("complex") == other.dtype.startswith("complex")
    )


def _same_bytes(a: Window, b: Window) -> bool:
    x, y = a.values.view(np.uint8), b.values.view(np.uint8)
    whole = x.size // 8 * 8  # eight bytes at a time
    return _equal(x[:whole].view(np.uint64), y[:whole].view(np.uint64)) and _equal(x[whole:], y[whole:])


def _equal(x: Bits, y: Bits) -> bool:
    return bool((x == y).all())


def _measure(a: _Side, b: _Side, tolerance: Tolerance) -> Tally:
    """Set all values of two tensors against each other."""
    tally = Tally()
    meter = Meter(a.entry.dtype, b.entry.dtype, tolerance, tally)
    for window_a, window_b in zip(a.windows(), b.windows(), strict=True):
        meter.add(window_a.values, window_b.values)
    return tally


def _plain_changes(
    a: dict[str, Any] | None, b: dict[str, Any] | None, tolerance: Tolerance
) -> list[PlainChange]:
    """Compare numbers and texts beside the tensors, where both formats have such."""
    if a is None or b is None:
        return []
    changes = [PlainChange(name, a.get(name), b.get(name)) for name in dict.fromkeys([*a, *b])]
    return [one for one in changes if not _same_plain(one.a, one.b, tolerance)]


def _same_plain(a: Any, b: Any, tolerance: Tolerance) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        both_nan = math.isnan(a) and math.isnan(b)
        return both_nan or math.isclose(a, b, rel_tol=tolerance.relative, abs_tol=tolerance.absolute)
    return type(a) is type(b) and bool(a == b)
