"""Which nodes are near each other by what a site says: Slurm's topology, or a published matrix of distances."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components

from contract.errors import UserError

Distances = NDArray[np.int32]

_MOST_NAMES = 1_000_000
"""A list of hosts that stands for more is a mistake, and would fill the memory."""


@dataclass(frozen=True)
class Topology:
    """Distances between nodes in levels: 0 itself, 1 on one switch (or in one block), 2 one level further up, ..."""

    nodes: tuple[str, ...]
    distance: Distances
    source: str
    """What says so: a file, `scontrol show topology`, SLURM_TOPOLOGY_ADDR."""
    switches: Mapping[str, str]
    """The name of each node's own switch or block, where it is known."""

    def groups(self, level: int = 1) -> dict[str, str]:
        """Return for each node the name of its group: those that are no further apart than `level`."""
        count, labels = connected_components(csr_matrix(self.distance <= level), directed=False)
        members: list[list[str]] = [[] for _ in range(count)]
        for name, label in zip(self.nodes, labels.tolist(), strict=True):
            members[label].append(name)
        names = []
        for group in members:
            known = sorted({self.switches[name] for name in group if name in self.switches})
            names.append(known[0] if level == 1 and len(known) == 1 else f"group of {group[0]}")
        return {name: names[label] for name, label in zip(self.nodes, labels.tolist(), strict=True)}

    def of(self, names: Sequence[str]) -> "Topology":
        """Return the part that concerns these nodes, in their order; those it does not know are left out."""
        place = {name: number for number, name in enumerate(self.nodes)}
        kept = [name for name in names if name in place]
        rows = [place[name] for name in kept]
        switches = {name: self.switches[name] for name in kept if name in self.switches}
        return Topology(tuple(kept), self.distance[np.ix_(rows, rows)], self.source, switches)


def parse_scontrol(text: str, source: str = "scontrol show topology") -> Topology:
    """Read what `scontrol show topology` prints with the plugins tree and block; raises UserError."""
    parents: dict[str, str] = {}
    leaves: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{source}, line {number}"
        fields = dict(field.split("=", 1) for field in line.split() if "=" in field)
        if not fields:
            continue
        switch = fields.get("SwitchName") or fields.get("BlockName") or fields.get("AggregatedBlock")
        if switch is None:
            raise UserError(
                f"{where} names neither a switch nor a block ({line.strip()[:60]!r}): is it Slurm's output?"
            )
        if "AggregatedBlock" in fields:
            continue
        leaf = "BlockName" in fields or fields.get("Level") == "0"
        for node in expand_hosts(fields.get("Nodes", ""), where) if leaf else ():
            leaves.setdefault(node, switch)
        for child in expand_hosts(fields.get("Switches", ""), where):
            parents.setdefault(child, switch)
    if not leaves:
        raise UserError(f"{source} tells of no nodes: is a topology plugin (tree or block) set up?")
    paths = {node: (*_above(switch, parents, source), switch) for node, switch in leaves.items()}
    return _from_paths(paths, source)


def parse_address(addresses: Mapping[str, str], patterns: Mapping[str, str]) -> Topology:
    """Read each node's SLURM_TOPOLOGY_ADDR (`s0.s1.n1`) and _PATTERN (`switch.switch.node`); raises UserError."""
    paths: dict[str, tuple[str, ...]] = {}
    for node, address in addresses.items():
        # A node's name may hold dots, a switch's does not.
        depth = (
            patterns.get(node, "node").split(".").index("node")
            if "node" in patterns.get(node, "node")
            else -1
        )
        parts = address.split(".", depth) if depth > 0 else [address]
        if depth < 0 or len(parts) != depth + 1 or not all(parts):
            raise UserError(
                f"SLURM_TOPOLOGY_ADDR={address} of {node} does not fit its pattern {patterns.get(node)}: without it "
                "nodes are compared by their measurement alone"
            )
        paths[node] = tuple(parts[:-1])
    if not paths:
        raise UserError("no node tells its SLURM_TOPOLOGY_ADDR")
    return _from_paths(paths, "SLURM_TOPOLOGY_ADDR")


def read_file(path: Path) -> Topology:
    """Read a site's file; raises UserError with the line.

    Fields are separated by commas, semicolons or space. Either a matrix of whole numbers with the nodes' names in its
    first line (and, if they are there, at the start of each row), or lines `NODE NODE DISTANCE`, or what `scontrol
    show topology` prints. `#` begins a comment.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UserError(f"{path} cannot be read ({reason}): cluster.topology_file names it") from error
    if re.search(r"^\s*(SwitchName|BlockName)=", text, re.MULTILINE):
        return parse_scontrol(text, str(path))
    rows = [
        (number, [field.strip() for field in re.split(r"[,;\t ]\s*", line.partition("#")[0].strip())])
        for number, line in enumerate(text.splitlines(), 1)
        if line.partition("#")[0].strip()
    ]
    if not rows:
        raise UserError(f"{path} holds no distances")
    if len(rows[0][1]) == 3 and rows[0][1][2].isdigit() and not rows[0][1][1].isdigit():
        return _from_list(path, rows)
    return _from_matrix(path, rows)


def expand_hosts(text: str, where: str = "a list of hosts") -> list[str]:
    """Spell out Slurm's short form: `n[1-2,07],login` are n1, n2, n07 and login; raises UserError that says `where`.

    `scontrol show hostnames` does the same on a machine with Slurm; a measurement may be looked at elsewhere.
    """
    if re.fullmatch(r"(?:[^\[\]]|\[[^\[\]]*\])*", text) is None:
        raise UserError(f"{where}: {text[:80]!r} has a bracket without its counterpart")
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        pieces = re.split(r"\[([^\]]*)\]", part.strip())
        choices = [
            [piece] if index % 2 == 0 else list(_ranges(piece, where)) for index, piece in enumerate(pieces)
        ]
        count = int(np.prod([len(choice) for choice in choices], dtype=float))
        if len(names) + count > _MOST_NAMES:
            raise UserError(f"{where}: {part!r} stands for more than a million hosts")
        names += ["".join(chosen) for chosen in itertools.product(*choices)]
    return [name for name in names if name]


def _ranges(text: str, where: str) -> Iterator[str]:
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None:
            raise UserError(f"{where}: {text!r} is no list of numbers")
        low, high = match[1], match[2] or match[1]
        if int(high) - int(low) >= _MOST_NAMES:
            raise UserError(f"{where}: {text!r} stands for more than a million hosts")
        yield from (str(number).zfill(len(low)) for number in range(int(low), int(high) + 1))


def _above(switch: str, parents: Mapping[str, str], source: str) -> tuple[str, ...]:
    path: list[str] = []
    while switch in parents:
        switch = parents[switch]
        if switch in path:
            raise UserError(f"{source}: the switch {switch} is above itself")
        path.insert(0, switch)
    return tuple(path)


def _from_paths(paths: Mapping[str, tuple[str, ...]], source: str) -> Topology:
    """Distance: how many levels up a pair's lowest common switch is; without any, one more than the highest."""
    nodes = tuple(paths)
    depth = np.array([len(path) for path in paths.values()], dtype=np.int32)
    most = int(depth.max())
    common = np.zeros((len(nodes), len(nodes)), dtype=np.int32)
    for level in range(1, most + 1):
        # Switches from the top down to this level, one number each; a node without so many shares none.
        own = [path[:level] if level <= len(path) else (node, "") for node, path in paths.items()]
        numbers: dict[tuple[str, ...], int] = {}
        label = np.array([numbers.setdefault(name, len(numbers)) for name in own])
        common[label[:, None] == label] = level
    distance = np.where(common > 0, np.maximum.outer(depth, depth) - common + 1, most + 1)
    np.fill_diagonal(distance, 0)
    switches = {node: path[-1] for node, path in paths.items() if path}
    return Topology(nodes, distance.astype(np.int32), source, switches)


def _from_list(path: Path, rows: list[tuple[int, list[str]]]) -> Topology:
    known: dict[tuple[str, str], int] = {}
    for number, fields in rows:
        if len(fields) != 3 or not fields[2].isdigit():
            raise UserError(f"{path}, line {number}: a line of this file is NODE NODE DISTANCE")
        known[fields[0], fields[1]] = int(fields[2])
    nodes = tuple(dict.fromkeys(name for pair in known for name in pair))
    place = {name: index for index, name in enumerate(nodes)}
    distance = np.full((len(nodes), len(nodes)), max(known.values()) + 1, dtype=np.int32)
    for (first, second), value in known.items():
        distance[place[first], place[second]] = distance[place[second], place[first]] = value
    np.fill_diagonal(distance, 0)
    return Topology(nodes, distance, str(path), {})


def _from_matrix(path: Path, rows: list[tuple[int, list[str]]]) -> Topology:
    number, header = rows[0]
    if all(field.lstrip("-").isdigit() for field in header):
        raise UserError(
            f"{path}, line {number}: the first line has to name the nodes, in the order of the columns"
        )
    body = rows[1:]
    labelled = bool(body) and not body[0][1][0].lstrip("-").isdigit()
    names = header[1:] if labelled and len(header) == len(body[0][1]) else header
    names = [name for name in names if name]
    if len(set(names)) != len(names):
        raise UserError(f"{path}, line {number} names a node twice")
    if len(body) != len(names):
        raise UserError(f"{path} names {len(names)} nodes in line {number}, but has {len(body)} rows")
    distance = np.zeros((len(names), len(names)), dtype=np.int32)
    for row, (number, fields) in enumerate(body):
        if labelled and fields[0] != names[row]:
            raise UserError(
                f"{path}, line {number} is of {fields[0]}, where {names[row]} is the next by the first line"
            )
        values = fields[1:] if labelled else fields
        if len(values) != len(names) or not all(value.isdigit() for value in values):
            raise UserError(f"{path}, line {number}: {len(names)} distances, whole numbers, belong here")
        distance[row] = [int(value) for value in values]
    crooked = np.argwhere(distance != distance.T)
    if len(crooked):
        first, second = crooked[0].tolist()
        raise UserError(
            f"{path}: the distance from {names[first]} to {names[second]} differs from the way back"
        )
    if distance.diagonal().any():
        raise UserError(f"{path}: a node's distance from itself is not 0")
    return Topology(tuple(names), distance, str(path), {})
