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
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from train.config import TrainConfig, load_config
from train.data.loader import Batch
from train.layout.check import lay_out
from train.layout.memory import STATE, memory, total
from train.mesh import Mesh
from train.model.config import parameter_count
from train.model.llama import Llama, build, next_token_loss
from train.monitor.live_bytes import local
from train.optim.adamw import gradients_of
from train.parallel.apply import Sharded, build_engine, build_parts
from train.parallel.clip import gradient_norm
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


def measure(overrides: list[str]) -> tuple[tuple[int, int, int], int, int]:
    """What lives; and as reckoned the state alone, and with all else that may live besides."""
    config = load_config(overrides)
    dims = lay_out(config, dist.get_world_size())
    reckoned = memory(config, dims, dist.get_rank(), "cpu")
    return live_bytes(config, dims, batches(config)), total(reckoned, STATE).device, total(reckoned).device


MEMORY = [
    *((2, "bf16", zero) for zero in range(4)),
    (4, "fp32", 1),
    pytest.param(8, "fp32", 3, marks=pytest.mark.chaos),
]


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
    for found, state_bytes, most_bytes in ranks(size, measure, overrides, timeout_s=120):
        assert 0.9 * state_bytes < found[1] < most_bytes, (state_bytes, found[1], most_bytes)
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
    # Gathered for forward and again for backward, but for the head, whose backward comes at once, and the embedding,
    # whose backward needs no weights.
    (2, "zero=3", {GATHER: ACCUMULATE * (2 * UNITS - 2), REDUCE_SCATTER: ACCUMULATE * UNITS}),
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


MARK = 1024
"""A weight of unit number n is n / MARK: a collective has no name, but what travels tells whose it is."""


class Watching(TorchDispatchMode):
    """Notes in their order the gathers of units (`>name`), their forwards (`name`) and backwards (`name'`)."""

    def __init__(self, part: Llama) -> None:
        super().__init__()
        self.found: list[str] = []
        units = {"embed": part.embed_tokens, **part.layers, "head": part.lm_head}
        self._names = [name for name, unit in units.items() if unit is not None]
        for number, name in enumerate(self._names):
            for parameter in units[name].parameters():
                nn.init.constant_(local(parameter.detach()), number / MARK)
            # Within a layer, for the hooks of the layer itself are those that gather.
            inside = getattr(units[name], "mlp", units[name])
            inside.register_forward_hook(lambda *_, name=name: self.found.append(name))
            if name != "embed":
                inside.register_full_backward_hook(lambda *_, name=name: self.found.append(f"{name}'"))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function._schema.name == f"c10d::{GATHER}":
            number = round(float(args[1].flatten()[-1]) * MARK)
            self.found.append(f">{self._names[number]}")
        return function(*args, **(kwargs or {}))


def order(overrides: list[str]) -> list[str]:
    """What a step of two micro-batches gathers and computes, one after the other."""
    config, sharded, engine = start([*overrides, "parallel.gradient_accumulation_steps=2"])
    (part,) = sharded.parts
    engine.train(batches(config)[:2])
    sharded.parts.zero_grad()
    with Watching(part) as watching:
        engine.train(batches(config)[:2])
    return watching.found


FORWARD = ">embed >0 embed >1 0 >2 1 >3 2 >head 3 head"
AGAIN = ">3 head' >2 3' >1 2' >0 1' 0'"
ORDERS = [
    (2, "zero=2", [f"{FORWARD} head' 3' 2' 1' 0'  embed 0 1 2 3 head head' 3' 2' 1' 0'"]),
    (2, "zero=3", [f"{FORWARD} {AGAIN}  {FORWARD} {AGAIN}"]),
    (
        4,
        "zero=3 pp=2 schedule=gpipe",
        [
            ">embed >0 embed >1 0 1  >embed >0 embed >1 0 1  >1 >0 1' 0'  >1 >0 1' 0'",
            # The head stays until its first backward.
            ">2 >3 2 >head 3 head  >2 >3 2 3 head  >3 head' >2 3' 2'  >head >3 head' >2 3' 2'",
        ],
    ),
]
"""By stage: what is asked for (`>name`) before what is computed."""


@pytest.mark.req("A9")
@pytest.mark.parametrize(("size", "layout", "expected"), ORDERS)
def test_weights_are_asked_for_before_they_are_needed(
    ranks: Ranks, tmp_path: Path, size: int, layout: str, expected: list[str]
) -> None:
    """While one unit computes, those of the next are on their way, and no others."""
    own = [f"parallel.{one}" for one in layout.split()]
    found = ranks(size, order, settings(tmp_path, "model.layers=4", "precision=fp32", *own))
    for rank, events in enumerate(found):
        assert events == expected[rank * len(expected) // size].split()


def compare_gradients(overrides: list[str]) -> tuple[dict[str, float], float]:
    """Relative distance of each gradient of ours from DDP's, and of our norm from theirs."""
    config, sharded, engine = start(overrides)
    engine.train(batches(config))
    ours = {name: whole(parameter.grad) for name, parameter in sharded.parts[0].named_parameters()}
    norm = gradient_norm(gradients_of(sharded.parts.parameters()), sharded.mesh)

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
