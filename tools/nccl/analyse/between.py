"""Exchanges between nodes: what is slow there (or late), a node, a NIC, a rail, a switch or a link."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tools.nccl.analyse.blame import blame
from tools.nccl.analyse.classes import against_class, crowding
from tools.nccl.analyse.pairs import Flags, Pairs
from tools.nccl.analyse.robust import Indices, by_group, median, row_medians, runs, sigma
from tools.nccl.analyse.rows import SIGMAS, Rows, Table, low_rows
from tools.nccl.findings import Part
from tools.nccl.measurement import Floats

TYPICAL = 0.75
"""Quantile that stands for a class or a node's rails: parts that are slow, even most of them, do not move it."""
TAIL, FEW_LINKS = 0.02, 2.5
"""Share of a class's pairs, or number of its links, that single bad links do not exceed."""
FEW_NODES = 3
"""So few nodes have so few pairs that a single disturbed test looks like a bad part: the median of all tests counts."""
MOST = 0.6
"""Share of a part's near pairs that are low when it is the part and not they."""


@dataclass(frozen=True)
class Limits:
    """What is too small to matter, however sure (logarithms)."""

    row: float
    """Of a node, a NIC, a rail, a switch."""
    link: float
    """Of a single pair."""


SPEED = Limits(row=-np.log(0.95), link=-np.log(0.88))
LATENCY = Limits(row=np.log(1.5), link=np.log(2.0))


@dataclass(frozen=True)
class Low:
    """Something that is worse than its peers."""

    nodes: tuple[int, ...]
    rails: tuple[int, ...]
    """Empty: all of them."""
    effect: float
    """Logarithm of its share of what is usual."""
    deviations: float
    """The same in sigmas of a healthy one."""
    tests: int = 0
    pairs: tuple[int, ...] = ()
    """Lines of the pairs concerned, for links."""


@dataclass
class Between:
    """What was found, and the figures that it rests on."""

    far: Flags
    """Of each pair: between groups (all, where there are no groups)."""
    relative: Floats
    """Of each pair: logarithm of its share of what is usual for its class and rail."""
    residual: Floats
    """The same after what its ends explain."""
    nodes: list[Low] = field(default_factory=list)
    switches: list[Low] = field(default_factory=list)
    rails: list[Low] = field(default_factory=list)
    nics: list[Low] = field(default_factory=list)
    links: list[Low] = field(default_factory=list)


def fit(
    pairs: Pairs,
    figure: Floats,
    again: Floats,
    nodes: int,
    gpus: int,
    levels: Sequence[Indices],
    limits: Limits,
) -> Between:
    """Attribute what is low.

    figure: logarithm for each pair, more is better, all in like conditions: what parts are judged by. again: the same
    with later tests, of that pair nearly alone: what a link is judged by as well. levels: groups of nodes.

    The model is additive in logarithms, with the worse of two ends counting: class of the pair + rail + what is shared
    by a group + min(node + NIC of one end, of the other) + the pair's own.
    """
    first, second = pairs.first // gpus, pairs.second // gpus
    # At how many levels of grouping a pair's ends are apart.
    apart = sum((labels[first] != labels[second] for labels in levels), np.zeros(len(pairs), dtype=np.int64))
    far = apart > 0 if levels else np.ones(len(pairs), dtype=bool)
    if nodes <= FEW_NODES:
        figure = again
    found = Between(far, figure, figure)
    if not np.isfinite(figure).any():
        return found
    relative = against_class(figure, first, second, apart, levels)
    rail = pairs.first % gpus
    same_rails = figure - _rails(found, pairs, relative, nodes, gpus, limits)[rail]
    relative = against_class(same_rails, first, second, apart, levels)
    found.relative = relative
    least = limits.row + crowding(levels, nodes, relative, first, second)
    by_switch = np.zeros(len(pairs))
    for labels in reversed(levels):
        by_switch += _groups(found, relative - by_switch, first, second, labels, least)
    by_node = _nodes(found, relative - by_switch, first, second, nodes, least)
    by_rank = _nics(found, pairs, relative - by_switch, by_node, nodes, gpus, least)
    found.residual = _unexplained(pairs, figure, relative, by_rank) - by_switch
    for one in np.unique(apart):
        found.residual[apart == one] -= median(found.residual[apart == one])
    key = first * nodes + second
    first_tests = found.residual
    found.residual = np.fmax(first_tests, first_tests + again - figure)
    _near_ends(found, pairs, _sigmas(first_tests, apart), nodes, gpus, limits)
    _links(found, pairs, _reach_of_links(first_tests, key, apart), nodes, gpus, limits)
    return found


def _sigmas(residual: Floats, apart: Indices) -> Floats:
    """Return for each pair the sigma of its class."""
    spread = np.zeros(len(residual))
    for one in np.unique(apart):
        spread[apart == one] = sigma(residual[apart == one])
    return spread


def _reach_of_links(residual: Floats, key: Indices, apart: Indices) -> Floats:
    """Return for each pair the sigma of its class, larger where the class has many low pairs: that is how it is built.

    Where links are shared by chance, speeds have two humps: what a few percent of the pairs have is no fault of theirs.
    """
    spread = _sigmas(residual, apart)
    for one in np.unique(apart):
        mine = residual[apart == one]
        usual = max(TAIL, FEW_LINKS / len(np.unique(key[apart == one])))
        finite = mine[np.isfinite(mine)]
        tail = -float(np.quantile(finite, min(0.5, usual))) if len(finite) else 0.0
        spread[apart == one] = np.maximum(spread[apart == one], 2 * tail / SIGMAS)
    return spread


def _unexplained(pairs: Pairs, figure: Floats, relative: Floats, by_rank: Floats) -> Floats:
    """Return what is left of each pair when the worse of its ends is taken off.

    A slow end is a limit of its own: a pair that should be quick (in a group) lacks more by it than one that is slow
    anyway. Hence of its usual share and its usual figure the one that explains more counts.
    """
    low = np.flatnonzero(by_rank < 0)
    limit = np.full(len(by_rank), np.inf)
    touched = (by_rank[pairs.first] < 0) | (by_rank[pairs.second] < 0)
    if len(low):
        ends = Table.of(pairs.first[touched], pairs.second[touched], len(by_rank))
        limit[low] = row_medians(ends.values(figure[touched])[low])
    usual = figure - relative
    ceiling = np.minimum(limit[pairs.first], limit[pairs.second]) - usual
    share = np.minimum(by_rank[pairs.first], by_rank[pairs.second])
    return relative - np.where(touched, np.minimum(share, ceiling), share)


def _groups(
    found: Between, relative: Floats, first: Indices, second: Indices, labels: Indices, least: Floats
) -> Floats:
    """Find groups that all others reach badly, through what the group shares; return what that takes off each pair."""
    off = np.zeros(len(relative))
    count = int(labels.max()) + 1
    far = labels[first] != labels[second]
    if count < 3 or not far.any():
        return off
    table = Table.of(labels[first[far]], labels[second[far]], count)
    rows = low_rows(table, relative[far], by_group(least, labels, count))
    sizes = np.bincount(labels, minlength=count)
    for group in np.flatnonzero(rows.low & (sizes > 1)):
        members = np.flatnonzero(labels == group)
        inner = median(relative[~far & (labels[first] == group)])
        mine = far & ((labels[first] == group) | (labels[second] == group))
        node = np.where(labels[first] == group, first, second)[mine]
        each = by_group(relative[mine], node, len(labels))[members]
        effect = float(rows.effect[group])
        if inner < 0.5 * effect or (each > 0.5 * effect).mean() > 0.1 or np.nanmin(each) < 2.5 * effect:
            continue
        sure = -effect / max(rows.sigma, 1e-6)
        found.switches.append(Low(tuple(members.tolist()), (), effect, sure))
        off[mine] = np.minimum(off[mine], effect)
    return off


def _rails(found: Between, pairs: Pairs, relative: Floats, nodes: int, gpus: int, limits: Limits) -> Floats:
    """Find slow rails; return each rail's effect. The better half of the rails is what is usual."""
    rail = pairs.first % gpus
    # With few nodes one bad node is in half of the pairs.
    effect = by_group(relative, rail, gpus, 0.5 if nodes > 4 else TYPICAL)
    measured = np.isfinite(effect)
    usual = np.sort(effect[measured])[::-1][(int(measured.sum()) - 1) // 2]
    counts = np.maximum(np.bincount(rail, minlength=gpus), 1)
    spread = sigma(relative - effect[rail])
    least = limits.row if nodes > 2 else limits.link
    reach = np.maximum(least, SIGMAS * 1.5 * spread / np.sqrt(np.minimum(counts, nodes)))
    low = measured & (effect - usual < -reach)
    for run in runs(np.flatnonzero(low)):
        share = float(np.mean(effect[list(run)] - usual))
        tests = int(pairs.tests[np.isin(rail, run)].min())
        found.rails.append(Low((), run, share, SIGMAS * -share / float(reach[run[0]]), tests))
    return np.where(measured, effect, 0.0)


def _nodes(
    found: Between, relative: Floats, first: Indices, second: Indices, nodes: int, least: Floats
) -> Floats:
    """Find slow nodes and switches; return each node's effect where it is low, else 0."""
    keys, which = np.unique(first * nodes + second, return_inverse=True)
    best = by_group(relative, which, len(keys), TYPICAL)
    ends = keys // nodes, keys % nodes
    rows = low_rows(Table.of(*ends, nodes), best - median(best), least)
    low = np.flatnonzero(rows.low)
    for group in _together(low, rows, ends, best - median(best)):
        share = float(np.median(rows.effect[group]))
        list_of = found.nodes if len(group) == 1 else found.switches
        list_of.append(Low(tuple(group), (), share, -share / max(rows.sigma, 1e-6)))
    return np.where(rows.low, rows.effect, 0.0)


def _together(low: Indices, rows: Rows, ends: tuple[Indices, Indices], best: Floats) -> list[list[int]]:
    """Bring low nodes together that are well with each other: what they share is at fault, not each of them."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    if len(low) < 2:
        return [[int(node)] for node in low]
    place = np.full(len(rows.low), -1)
    place[low] = np.arange(len(low))
    a, b = place[ends[0]], place[ends[1]]
    among = (a >= 0) & (b >= 0) & np.isfinite(best)
    well = among & (best > 0.5 * np.maximum(rows.effect[ends[0]], rows.effect[ends[1]]))
    graph = coo_array((np.ones(int(well.sum())), (a[well], b[well])), shape=(len(low), len(low)))
    count, label = connected_components(graph, directed=False)
    found = []
    for one in range(count):
        members = low[label == one]
        inside = among & np.isin(ends[0], members) & np.isin(ends[1], members)
        if len(members) > 1 and well[inside].mean() < 0.7:
            found += [[int(node)] for node in members]
        else:
            found.append(_completed(members, rows))
    return found


def _completed(members: Indices, rows: Rows) -> list[int]:
    """Add nodes to several that share a fault: those that are nearly as low, but not surely so by themselves."""
    if len(members) == 1:
        return [int(members[0])]
    alike = rows.effect < 0.6 * np.median(rows.effect[members])
    alike[rows.low] = False
    alike[members] = True
    return [int(node) for node in np.flatnonzero(alike)]


def _nics(
    found: Between, pairs: Pairs, relative: Floats, of_node: Floats, nodes: int, gpus: int, least: Floats
) -> Floats:
    """Find slow NICs; return each rank's effect, with its node's."""
    ends = pairs.first // gpus, pairs.second // gpus
    explained = np.repeat(of_node, gpus)
    if gpus == 1:
        return explained
    rest = relative - np.minimum(of_node[ends[0]], of_node[ends[1]])
    rows = low_rows(Table.of(pairs.first, pairs.second, nodes * gpus), rest, np.repeat(least, gpus))
    low = rows.low.reshape(nodes, gpus)
    effect = np.nan_to_num(rows.effect).reshape(nodes, gpus)
    often = low.sum(axis=0)
    for rail in np.flatnonzero((often >= 3) & (often >= 3 * (often.sum() - often) / max(1, gpus - 1))):
        members = np.flatnonzero(low[:, rail])
        share = float(np.median(effect[members, rail]))
        found.switches.append(
            Low(tuple(members.tolist()), (int(rail),), share, -share / max(rows.sigma, 1e-6))
        )
        low[:, rail] = False
    for node in np.flatnonzero(low.any(axis=1)):
        for run in runs(np.flatnonzero(low[node])):
            of_all = len(run) == gpus
            share = float(np.mean(effect[node, list(run)]))
            parts = found.nodes if of_all else found.nics
            parts.append(Low((int(node),), () if of_all else run, share, -share / max(rows.sigma, 1e-6)))
    return np.asarray(explained + np.where(rows.low, rows.effect, 0.0))


def _links(found: Between, pairs: Pairs, spread: Floats, nodes: int, gpus: int, limits: Limits) -> None:
    """Find pairs that are low though their ends are not: of nodes when at least half of the rails are, else by rail."""
    low = np.flatnonzero(found.residual < -np.maximum(limits.link, SIGMAS * spread))
    if not len(low):
        return
    keys = (pairs.first // gpus) * nodes + pairs.second // gpus
    per_pair: dict[int, list[int]] = {}
    for line in low.tolist():
        per_pair.setdefault(int(keys[line]), []).append(line)
    for key, lines in per_pair.items():
        ends = (key // nodes, key % nodes)
        rails = np.unique(pairs.first[lines] % gpus)
        whole = len(lines) >= max(1, gpus / 2)
        for run in [()] if whole else runs(rails):
            chosen = lines if whole else [line for line in lines if pairs.first[line] % gpus in run]
            share = float(np.median(found.residual[chosen]))
            sure = -share / max(float(spread[chosen[0]]), 1e-6)
            tests = int(pairs.tests[chosen].max())
            found.links.append(Low(ends, run, share, sure, tests, tuple(chosen)))


def _near_ends(found: Between, pairs: Pairs, spread: Floats, nodes: int, gpus: int, limits: Limits) -> None:
    """Find parts that are slow among their neighbours only, where the fabric blocks what is far; take that off."""
    near = ~found.far
    failed = near & (found.residual < -np.maximum(limits.link, SIGMAS * spread))
    if not failed.any():
        return
    for one in blame(pairs.take(near), failed[near], MOST, gpus):
        if one.part is Part.link:
            continue
        ranks = [one.nodes[0] * gpus + number for number in one.gpus or range(gpus)]
        mine = failed & (np.isin(pairs.first, ranks) | np.isin(pairs.second, ranks))
        share = float(np.median(found.residual[mine]))
        parts = found.nodes if one.part is Part.node else found.nics
        parts.append(Low(one.nodes, one.gpus, share, -share / max(float(spread[mine][0]), 1e-6)))
        found.residual[mine] -= share
