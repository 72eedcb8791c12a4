"""What two checkpoints differ in, for scripts; `diff_text` and `diff_html` show it to people."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from tools.ckpt.diff_names import place_of
from tools.ckpt.diff_tally import Tally, Tolerance
from tools.ckpt.pieces import Entry
from tools.ckpt.source import Source
from tools.ckpt.stored import rounding_of

_Key = TypeVar("_Key")


class State(StrEnum):
    """What became of a tensor."""

    EQUAL = "equal"
    WITHIN = "within tolerance"
    VALUES = "values differ"
    DTYPE = "other type"
    SHAPE = "other shape"
    REMOVED = "removed"
    ADDED = "added"
    RENAMED = "renamed"
    UNREADABLE = "unreadable"


_SAME = (State.EQUAL, State.WITHIN)


@dataclass
class Comparison:
    """One tensor in both checkpoints, or in the one that has it."""

    a: Entry | None
    b: Entry | None
    state: State
    tally: Tally | None = None
    """None where values were not set against each other: the same bytes, pickled objects, nothing to compare with."""
    error: str | None = None

    @property
    def entry(self) -> Entry:
        """The tensor of A, or that of B where A has none."""
        entry = self.a or self.b
        assert entry is not None
        return entry

    @property
    def place(self) -> str:
        """Where in the model it belongs."""
        return place_of(self.entry)

    @property
    def differs(self) -> bool:
        """Whether it makes the checkpoints differ."""
        return self.state not in _SAME

    @property
    def distance(self) -> float:
        """To sort by: ||a - b|| / ||a||, infinite for what has no values to set against each other."""
        if self.tally is not None:
            return self.tally.relative_norm
        return math.inf if self.differs else 0.0

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        sides = {"a": self.a, "b": self.b}
        shown = {
            side: None if one is None else {"name": one.name, "dtype": one.dtype, "shape": list(one.shape)}
            for side, one in sides.items()
        }
        head = {"name": self.entry.name, "role": self.entry.role, "place": self.place, "state": self.state}
        tally = None if self.tally is None else self.tally.facts()
        return {**head, **shown, "values": tally, "error": self.error}


@dataclass
class Group:
    """Tensors of one role, of one layer, or of both."""

    tensors: int = 0
    differing: int = 0
    elements: int = 0
    tally: Tally = field(default_factory=Tally)
    distance: float = 0.0
    """The largest of its tensors."""

    def add(self, one: Comparison) -> None:
        """Count a tensor in."""
        self.tensors += 1
        self.differing += one.differs
        self.elements += one.entry.elements if one.tally is None else one.tally.elements
        self.distance = max(self.distance, one.distance)
        if one.tally is not None:
            self.tally.merge(one.tally)

    @property
    def changed_fraction(self) -> float:
        """Of its elements, those that are equal without a look at values included."""
        return self.tally.changed / self.elements if self.elements else 0.0

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        tally = self.tally
        return {
            "tensors": self.tensors,
            "differing": self.differing,
            "elements": self.elements,
            "changed_fraction": self.changed_fraction,
            "nan": tally.nan,
            "infinite": tally.infinite,
            "max_absolute": tally.absolute_max,
            "mean_absolute": tally.absolute_sum / self.elements if self.elements else 0.0,
            "max_relative": tally.relative_max,
            "max_ulp": tally.ulp_max,
            "norm_of_difference": math.sqrt(tally.squares_of_differences),
            "largest_relative_norm": self.distance if math.isfinite(self.distance) else None,
        }


@dataclass(frozen=True)
class PlainChange:
    """A number or a text beside the tensors; None where there is none of the name."""

    name: str
    a: Any
    b: Any

    def facts(self) -> dict[str, Any]:
        """For JSON, which has no NaN and no infinity: they are texts there."""
        sides = {"a": self.a, "b": self.b}
        strange = {
            side for side, value in sides.items() if isinstance(value, float) and not math.isfinite(value)
        }
        return {
            "name": self.name,
            **{side: str(value) if side in strange else value for side, value in sides.items()},
        }


@dataclass
class Diff:
    """Two checkpoints, side by side."""

    a: Source
    b: Source
    tolerance: Tolerance
    comparisons: list[Comparison]
    by_bare_name: int = 0
    """Tensors whose names differ in a prefix only."""
    plain: list[PlainChange] = field(default_factory=list)
    read_bytes: int = 0
    """Of both, of tensors that were read."""

    @property
    def differing(self) -> list[Comparison]:
        """Tensors that differ, the most different first."""
        found = [one for one in self.comparisons if one.differs]
        return sorted(found, key=lambda one: -one.distance)

    @property
    def unreadable(self) -> list[Comparison]:
        """Tensors that could not be compared."""
        return [one for one in self.comparisons if one.state is State.UNREADABLE]

    @property
    def exit_code(self) -> int:
        """0 equal within the tolerance, 1 different, 2 something is unreadable."""
        return 2 if self.unreadable else int(bool(self.differing or self.plain))

    def count(self, state: State) -> int:
        """How many tensors are in a state."""
        return sum(one.state is state for one in self.comparisons)

    def by_role(self) -> dict[str, Group]:
        """Sum up by role, in the order of the checkpoint."""
        return grouped(self.comparisons, lambda one: one.entry.role)

    def by_place(self) -> dict[str, Group]:
        """Sum up by layer, or by module outside of layers; what is no parameter's is left out."""
        placed = (one for one in self.comparisons if one.place)
        return grouped(placed, lambda one: one.place)

    def grid(self) -> dict[tuple[str, str], Group]:
        """Sum up by (place, role)."""
        placed = (one for one in self.comparisons if one.place)
        return grouped(placed, lambda one: (one.place, one.entry.role))

    def facts(self, top: int | None = None) -> dict[str, Any]:
        """For JSON: everything, or of the tensors that differ the `top` most different."""
        return {
            "a": _side(self.a),
            "b": _side(self.b),
            "exit_code": self.exit_code,
            "tolerance": {"absolute": self.tolerance.absolute, "relative": self.tolerance.relative},
            "tensors": len(self.comparisons),
            "states": {state: self.count(state) for state in State},
            "matched_without_prefix": self.by_bare_name,
            "read_bytes": self.read_bytes,
            "roles": [{"role": role, **group.facts()} for role, group in self.by_role().items()],
            "places": [{"place": place, **group.facts()} for place, group in self.by_place().items()],
            "grid": [
                {"place": place, "role": role, **group.facts()}
                for (place, role), group in self.grid().items()
            ],
            "differing": [one.facts() for one in self.differing[:top]],
            "plain_values": [one.facts() for one in self.plain],
        }


def grouped(comparisons: Iterable[Comparison], key: Callable[[Comparison], _Key]) -> dict[_Key, Group]:
    """Sum up by what `key` says of each."""
    found: dict[_Key, Group] = {}
    for one in comparisons:
        found.setdefault(key(one), Group()).add(one)
    return found


def _side(source: Source) -> dict[str, Any]:
    return {
        "path": str(source.path),
        "format": source.format,
        "step": source.step,
        "layout": source.layout,
        "rounded": rounding_of(source),
        "tensors": len(source.entries),
    }
