"""Small checkpoints of every format, made by the libraries that such files come from."""

import io
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from train.checkpoint.digests import write_digests
from train.checkpoint.rest import PlacingWriter, located
from train.checkpoint.stored import HashingPlanner, Stored

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and shape."""
CUTS: dict[str, list[Box]] = {
    "model.embed_tokens.weight": [((0, 0), (20, 32)), ((20, 0), (44, 32))],
    "model.layers.0.mlp.up_proj.weight": [((0, 0), (48, 10)), ((0, 10), (48, 22))],
}
"""How two tensors of `MODEL` are cut: by rows, and by columns."""
MODEL = {"vocab_size": 64, "dim": 32, "layers": 1, "heads": 2, "ffn_dim": 48, "max_sequence_length": 16}


DTYPES = (
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
)
"""Of tensors in checkpoints, beside float32 and int64."""


def in_all_types(tensor: Tensor, *more: torch.dtype) -> dict[str, Tensor]:
    """A tensor of float32 in other types, by their names."""
    return {str(dtype).removeprefix("torch."): tensor.to(dtype) for dtype in (*DTYPES, *more)}


class CutPlanner(dcp.DefaultSavePlanner):
    """Saves chosen tensors in boxes, as if several ranks had them."""

    def __init__(self, cuts: Mapping[str, Sequence[Box]]) -> None:
        super().__init__()
        self._cuts = cuts

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items: list[WriteItem] = []
        for item in plan.items:
            boxes = self._cuts.get(item.index.fqn)
            items += [item] if boxes is None else self._boxes(item.index.fqn, boxes)
        self.plan = SavePlan(items, planner_data=plan.planner_data)
        return self.plan

    def _boxes(self, name: str, boxes: Sequence[Box]) -> list[WriteItem]:
        tensor = self.state_dict[name]
        properties = TensorProperties.create_from_tensor(tensor)
        return [
            WriteItem(
                MetadataIndex(name, torch.Size(start), index),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(start), torch.Size(shape)), properties, tensor.size()
                ),
            )
            for index, (start, shape) in enumerate(boxes)
        ]

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = self.state_dict[write_item.index.fqn]
        if write_item.index.fqn not in self._cuts:
            return super().resolve_data(write_item)
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        box = tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
        return data[box]


def save_dcp(
    folder: Path, tree: Mapping[str, Any], cuts: Mapping[str, Sequence[Box]] | None = None, files: int = 1
) -> Path:
    """Save with torch; returns the folder."""
    writer = dcp.FileSystemWriter(folder, thread_count=files)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            dict(tree),
            storage_writer=writer,
            planner=CutPlanner(cuts or {}),
            no_dist=True,
        )
    return folder


def write_step(
    folder: Path, tree: dict[str, Tensor], stored: Mapping[tuple[str, ...], Stored] | None = None
) -> None:
    """Write a step as one rank of a run does, but for its manifest."""
    planner = HashingPlanner(stored or {})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        writer = PlacingWriter(folder, per_thread_copy_ahead=0)
        dcp.save(tree, storage_writer=writer, planner=planner, no_dist=True)
    write_digests(folder, 0, *located(folder, writer.written, planner.digests))


def load_dcp(folder: Path, like: Mapping[str, Any]) -> dict[str, Any]:
    """Load with torch into tensors as those of `like`."""

    def empty(tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return torch.full_like(tree, 77)
        return {name: empty(value) for name, value in tree.items()} if isinstance(tree, Mapping) else tree

    found: dict[str, Any] = empty(like)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


def flat(tree: Mapping[str, Any], name: str = "") -> dict[str, Tensor]:
    """Tensors of a tree by keys joined with dots."""
    found: dict[str, Tensor] = {}
    for key, value in tree.items():
        path = f"{name}.{key}" if name else str(key)
        found |= {path: value} if isinstance(value, Tensor) else {}
        found |= flat(value, path) if isinstance(value, Mapping) else {}
    return found


def state(seed: int = 0, step: int = 7) -> dict[str, Any]:
    """A tree as our trainer saves it, of the model `MODEL`."""
    from train.model.config import ModelConfig, parameter_shapes

    generator = torch.Generator().manual_seed(seed)
    shapes = parameter_shapes(ModelConfig(**MODEL))
    model = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    moments = {
        name: {
            "step": torch.tensor(float(step)),
            "exp_avg": torch.randn(shape, generator=generator),
            "exp_avg_sq": torch.rand(shape, generator=generator),
        }
        for name, shape in shapes.items()
    }
    progress = {name: torch.tensor(step * scale) for name, scale in (("step", 1), ("samples", 8))}
    return {
        "model": model,
        "optimizer": moments,
        "progress": progress,
        "rng": {"rank_0": {"torch": torch.ones(9)}},
    }


def save_ours(
    folder: Path,
    tree: Mapping[str, Any],
    step: int = 7,
    cuts: Mapping[str, Sequence[Box]] | None = None,
    files: int = 1,
    places: bool = True,
) -> Path:
    """Save a step of format 2; returns its folder. `places`: whether it says where the values of slices lie."""
    cuts = cuts or {}
    save_dcp(folder, tree, cuts, files)
    (folder / "digests").mkdir()
    tensors = flat(tree)
    lies = values_in(folder) if places else {}
    slices = []
    for name, tensor in tensors.items():
        whole: list[Box] = [((0,) * tensor.dim(), tuple(tensor.shape))]
        for start, shape in cuts.get(name, whole):
            part = tensor[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]
            told = {"tensor": name, "start": start, "shape": shape, "xxh3": hexed(part)}
            if (name, tuple(start)) in lies:
                told["offset"] = lies[name, tuple(start)][1]
            slices.append(told)
    rest = {path.name: rest_hexed(path) for path in folder.glob("*.distcp")}
    (folder / "digests/rank_0.json").write_text(json.dumps({"slices": slices, "rest": rest}))
    write_manifest(folder, tensors, step)
    return folder


def write_manifest(folder: Path, tensors: Mapping[str, Tensor], step: int, **fields: Any) -> None:
    """Write `manifest.json` over what is in `folder`."""
    files = {
        str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()
    }
    manifest = {
        "step": step,
        "world_size": 1,
        "model": MODEL,
        "data": {},
        "files": {name: size for name, size in files.items() if name != "manifest.json"},
        "layout": {"dp_shard": 1, "tp": 1, "zero": 1},
        "format": 2,
        "tensors": {
            name: {"dtype": str(one.dtype)[6:], "shape": list(one.shape), "xxh3": hexed(one)}
            for name, one in tensors.items()
        },
        "digests": {
            path.name: xxhash.xxh3_128_hexdigest(path.read_bytes())
            for path in (folder / "digests").glob("*.json")
        },
        "metadata": xxhash.xxh3_128_hexdigest((folder / ".metadata").read_bytes()),
        **fields,
    }
    seal(folder, manifest)


def seal(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write a manifest with the hash of what it says."""
    fields = {name: value for name, value in manifest.items() if name != "xxh3"}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    fields["xxh3"] = xxhash.xxh3_128_hexdigest(text.encode())
    (folder / "manifest.json").write_text(json.dumps(fields))


def values_in(folder: Path) -> dict[tuple[str, tuple[int, ...]], tuple[str, int, int]]:
    """Where torch's reader of archives finds the values of each slice: (file, first byte, number of bytes)."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    data = {path.name: path.read_bytes() for path in folder.glob("*.distcp")}
    found = {}
    for index, place in metadata.storage_data.items():
        part = io.BytesIO(data[place.relative_path][place.offset : place.offset + place.length])
        reader = torch._C.PyTorchFileReader(part)
        if "data/0" in reader.get_all_records():
            begin = place.offset + reader.get_record_offset("data/0")
            size = len(reader.get_record("data/0"))
            found[index.fqn, tuple(index.offset or ())] = (place.relative_path, begin, size)
    return found


def rest_hexed(path: Path) -> str:
    """Hash a file of slices without the values in it."""
    data = path.read_bytes()
    keep = bytearray(b"\1" * len(data))
    for file, begin, size in values_in(path.parent).values():
        if file == path.name:
            keep[begin : begin + size] = bytes(size)
    kept = np.frombuffer(data, np.uint8)[np.frombuffer(keep, np.bool_)]
    return xxhash.xxh3_128_hexdigest(kept.tobytes())


def hexed(tensor: Tensor) -> str:
    """Hash the bytes of a tensor."""
    return xxhash.xxh3_128_hexdigest(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


class Hostile:
    """Unpickled, it runs a command that leaves a file."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self._mark}",)
