"""What `train.layout.traffic` says each group sends is what torch really sends in a step."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.pool import Ranks
from harness.toy import toy_overrides
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from train.config import load_config
from train.data.loader import Batch
from train.layout.batch import micro_batches
from train.layout.check import lay_out
from train.layout.traffic import Operation, traffic
from train.mesh import Mesh
from train.parallel.apply import build_engine, build_parts
from train.parallel.ring import attend_around, attend_around_backward

pytestmark = pytest.mark.slow

SETTINGS = [
    "model.layers=2",
    "model.vocab_size=320",
    "data.sequence_length=32",
    "parallel.micro_batch_size=2",
    "parallel.gradient_accumulation_steps=2",
    "loop.global_batch_size=null",
]
OPERATIONS = {
    "allreduce_": Operation.all_reduce,
    "all_reduce": Operation.all_reduce,
    "all_reduce_": Operation.all_reduce,
    "_allgather_base_": Operation.all_gather,
    "all_gather_into_tensor": Operation.all_gather,
    "_reduce_scatter_base_": Operation.reduce_scatter,
    "reduce_scatter_tensor": Operation.reduce_scatter,
    "alltoall_base_": Operation.all_to_all,
    "all_to_all_single": Operation.all_to_all,
    "send": Operation.send,
}
QUIET = {"wait_tensor", "_wrap_tensor_autograd", "recv_"}
"""What goes with the others and sends nothing itself."""
OWN = {"ring_attention": attend_around, "ring_attention_backward": attend_around_backward}
"""What our own operators do: they hide what they send."""
Key = tuple[tuple[int, ...], Operation]
"""Ranks of the group and what it does."""


class Counting(TorchDispatchMode):
    """Adds up calls and bytes of every collective, whatever part of torch calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Key] = Counter()
        self.bytes: Counter[Key] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # to be asked again for what it does inside
        namespace, _, name = function._schema.name.partition("::")
        if namespace == "trierarch":
            with self:
                return OWN[name](*args, **(kwargs or {}))
        result = function(*args, **(kwargs or {}))
        if namespace in ("c10d", "_c10d_functional") and name not in QUIET:
            group = next((found for argument in args if (found := _group(argument)) is not None), None)
            assert group is not None, f"{function} of {[type(one) for one in args]}"
            if group.size() == 1:
                return result  # nothing leaves the rank
            operation = OPERATIONS[name]
            key = tuple(dist.get_process_group_ranks(group)), operation
            self.calls[key] += 1
            # The whole tensor: what goes in, but of a gather what comes out.
            tensor = result if operation is Operation.all_gather and namespace != "c10d" else args[0]
            self.bytes[key] += _size_bytes(args[1] if name == "_reduce_scatter_base_" else tensor)
        return result


def _group(argument: Any) -> dist.ProcessGroup | None:
    """An operator's argument as a group, whichever way it is given: itself, boxed or by name."""
    if isinstance(argument, dist.ProcessGroup):
        return argument
    if isinstance(argument, str) and argument not in ("sum", "avg", "max"):
        group: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(argument)
        return group
    if isinstance(argument, torch.ScriptObject) and argument._type().name() == "ProcessGroup":
        return dist.ProcessGroup.unbox(argument)
    return None


def _size_bytes(tensor: Any) -> int:
    if isinstance(tensor, torch.Tensor):
        return tensor.numel() * tensor.element_size()
    return sum(map(_size_bytes, tensor))


def count_step(overrides: list[str]) -> tuple[Counter[Key], Counter[Key], Counter[Key], Counter[Key]]:
    """Calls and bytes of one step on this rank: as counted, and as `traffic` says."""
    config = load_config(overrides)
    rank, size = dist.get_rank(), dist.get_world_size()
    dims = lay_out(config, size)
    sharded = build_parts(config, Mesh.build(dims, "cpu"), torch.device("cpu"), seed=1)
    engine = build_engine(sharded, config, torch.device("cpu"))
    tokens = torch.randint(320, (2, 32))
    batches = [Batch(tokens, tokens, None)] * micro_batches(config, dims)
    engine.train(batches)  # the first step of a pipeline and of DDP finds things out
    sharded.parts.zero_grad()
    with Counting() as counting:
        engine.train(batches)
    calls: Counter[Key] = Counter()
    sizes: Counter[Key] = Counter()
    for transfer in traffic(config, dims, rank):
        key = tuple(sorted(dims.group(transfer.axes, rank))), transfer.operation
        calls[key] += transfer.times
        sizes[key] += transfer.tensor_bytes
    return counting.calls, counting.bytes, calls, sizes


LAYOUTS = [
    (2, "zero=0"),
    (2, "zero=1"),
    (2, "zero=2"),
    (2, "zero=3 precision=fp32"),
    (4, "zero=3 dp_replicate=2 model.tie_embeddings=true"),
    (2, "tp=2"),
    (2, "tp=2 loss_parallel=false recompute=full precision=fp32"),
    (4, "tp=4 sequence_parallel=false recompute=selective"),
    (4, "tp=2 cp=2 zero=1"),
    (2, "cp=2 context=ring recompute=full"),
    (2, "cp=2 context=ring recompute=selective"),
    (4, "cp=4 zero=1 recompute=selective"),
    (4, "pp=2 tp=2 zero=2"),
    (4, "pp=2 zero=3 schedule=interleaved_1f1b model.layers=4"),
    (4, "pp=2 zero=2 schedule=zbv model.tie_embeddings=true model.layers=4 precision=fp32"),
    (2, "pp=2 model.tie_embeddings=true"),
    (2, "zero=2 precision.reduce=bfloat16"),
    (2, "zero=0 precision.parameters=bfloat16"),
    (2, "zero=3 precision=four_level"),
    (4, "zero=1 tp=2 precision.accumulate=float64 precision.reduce=float64"),
    (2, "tp=2 precision.parameters=bfloat16"),
    (4, "zero=2 tp=2 precision=four_level"),
]


@pytest.mark.req("A5", "A9")
@pytest.mark.parametrize(("size", "layout"), LAYOUTS, ids=lambda value: str(value).replace(" ", ","))
def test_traffic_is_what_torch_sends(ranks: Ranks, tmp_path: Path, size: int, layout: str) -> None:
    own = [one if "." in one or one.startswith("precision=") else f"parallel.{one}" for one in layout.split()]
    overrides = toy_overrides(tmp_path / "none", tmp_path, "run", *SETTINGS, *own)
    for counted_calls, counted, calls, said in ranks(size, count_step, overrides):
        assert counted == said
        assert counted_calls == calls
