"""Change the type of floating-point values, rounded to the nearest and of two nearest to the even one."""

import numpy as np
from numpy.typing import NDArray

from tools.ckpt.dtypes import BITS, Bits, is_floating
from tools.ckpt.values import Scratch, widened

TARGETS = ("float32", "bfloat16", "float16")


class RangeError(ValueError):
    """A finite value is beyond the largest one of the type."""


def convertible(dtype: str) -> bool:
    """Whether the values of a type can be converted to those of `TARGETS`."""
    return is_floating(dtype) and not dtype.startswith(("complex", "float8_e8m0"))  # those are scales


def converted(values: Bits, own: str, wanted: str) -> Bits:
    """Return values of the type `own` as `wanted`, one of `TARGETS`; both as `dtypes.BITS` has them.

    Each is rounded once. Raises `RangeError` where a finite value would become infinite.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        exact = values if own in ("float32", "float64") else _exact(own, values)
        if wanted == "bfloat16":
            made, infinite = _bfloat16(exact)
        else:
            made = exact.astype(BITS[wanted])
            infinite = np.isinf(made)
    lost = int((infinite & np.isfinite(exact)).sum())
    if lost:
        raise RangeError(f"{lost} finite values are beyond the range of {wanted}")
    return made


def _exact(own: str, values: Bits) -> Bits:
    return widened(own, values, np.empty(values.shape, np.float64), Scratch(values.size))


def _bfloat16(exact: Bits) -> tuple[Bits, Bits]:
    """Return the bits of the nearest bfloat16, and which are infinite."""
    single: NDArray[np.float32] = exact.astype(np.float32, copy=False)
    bits = single.view(np.uint32)
    nan = np.isnan(single)
    if exact.dtype != single.dtype:
        bits = _to_odd(exact, single)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    made = np.where(nan, (bits >> 16) | 0x40, rounded).astype(np.uint16)
    return made, ((made & 0x7FFF) == 0x7F80) & ~nan


def _to_odd(exact: Bits, single: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Return the bits of `single`, the last one odd where something was cut off.

    To round twice is wrong where the first time ends halfway between two values; an odd last bit never does.
    """
    bits = single.view(np.uint32)
    inexact = (single.astype(np.float64) != exact) & (bits & 1 == 0) & ~np.isnan(single)
    too_large = np.abs(single) > np.abs(exact)
    return bits + np.where(inexact, np.where(too_large, np.uint32(0xFFFFFFFF), np.uint32(1)), np.uint32(0))
