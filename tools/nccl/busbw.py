"""Bus bandwidth as nccl-tests define it: comparable with the hardware's, whatever the number of ranks.

Source: NVIDIA, nccl-tests, doc/PERFORMANCE.md.
"""

from collections.abc import Callable
from fractions import Fraction

FACTORS: dict[str, Callable[[int], Fraction]] = {
    "all_reduce": lambda ranks: Fraction(2 * (ranks - 1), ranks),
    "all_gather": lambda ranks: Fraction(ranks - 1, ranks),
    "reduce_scatter": lambda ranks: Fraction(ranks - 1, ranks),
    "all_to_all": lambda ranks: Fraction(ranks - 1, ranks),
    "broadcast": lambda ranks: Fraction(1),
    "reduce": lambda ranks: Fraction(1),
    "sendrecv": lambda ranks: Fraction(1),
}
"""busbw / algbw of each operation, by the number of ranks."""


def busbw(operation: str, ranks: int, size_bytes: int, time_s: float) -> float:
    """Return the bus bandwidth in bytes a second; 0 for a single rank, which uses no bus."""
    if ranks < 2 or time_s <= 0:
        return 0.0
    return float(FACTORS[operation](ranks)) * size_bytes / time_s
