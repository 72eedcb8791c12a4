"""`ckpt convert`: write any checkpoint that can be read in another form."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from contract.errors import ConfigError, UserError
from contract.run_folder import STEP_FOLDER
from tools.ckpt.checks import Advance
from tools.ckpt.convert_hf import HfOf, hf_writer
from tools.ckpt.convert_place import draft, refuse_existing
from tools.ckpt.convert_read import RawBytes, Tensor, check_storages, tensors_of
from tools.ckpt.findings import Severity
from tools.ckpt.open import open_source
from tools.ckpt.source import Source
from tools.ckpt.steady import steadily
from tools.ckpt.stored import rounding_of
from tools.ckpt.write_dcp import write_dcp
from tools.ckpt.write_ours import told_by, write_ours
from tools.ckpt.write_safetensors import write_safetensors
from tools.ckpt.write_torch import write_torch


class Form(StrEnum):
    """What can be written."""

    TRIERARCH = "trierarch"
    """A step that a run continues from."""
    DCP = "dcp"
    SAFETENSORS = "safetensors"
    HF = "hf"
    """Weights of a Hugging Face model, with its config.json."""
    TORCH = "torch"


@dataclass(frozen=True)
class Wish:
    """How to convert."""

    form: Form
    dtype: str | None = None
    """Of floating weights and moments; None keeps the types."""
    weights_only: bool = False
    force: bool = False
    """Convert what is damaged, too."""
    like: Path | None = None
    """What knows the model, and the data, where the source does not: a step or run of ours; for `hf`, a model too."""


Begin = Callable[[int], Advance]
"""Is given the number of bytes to write."""


@dataclass(frozen=True)
class Done:
    """What was converted."""

    source: Path
    format: str
    tensors: int
    nbytes: int
    notes: list[str]
    """What is not in there."""


def convert(
    path: Path, target: Path, wish: Wish, hf_of: HfOf, begin: Begin = lambda total: lambda nbytes: None
) -> Done:
    """Write the checkpoint at `path` to `target`, which appears whole or not at all.

    Raises `UnreadableError` (2) for what cannot be read, `DamagedSourceError` (1) for what is damaged, `SaveError`
    (1) where the system refuses to write, `ConfigError` for a wish that makes no sense.
    """
    paths = [path] if wish.like is None else [path, wish.like]
    return steadily(paths, lambda: _convert(path, target, wish, hf_of, begin))


def _convert(path: Path, target: Path, wish: Wish, hf_of: HfOf, begin: Begin) -> Done:
    refuse_existing(target)
    with ExitStack() as stack:
        source = stack.enter_context(open_source(path))
        like = source if wish.like is None else stack.enter_context(open_source(wish.like))
        if source.path.is_dir() and target.resolve().is_relative_to(source.path.resolve()):
            raise ConfigError(f"{target} lies in the checkpoint {source.path}: give a path outside of it")
        tensors = tensors_of(source, wish.weights_only or wish.form is Form.HF, wish.dtype, wish.force)
        if not tensors:
            raise UserError(
                f"{source.path} holds no tensors to convert: look at it with `trierarch ckpt show`"
            )
        total = sum(one.nbytes for one in tensors)
        writer = _writer(source, like, tensors, target, wish, hf_of, begin(total))
        with draft(target) as temporary:
            if not wish.force:
                check_storages(source, tensors, lambda nbytes: None)
            writer(temporary)
        return Done(source.path, source.format, len(tensors), total, _notes(source, like, wish))


def _writer(
    source: Source,
    like: Source,
    tensors: list[Tensor],
    target: Path,
    wish: Wish,
    hf_of: HfOf,
    advance: Advance,
) -> Callable[[Path], None]:
    counted = [replace(one, stream=_counting(one, advance)) for one in tensors]
    if wish.form is Form.TORCH:
        return lambda path: write_torch(path, counted)
    if wish.form is Form.SAFETENSORS:
        return lambda path: write_safetensors(path, counted)
    if wish.form is Form.DCP:
        return lambda path: _write_dcp(path, counted)
    if wish.form is Form.HF:
        return hf_writer(source, like, counted, hf_of)
    told = told_by(source, like)
    named = STEP_FOLDER.match(target.name)
    if named and int(named[1]) != told.step:
        raise ConfigError(f"{target} would hold step {told.step}: call it step_{told.step}")
    return lambda path: write_ours(path, counted, told, rounding_of(source))


def _write_dcp(path: Path, tensors: list[Tensor]) -> None:
    write_dcp(path, tensors)


def _counting(one: Tensor, advance: Advance) -> Callable[[], Iterator[RawBytes]]:
    def stream() -> Iterator[RawBytes]:
        for part in one.stream():
            yield part
            advance(part.nbytes)

    return stream


def _notes(source: Source, like: Source, wish: Wish) -> list[str]:
    notes = [
        str(one).replace("note: ", "left out: ", 1)
        for one in source.findings
        if one.severity is Severity.NOTE and one.tensor is not None
    ]
    objects = [one.name for one in source.entries if one.dtype == "object"]
    values = source.facts.get("values", {})
    if objects and not wish.weights_only:
        notes.append(f"left out: {len(objects)} objects that are no tensors ({', '.join(objects[:3])}, ...)")
    if values and not wish.weights_only:
        names = ", ".join(list(values)[:3])
        notes.append(f"left out: {len(values)} values that are no tensors ({names}, ...)")
    if wish.form is Form.TRIERARCH and not like.facts.get("model"):
        notes.append(
            "no run can continue from it: the model and the data are not known, --like STEP has them"
        )
    return notes
