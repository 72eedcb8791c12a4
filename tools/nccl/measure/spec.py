"""What is to be measured, as whoever starts the ranks writes it down for them. Imports no torch."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from contract.errors import ConfigError, UserError, closest

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "sendrecv")
DTYPES = ("float32", "bfloat16", "float16")
SMALLEST_BYTES = 1 << 10
LARGEST_BYTES = {"nccl": 8 << 30, "gloo": 64 << 20}
EXCHANGE_BYTES = {"nccl": 64 << 20, "gloo": 4 << 20}
GROWTH = 4
"""From one size to the next."""
RENEW_ROUNDS = {"nccl": 64, "gloo": 0}


@dataclass(frozen=True)
class Spec:
    """One measurement. All paths are on a file system that every node sees."""

    folder: str
    """Where results, progress and the notes about waiting go; made if it is missing."""
    nodes: list[str] = field(default_factory=list)
    """Names in the order of the nodes' numbers; empty: their host names."""
    silent: dict[str, str] = field(default_factory=dict)
    """Nodes that were left out before, and why; they are passed on into the measurement."""
    budget_s: float = 300.0
    """For everything after the start: what does not fit is left out, and the measurement says what."""
    operations: list[str] = field(default_factory=lambda: list(OPERATIONS))
    """Collective operations; empty for none."""
    sizes: list[int] = field(default_factory=list)
    """Bytes, ascending; empty: from 1 KB in steps of 4 to what backend and memory allow."""
    repetitions: int = 100
    """Of an operation at one size, at most."""
    dtype: str = "float32"
    exchanges: bool = True
    """Whether pairs of ranks are measured."""
    exchange_bytes: int | None = None
    """A message of which the bandwidth is measured; None: 64 MB with NCCL, 4 MB with gloo."""
    skip: list[list[int]] = field(default_factory=list)
    """Pairs of ranks that are known to get no answer: noted so, and not tried."""
    resume: bool = True
    """Keep what an earlier start in this folder has measured between the same nodes, and do not try what it hung in."""
    baseline: str | None = None
    """An earlier measurement of this machine, for the report to compare with."""
    seed: int = 0
    start_timeout_s: float = 120.0
    round_timeout_s: float = 30.0
    """How long one exchange, and one repetition of an operation beyond the time expected, may take."""
    pair_s: float = 0.5
    """How long the repetitions of one pair's message take together, about."""
    roll_call_s: float = 5.0
    """How long ranks that got no answer wait for each other's notes, to tell who is missing."""
    renew_rounds: int | None = None
    """After so many rounds connections between pairs are given up, for NCCL keeps buffers for each; 0: never;
    None: 64 with NCCL, never with gloo."""

    def __post_init__(self) -> None:
        for name in self.operations:
            if name not in OPERATIONS:
                raise ConfigError(f"operations: {name} is unknown, {closest(name, OPERATIONS)}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype: {self.dtype} is unknown, {closest(self.dtype, DTYPES)}")
        for name in (
            "budget_s",
            "repetitions",
            "start_timeout_s",
            "round_timeout_s",
            "pair_s",
            "roll_call_s",
        ):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be more than 0")
        if any(size < 1 for size in self.sizes) or sorted(set(self.sizes)) != self.sizes:
            raise ConfigError(f"sizes={self.sizes} must be numbers of bytes in ascending order")

    @classmethod
    def read(cls, path: Path) -> "Spec":
        """Read a JSON file; raises UserError when it is none, and ConfigError for a wrong key or value."""
        try:
            values = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"{path} holds no measurement to make ({error}): give a JSON object") from error
        return cls.of(values, str(path))

    @classmethod
    def of(cls, values: dict[str, Any], where: str) -> "Spec":
        """Take the fields from a dictionary; `where` they come from is for error sentences."""
        known = [one.name for one in fields(cls)]
        for name in values:
            if name not in known:
                raise ConfigError(f"{where}: {name} is unknown, {closest(name, known)}")
        if "folder" not in values:
            raise ConfigError(f"{where}: folder is missing")
        return cls(**values)

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    def message_bytes(self, backend: str) -> int:
        """Size of a message whose bandwidth is measured between two ranks."""
        return EXCHANGE_BYTES[backend] if self.exchange_bytes is None else self.exchange_bytes

    def rounds_between_renewals(self, backend: str) -> int:
        """0 for never."""
        return RENEW_ROUNDS[backend] if self.renew_rounds is None else self.renew_rounds

    def all_sizes(self, backend: str, memory_bytes: int) -> list[int]:
        """Sizes of collective operations, where a rank has so much memory for buffers."""
        # The largest needs two buffers, and checking them a little.
        largest = min(LARGEST_BYTES[backend], memory_bytes // 3)
        if self.sizes:
            return [size for size in self.sizes if size <= memory_bytes // 3]
        sizes = [SMALLEST_BYTES]
        while sizes[-1] * GROWTH <= largest:
            sizes.append(sizes[-1] * GROWTH)
        return sizes
