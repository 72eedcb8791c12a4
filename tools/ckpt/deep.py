"""What the values and the relations of tensors say: damage that no hash shows, since it was saved so."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from tools.ckpt.dtypes import is_floating, not_finite, zeros
from tools.ckpt.findings import Finding, error, note, warning
from tools.ckpt.pieces import Entry, Shape
from tools.ckpt.roles import FIRST, MASTER, SECOND, WEIGHTS, parameter_of
from tools.ckpt.source import Source, Window

_PAGE_BYTES = 4096
_VALUES = (WEIGHTS, FIRST, SECOND, MASTER)


class Values:
    """What one pass over a tensor tells of it."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._nan = self._infinite = self._zeros = self._zero_pages = 0
        self._first_page: int | None = None
        self.hash = xxhash.xxh3_128()

    def add(self, window: Window) -> None:
        """Look at the next values."""
        self.hash.update(window.values.view(np.uint8))  # type: ignore[arg-type]
        if self._entry.role not in _VALUES or not is_floating(self._entry.dtype):
            return
        nan, infinite = not_finite(self._entry.dtype, window.values)
        self._nan += nan
        self._infinite += infinite
        self._zeros += zeros(self._entry.dtype, window.values)

    def pages(self, raw: NDArray[np.uint8], offset: int) -> None:
        """Look for pages of the file that are all zero; `raw` lies at `offset` in it."""
        if self._entry.role != WEIGHTS:
            return
        skipped = -offset % _PAGE_BYTES
        whole = raw[skipped : skipped + (raw.nbytes - skipped) // _PAGE_BYTES * _PAGE_BYTES]
        if whole.nbytes == 0:
            return
        words = whole.reshape(-1, _PAGE_BYTES)
        # The first byte of most pages settles it.
        candidates = np.flatnonzero(~words[:, :16].any(axis=1))
        empty = [index for index in candidates if not words[index].any()]
        self._zero_pages += len(empty)
        if empty and self._first_page is None:
            self._first_page = offset + skipped + int(empty[0]) * _PAGE_BYTES

    def findings(self, source: Source) -> Iterator[Finding]:
        """Say what is wrong with them."""
        entry = self._entry
        for count, what in ((self._nan, "NaN"), (self._infinite, "infinite")):
            if count:
                yield error(f"{count} of its {entry.elements} values are {what}", tensor=entry.name)
        if entry.role not in _VALUES or not is_floating(entry.dtype) or entry.elements == 0:
            return
        if self._zeros == entry.elements:
            yield from self._all_zero(source)
        elif (
            self._zero_pages
            and self._zeros < 2 * self._zero_pages * _PAGE_BYTES * entry.elements / entry.nbytes
        ):
            # Else the tensor is sparse, and so are its pages.
            text = f"{self._zero_pages} pages of {_PAGE_BYTES} bytes of the file are all zero, in weights that are not"
            file = source.name_of(entry.pieces[0].path) if len(entry.pieces) == 1 else None
            yield error(text, tensor=entry.name, file=file, offset=self._first_page if file else None)

    def _all_zero(self, source: Source) -> Iterator[Finding]:
        """Matrices of weights never are after training; biases, some norms and moments can be."""
        entry = self._entry
        started = source.step is None or source.step > 0
        if entry.role in (WEIGHTS, MASTER) and len(entry.shape) > 1 and started:
            yield error("all its values are zero", tensor=entry.name)
        elif entry.role in (WEIGHTS, MASTER) or started:
            text = "all its values are zero: right for a bias, or for what has had no gradient yet"
            yield warning(text, tensor=entry.name)


class Deep:
    """What is known of all tensors of a checkpoint after they were read."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._hashes: dict[str, tuple[Shape, str, str]] = {}

    def keep(self, entry: Entry, values: Values) -> None:
        """Remember the hash of a tensor."""
        self._hashes[entry.name] = (entry.shape, entry.dtype, values.hash.hexdigest())

    def ties(self) -> Iterator[Finding]:
        """Embedding and head of a model that ties them must be equal, where both are stored."""
        tied = self._source.facts.get("config.json", {}).get("tie_word_embeddings")
        model = self._source.facts.get("model")
        if isinstance(model, dict):
            tied = model.get("tie_embeddings", tied)
        if tied is not True:
            return
        heads = [name for name in self._hashes if name.endswith("lm_head.weight") and "optim" not in name]
        bodies = [
            name for name in self._hashes if name.endswith("embed_tokens.weight") and "optim" not in name
        ]
        if len(heads) == len(bodies) == 1 and self._hashes[heads[0]] != self._hashes[bodies[0]]:
            yield error(f"differs from {bodies[0]}, to which the model ties it", tensor=heads[0])


def relations(
    source: Source, shapes_of: Callable[[dict[str, Any]], dict[str, Shape] | None]
) -> Iterator[Finding]:
    """Compare shapes: those of optimizer state with their parameters', those of weights with the model's."""
    weights = {entry.name: entry for entry in source.entries if entry.role == WEIGHTS}
    for entry in source.entries:
        if entry.role in (FIRST, SECOND, MASTER):
            yield from _belongs(entry, weights)
    yield from _pairs(source)
    model = source.facts.get("model")
    if isinstance(model, dict) and model:
        shapes = shapes_of(model)
        if shapes is None:
            yield note("shapes could not be compared with those of the model that it names")
        else:
            yield from _against_model(source, weights, shapes)


def _belongs(entry: Entry, weights: dict[str, Entry]) -> Iterator[Finding]:
    try:
        name = parameter_of(entry.name, weights)
    except LookupError as missing:
        yield error(f"belongs to the parameter {missing.args[0]}, which is not there", tensor=entry.name)
        return
    if name is not None and weights[name].shape != entry.shape:
        text = f"has the shape {list(entry.shape)}, its parameter {list(weights[name].shape)}"
        yield error(text, tensor=entry.name)


def _pairs(source: Source) -> Iterator[Finding]:
    """The two moments of a parameter come together, in one shape."""
    by_name = {entry.name: entry for entry in source.entries}
    for entry in source.entries:
        words = entry.name.split(".")
        if words[-1] not in ("exp_avg", "exp_avg_sq"):
            continue
        other = by_name.get(".".join([*words[:-1], "exp_avg_sq" if words[-1] == "exp_avg" else "exp_avg"]))
        if other is None:
            yield error("its other moment is not there", tensor=entry.name)
        elif words[-1] == "exp_avg_sq" and other.shape != entry.shape:
            text = f"has the shape {list(entry.shape)}, the first moment {list(other.shape)}"
            yield error(text, tensor=entry.name)


def _against_model(source: Source, weights: dict[str, Entry], shapes: dict[str, Shape]) -> Iterator[Finding]:
    has_moments = any(entry.role == SECOND for entry in source.entries)
    names = {entry.name for entry in source.entries}
    for name, shape in shapes.items():
        entry = weights.get(f"model.{name}")
        if entry is None:
            yield error("is missing: the model has it", tensor=f"model.{name}")
        elif entry.shape != shape:
            yield error(
                f"has the shape {list(entry.shape)}, the model wants {list(shape)}", tensor=entry.name
            )
        if has_moments and f"optimizer.{name}.exp_avg_sq" not in names:
            yield error("is missing: other parameters have theirs", tensor=f"optimizer.{name}.exp_avg_sq")
    extra = {name.removeprefix("model."): name for name in weights if name.startswith("model.")}
    for bare, name in extra.items():
        if bare not in shapes and bare != "lm_head.weight":
            yield error("is none of the model's parameters", tensor=name)
