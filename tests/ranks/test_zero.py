"""What the stages of ZeRO promise: memory by the formulas, communication as often as needed, DDP's gradients."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.pool import Ranks
from harness.toy import toy_overrides
from harness.zero_memory import CPU, formula, live_bytes
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from train.config import TrainConfig, load_config
from train.data.loader import Batch
from train.layout.check import lay_out
from train.mesh import Mesh
from train.model.config import parameter_count
from train.model.llama import build, next_token_loss
from train.parallel.apply import Sharded, build_engine, build_parts
from train.parallel.clip import clip_grad_norm
from train.parallel.engine import Engine

pytestmark = pytest.mark.slow

ACCUMULATE, LAYERS = 4, 8
SETTINGS = [
    "model.vocab_size=320",
    "model.dim=64",
    "model.ffn_dim=192",
    "model.max_sequence_length=8",
    f"model.layers={LAYERS}",
    "data.sequence_length=8",
    "parallel.micro_batch_size=1",
    f"parallel.gradient_accumulation_steps={ACCUMULATE}",
    "loop.global_batch_size=null",
]
UNITS = LAYERS + 2
"""Layers, embedding and head travel one by one."""


def settings(folder: Path, *more: str) -> list[str]:
    return toy_overrides(folder / "none", folder, "run", *SETTINGS, *more)


def start(overrides: list[str]) -> tuple[TrainConfig, Sharded, Engine]:
    config = load_config(overrides)
    dims = lay_out(config, dist.get_world_size())
    sharded = build_parts(config, Mesh.build(dims, "cpu"), CPU, seed=1)
    return config, sharded, build_engine(sharded, config, CPU)


def batches(config: TrainConfig) -> list[Batch]:
    """Micro-batches of one step, other ones on each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = ACCUMULATE, config.parallel.micro_batch_size, config.data.sequence_length + 1
    tokens = torch.randint(config.model.vocabulary, shape, generator=generator)
    return [Batch(one[:, :-1], one[:, 1:], None) for one in tokens]


def measure(overrides: list[str]) -> tuple[int, int, int]:
    config = load_config(overrides)
    return live_bytes(config, lay_out(config, dist.get_world_size()), batches(config))


MEMORY = [(2, "bf16", zero) for zero in range(4)] + [(8, "fp32", 1), (8, "fp32", 3)]


@pytest.mark.req("A9")
@pytest.mark.parametrize(("size", "precision", "zero"), MEMORY)
def test_memory_is_what_the_formula_says(
    ranks: Ranks, tmp_path: Path, size: int, precision: str, zero: int
) -> None:
    """Nothing but the formula and the working set: some layers' copies, their gradients, and buffers."""
    overrides = settings(tmp_path, f"precision={precision}", f"parallel.zero={zero}")
    model = load_config(overrides).model
    parameters = parameter_count(model)
    between, within, after = (value * parameters for value in formula(zero, size, precision))
    layer_bytes = 4 * (parameters - 2 * model.vocabulary * model.dim) / LAYERS
    for found in ranks(size, measure, overrides, timeout_s=120):
        assert found[0] == pytest.approx(between, rel=0.05)
        assert within < found[1] < within + 6 * layer_bytes
        assert found[2] == pytest.approx(after, rel=0.05)


class Counting(TorchDispatchMode):
    """Counts the collectives that this rank takes part in, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        namespace, _, name = function._schema.name.partition("::")
        if namespace == "c10d":
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


def collectives(overrides: list[str]) -> Counter[str]:
    """Collectives of a step."""
    config, sharded, engine = start(overrides)
    engine.train(batches(config))  # the first step finds things out
    sharded.parts.zero_grad()
    with Counting() as counting:
        engine.train(batches(config))
    return counting.found


GATHER, REDUCE_SCATTER, ALL_REDUCE = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"
COLLECTIVES = [
    (2, "zero=1", {GATHER: UNITS, REDUCE_SCATTER: UNITS}),
    (2, "zero=2", {GATHER: UNITS, REDUCE_SCATTER: ACCUMULATE * UNITS}),
    # Gathered for forward and again for backward, but for the head, whose backward comes at once.
    (2, "zero=3", {GATHER: ACCUMULATE * (2 * UNITS - 1), REDUCE_SCATTER: ACCUMULATE * UNITS}),
    (4, "zero=1 dp_replicate=2", {GATHER: UNITS, REDUCE_SCATTER: UNITS, ALL_REDUCE: UNITS}),
    (4, "zero=2 dp_replicate=2", {GATHER: UNITS, REDUCE_SCATTER: ACCUMULATE * UNITS, ALL_REDUCE: UNITS}),
]


@pytest.mark.parametrize(("size", "layout", "expected"), COLLECTIVES)
def test_a_stage_communicates_as_often_as_it_must(
    ranks: Ranks, tmp_path: Path, size: int, layout: str, expected: dict[str, int]
) -> None:
    """Though a step has several micro-batches."""
    overrides = settings(tmp_path, *(f"parallel.{one}" for one in layout.split()))
    for found in ranks(size, collectives, overrides):
        assert found == Counter(expected)


def test_plain_replicas_communicate_once_a_step(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks(2, collectives, settings(tmp_path)):
        # DDP's first bucket ends at 1 MiB, the second takes the rest.
        assert found == Counter({ALL_REDUCE: 2})


def compare_gradients(overrides: list[str]) -> tuple[dict[str, float], float]:
    """Relative distance of each gradient of ours from DDP's, and of our norm from theirs."""
    config, sharded, engine = start(overrides)
    engine.train(batches(config))
    ours = {name: whole(parameter.grad) for name, parameter in sharded.parts[0].named_parameters()}
    norm = clip_grad_norm(list(sharded.parts.parameters()), 0.0, sharded.mesh)

    reference = DistributedDataParallel(build(config.model, 1, CPU))
    for index, batch in enumerate(batches(config)):
        reference.require_backward_grad_sync = index == ACCUMULATE - 1
        loss = next_token_loss(reference(batch.tokens), batch.targets)
        (loss / ACCUMULATE).backward()
    theirs = {name: whole(parameter.grad) for name, parameter in reference.module.named_parameters()}
    assert ours.keys() == theirs.keys()
    errors = {name: float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs}
    expected = torch.cat([gradient.flatten().double() for gradient in theirs.values()]).norm()
    return errors, abs(float(norm / expected) - 1)


def whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


@pytest.mark.req("A9")
@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, "zero=0"),
        (2, "zero=1"),
        (2, "zero=2"),
        (2, "zero=3"),
        (4, "zero=1 dp_replicate=2"),
        (4, "zero=2 dp_replicate=2"),
        (4, "zero=3 dp_replicate=2"),
    ],
)
def test_gradients_are_those_of_ddp(ranks: Ranks, tmp_path: Path, size: int, layout: str) -> None:
    """Gradients themselves, not weights after Adam, which hides a wrong scale; the norm counts no copy twice."""
    overrides = settings(tmp_path, "precision=fp32", *(f"parallel.{one}" for one in layout.split()))
    for errors, norm_error in ranks(size, compare_gradients, overrides):
        assert max(errors.values()) < 1e-5, errors
        assert norm_error < 1e-5
