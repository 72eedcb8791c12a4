"""Write a step with rounded moments, and weights, as a new step that takes far less room."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tools.ckpt.compress import Compressor, Done
from tools.ckpt.convert_place import draft
from tools.ckpt.convert_read import RawBytes, Tensor, tensors_of
from tools.ckpt.dtypes import BITS
from tools.ckpt.open import open_source
from tools.ckpt.steady import steadily
from tools.ckpt.stored import rounding_of
from tools.ckpt.write_dcp import SLICE_BYTES, slices_of
from tools.ckpt.write_ours import told_by, write_ours
from train.checkpoint.compress.rounding import GROUP, Rounding

_GROUPS_AT_ONCE = 1024


def write_rounded(folder: Path, target: Path, rounding: Rounding, compressor: Compressor) -> Done:
    """Write the step in `folder` to `target`, rounded and compressed. Raises as `convert.convert` does."""
    return steadily([folder], lambda: _write(folder, target, rounding, compressor))


def _write(folder: Path, target: Path, rounding: Rounding, compressor: Compressor) -> Done:
    with open_source(folder) as source:
        before = rounding_of(source)
        errors = dict(before)

        def told(role: str, error: float) -> None:
            # What was rounded before had an error already.
            both = (1 + before.get(role, 0.0)) * (1 + error) - 1
            errors[role] = max(errors.get(role, 0.0), both)

        tensors = [_rounded(one, rounding, told) for one in tensors_of(source, False, None, False)]
        with draft(target) as temporary:
            write_ours(temporary, tensors, told_by(source, source), errors)
            return compressor.compress_draft(temporary, target)


def _rounded(one: Tensor, rounding: Rounding, told: Callable[[str, float], None]) -> Tensor:
    """Return a tensor whose stream is rounded, where it is one that is."""
    role = rounding.role(one.name, one.dtype)
    if role is None:
        return one
    itemsize = BITS[one.dtype].itemsize
    sizes = [math.prod(shape) * itemsize for _, shape in slices_of(one, SLICE_BYTES)]
    stream = one.stream

    def rounded() -> Iterator[RawBytes]:
        for values in _groups(stream(), sizes, itemsize):
            new, error = rounding.round(role, itemsize, values)
            told(role, error)
            yield new

    return replace(one, stream=rounded)


def _groups(parts: Iterator[RawBytes], sizes: Sequence[int], itemsize: int) -> Iterator[RawBytes]:
    """Hand a stream out in whole groups, which begin anew with each slice; `sizes`: of these, bytes."""
    most = _GROUPS_AT_ONCE * GROUP * itemsize
    buffer = np.empty(most, np.uint8)
    left = np.empty(0, np.uint8)
    for size in sizes:
        for begin in range(0, size, most):
            wanted = buffer[: min(most, size - begin)]
            done = 0
            while done < wanted.nbytes:
                if left.nbytes == 0:
                    left = next(parts)
                count = min(left.nbytes, wanted.nbytes - done)
                wanted[done : done + count] = left[:count]
                left = left[count:]
                done += count
            yield wanted
    # At its end a stream says whether it was right.
    rest = next(parts, None)
    assert rest is None and left.nbytes == 0, "more bytes than the shape has"
