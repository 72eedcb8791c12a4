"""Write safetensors as Hugging Face lays them out: one file, or several with an index."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path

from contract.errors import UserError
from tools.ckpt.convert_read import Tensor
from tools.ckpt.dtypes import BITS
from tools.ckpt.safetensors_files import DTYPES

FILE_BYTES = 4 * 10**9
"""Largest file, unless one tensor alone is larger."""
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_CODES = {own: code for code, own in DTYPES.items()}
_HEADER_ALIGNMENT = 8


def write_safetensors(folder: Path, tensors: Sequence[Tensor], file_bytes: int = FILE_BYTES) -> None:
    """Make `folder` and write `tensors` to it; raises `UserError` for what the format does not have, or OSError."""
    for one in tensors:
        if one.dtype not in _CODES:
            raise UserError(
                f"{one.name} is {one.dtype}, which safetensors does not have: convert to torch or dcp"
            )
        if one.name == "__metadata__":
            raise UserError(f"a tensor cannot be called {one.name} in safetensors: convert to torch or dcp")
    folder.mkdir()
    shards = _shards(tensors, file_bytes)
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [_WEIGHTS]
    for file, shard in zip(files, shards, strict=True):
        _write_file(folder / file, shard)
    if len(shards) > 1:
        where = {one.name: file for file, shard in zip(files, shards, strict=True) for one in shard}
        total = sum(one.nbytes for one in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_file(path: Path, tensors: Sequence[Tensor]) -> None:
    # Wide ones first: whoever maps the file has every value where its type may be used.
    tensors = sorted(tensors, key=lambda one: -BITS[one.dtype].itemsize)
    # Without this mark some versions of transformers refuse the file.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for one in tensors:
        place = [end, end + one.nbytes]
        header[one.name] = {"dtype": _CODES[one.dtype], "shape": list(one.shape), "data_offsets": place}
        end += one.nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for one in tensors:
            for part in one.stream():
                file.write(part)  # type: ignore[arg-type]


def _shards(tensors: Sequence[Tensor], file_bytes: int) -> list[list[Tensor]]:
    """Cut the tensors, in their order, into groups that fit a file."""
    shards: list[list[Tensor]] = [[]]
    filled_bytes = 0
    for one in tensors:
        if shards[-1] and filled_bytes + one.nbytes > file_bytes:
            shards.append([])
            filled_bytes = 0
        shards[-1].append(one)
        filled_bytes += one.nbytes
    return shards
