"""At a start: publish what an earlier start has kept on the nodes' disks and could not publish any more."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch.distributed as dist

from train.checkpoint.fast import FastTier, Note, copy_files, read_notes
from train.checkpoint.write import Writer, broadcast

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


def survey(found: Sequence[Found], newest_step: int, newest_time: float) -> list[Kept]:
    """Put together what the ranks have found: steps that count, the newest first, whole or not.

    `newest_step`: of the newest published one, which was written at `newest_time`, s since the epoch. What is older by
    either is of no use: the run has gone on without it.
    """
    steps: dict[str, Kept] = {}
    for now, notes_by_name in enumerate(found):
        for name, notes in notes_by_name.items():
            for note in notes:
                kept = steps.setdefault(name, Kept(name, note))
                kept.holders[note.rank].append(now)
                kept.sizes[note.rank] = note.bytes
    useful = [one for one in steps.values() if one.note.step > newest_step and one.note.began > newest_time]
    return sorted(useful, key=lambda one: (one.note.step, one.note.began), reverse=True)


def recover(
    tier: FastTier,
    writer: Writer,
    paths: Callable[[int], tuple[Path, Path]],
    newest: Callable[[], tuple[int, float]],
    warn: Callable[[int, str], None],
) -> int | None:
    """Publish the newest step that is whole on the nodes and newer than what is published; return it. Collective.

    `paths`: where a step is written at first, and its place; `newest`: as `survey` wants it, called on rank 0, as
    `warn` is with a step and a sentence. Raises `PeerError` when another process has taken the run over.
    """
    group = writer.group
    rank, leads = dist.get_rank(group), dist.get_rank(group) == 0
    names = sorted(path.name for path in tier.root.iterdir()) if tier.root.is_dir() else []
    own = {name: list(read_notes(tier.root / name)) for name in names}
    found: list[Found] = list(writer.gather(own))
    steps: list[Kept] = broadcast(survey(found, *newest()) if leads else [], group)
    left: dict[str, str] = {}
    published: Kept | None = None
    for kept in steps:
        if kept.missing:
            ranks = ", ".join(map(str, kept.missing))
            left[kept.name] = f"the files of rank {ranks} are on none of these nodes"
            continue
        reason = _publish(
            tier, replace(writer, manifest=kept.note.base()), kept, own, kept.deal().get(rank, []), paths
        )
        if reason is None:
            published = kept
            break
        left[kept.name] = reason
    if leads and left:
        _tell(steps, left, published, warn)
    # One may still be of use at the next start, with other nodes or when there is room: best one that is whole.
    stays = min((one for one in steps if one.name in left), key=lambda one: bool(one.missing), default=None)
    if published is None and stays is not None:
        tier.others = {stays.name}
    tier.remove(set(names) - tier.others)
    return None if published is None else published.note.step


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
    """One warning, about the newest that is left out."""
    newest = next(one for one in steps if one.name in left)
    instead = "" if published is None else f": step {published.note.step} is"
    warn(
        newest.note.step,
        f"step {newest.note.step}, which an earlier start has kept on the nodes' disks, is not published "
        f"({left[newest.name]}){instead}",
    )
