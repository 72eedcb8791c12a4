"""How far the values of two tensors are apart."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.ckpt.dtypes import BITS, Bits, is_floating
from tools.ckpt.values import Doubles, Scratch, distances, has_sign, real, signed_distances, widened

_CHUNK = 64 << 10
"""Elements at once: what is made of them stays near a core, and threads seldom wait for each other to start on more."""
_BLOCK = 2048
_SMALLEST = 5e-324


@dataclass(frozen=True)
class Tolerance:
    """What counts as equal: a difference within either of the two."""

    absolute: float = 0.0
    relative: float = 0.0
    """Of the larger magnitude of the two values."""

    @property
    def given(self) -> bool:
        """Whether anything but the same value is let pass."""
        return self.absolute > 0 or self.relative > 0


EXACT = Tolerance()


@dataclass
class Tally:
    """Differences of two tensors, or of two groups of tensors, element by element.

    Elements of which one is NaN or infinite, and that are not the same, are changed and beyond any tolerance. They
    are counted, and kept out of sums and maxima; so are those that are the same. A complex element counts as two.
    """

    elements: int = 0
    compared: int = 0
    """Finite in both."""
    changed: int = 0
    beyond: int = 0
    """Differ by more than the tolerance."""
    nan: int = 0
    """Changed elements of which one is NaN, or both with other bits."""
    infinite: int = 0
    """Changed elements of which one is infinite, and none NaN."""
    absolute_max: float = 0.0
    absolute_sum: float = 0.0
    relative_max: float = 0.0
    """|a - b| / max(|a|, |b|); 0 where both are 0."""
    relative_sum: float = 0.0
    ulp_max: int | None = None
    """Values of the type from one to the other; None across types."""
    ulp_sum: float = 0.0
    squares_a: float = 0.0
    squares_b: float = 0.0
    products: float = 0.0
    squares_of_differences: float = 0.0

    def merge(self, other: "Tally") -> None:
        """Add what was found elsewhere."""
        for name in ("absolute_max", "relative_max"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        if other.ulp_max is not None:
            self.ulp_max = max(self.ulp_max or 0, other.ulp_max)
        for name in ("elements", "compared", "changed", "beyond", "nan", "infinite"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("absolute_sum", "relative_sum", "ulp_sum", "squares_a", "squares_b"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("products", "squares_of_differences"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def changed_fraction(self) -> float:
        """Of all elements."""
        return self.changed / self.elements if self.elements else 0.0

    @property
    def relative_norm(self) -> float:
        """||a - b|| / ||a||; infinite where a is all zeros, or values are not finite in one only, or too large."""
        if self.nan or self.infinite:
            return math.inf
        if self.squares_of_differences == 0:
            return 0.0
        ratio = self.squares_of_differences / self.squares_a if self.squares_a else math.inf
        return math.sqrt(ratio) if math.isfinite(ratio) else math.inf

    @property
    def cosine(self) -> float | None:
        """Of the angle between the two; None where one is all zeros."""
        scale = math.sqrt(self.squares_a) * math.sqrt(self.squares_b)
        return max(-1.0, min(1.0, self.products / scale)) if 0 < scale < math.inf else None

    def facts(self) -> dict[str, Any]:
        """For JSON; what is infinite is null there."""
        found = {
            "elements": self.elements,
            "changed": self.changed,
            "changed_fraction": self.changed_fraction,
            "beyond_tolerance": self.beyond,
            "nan": self.nan,
            "infinite": self.infinite,
            "max_absolute": self.absolute_max,
            "mean_absolute": self._mean(self.absolute_sum),
            "max_relative": self.relative_max,
            "mean_relative": self._mean(self.relative_sum),
            "max_ulp": self.ulp_max,
            "mean_ulp": None if self.ulp_max is None else self._mean(self.ulp_sum),
            "norm_a": math.sqrt(self.squares_a),
            "norm_b": math.sqrt(self.squares_b),
            "norm_of_difference": math.sqrt(self.squares_of_differences),
            "relative_norm": self.relative_norm,
            "cosine": self.cosine,
        }
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in found.items()
        }

    def _mean(self, total: float) -> float:
        return total / self.compared if self.compared else 0.0


@dataclass
class Meter:
    """Compares a tensor with one of the same shape, part by part, into `tally`.

    Their types may differ; either both are complex, or none is.
    """

    dtype_a: str
    dtype_b: str
    tolerance: Tolerance
    tally: Tally
    _scratch: Scratch = field(default_factory=lambda: Scratch(_CHUNK))

    def add(self, a: Bits, b: Bits) -> None:
        """Compare the next elements of both."""
        a, b = a.view(BITS[real(self.dtype_a)]), b.view(BITS[real(self.dtype_b)])
        with np.errstate(all="ignore"):  # sums of float64 may overflow; then a norm is infinite
            for low in range(0, a.size, _CHUNK):
                self._chunk(a[low : low + _CHUNK], b[low : low + _CHUNK])

    def _chunk(self, a: Bits, b: Bits) -> None:
        scratch, tally = self._scratch, self.tally
        x = widened(real(self.dtype_a), a, scratch.doubles[0, : a.size], scratch)
        y = widened(real(self.dtype_b), b, scratch.doubles[1, : b.size], scratch)
        tally.elements += a.size
        squares_a, squares_b = _dot(x, x), _dot(y, y)
        if not math.isfinite(squares_a + squares_b):
            finite = self._count_not_finite(a, b, x, y)
            a, b, x, y = a[finite], b[finite], x[finite], y[finite]
            squares_a, squares_b = _dot(x, x), _dot(y, y)
        if x.size == 0:
            return
        tally.compared += x.size
        tally.squares_a += squares_a
        tally.squares_b += squares_b
        if self.dtype_a == self.dtype_b and _same(a, b):
            tally.products += squares_a
            tally.ulp_max = tally.ulp_max or 0
            return
        tally.products += _dot(x, y)
        apart = np.subtract(x, y, out=scratch.doubles[2, : x.size])
        dtype = real(self.dtype_a)
        if self.dtype_a != self.dtype_b:
            self._values(x, y, apart, None, None)
        elif has_sign(dtype):
            steps, larger = signed_distances(a, b, scratch)
            self._values(x, y, apart, steps, larger.view(a.dtype))
        else:
            steps = distances(dtype, a, b, scratch)
            if not is_floating(dtype):
                apart[...] = steps  # float64 cannot tell large integers apart
            self._values(x, y, apart, steps, None)

    def _count_not_finite(self, a: Bits, b: Bits, x: Doubles, y: Doubles) -> NDArray[np.bool_]:
        """Count changes to, from and among NaN and infinities; return where both values are finite."""
        either = np.isnan(x) | np.isnan(y)
        if self.dtype_a == self.dtype_b:
            same = a.view(f"uint{a.itemsize * 8}") == b.view(f"uint{b.itemsize * 8}")
        else:
            same = (x == y) | (np.isnan(x) & np.isnan(y))
        finite = np.isfinite(x) & np.isfinite(y)
        nan, infinite = np.count_nonzero(either & ~same), np.count_nonzero(~finite & ~either & ~same)
        self.tally.nan += int(nan)
        self.tally.infinite += int(infinite)
        self.tally.changed += int(nan + infinite)
        self.tally.beyond += int(nan + infinite)
        return finite

    def _values(
        self, x: Doubles, y: Doubles, apart: Doubles, steps: Bits | None, larger: Bits | None
    ) -> None:
        """Compare finite values; overwrites them. `apart`: their differences.

        `steps` from one to the other, and the `larger` magnitudes: where they are known.
        """
        tally = self.tally
        tally.squares_of_differences += _dot(apart, apart)
        np.abs(apart, out=apart)
        if larger is not None:
            most = widened(real(self.dtype_a), larger, x, self._scratch)
        else:
            most = np.maximum(np.abs(x, out=x), np.abs(y, out=y), out=x)
        relative = np.divide(apart, most, out=y)
        relative_max = float(relative.max())
        if math.isnan(relative_max):  # both are 0 somewhere
            np.divide(apart, np.maximum(most, _SMALLEST, out=most), out=relative)
            relative_max = float(relative.max())
        absolute_max = float(apart.max())
        if steps is None:
            changed = int(np.count_nonzero(np.not_equal(apart, 0, out=self._scratch.flags[: x.size])))
        else:
            changed = int(np.count_nonzero(steps))
            tally.ulp_max = max(tally.ulp_max or 0, int(steps.max()))
            wide = np.uint64 if steps.itemsize < 8 else np.float64
            tally.ulp_sum += float(np.add.reduce(steps, dtype=wide))
        tally.changed += changed
        tally.beyond += self._beyond(apart, relative, changed, absolute_max, relative_max)
        tally.absolute_max = max(tally.absolute_max, absolute_max)
        tally.relative_max = max(tally.relative_max, relative_max)
        tally.absolute_sum += float(apart.sum())
        tally.relative_sum += float(relative.sum())

    def _beyond(
        self, apart: Doubles, relative: Doubles, changed: int, absolute_max: float, relative_max: float
    ) -> int:
        limits = self.tolerance
        if not limits.given:
            return changed
        if absolute_max <= limits.absolute or relative_max <= limits.relative:
            return 0
        return int(np.count_nonzero((apart > limits.absolute) & (relative > limits.relative)))


def _same(a: Bits, b: Bits) -> bool:
    first = slice(0, 64)  # most chunks that differ do so here
    bits = f"uint{a.itemsize * 8}"
    a, b = a.view(bits), b.view(bits)
    return bool((a[first] == b[first]).all() and (a == b).all())


def _dot(x: Doubles, y: Doubles) -> float:
    """Sum products on this thread.

    BLAS would start others for a long one, which compete with those that compare; it has no rivals for short ones.
    """
    whole = x.size // _BLOCK * _BLOCK
    blocks = np.matmul(x[:whole].reshape(-1, 1, _BLOCK), y[:whole].reshape(-1, _BLOCK, 1))
    return float(blocks.sum() + np.dot(x[whole:], y[whole:]))
