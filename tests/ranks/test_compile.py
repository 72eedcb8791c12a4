"""Compiled layers compute what plain ones do, in every layout, and equal ones are compiled once."""

import contextlib
import functools
import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness.one_step import CPU, SHAPE, OneStep
from harness.pool import Ranks
from harness.toy import toy_overrides, train_toy
from torch import Tensor

from train.config import load_config
from train.layout.check import lay_out
from train.mesh import Mesh
from train.model.llama import CoreAttention
from train.parallel.apply import build_engine, build_parts

pytestmark = pytest.mark.slow

# No more operators than needed: a C++ compiler takes seconds for each kernel.
SMALL = ["model.dim=32", "model.heads=4", "model.kv_heads=2", "model.ffn_dim=64"]
NARROW = ["model.layers=3", "model.dim=32", "model.heads=2", "model.kv_heads=2", "model.ffn_dim=64"]
BUILT = [(1, "parallel.recompute=full"), (2, "parallel.zero=2")]
BUILT_LONG = [
    (2, "parallel.zero=0"),
    (2, "parallel.zero=3 parallel.recompute=full"),
    (2, "parallel.tp=2"),
    (2, "parallel.pp=2"),
    (2, "parallel.cp=2 data.mask_documents=true"),
    (2, "parallel.cp=2 parallel.context=ring"),
]
TRACED = [
    (2, "precision=bf16 parallel.zero=0"),
    (2, "precision=fp32 parallel.zero=3"),
    (2, "precision=bf16 parallel.tp=2 parallel.recompute=full"),
    (2, "precision=fp32 parallel.pp=2 parallel.schedule=interleaved_1f1b"),
    (2, "precision=fp32 parallel.cp=2 parallel.zero=2 data.mask_documents=true"),
    (2, "precision=bf16 parallel.cp=2 parallel.context=ring parallel.recompute=full"),
]
TRACED_LONG = [
    (1, "precision=bf16 data.mask_documents=true"),
    (2, "precision=fp32 parallel.tp=2 parallel.sequence_parallel=false data.mask_documents=true"),
    (4, "precision=fp32 parallel.tp=4 parallel.zero=0"),
    (4, "precision=bf16 parallel.tp=2 parallel.zero=3"),
    (4, "precision=fp32 parallel.pp=2 parallel.cp=2 parallel.context=ring"),
]


def layouts(slow: list[tuple[int, str]], long: list[tuple[int, str]]) -> pytest.MarkDecorator:
    """Run a test in each layout, in those that are `long` only in `make chaos`."""
    chaos = [pytest.param(*layout, marks=pytest.mark.chaos) for layout in long]
    return pytest.mark.parametrize(
        ("size", "layout"), [*slow, *chaos], ids=lambda value: str(value).replace(" ", ",")
    )


def forget() -> None:
    """Let the compiler forget what it has compiled and counted in this process."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@contextmanager
def traced() -> Iterator[dict[str, int]]:
    """Context in which torch.compile traces and differentiates, but makes no kernels; yields its counts."""
    forget()
    with mock.patch("torch.compile", functools.partial(torch.compile, backend="aot_eager")):
        yield torch._dynamo.utils.counters["stats"]


def compare(compiled: OneStep, plain: OneStep) -> None:
    assert compiled.loss == pytest.approx(plain.loss, rel=1e-6)
    expected = plain.gradients()
    for name, gradient in compiled.gradients().items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@layouts(BUILT, BUILT_LONG)
def test_compiled_layers_give_the_same_gradients(ranks: Ranks, size: int, layout: str) -> None:
    def run() -> None:
        settings = [*NARROW, "precision=fp32", *layout.split()]
        forget()
        plain, compiled = (OneStep([*settings, f"parallel.compile={on}"]) for on in ("false", "true"))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
        compare(compiled, plain)

    ranks(size, run, timeout_s=280)


def nats(step: OneStep, samples: int) -> Tensor:
    """Sum of the loss over the first samples of as many micro-batches as an evaluation takes."""
    cut = [
        type(batch)(*(None if value is None else value[:samples] for value in batch))
        for batch in step._batches[: step._engine.batches_at_once]
    ]
    return step._engine.evaluate(cut)


@pytest.mark.req("C5")
@layouts(TRACED, TRACED_LONG)
def test_equal_layers_are_compiled_once_for_each_kind_of_batch(ranks: Ranks, size: int, layout: str) -> None:
    # More layers than the compiler would compile one by one before it gave up.
    settings = [*SMALL, "model.layers=10", *layout.split()]

    def run() -> None:
        plain = OneStep(settings)
        with traced() as counts:
            compiled = OneStep([*settings, "parallel.compile=true"])
            assert counts["unique_graphs"] == 1
            compare(compiled, plain)
            assert torch.equal(nats(compiled, 4), nats(plain, 4))
            assert counts["unique_graphs"] == 2, "an evaluation keeps nothing for a backward"
            if compiled.dims.pp > 1:
                return
            for samples in (3, 2):
                torch.testing.assert_close(nats(compiled, samples), nats(plain, samples))
                assert counts["unique_graphs"] == 3, "a smaller batch is one of any size"

    ranks(size, run, timeout_s=120)


def test_replicas_settle_in_the_type_of_a_step_and_uncompiled(ranks: Ranks) -> None:
    def run() -> None:
        types: list[torch.dtype] = []
        attend = CoreAttention.forward

        def spy(core: CoreAttention, query: Tensor, *others: Tensor) -> Tensor:
            types.append(query.dtype)
            return attend(core, query, *others)

        settings = [*SHAPE, *SMALL, "precision=bf16", "parallel.zero=0", "parallel.compile=true"]
        config = load_config(settings)
        mesh = Mesh.build(lay_out(config, dist.get_world_size()), "cpu")
        replicas = torch.nn.parallel.distributed.logger
        with traced() as counts, mock.patch.object(CoreAttention, "forward", spy):
            with mock.patch.object(replicas, "info") as told:
                engine = build_engine(build_parts(config, mesh, CPU, seed=1), config, CPU)
            assert "buckets have been rebuilt" in str(told.call_args_list)
            assert not counts["unique_graphs"]
        assert types == [torch.bfloat16] * 2 * config.model.layers
        assert all(parameter.grad is None for parameter in engine._model.parameters())

    ranks(2, run)


def test_a_run_compiles_neither_its_sample_nor_a_layer_twice(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path
) -> None:
    overrides = toy_overrides(
        toy_tokens, tmp_path, "run", "loop.steps=2", "parallel.compile=true", "monitor.progress=auto"
    )

    def run() -> tuple[str, int]:
        with traced() as counts, contextlib.redirect_stdout(io.StringIO()) as stdout:
            train_toy(overrides)
        return stdout.getvalue(), counts["unique_graphs"]

    ((said, graphs),) = ranks(1, run, timeout_s=120)
    assert "a sample that continues" in said and "failed" not in said
    assert graphs == 2, "one for a step, one for an evaluation"
