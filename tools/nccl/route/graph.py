"""The measured matrix as a graph: where going over another node beats the direct way.

A matrix describes ends, not cables: with adaptive routing a pair has no fixed path, and a relay here is a node that
would receive and send on, which costs it as much of its own bandwidth.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import dijkstra

from tools.nccl.measurement import Floats
from tools.nccl.route.spanning import spanning_tree

MARGIN = 0.2
"""A relay is worth naming when it saves at least this share of the direct time."""
MOST = 1000
"""Relays returned at most, those that save most."""


@dataclass(frozen=True)
class Relay:
    """A way over other nodes that is quicker than the direct one."""

    first: int
    second: int
    via: tuple[int, ...]
    """In the order in which they are passed."""
    direct_s: float
    """Infinite where there is no direct way."""
    relayed_s: float


@dataclass(frozen=True)
class Paths:
    """Shortest paths between all nodes, or from some."""

    sources: tuple[int, ...]
    seconds: Floats
    """A row for each source; infinite where there is no path."""
    before: NDArray[np.int32]
    """The node before the last one, negative where there is none; rows as in `seconds`."""

    def via(self, first: int, second: int) -> tuple[int, ...]:
        """Return the nodes between two, none for a direct way; `first` is one of `sources`."""
        row = self.before[self.sources.index(first)]
        path: list[int] = []
        node = int(row[second])
        while node not in (first, -9999):
            path.append(node)
            node = int(row[node])
        return tuple(reversed(path))


def shortest_paths(times: Floats, sources: tuple[int, ...] | None = None) -> Paths:
    """Return the shortest paths by Dijkstra's algorithm (1959), from all nodes unless some are named.

    times[i][j]: positive seconds from i to j; NaN or infinite where there is no edge.
    """
    chosen = tuple(range(len(times))) if sources is None else sources
    edges = np.isfinite(times)
    np.fill_diagonal(edges, False)
    first, second = np.nonzero(edges)
    graph = csr_matrix((times[first, second], (first, second)), shape=times.shape)
    seconds, before = dijkstra(graph, indices=list(chosen), return_predecessors=True)
    return Paths(chosen, seconds, before)


def relays(times: Floats, *, margin: float = MARGIN, most: int = MOST) -> list[Relay]:
    """Return the pairs that are quicker over other nodes, each of which receives all before it sends on.

    times[i][j]: seconds that a message takes from i to j, such as a latency, or latency + size / bandwidth; infinite:
    no way; NaN: not measured, and then nothing is said of the pair. The relays that save most come first.
    """
    nodes = len(times)
    if nodes < 3:
        return []
    away = np.where(np.isfinite(times), times, np.inf)
    np.fill_diagonal(away, np.inf)
    # No way over others takes less than the quickest edge out and the quickest edge in.
    least = away.min(axis=1)[:, None] + away.min(axis=0)
    doubtful = (least <= (1 - margin) * times) & ~np.eye(nodes, dtype=bool)
    sources = tuple(np.flatnonzero(doubtful.any(axis=1)).tolist())
    if not sources:
        return []
    paths = shortest_paths(times, sources)
    rows = np.array(sources)
    direct = times[rows]
    better = doubtful[rows] & (paths.seconds <= (1 - margin) * direct) & np.isfinite(paths.seconds)
    row, second = np.nonzero(better)
    saved = paths.seconds[row, second] / direct[row, second]
    found = []
    for index in np.argsort(saved, kind="stable")[:most].tolist():
        first, other = int(rows[row[index]]), int(second[index])
        ends = float(times[first, other]), float(paths.seconds[row[index], other])
        found.append(Relay(first, other, paths.via(first, other), *ends))
    return found


def widest_paths(bandwidth: Floats) -> Floats:
    """Return for each pair the bandwidth of the way whose narrowest edge is widest; symmetric, 0: no way.

    All such ways lie in one spanning tree of the widest edges (Hu, 1961).
    """
    nodes = len(bandwidth)
    widest = np.zeros((nodes, nodes))
    reached = [0]
    for known, new in spanning_tree(_narrowness(bandwidth)).tolist():
        width = float(np.nan_to_num(bandwidth[known, new]))
        to_others = np.minimum(widest[known, reached], width)
        to_others[reached.index(known)] = width
        widest[new, reached] = widest[reached, new] = to_others
        reached.append(new)
    return widest


def wide_relays(
    bandwidth: Floats, size_bytes: float, *, margin: float = MARGIN, most: int = MOST
) -> list[Relay]:
    """Return the pairs between which a large message is quicker over one other node that sends on while it receives.

    bandwidth[i][j]: symmetric, bytes a second; 0: no way; NaN: not measured, and then nothing is said of the pair.
    """
    if len(bandwidth) < 3:
        return []
    doubtful = np.triu(bandwidth <= (1 - margin) * widest_paths(bandwidth), 1)
    known = np.nan_to_num(bandwidth)
    np.fill_diagonal(known, 0.0)
    found = []
    for first, second in np.argwhere(doubtful).tolist():
        over = np.minimum(known[first], known[second])
        middle = int(over.argmax())
        if over[middle] > 0 and known[first, second] <= (1 - margin) * over[middle]:
            with np.errstate(divide="ignore"):
                direct_s, relayed_s = size_bytes / np.array([known[first, second], over[middle]])
            found.append(Relay(first, second, (middle,), float(direct_s), float(relayed_s)))
    return sorted(found, key=lambda relay: relay.relayed_s / relay.direct_s)[:most]


def _narrowness(bandwidth: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(bandwidth > 0, 1 / bandwidth, np.inf)
