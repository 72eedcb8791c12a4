"""Time by size: the line of latency and bandwidth, and the measured curve."""

from dataclasses import dataclass

import numpy as np

from tools.nccl.measurement import Floats

_FAR = 4.0
"""Sizes this many times below (above) alpha * bandwidth tell alpha (the bandwidth); those between tell of neither, and
there libraries change protocol, so that times jump."""


@dataclass(frozen=True)
class Line:
    """seconds(size) = alpha + size / bandwidth (Hockney, 1994)."""

    alpha_s: float
    bandwidth: float
    """Bytes a second."""

    def seconds(self, size_bytes: float) -> float:
        """Return the time of a message."""
        return self.alpha_s + size_bytes / self.bandwidth


@dataclass(frozen=True)
class Curve:
    """Measured times by size."""

    sizes: Floats
    """Bytes, ascending."""
    times: Floats

    @classmethod
    def of(cls, points: list[tuple[float, float]]) -> "Curve":
        """Take (bytes, seconds) in any order; of a size that was measured several times the median."""
        sizes = sorted({size for size, _ in points})
        times = [float(np.median([time for size, time in points if size == one])) for one in sizes]
        return cls(np.array(sizes, dtype=np.float64), np.array(times))

    def seconds(self, size_bytes: float) -> float:
        """Interpolate between logarithms; a smaller message takes as long as the smallest, a larger one its share."""
        if size_bytes > self.sizes[-1]:
            return float(self.times[-1] * size_bytes / self.sizes[-1])
        size = max(size_bytes, float(self.sizes[0]))
        return float(np.exp(np.interp(np.log(size), np.log(self.sizes), np.log(self.times))))


def fit_line(sizes: Floats, times: Floats) -> Line:
    """Fit latency to small messages and bandwidth to large ones, by medians: all relative, outliers don't count.

    Not one regression over all sizes: between small and large a library changes its protocol, times jump, and a line
    drawn through that fits neither end. Needs one point at least; a bandwidth that no point tells is infinite.
    """
    rank = np.argsort(sizes)
    sizes, times = sizes[rank].astype(np.float64), times[rank]
    alpha, bandwidth = float(times[0]), float("inf")
    for _ in range(20):
        middle = alpha * bandwidth if np.isfinite(bandwidth) else float(sizes[len(sizes) // 2])
        large = (sizes >= _FAR * middle) & (times > alpha)
        if not large.any():
            large = (sizes == sizes[-1]) & (times > alpha)
        before = alpha, bandwidth
        if large.any():
            bandwidth = float(np.median(sizes[large] / (times[large] - alpha)))
        small = sizes <= alpha * bandwidth / _FAR
        rest = times[small] - sizes[small] / bandwidth if small.any() else times[:1] - sizes[:1] / bandwidth
        alpha = max(float(np.median(rest)), 0.0)
        if np.allclose(before, (alpha, bandwidth), rtol=1e-9):
            break
    return Line(alpha, bandwidth)
