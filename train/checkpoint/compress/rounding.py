"""Moments in 8 bits each: rounded to values that a code of 8 bits can name, within a bound that is checked.

Values are rounded in groups of 256 along a slice. The bits of a positive floating-point number, read as an integer,
grow like its logarithm: the magnitudes of a group lie between two such integers, and codes divide what is between them
evenly. Zeros stay zeros and signs stay. A group without negative values, as those of the second moment, has 255 codes
for its magnitudes, any other 127.

The largest relative error of a group is half the distance of two codes: (high - low) / (2 steps) / 2^mantissa bits.
Groups where that is beyond the bound, or which hold what has no logarithm (NaN, infinities, subnormals), stay exact.
What was rounded is named by its codes again, bit for bit and on every machine: only integers and exact or correctly
rounded float64 operations are used.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from train.checkpoint.errors import DamagedError

Bytes = NDArray[np.uint8]
Words = NDArray[Any]
"""Unsigned integers: the bits of bfloat16 or float32."""

GROUP = 256
_AT_ONCE = 128 * GROUP
"""Words in work at a time, so that what is made of them stays in the caches."""
_MANTISSA_BITS = {2: 7, 4: 23}
_STEPS = np.array([254, 126], np.float64)
"""Between the lowest and the highest code, without and with signs."""
_NEGATIVE = 128
"""Set in the code of a negative value."""


_MOMENTS = ("exp_avg", "exp_avg_sq")
_WEIGHTS = "weights"


@dataclass(frozen=True)
class Rounding:
    """What is rounded in a checkpoint, and how far."""

    weights: bool
    """Those in float32 too: to bfloat16."""
    largest_error: float
    """Of a moment, relative."""

    def role(self, tensor: str, dtype: str) -> str | None:
        """Return what a tensor is, by its name in a step and torch's name of its type; None where it is not rounded."""
        kind = tensor.rpartition(".")[2]
        if tensor.startswith("optimizer.") and kind in _MOMENTS and dtype in ("float32", "bfloat16"):
            return kind
        return _WEIGHTS if self.weights and tensor.startswith("model.") and dtype == "float32" else None

    def round(self, role: str, itemsize: int, values: Bytes) -> tuple[Bytes, float]:
        """Round what follows each other in a slice, from a multiple of `GROUP` on; return it and its largest error."""
        words = values.view(f"<u{itemsize}")
        rounded, error = (
            round_weights(words) if role == _WEIGHTS else round_moments(words, self.largest_error)
        )
        assert error <= (2**-8 if role == _WEIGHTS else self.largest_error), f"{role} is off by {error}"
        return rounded.view(np.uint8), error


@dataclass(frozen=True)
class _Groups:
    """Words in rows of `GROUP`, the last filled up with zeros, and how each row is coded."""

    bits: NDArray[np.int64]
    """Magnitudes, without signs."""
    negative: NDArray[np.bool_]
    low: NDArray[np.int64]
    high: NDArray[np.int64]
    signed: NDArray[np.bool_]
    """Of each row: whether it has negative values."""
    coded: NDArray[np.bool_]
    """Of each row: whether it has nothing that has no logarithm."""

    @property
    def steps(self) -> NDArray[np.float64]:
        """Of each row."""
        return _STEPS[self.signed.astype(np.intp)]


def round_moments(words: Words, bound: float) -> tuple[Words, float]:
    """Round the values with these bits; return the new bits and the largest relative error that they have.

    No error is beyond `bound`; groups in which it would be are left as they are.
    """
    new = np.empty_like(words)
    error = 0.0
    for begin in range(0, words.size, _AT_ONCE):
        part = slice(begin, begin + _AT_ONCE)
        new[part] = _rounded(words[part], bound)
        error = max(error, _largest_error(words[part], new[part]))
    return new, error


def _rounded(words: Words, bound: float) -> Words:
    groups = _grouped(words)
    mantissa = _MANTISSA_BITS[words.itemsize]
    # Half the distance of two codes, and half an integer, to which that is rounded.
    largest = ((groups.high - groups.low) / (2 * groups.steps) + 0.5) / (1 << mantissa)
    rows = groups.coded & (largest <= bound)
    rounded = _decode(_codes(groups), groups.low, groups.high, groups.signed, mantissa)
    flat = np.where(rows[:, None], rounded, _with_signs(groups, words.itemsize)).reshape(-1)
    return flat[: words.size].astype(words.dtype)


def round_weights(words: NDArray[np.uint32]) -> tuple[NDArray[np.uint32], float]:
    """Round float32 values to bfloat16, ties to even; return the new bits and the largest relative error.

    That is 2^-8 at most. NaN, infinities, subnormal numbers, and what would become infinite, stay as they are.
    """
    new = np.empty_like(words)
    error = 0.0
    for begin in range(0, words.size, _AT_ONCE):
        part = words[begin : begin + _AT_ONCE]
        # NaN and infinities may overflow: they are left out below.
        nearest = (part + np.uint32(0x7FFF) + ((part >> 16) & 1)) >> 16 << 16
        before, after = (part >> 23) & 0xFF, (nearest >> 23) & 0xFF
        kept = (before == 0) | (before == 0xFF) | (after == 0xFF)
        new[begin : begin + _AT_ONCE] = np.where(kept, part, nearest)
        error = max(error, _largest_error(part, new[begin : begin + _AT_ONCE]))
    return new, error


def code_words(words: Words) -> list[Bytes]:
    """Name rounded words by their codes, any others by themselves: as streams of bytes for `decode_words`."""
    parts = [_coded(words[begin : begin + _AT_ONCE]) for begin in range(0, words.size, _AT_ONCE)]
    codes, low, high, raw = (np.concatenate(one) for one in zip(*parts, strict=True))
    return [codes, *_planes(low), *_planes(high), *_planes(raw)]


def _coded(words: Words) -> tuple[Bytes, Words, Words, Words]:
    """Codes, low and high ends of the rows, and the words of rows that are exact."""
    groups = _grouped(words)
    codes = _codes(groups)
    mantissa = _MANTISSA_BITS[words.itemsize]
    decoded = _decode(codes, groups.low, groups.high, groups.signed, mantissa)
    exact = ~groups.coded | (decoded != _with_signs(groups, words.itemsize)).any(axis=1)
    # A low end beyond the high one says that a row is exact; its sign bit that codes have signs.
    sign = 1 << (8 * words.itemsize - 1)
    low = np.where(exact, 1, groups.low | np.where(groups.signed, sign, 0)).astype(words.dtype)
    high = np.where(exact, 0, groups.high).astype(words.dtype)
    codes[exact] = 0
    return codes.reshape(-1), low, high, _padded(words)[exact].reshape(-1)


def decode_words(streams: list[Bytes], out: Words) -> None:
    """Fill `out` with the words that `code_words` was given; raises `DamagedError` for what it never makes."""
    size = out.itemsize
    rows = -(-out.size // GROUP)
    if len(streams) != 1 + 3 * size or streams[0].size != rows * GROUP:
        raise DamagedError("a block of rounded values has other parts")
    low, high, raw = (
        _from_planes(streams[1 + part * size : 1 + (part + 1) * size], out.dtype) for part in range(3)
    )
    sign = out.dtype.type(1 << (8 * size - 1))
    signed, low = (low & sign) != 0, low & ~sign
    exact = low > high
    if low.size != rows or high.size != rows or raw.size != int(exact.sum()) * GROUP:
        raise DamagedError("a block of rounded values has other parts")
    codes = streams[0].reshape(rows, GROUP)
    wide_low, wide_high = low.astype(np.int64), np.maximum(high, low).astype(np.int64)
    for begin in range(0, rows, _AT_ONCE // GROUP):
        part = slice(begin, begin + _AT_ONCE // GROUP)
        bits = _decode(codes[part], wide_low[part], wide_high[part], signed[part], _MANTISSA_BITS[size])
        target = out[begin * GROUP : begin * GROUP + bits.size]
        target[...] = bits.reshape(-1)[: target.size]
    for row, values in zip(np.flatnonzero(exact), raw.reshape(-1, GROUP), strict=True):
        target = out[row * GROUP : (row + 1) * GROUP]
        target[...] = values[: target.size]


def _padded(words: Words) -> Words:
    rows = -(-words.size // GROUP)
    if rows * GROUP == words.size:
        return words.reshape(rows, GROUP)
    padded = np.zeros(rows * GROUP, words.dtype)
    padded[: words.size] = words
    return padded.reshape(rows, GROUP)


def _grouped(words: Words) -> _Groups:
    mantissa = _MANTISSA_BITS[words.itemsize]
    top = 8 * words.itemsize - 1
    rows = _padded(words)
    negative = (rows >> top) != 0
    bits = (rows & ((1 << top) - 1)).astype(np.int64)
    there = bits != 0
    infinite = np.int64(((1 << (top - mantissa)) - 1) << mantissa)
    high = bits.max(axis=1)
    low = np.minimum(np.where(there, bits, infinite).min(axis=1), high)
    coded = (high < infinite) & ((low >= 1 << mantissa) | (high == 0))
    return _Groups(bits, negative, low, high, (negative & there).any(axis=1), coded)


def _with_signs(groups: _Groups, itemsize: int) -> NDArray[np.int64]:
    return groups.bits | (groups.negative.astype(np.int64) << (8 * itemsize - 1))


def _codes(groups: _Groups) -> Bytes:
    """0 for zeros, from 1 on for magnitudes."""
    distance = np.maximum(groups.high - groups.low, 1).astype(np.float64)
    scale = groups.steps / distance
    steps = np.rint((groups.bits - groups.low[:, None]) * scale[:, None])
    # Rows that cannot be coded get codes too, which nobody uses.
    codes: Bytes = np.clip(steps + 1, 1, groups.steps[:, None] + 1).astype(np.uint8)
    codes |= (groups.negative & groups.signed[:, None]).astype(np.uint8) * np.uint8(_NEGATIVE)
    codes *= groups.bits != 0
    return codes


def _decode(
    codes: Bytes,
    low: NDArray[np.int64],
    high: NDArray[np.int64],
    signed: NDArray[np.bool_],
    mantissa_bits: int,
) -> NDArray[np.int64]:
    """Bits of the values that codes name, one row for each of `low`."""
    top = 31 if mantissa_bits == 23 else 15
    mask = np.where(signed, _NEGATIVE - 1, 255).astype(np.uint8)
    magnitude = codes & mask[:, None]
    steps = _STEPS[signed.astype(np.intp)]
    distance = (high - low).astype(np.float64)
    # The product is exact, and a division of float64 is rounded alike everywhere.
    beyond = np.floor((magnitude.astype(np.float64) - 1) * distance[:, None] / steps[:, None] + 0.5)
    bits = np.where(magnitude == 0, 0, low[:, None] + beyond.astype(np.int64))
    negative = (codes != magnitude) & (magnitude != 0)
    signed_bits: NDArray[np.int64] = bits | (negative.astype(np.int64) << top)
    return signed_bits


def _largest_error(before: Words, after: Words) -> float:
    """The largest relative error between values with these bits; NaN, infinities and zeros have none."""
    old, new = _values(before), _values(after)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.abs(new / old - 1)
    return float(np.where((before != after) & (old != 0), error, 0).max(initial=0))


def _values(words: Words) -> NDArray[np.float64]:
    wide = words.astype(np.uint32) << np.uint32(16) if words.itemsize == 2 else words
    return wide.view(np.float32).astype(np.float64)


def _planes(words: Words) -> list[Bytes]:
    return list(words.view(np.uint8).reshape(-1, words.itemsize).T)


def _from_planes(planes: list[Bytes], dtype: np.dtype[Any]) -> Words:
    if len({plane.size for plane in planes}) != 1:
        raise DamagedError("a block of rounded values has other parts")
    return np.ascontiguousarray(np.stack(planes, axis=1)).reshape(-1).view(dtype)
