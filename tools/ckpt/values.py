"""Values of tensors as numbers that can be compared, from bits alone: numpy has neither bfloat16 nor float8."""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.ckpt.dtypes import Bits, is_floating

Doubles = NDArray[np.float64]

_FLOAT8 = {
    "float8_e4m3fn": (4, 7, 0x7F),
    "float8_e4m3fnuz": (4, 8, 0x80),
    "float8_e5m2": (5, 15, None),
    "float8_e5m2fnuz": (5, 16, 0x80),
}
"""Bits of the exponent, its bias, and the code of NaN; None: infinities and NaN are as in IEEE 754."""


class Scratch:
    """Memory for `count` elements, used again and again: fresh memory costs a page fault for each 4 KiB of it."""

    def __init__(self, count: int) -> None:
        self.doubles = np.empty((3, count))
        self.words = np.empty((3, count), np.uint64)
        self.flags = np.empty(count, np.bool_)

    def of(self, row: int, like: np.dtype[Any], count: int) -> NDArray[Any]:
        """Return the first elements of a row of words, as another type."""
        typed: NDArray[Any] = self.words[row].view(like)
        return typed[:count]


def widened(dtype: str, bits: Bits, out: Doubles, scratch: Scratch) -> Doubles:
    """Write each element as float64 to `out`: exact, but for integers beyond 2^53. Not for complex ones: see `real`."""
    if dtype == "bfloat16":
        single = scratch.of(0, np.dtype(np.uint32), bits.size)
        single[...] = bits
        single <<= 16
        out[...] = single.view(np.float32)
    elif dtype.startswith("float8"):
        codes = scratch.of(0, np.dtype(np.intp), bits.size)
        codes[...] = bits
        np.take(_float8(dtype), codes, out=out, mode="clip")  # any other mode takes memory of its own
    else:
        out[...] = bits
    return out


def real(dtype: str) -> str:
    """Return the type of both parts of a complex one; any other as it is."""
    return {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)


def distances(dtype: str, a: Bits, b: Bits, scratch: Scratch) -> Bits:
    """Count the steps from each element of `a` to that of `b`, through all values of their type, as unsigned integers.

    For floats these are ULPs. What is returned lies in `scratch`.
    """
    if dtype == "bool":
        apart = scratch.of(2, np.dtype(np.bool_), a.size)
        np.not_equal(a, b, out=apart)
        return apart.view(np.uint8)
    if has_sign(dtype):
        return signed_distances(a, b, scratch)[0]
    larger, smaller = (scratch.of(row, a.dtype, a.size) for row in (1, 2))
    np.maximum(a, b, out=larger)
    np.minimum(a, b, out=smaller)
    np.subtract(larger, smaller, out=larger)
    return larger.view(f"uint{a.itemsize * 8}")


def has_sign(dtype: str) -> bool:
    """Whether the type is a float of which one bit is the sign, and the others grow with the value."""
    return is_floating(dtype) and dtype != "float8_e8m0fnu"


def signed_distances(a: Bits, b: Bits, scratch: Scratch) -> tuple[Bits, Bits]:
    """Return ULPs between floats, and the larger of both magnitudes, as bits; both lie in `scratch`, -0 is 0.

    The bits without the sign are the number of steps from 0. Of one sign, the two numbers are subtracted, of two added.
    """
    signed = np.dtype(f"int{a.itemsize * 8}")
    a, b = a.view(signed), b.view(signed)
    smaller, sign, larger = (scratch.of(row, signed, a.size) for row in range(3))
    magnitude = np.iinfo(signed).max
    np.bitwise_and(a, magnitude, out=smaller)
    np.bitwise_and(b, magnitude, out=sign)
    np.maximum(smaller, sign, out=larger)
    np.minimum(smaller, sign, out=smaller)
    np.bitwise_xor(a, b, out=sign)
    np.right_shift(sign, a.itemsize * 8 - 1, out=sign)  # -1 where signs differ
    np.bitwise_xor(smaller, sign, out=smaller)
    np.subtract(smaller, sign, out=smaller)
    steps = np.subtract(larger, smaller, out=sign)
    return steps.view(f"uint{a.itemsize * 8}"), larger


@cache
def _float8(dtype: str) -> Doubles:
    """Return the values of all 256 codes."""
    codes = np.arange(256)
    if dtype == "float8_e8m0fnu":
        scales: Doubles = np.where(codes == 255, np.nan, np.exp2(codes - 127.0))
        return scales
    width, bias, nan = _FLOAT8[dtype]
    fraction_bits = 7 - width
    exponent, fraction = (codes & 0x7F) >> fraction_bits, codes & ((1 << fraction_bits) - 1)
    steps = np.where(exponent == 0, fraction, fraction + (1 << fraction_bits))
    values = np.ldexp(steps.astype(np.float64), np.maximum(exponent, 1) - bias - fraction_bits)
    if nan is None:
        top = exponent == (1 << width) - 1
        values = np.where(top, np.where(fraction == 0, np.inf, np.nan), values)
    else:
        values[[nan, nan | 0x80]] = np.nan
    signed: Doubles = np.where(codes >> 7 == 1, -values, values)
    return signed
