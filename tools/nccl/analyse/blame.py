"""Who is to blame for exchanges that failed: what most of them have in common."""

from dataclasses import dataclass

import numpy as np

from tools.nccl.analyse.pairs import Flags, Pairs
from tools.nccl.analyse.robust import runs
from tools.nccl.findings import Part

NEARLY_ALL = 0.9


@dataclass(frozen=True)
class Blame:
    """A part that explains some of the failures."""

    part: Part
    nodes: tuple[int, ...]
    gpus: tuple[int, ...]
    """Local numbers: of the GPU, of an NVLink's ends, of the rails of a NIC or a link; empty: all."""
    failed: int
    """Pairs that failed."""
    tested: int
    """Pairs of the part that were tested."""


def blame(pairs: Pairs, failed: Flags, least: float, gpus: int) -> list[Blame]:
    """Explain failed pairs by as few parts as will do.

    A rank of whose pairs at least two and a share of `least` failed is to blame for them, those with most failures
    first; what no rank explains is a pair's own. least: share to expect, 1 for a rank that always fails.
    """
    if not failed.any():
        return []
    ranks = int(pairs.second.max()) + 1
    tested = np.bincount(pairs.first, minlength=ranks) + np.bincount(pairs.second, minlength=ranks)
    first, second = pairs.first[failed], pairs.second[failed]
    open_ = np.ones(len(first), dtype=bool)
    nodes = _nodes(pairs, failed, gpus)
    for one in nodes:
        open_ &= (first // gpus != one.nodes[0]) & (second // gpus != one.nodes[0])
    guilty: dict[int, tuple[int, int]] = {}
    while True:
        counts = np.bincount(np.concatenate([first[open_], second[open_]]), minlength=ranks)
        fitting = (counts >= 2) & (counts >= least * tested)
        if not fitting.any():
            break
        rank = int(np.argmax(np.where(fitting, counts / np.maximum(tested, 1) + counts / counts.max(), 0)))
        hit = open_ & ((first == rank) | (second == rank))
        inside = hit & (first // gpus == second // gpus)
        guilty[rank] = (int(hit.sum()), int(inside.sum()))
        open_ &= ~hit
    return [
        *nodes,
        *_ranks(guilty, tested.tolist(), gpus),
        *_pairs(pairs, failed, first[open_], second[open_], gpus),
    ]


def _nodes(pairs: Pairs, failed: Flags, gpus: int) -> list[Blame]:
    """Return nodes of whose pairs nearly all failed, those inside and those with two others at least."""
    ends = np.stack([pairs.first // gpus, pairs.second // gpus])
    count = int(ends.max()) + 1
    inside = ends[0] == ends[1]
    tested = np.bincount(ends[0], minlength=count) + np.bincount(ends[1][~inside], minlength=count)
    bad = np.bincount(ends[0][failed], minlength=count) + np.bincount(
        ends[1][failed & ~inside], minlength=count
    )
    found = []
    for node in np.flatnonzero((bad >= NEARLY_ALL * tested) & (bad > 0)).tolist():
        mine = failed & ((ends[0] == node) | (ends[1] == node))
        partners = np.unique(ends[:, mine])
        if len(partners) > 2 or (mine & inside).any():
            found.append(Blame(Part.node, (node,), (), int(bad[node]), int(tested[node])))
    return found


def _ranks(guilty: dict[int, tuple[int, int]], tested: list[int], gpus: int) -> list[Blame]:
    found = []
    for node in sorted({rank // gpus for rank in guilty}):
        own = [rank for rank in sorted(guilty) if rank // gpus == node]
        failures = {rank % gpus: guilty[rank] for rank in own}
        total, tests = sum(guilty[rank][0] for rank in own), sum(tested[rank] for rank in own)
        if len(own) == gpus or (gpus > 2 and len(own) >= gpus - 1):
            found.append(Blame(Part.node, (node,), (), total, tests))
            continue
        outside = np.array([gpu for gpu, (_, inside) in failures.items() if not inside], dtype=np.int64)
        for run in runs(outside):
            some = [node * gpus + gpu for gpu in run]
            found.append(
                Blame(Part.nic, (node,), run, sum(guilty[r][0] for r in some), sum(tested[r] for r in some))
            )
        for gpu, (count, inside) in failures.items():
            if inside:
                found.append(Blame(Part.gpu, (node,), (gpu,), count, tested[node * gpus + gpu]))
    return found


def _pairs(pairs: Pairs, failed: Flags, first: np.ndarray, second: np.ndarray, gpus: int) -> list[Blame]:
    found = []
    links: dict[tuple[int, int], list[int]] = {}
    for a, b in zip(first.tolist(), second.tolist(), strict=True):
        if a // gpus == b // gpus:
            found.append(Blame(Part.nvlink, (a // gpus,), (a % gpus, b % gpus), 1, 1))
        else:
            links.setdefault((a // gpus, b // gpus), []).append(a % gpus)
    for ends, rails in links.items():
        whole = len(rails) >= max(1, gpus / 2)
        for run in [()] if whole else runs(np.array(sorted(rails))):
            count = len(rails) if whole else len(run)
            found.append(Blame(Part.link, ends, run, count, gpus if whole else len(run)))
    return found
