"""DeepSpeed's folders, ZeRO 1 to 3: flat partitions of each rank, put together to the tensors of the model.

Names are those of our own checkpoints: `model.NAME`, `optimizer.NAME.exp_avg`, and `optimizer.NAME.fp32` for the
weights that the optimizer keeps. The layout of partitions is that of deepspeed/utils/zero_to_fp32.py.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.ckpt.dtypes import BITS
from tools.ckpt.findings import DamageError, UnreadableError, error, note
from tools.ckpt.pickles import Opaque, StoredTensor
from tools.ckpt.pieces import Entry, Piece, Shape
from tools.ckpt.roles import role_of
from tools.ckpt.source import Source
from tools.ckpt.torch_files import add_archive, add_tensors, piece_of
from tools.ckpt.torch_zip import TorchArchive

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_STEP = re.compile(r"global_step(\d+)")
_FP32 = "fp32"
_UNIVERSAL = "zero"
"""Folder of a universal checkpoint: one folder for each parameter, in it a file for each of its states."""


@dataclass(frozen=True)
class _Fragment:
    """Elements [begin, begin + count) of a parameter, which begin at `at` in one of a rank's flat tensors."""

    parameter: str
    begin: int
    count: int
    group: int
    at: int


@dataclass
class _Rank:
    """What one rank has written of the optimizer."""

    number: int
    path: Path
    archive: TorchArchive
    flat: list[dict[str, StoredTensor]]
    """For each group: its fp32 weights and its moments, of one size."""
    steps: list[StoredTensor]
    mappings: Any
    """Where parameters lie in the groups, of ZeRO 1 and 2."""


def is_deepspeed(folder: Path) -> bool:
    """Whether a folder, or the step that its file `latest` names, holds DeepSpeed's files."""
    return any(_MODEL.fullmatch(path.name) for path in _step_folder(folder).iterdir())


def _step_folder(folder: Path) -> Path:
    for latest in (folder / "latest", folder / "latest_universal"):
        if latest.is_file():
            named = folder / Path(latest.read_text(errors="replace").strip() or ".").name
            return named if named.is_dir() else folder
    return folder


def read_deepspeed(folder: Path) -> Source:
    """Open a folder of one step, or the one above it with `latest`; raises `UnreadableError`."""
    folder = _step_folder(folder)
    source = Source(folder, "deepspeed", [], "CRC-32 of each storage")
    models = sorted(path for path in folder.iterdir() if _MODEL.fullmatch(path.name))
    optimizers = sorted(path for path in folder.iterdir() if _OPTIMIZER.fullmatch(path.name))
    source.files = {path.name for path in (*models, *optimizers)}
    if len({path.name.partition("mp_rank_")[2][:2] for path in models}) > 1:
        raise UnreadableError(
            f"{folder} was saved with tensor parallelism, whose cuts DeepSpeed does not write down: convert it with "
            "deepspeed.checkpoint.ds_to_universal first"
        )
    try:
        shapes = _add_models(source, models)
        if (folder / _UNIVERSAL).is_dir():
            _add_universal(source, shapes)
            return source
        ranks = sorted(_ranks(source, optimizers), key=lambda one: one.number)
        _add_optimizer(source, ranks, shapes)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as reason:
        raise UnreadableError(
            f"{folder} is damaged, or of a version of DeepSpeed that is not known here "
            f"({type(reason).__name__} {reason})"
        ) from reason
    return source


def _add_models(source: Source, paths: list[Path]) -> list[dict[str, Shape]]:
    """Add the weights that are whole; return the shapes of the parameters by the optimizer's groups."""
    shapes: list[dict[str, Shape]] = []
    told: dict[str, int] = {}
    for index, path in enumerate(paths):
        archive, tree = add_archive(source, path)
        told[path.name] = int(tree["global_steps"])
        if index > 0:
            continue
        source.step = told[path.name]
        source.layout = {"dp_shard": int(tree["dp_world_size"]), "tp": int(tree["mp_world_size"])}
        source.facts["version"] = str(tree.get("ds_version"))
        if tree.get("frozen_param_fragments"):
            source.findings.append(note("frozen parameters of ZeRO 3 are not read"))
        shapes = [
            {str(name): tuple(map(int, shape)) for name, shape in group.items()}
            for group in tree["param_shapes"] or []
        ]
        parted = {name for group in shapes for name in group}
        module = {
            f"model.{name}": value
            for name, value in tree["module"].items()
            # Of ZeRO 3, nothing is left of them here.
            if not (isinstance(value, StoredTensor) and value.shape == (0,) and name in parted)
        }
        # Without ZeRO the optimizer's state lies here, too.
        module |= {"optimizer": tree["optimizer"]} if isinstance(tree["optimizer"], dict) else {}
        add_tensors(source, path, archive, module)
        settings = tree.get("ds_config") or {}
        source.facts["zero"] = int(settings.get("zero_optimization", {}).get("stage", 0))
    if named := _STEP.fullmatch(source.path.name):
        told["the folder's name"] = int(named[1])
    source.facts["steps"] = told
    return shapes


def _ranks(source: Source, paths: list[Path]) -> Iterator[_Rank]:
    """Open what can be opened: the damage of one file must not hide what the others hold."""
    for path in paths:
        found = _OPTIMIZER.fullmatch(path.name)
        assert found is not None
        try:
            yield _rank(source, path, int(found[1]))
        except UnreadableError as reason:
            text = f"cannot be read: {str(reason).removeprefix(f'{path} ')}"
            source.findings.append(error(text, file=path.name, rank=int(found[1])))


def _rank(source: Source, path: Path, number: int) -> _Rank:
    archive, tree = add_archive(source, path)
    written_as = f"{archive.root}.pt"
    if written_as != path.name and _OPTIMIZER.fullmatch(written_as):
        source.findings.append(error(f"was written as {written_as}", file=path.name, rank=number))
    whole = tree["optimizer_state_dict"]
    stage = whole["zero_stage"]
    source.format = f"deepspeed zero {stage.args[0] if isinstance(stage, Opaque) else int(stage)}"
    inner = whole["base_optimizer_state" if "base_optimizer_state" in whole else "optimizer_state_dict"]
    partitions = "single_partition_of_fp32_groups"
    weights = whole[partitions if partitions in whole else "fp32_flat_groups"]
    states = inner["state"] if isinstance(inner, dict) else inner
    flat, steps = [], []
    for group, weight in enumerate(weights):
        state = states[group]
        moments = {
            name: value
            for name, value in state.items()
            # Moments are padded where weights may not be.
            if isinstance(value, StoredTensor) and len(value.shape) == 1 and value.shape >= weight.shape
        }
        flat.append({_FP32: weight, **moments})
        if isinstance(state.get("step"), StoredTensor):
            steps.append(state["step"])
    return _Rank(number, path, archive, flat, steps, whole.get("param_slice_mappings"))


def _add_optimizer(source: Source, ranks: list[_Rank], shapes: list[dict[str, Shape]]) -> None:
    world = source.layout.get("dp_shard", len(ranks))
    there = {int(found[1]) for name in source.files if (found := _OPTIMIZER.fullmatch(name))}
    for number in sorted(set(range(world)) - there) if source.facts["zero"] or there else ():
        source.findings.append(error("the optimizer's file of this rank is missing", rank=number))
    source.findings += _other_steps(source, ranks)
    is_sharded = source.format.endswith("zero 3")
    fragments = {
        one.number: list(_parts_of_3(one, shapes, world) if is_sharded else _parts_of_2(one)) for one in ranks
    }
    if not is_sharded:
        fragments = _in_order(fragments)
    whole = {name: shape for group in shapes for name, shape in group.items()}
    kinds = dict.fromkeys(kind for one in ranks for group in one.flat for kind in group)
    for kind in kinds:
        pieces: dict[str, list[Piece]] = {name: [] for name in whole}
        dtypes: dict[str, str] = {}
        for one in ranks:
            for part in fragments[one.number]:
                tensor = one.flat[part.group][kind]
                pieces[part.parameter].append(_piece(one, tensor, part))
                dtypes[part.parameter] = tensor.dtype
        for name, shape in whole.items():
            full = f"model.{name}" if is_sharded and kind == _FP32 else f"optimizer.{name}.{kind}"
            dtype = dtypes.get(name, "float32")
            source.entries.append(Entry(full, role_of(full, dtype), dtype, shape, tuple(pieces[name])))


def _add_universal(source: Source, shapes: list[dict[str, Shape]]) -> None:
    source.format = "deepspeed universal"
    have = {entry.name for entry in source.entries}
    for name in (name for group in shapes for name in group):
        files = sorted((source.path / _UNIVERSAL / name).glob("*.pt"))
        if _FP32 not in {path.stem for path in files}:
            source.findings.append(error(f"has no {_FP32}.pt in {_UNIVERSAL}/{name}", tensor=name))
        for path in files:
            archive, tree = add_archive(source, path)
            source.files.add(source.name_of(path))
            tensor = tree["param"] if isinstance(tree, dict) else tree
            if not isinstance(tensor, StoredTensor):
                continue
            is_weight = path.stem == _FP32 and f"model.{name}" not in have
            full = f"model.{name}" if is_weight else f"optimizer.{name}.{path.stem}"
            pieces = (piece_of(archive, path, tensor),)
            source.entries.append(
                Entry(full, role_of(full, tensor.dtype), tensor.dtype, tensor.shape, pieces)
            )


def _other_steps(source: Source, ranks: list[_Rank]) -> Iterator[Any]:
    """Ranks whose Adam has made another number of steps than that of the first."""
    found: dict[int, float] = {}
    for one in ranks:
        for tensor in one.steps[:1]:
            entry = Entry("step", "step counts", tensor.dtype, (), (piece_of(one.archive, one.path, tensor),))
            try:
                found[one.number] = float(source.rows(entry, 0, 1))
            except DamageError as damage:
                yield damage.finding
    first = next(iter(found.values()), None)
    for one in ranks:
        if found.get(one.number, first) != first:
            text = f"mixes steps: Adam has made {found[one.number]:g} here and {first:g} on the first rank"
            yield error(text, file=one.path.name, rank=one.number)


def _parts_of_2(rank: _Rank) -> Iterator[_Fragment]:
    """ZeRO 1 and 2: a group is one long row of parameters, cut among the ranks; each tells what it has of it."""
    for group, mapping in enumerate(rank.mappings):
        for name, address in mapping.items():
            fields = address.state if isinstance(address, Opaque) else address
            if not isinstance(fields, dict):
                fields = dict(zip(("numel", "start"), address.args, strict=True))
            yield _Fragment(str(name), 0, int(fields["numel"]), group, int(fields["start"]))


def _in_order(fragments: dict[int, list[_Fragment]]) -> dict[int, list[_Fragment]]:
    """What a rank has of a parameter begins where that of the rank before it has ended."""
    done: dict[str, int] = {}
    placed: dict[int, list[_Fragment]] = {}
    for rank in sorted(fragments):
        placed[rank] = []
        for part in fragments[rank]:
            begin = done.get(part.parameter, 0)
            placed[rank].append(_Fragment(part.parameter, begin, part.count, part.group, part.at))
            done[part.parameter] = begin + part.count
    return placed


def _parts_of_3(rank: _Rank, shapes: list[dict[str, Shape]], world: int) -> Iterator[_Fragment]:
    """ZeRO 3: each parameter is cut into as many equal parts as there are ranks, the last one padded."""
    group, at = 0, 0
    for name, shape in ((name, shape) for one in shapes for name, shape in one.items()):
        elements = math.prod(shape)
        size = -(-elements // world)
        while at + size > math.prod(rank.flat[group][_FP32].shape):
            group, at = group + 1, 0
        begin = min(rank.number * size, elements)
        yield _Fragment(name, begin, min(size, elements - begin), group, at)
        at += size


def _piece(rank: _Rank, tensor: StoredTensor, part: _Fragment) -> Piece:
    if tensor.strides != (1,) or not 0 <= part.at <= part.at + part.count <= tensor.shape[0]:
        raise ValueError(f"{part.parameter} is not within its partition")
    itemsize = BITS[tensor.dtype].itemsize
    offset = rank.archive.storage(tensor).offset + (tensor.offset + part.at) * itemsize
    nbytes = part.count * itemsize
    return Piece(rank.path, offset, nbytes, (part.begin,), (part.count,), flat=True, rank=rank.number)
