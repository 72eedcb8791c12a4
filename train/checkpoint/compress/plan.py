"""Which steps are to be stored anew: those that are plain yet, and those whose parents go."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """How a step is stored."""

    compressed: bool
    parent: int | None = None
    """The step that it is stored as the difference to."""


@dataclass(frozen=True)
class Job:
    """A step to be stored compressed."""

    step: int
    parent: int | None
    """To be compared with; None lets it stand by itself."""


@dataclass(frozen=True)
class Wish:
    """How steps are to be stored."""

    compress: bool
    """False leaves plain ones as they are."""
    deltas: bool = False
    longest_chain: int = 4
    """Steps that any step may need, one after the other."""
    alone_every_steps: int = 0
    """Multiples of it stand by themselves: they outlive their neighbours. 0 for none."""


def jobs(steps: Mapping[int, Step], removed: Collection[int], wish: Wish) -> list[Job]:
    """Return what is to be done before `removed` can go, and to have the rest as wished; in the order of steps."""
    parents = {step: one.parent for step, one in steps.items()}
    found = []
    for step in sorted(set(steps) - set(removed)):
        orphaned = parents[step] in removed
        if orphaned:
            found.append(Job(step, None))
        elif not steps[step].compressed and wish.compress:
            found.append(Job(step, _parent(step, parents, removed, wish)))
        if found and found[-1].step == step:
            parents[step] = found[-1].parent
    return found


def removable(steps: Mapping[int, Step], surplus: Collection[int]) -> list[int]:
    """Return those of `surplus` that are there and that no other step needs, however many lie between."""
    needed: set[int] = set()
    for step in set(steps) - set(surplus):
        parent = steps[step].parent
        while parent is not None and parent not in needed:
            needed.add(parent)
            parent = steps[parent].parent if parent in steps else None
    return sorted(set(steps) & set(surplus) - needed)


def stranded(steps: Mapping[int, Step], surplus: Collection[int]) -> list[int]:
    """Return steps that need one of `surplus`, and these, but for the newest step and what that needs."""
    if not steps:
        return []
    parents = {step: one.parent for step, one in steps.items()}
    pinned = set(surplus) & set(steps)
    safe = {step for step in steps if _needs(max(steps), step, parents)}
    lost = {step for step in steps if any(_needs(step, one, parents) for one in pinned)}
    return sorted(lost - safe)


def chain(step: int, parents: Mapping[int, int | None]) -> int:
    """How many steps `step` needs, one after the other."""
    length = 0
    while (parent := parents.get(step)) is not None:
        step, length = parent, length + 1
    return length


def _parent(step: int, parents: Mapping[int, int | None], removed: Collection[int], wish: Wish) -> int | None:
    if not wish.deltas or (wish.alone_every_steps > 0 and step % wish.alone_every_steps == 0):
        return None
    older = [one for one in parents if one < step and one not in removed]
    if not older:
        return None
    below = max(chain(one, parents) for one in parents if _needs(one, step, parents))
    return max(older) if chain(max(older), parents) + 1 + below <= wish.longest_chain else None


def _needs(one: int, step: int, parents: Mapping[int, int | None]) -> bool:
    """Whether `one` is `step`, or needs it."""
    current: int | None = one
    while current is not None and current != step:
        current = parents.get(current)
    return current == step
