"""Write the weights of a checkpoint as a Hugging Face model."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from contract.errors import UserError
from tools.ckpt.convert_read import Tensor
from tools.ckpt.pieces import Shape
from tools.ckpt.source import Source
from tools.ckpt.write_safetensors import write_safetensors

_CONFIG = "config.json"


@dataclass(frozen=True)
class HfModel:
    """What a Hugging Face model is made of."""

    config: Callable[[str], dict[str, Any]]
    """Content of config.json for weights of a type."""
    shapes: dict[str, Shape] | None
    """Of each tensor by its name in the files; None where they are not known."""


HfOf = Callable[[dict[str, Any]], HfModel]
"""Of the model in a manifest; raises `UserError` where there is none."""


def hf_writer(source: Source, like: Source, tensors: Sequence[Tensor], hf_of: HfOf) -> Callable[[Path], None]:
    """Return what writes `tensors` to a folder, as the model that `like` tells of; raises `UserError`."""
    model = _model_in(like) if like.format == "huggingface" else hf_of(like.facts.get("model", {}))
    named = [replace(one, name=_name(one.name)) for one in tensors]
    if model.shapes is not None:
        _check(source.path, named, model.shapes)
    sizes: dict[str, int] = {}
    for one in named:
        sizes[one.dtype] = sizes.get(one.dtype, 0) + one.nbytes
    config = model.config(max(sizes, key=lambda dtype: sizes[dtype]))

    def write(folder: Path) -> None:
        write_safetensors(folder, named)
        (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")

    return write


def _model_in(source: Source) -> HfModel:
    """Return the model of a folder that holds one already, whichever it is."""
    found: dict[str, Any] = json.loads((source.path / _CONFIG).read_text())
    return HfModel(lambda dtype: {**found, "dtype": dtype, "torch_dtype": dtype}, None)


def _name(name: str) -> str:
    """Return the name in a LlamaForCausalLM: that of our checkpoints, but for the head."""
    return "lm_head.weight" if name == "model.lm_head.weight" else name


def _check(path: Path, tensors: Sequence[Tensor], shapes: dict[str, Shape]) -> None:
    found = {one.name: one.shape for one in tensors}
    for name, shape in shapes.items():
        if name not in found:
            raise UserError(f"{path} has no {name}, which its model has: convert it to safetensors")
        if found[name] != shape:
            text = f"is {list(found[name])}, and {list(shape)} in its model"
            raise UserError(f"{name} of {path} {text}: convert it to safetensors")
    extra = [one.name for one in tensors if one.name not in shapes]
    if extra or len(tensors) != len(shapes):
        more = extra[0] if extra else "lm_head.weight, twice,"
        raise UserError(f"{path} has {more} which its model does not have: convert it to safetensors")
