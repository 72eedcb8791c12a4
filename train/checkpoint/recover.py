"""At a start: publish what an earlier start has kept on the nodes' disks and could not publish any more."""

import socket
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch.distributed as dist

from contract.errors import NodeError
from contract.run_folder import Event
from train.checkpoint.fast import FastTier, Note, copy_files, read_notes
from train.checkpoint.write import Writer, broadcast
from train.resilience.together import together

Found = Mapping[str, Sequence[Note]]
"""What a node has kept: notes by the name of their folder."""


@dataclass
class Kept:
    """One step on all nodes of this start."""

    name: str
    note: Note
    """Of any rank that has saved it."""
    holders: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Ranks of now that reach the files of each rank of then."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Bytes of each rank of then."""
    outdated: str | None = None
    """Why it is of no use any more, as a clause; None where it is."""

    @property
    def missing(self) -> list[int]:
        """Ranks of then whose files are on no node."""
        return [rank for rank in range(self.note.base().world_size) if rank not in self.holders]

    def deal(self) -> dict[int, list[int]]:
        """Share the ranks of then out among those of now, by the bytes that each has to copy."""
        loads: dict[int, int] = defaultdict(int)
        shares: dict[int, list[int]] = defaultdict(list)
        for then in sorted(self.holders, key=lambda one: (-self.sizes[one], one)):
            now = min(self.holders[then], key=lambda one: (loads[one], one))
            loads[now] += self.sizes[then]
            shares[now].append(then)
        return dict(shares)

    def problem(self) -> str | None:
        """Why it can't be published, as a clause; None where it may."""
        if self.outdated is None and self.missing:
            return f"the files of rank {', '.join(map(str, self.missing))} are on none of these nodes"
        return self.outdated


def survey(found: Sequence[Found], newest_step: int, newest_began: float) -> list[Kept]:
    """Put together what the ranks have found: steps further than what is published, the newest first, whole or not.

    `newest_step`: the newest published one, which rank 0 began with at `newest_began`, s since the epoch. Where that is
    later the run has gone on from an older step, and left the kept one behind.
    """
    steps: dict[str, Kept] = {}
    for now, notes_by_name in enumerate(found):
        for name, notes in notes_by_name.items():
            for note in notes:
                kept = steps.setdefault(name, Kept(name, note))
                kept.holders[note.rank].append(now)
                kept.sizes[note.rank] = note.bytes
    further = [one for one in steps.values() if one.note.step > newest_step]
    for kept in further:
        later_s = newest_began - kept.note.began
        if later_s >= 0:
            later = f"it began to save step {newest_step} {later_s:.3g} s later"
            kept.outdated = f"the run has gone on from an older one: {later}"
    return sorted(further, key=lambda one: (one.note.step, one.note.began), reverse=True)


def recover(
    tier: FastTier,
    writer: Writer,
    paths: Callable[[int], tuple[Path, Path]],
    newest: Callable[[], tuple[int, float]],
    warn: Callable[[int, str], None],
) -> int | None:
    """Publish the newest step that is whole on the nodes and newer than what is published; return it. Collective.

    `paths`: where a step is written at first, and its place; `newest`: as `survey` wants it, called on rank 0, as
    `warn` is with a step and a sentence, for each step that could have been of use and is left out. Raises `NodeError`
    where `newest` raises OSError, `PeerError` when another process has taken the run over.
    """
    group = writer.group
    rank, leads = dist.get_rank(group), dist.get_rank(group) == 0
    known = together(group, lambda: _ask(tier, newest) if leads else None)
    own = _look(tier)
    found: list[Found] = list(writer.gather(own))
    steps: list[Kept] = broadcast([] if known is None else survey(found, *known), group)
    left: dict[str, str] = {}
    published: Kept | None = None
    for kept in steps:
        share = kept.deal().get(rank, [])
        reason = kept.problem() or _publish(
            tier, replace(writer, manifest=kept.note.base()), kept, own, share, paths
        )
        if reason is None:
            published = kept
            break
        left[kept.name] = reason
    if leads:
        _tell(steps, left, published, warn)
    # One may still be of use at the next start, with other nodes or when there is room: best one that is whole.
    stays = min(
        (one for one in steps if one.name in left and one.outdated is None),
        key=lambda one: bool(one.missing),
        default=None,
    )
    if published is None and stays is not None:
        tier.others = {stays.name}
    tier.remove(set(own) - tier.others)
    return None if published is None else published.note.step


def _ask(tier: FastTier, newest: Callable[[], tuple[int, float]]) -> tuple[int, float]:
    try:
        return newest()
    except OSError as error:
        steps = tier.run.checkpoints
        raise NodeError(
            f"the steps in {steps} cannot be read ({error.strerror or error}): look at its file system"
        ) from error


def _look(tier: FastTier) -> dict[str, Sequence[Note]]:
    """What this rank finds on its node; nothing, with a warning, where that cannot be read."""
    try:
        names = sorted(path.name for path in tier.root.iterdir()) if tier.root.is_dir() else []
        return {name: list(read_notes(tier.root / name)) for name in names}
    except OSError as error:
        reason = (
            f"what an earlier start has kept in {tier.root} on {socket.gethostname()} cannot be read "
            f"({error.strerror or error})"
        )
        tier.run.try_event(Event.WARNING, reason=reason)
        return {}


def _publish(
    tier: FastTier,
    writer: Writer,
    kept: Kept,
    own: Found,
    share: Sequence[int],
    paths: Callable[[int], tuple[Path, Path]],
) -> str | None:
    temporary, final = paths(kept.note.step)
    files = [name for note in own.get(kept.name, []) if note.rank in share for name in note.files]
    reason = writer.agree(lambda: copy_files(tier.root / kept.name, temporary, files))
    return writer.publish(kept.note.step, temporary, final, reason)


def _tell(
    steps: Sequence[Kept], left: Mapping[str, str], published: Kept | None, warn: Callable[[int, str], None]
) -> None:
    """One warning about each that is left out, but for what is no further than the one that is published."""
    instead = "" if published is None else f": step {published.note.step} is"
    for kept in steps:
        if kept.name in left and (published is None or kept.note.step > published.note.step):
            step = kept.note.step
            warn(
                step,
                f"step {step}, which an earlier start has kept on the nodes' disks, is not published "
                f"({left[kept.name]}){instead}",
            )
