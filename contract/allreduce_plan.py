"""Which all-reduce suits which size on a machine: written by the network test, read by the trainer."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from contract.errors import UserError

FILE = "plan.json"
"""Its name in a run's folder `nccl`."""
FORMAT = 1
FLAT = ("ring", "tree")
"""What the library does by itself over all ranks; which of the two is its own choice."""
HIERARCHICAL = "hierarchical"

Switch = tuple[int, str]
"""From how many bytes on, and which of `FLAT` or `HIERARCHICAL`."""


@dataclass(frozen=True)
class AllReducePlan:
    """The fitted switch points of a machine, by number of nodes."""

    ranks_per_node: int
    switches: Mapping[int, Sequence[Switch]] = field(default_factory=dict)
    """For each number of nodes: ascending, the first from 0 bytes on."""

    def __post_init__(self) -> None:
        if not self.switches:
            raise ValueError("it has no switch points")
        for nodes, points in self.switches.items():
            sizes = [size for size, _ in points]
            known = all(algorithm in (*FLAT, HIERARCHICAL) for _, algorithm in points)
            if nodes < 1 or not sizes or sizes[0] != 0 or sorted(set(sizes)) != sizes or not known:
                raise ValueError(f"its switch points for {nodes} nodes are wrong: {list(points)}")

    def choose(self, nodes: int, size_bytes: int) -> str:
        """Return what to use for a buffer of `size_bytes`, see `switches_for`."""
        return [algorithm for start, algorithm in self.switches_for(nodes) if start <= size_bytes][-1]

    def switches_for(self, nodes: int) -> Sequence[Switch]:
        """Return the switch points of the number of nodes that is nearest, as a ratio, to `nodes`."""
        nearest = min(self.switches, key=lambda known: (abs(math.log(known / nodes)), known))
        return self.switches[nearest]

    def save(self, path: Path) -> None:
        """Write it as JSON, replacing the file as a whole; raises OSError."""
        points = {str(nodes): [list(point) for point in self.switches[nodes]] for nodes in self.switches}
        text = {"format": FORMAT, "ranks_per_node": self.ranks_per_node, "switches": points}
        fresh = path.with_name(f".{path.name}.new")
        fresh.write_text(json.dumps(text, indent=1) + "\n")
        fresh.rename(path)

    @classmethod
    def load(cls, path: Path) -> "AllReducePlan":
        """Read what `save` wrote; raises UserError for anything else."""
        try:
            text = json.loads(path.read_text())
            if text["format"] != FORMAT:
                raise ValueError(f"its format {text['format']} is not {FORMAT}")
            switches = {
                int(nodes): tuple((int(size), str(algorithm)) for size, algorithm in points)
                for nodes, points in text["switches"].items()
            }
            return cls(int(text["ranks_per_node"]), switches)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror})") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path} is no plan of `trierarch nccl test` ({error}): run that again, or give another comm.plan"
            ) from error
