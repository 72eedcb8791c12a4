"""Types of tensors: how wide an element is, and what can be said of its bits without torch."""

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.generic]

BITS: dict[str, np.dtype[np.generic]] = {
    **{name: np.dtype(name) for name in ("float64", "float32", "float16", "complex64", "complex128", "bool")},
    **{f"{kind}{width}": np.dtype(f"{kind}{width}") for kind in ("int", "uint") for width in (8, 16, 32, 64)},
    "bfloat16": np.dtype("uint16"),
    "float8_e4m3fn": np.dtype("uint8"),
    "float8_e4m3fnuz": np.dtype("uint8"),
    "float8_e5m2": np.dtype("uint8"),
    "float8_e5m2fnuz": np.dtype("uint8"),
    "float8_e8m0fnu": np.dtype("uint8"),
    "object": np.dtype("uint8"),
}
"""numpy's type for an element, by torch's name. What numpy lacks is held as unsigned integers of its width.

`object` is no tensor but pickled bytes, which are compared and never loaded.
"""

_FINITE_MASK = {"bfloat16": (0x7F80, 0x7F), "float8_e5m2": (0x7C, 0x03)}
"""Types with an infinity: the bits of the exponent, and those of the fraction."""
_NAN_CODES = {
    "float8_e4m3fn": (0x7F, 0xFF),
    "float8_e4m3fnuz": (0x80,),
    "float8_e5m2fnuz": (0x80,),
    "float8_e8m0fnu": (0xFF,),
}
"""Types without one: the values that are no number."""


def is_floating(dtype: str) -> bool:
    """Whether the type holds fractions."""
    return dtype.startswith(("float", "bfloat", "complex"))


def not_finite(dtype: str, values: Bits) -> tuple[int, int]:
    """Count (NaN, infinities) of an array as `BITS` has it."""
    if dtype in _NAN_CODES:
        return int(np.isin(values, _NAN_CODES[dtype]).sum()), 0
    if dtype in _FINITE_MASK:
        exponent, fraction = _FINITE_MASK[dtype]
        special = (values & exponent) == exponent  # type: ignore[operator]
        if not special.any():
            return 0, 0
        nan = int((special & ((values & fraction) != 0)).sum())  # type: ignore[operator]
        return nan, int(special.sum()) - nan
    if not is_floating(dtype) or np.isfinite(values).all():
        return 0, 0
    return int(np.isnan(values).sum()), int(np.isinf(values).sum())


def zeros(dtype: str, values: Bits) -> int:
    """Count elements that are zero; -0 is."""
    if dtype == "bfloat16":
        return values.size - int(np.count_nonzero(values & 0x7FFF))  # type: ignore[operator]
    if dtype.startswith("float8") and "fnuz" not in dtype and "e8m0" not in dtype:
        return values.size - int(np.count_nonzero(values & 0x7F))  # type: ignore[operator]
    return values.size - int(np.count_nonzero(values))
