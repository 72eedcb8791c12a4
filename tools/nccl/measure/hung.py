"""What nobody is to blame for and yet gave no answer in an earlier start: it is not tried again. Imports no torch."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tools.nccl.measure.waits import HUNG, Wait, read_waits, remove_waits

FILE = "hung.json"


@dataclass
class Hung:
    """Pairs and operations in which all ranks lived and some got no answer."""

    pairs: list[list[str | int]] = field(default_factory=list)
    """[node, gpu, node, gpu] of each."""
    series: dict[str, str] = field(default_factory=dict)
    """Name of an operation (`collectives.Series.name`) -> what to say of it."""

    @classmethod
    def take_up(cls, folder: Path) -> "Hung":
        """Read what earlier starts left behind; the notes of their ranks are then removed."""
        path = folder / FILE
        try:
            found = cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            found = cls()
        for wait in read_waits(folder, HUNG):
            found._learn(wait)
        if found != cls():
            path.write_text(json.dumps(asdict(found)) + "\n")
        remove_waits(folder)
        return found

    def _learn(self, wait: Wait) -> None:
        if wait.kind == "round":
            self.pairs += [[wait.node, wait.gpu, *peer] for peer in wait.peers]
        elif wait.kind == "collective":
            name = wait.what.partition(", ")[0]
            self.series[name] = f"{wait.what}: no answer within {wait.waited_s:.0f} s though all ranks lived"

    def ranks(self, nodes: Sequence[str], gpus_per_node: int) -> set[tuple[int, int]]:
        """Return the pairs as numbers of ranks, those of nodes that are no longer there left out."""
        first = {name: number * gpus_per_node for number, name in enumerate(nodes)}
        found = set()
        for pair in self.pairs:
            one, gpu, other, other_gpu = (str(word) for word in pair)
            if one in first and other in first:
                found.add((first[one] + int(gpu), first[other] + int(other_gpu)))
        return found

    @staticmethod
    def forget(folder: Path) -> None:
        """Remove all that earlier starts left behind."""
        (folder / FILE).unlink(missing_ok=True)
        remove_waits(folder)
