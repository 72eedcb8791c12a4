"""Types of numbers in real trainings: near fp32, agreed on by all ranks, and kept through restarts."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness.one_step import OneStep
from harness.parity import Course, course_of
from harness.pool import Ranks
from harness.toy import toy_overrides, train_toy
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.nn.modules.module import register_module_forward_hook

import train.loop
from contract.errors import UserError
from contract.exit_codes import ExitCode
from contract.run_folder import Event, RunFolder, read_json_lines
from train.optim.adamw import build_optimizer
from train.precision.rows import Rows
from train.precision.scale import LossScale

pytestmark = [pytest.mark.req("C7", "A14"), pytest.mark.slow]

COMMON = [
    "loop.steps=10",
    "loop.eval_batches=1",
    "data.sequence_length=16",
    "optim.decay=constant",
    "optim.lr=3e-3",
    "optim.eps=1e-5",
]


def run(ranks: Ranks, size: int, tokens: Path, folder: Path, name: str, *more: str) -> RunFolder:
    """Train a toy to its end."""
    codes = ranks(size, train_toy, toy_overrides(tokens, folder, name, *COMMON, *more), timeout_s=120)
    assert codes == [ExitCode.FINISHED] * size
    return RunFolder(folder / name)


def metrics(folder: RunFolder) -> list[dict[str, Any]]:
    """The lines of the steps."""
    return [line for line in read_json_lines(folder.metrics) if "loss" in line]


def checkpoint(folder: RunFolder, step: int) -> dict[str, Any]:
    """The tree of a checkpoint, read by torch's own converter."""
    target = folder.path / f"{step}.pt"
    dcp_to_torch_save(folder.checkpoints / f"step_{step}", target)
    tree: dict[str, Any] = torch.load(target, weights_only=True)
    return tree


@pytest.fixture(scope="module")
def reference(ranks: Ranks, toy_tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Course:
    """The same training in fp32 on one rank."""
    folder = tmp_path_factory.mktemp("reference")
    return course_of(run(ranks, 1, toy_tokens, folder, "fp32", "precision=fp32"), folder)


SLOW, CHAOS = pytest.mark.slow, pytest.mark.chaos
# Relative deviations from fp32 that the loss of any step may have.
LOWER, LOSSLESS = 2e-3, 1e-5


@pytest.mark.req("A23", "B4")
@pytest.mark.parametrize(
    ("size", "types", "tolerance"),
    [
        (1, "precision=fp16", LOWER),
        (2, "precision=fp16 parallel.zero=0", LOWER),
        (2, "precision=fp16 parallel.zero=3", LOWER),
        pytest.param(2, "precision=fp16 parallel.tp=2", LOWER, marks=SLOW),
        pytest.param(2, "precision=fp16 parallel.pp=2", LOWER, marks=CHAOS),
        (1, "precision.backward=float16", LOWER),
        (2, "precision=fp32 precision.backward=float16 parallel.zero=2", LOWER),
        pytest.param(
            2, "precision.backward=float16 parallel.tp=2 model.tie_embeddings=false", LOWER, marks=SLOW
        ),
        (2, "precision=fp32 precision.accumulate=float64 precision.reduce=float64 parallel.zero=2", LOSSLESS),
        pytest.param(2, "precision=fp32 precision.accumulate=float64 parallel.tp=2", LOSSLESS, marks=CHAOS),
        (2, "precision=fp32 precision.reduce=bfloat16 parallel.zero=1", LOWER),
        (1, "precision=fp32 precision.embedding=int8", LOWER),
        (2, "precision=fp32 precision.embedding=int8 parallel.zero=3", LOWER),
        pytest.param(
            4, "precision=fp32 precision.embedding=int8 parallel.tp=2 parallel.zero=2", LOWER, marks=SLOW
        ),
        (2, "precision=fp32 precision.optimizer_state=int8 parallel.zero=2", LOWER),
        (1, "precision=four_level", LOWER),
        (2, "precision=four_level parallel.zero=2", LOWER),
        pytest.param(4, "precision=four_level parallel.tp=2 parallel.pp=2", LOWER, marks=SLOW),
        pytest.param(2, "precision=four_level parallel.pp=2 parallel.recompute=full", LOWER, marks=CHAOS),
        pytest.param(4, "precision=four_level parallel.cp=2 parallel.zero=3", LOWER, marks=CHAOS),
        pytest.param(4, "precision=four_level parallel.zero=2 parallel.dp_replicate=2", LOWER, marks=CHAOS),
        pytest.param(2, "precision=four_level parallel.pp=2 parallel.schedule=zbv", LOWER, marks=CHAOS),
        pytest.param(2, "precision=fp16 offload.optimizer=cpu offload.gradients=cpu", LOWER, marks=SLOW),
    ],
    ids=lambda value: str(value).replace(" ", ","),
)
def test_types_train_as_fp32_does(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path, reference: Course, size: int, types: str, tolerance: float
) -> None:
    folder = run(ranks, size, toy_tokens, tmp_path, "run", *types.split())
    found = course_of(folder, tmp_path)
    for ours, theirs in zip(found.losses, reference.losses, strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance)
    for ours, theirs in zip(found.norms, reference.norms, strict=True):
        assert ours == pytest.approx(theirs, rel=10 * tolerance)
    assert found.eval_loss == pytest.approx(reference.eval_loss, rel=min(tolerance, 0.005))
    for name, weight in reference.weights.items():
        assert found.weights[name].dtype is torch.float32, "any other run can go on from here"
        error = (found.weights[name] - weight).norm() / weight.norm()
        assert error < 50 * tolerance, f"{name}: {error:.1e}"


GRADIENT = "0.layers.0.mlp.down_proj.weight"


def gradient_error(*types: str) -> tuple[float, torch.dtype]:
    """How far one step's gradient is from that in fp64, and its type, on every rank the same. Collective."""
    step = OneStep(["model.layers=1", "parallel.zero=2", *types])
    (parameter,) = (p for name, p in step.sharded.parts.named_parameters() if name == GRADIENT)
    assert parameter.grad is not None
    ours = step.gradients()[GRADIENT].double()
    exact = OneStep(["model.layers=1", "precision=fp32"]).gradients()[GRADIENT].double()
    return float((ours - exact).norm() / exact.norm()), parameter.grad.dtype


@pytest.mark.req("B4")
def test_gradients_add_up_in_the_types_that_were_asked_for(ranks: Ranks) -> None:
    def errors() -> dict[str, tuple[float, torch.dtype]]:
        return {
            types: gradient_error("precision=fp32", *types.split())
            for types in (
                "precision.accumulate=float64 precision.reduce=float64",
                "precision.reduce=bfloat16",
                "precision.accumulate=bfloat16",
            )
        }

    for found in ranks(2, errors):
        assert [dtype for _, dtype in found.values()] == [torch.float64, torch.float32, torch.bfloat16]
        wide, travels_narrow, narrow = (error for error, _ in found.values())
        assert wide < 1e-6 < 2**-11 < travels_narrow < 2**-8
        assert 2**-11 < narrow < 2**-8


@pytest.mark.req("B4")
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_sums_over_micro_batches_keep_the_bits_of_float64(ranks: Ranks, zero: int) -> None:
    def gradient() -> Tensor:
        types = ["precision=fp32", "precision.accumulate=float64", "precision.reduce=float64"]
        types.append(f"parallel.zero={zero}")
        return OneStep(["model.layers=1", *types]).gradients()[GRADIENT]

    (found,) = ranks(1, gradient)
    assert found.dtype is torch.float64 and not torch.equal(found.float().double(), found)


@pytest.mark.req("B4")
def test_backward_products_keep_the_bits_of_float16_under_zero(ranks: Ranks) -> None:
    def gradient() -> Tensor:
        types = ["precision.backward=float16", "precision.accumulate=float64"]
        step = OneStep(["model.layers=1", "parallel.zero=2", *types])
        step.sharded.parts.zero_grad()
        step._engine.train(step._batches[:1])
        return step.gradients()[GRADIENT]

    (found,) = ranks(1, gradient)
    assert found.dtype is torch.float64
    assert torch.equal(found.half().double(), found)
    assert not torch.equal(found.bfloat16().double(), found)


@pytest.mark.chaos
@pytest.mark.parametrize(("size", "layout"), [(1, "parallel.recompute=full"), (2, "parallel.tp=2")])
def test_compiled_layers_compute_their_backward_in_its_own_type(ranks: Ranks, size: int, layout: str) -> None:
    def compare() -> None:
        # A C++ compiler takes seconds for each kernel.
        tiny = ["model.layers=1", "model.dim=32", "model.heads=2", "model.kv_heads=2", "model.ffn_dim=64"]
        types = ["precision=fp32", "precision.backward=float16"]
        plain, compiled = (
            OneStep([*tiny, *types, layout, f"parallel.compile={on}"]) for on in ("false", "true")
        )
        assert compiled.loss == pytest.approx(plain.loss, rel=1e-6)
        expected = plain.gradients()
        for name, gradient in compiled.gradients().items():
            torch.testing.assert_close(gradient, expected[name], rtol=2e-3, atol=1e-5, msg=name)

    ranks(size, compare, timeout_s=280)


def table_bytes(zero: int) -> tuple[int, int]:
    """Bytes between steps of the table of this rank, in fp32 and in int8. Collective."""

    def held(*types: str) -> int:
        step = OneStep(["model.dim=512", "model.layers=1", f"parallel.zero={zero}", *types])
        embedding = step.sharded.parts[0].embed_tokens
        assert isinstance(embedding, nn.Embedding)
        table = embedding.weight.to_local() if hasattr(embedding.weight, "to_local") else embedding.weight
        return table.packed.nbytes if isinstance(table, Rows) else table.nbytes

    return held("precision=fp32"), held("precision=fp32", "precision.embedding=int8")


@pytest.mark.req("B4")
@pytest.mark.parametrize("zero", [1, 3])
def test_the_embedding_takes_a_quarter_on_every_rank(ranks: Ranks, zero: int) -> None:
    for plain, compact in ranks(2, table_bytes, zero):
        assert plain == 320 * 512 * 4 // 2
        assert 1 - compact / plain == pytest.approx(0.75, abs=0.003)


@pytest.mark.req("B4")
def test_copies_of_a_table_are_rounded_alike(ranks: Ranks) -> None:
    def table() -> Tensor:
        step = OneStep(["model.layers=1", "parallel.zero=0", "precision.embedding=int8"])
        build_optimizer(step.sharded.parts, step.config, torch.device("cpu")).step()
        held = step.sharded.parts[0].embed_tokens.weight.to_local()
        assert isinstance(held, Rows)
        return held.packed

    one, other = ranks(2, table)
    assert torch.equal(one, other)


@contextmanager
def broken(where: str, steps: range, here: bool, forward: bool = False) -> Iterator[list[bool]]:
    """Have a module's result, or its gradient, be too large in some steps of `train.loop.train` on this rank.

    Yields what the loss scale decides of each step.
    """
    now = -1
    decisions: list[bool] = []
    decide, rate = LossScale.passes, train.loop.learning_rate

    def learning_rate(config: Any, step: int, count: int) -> float:
        nonlocal now
        now = step
        return rate(config, step, count)

    def passes(self: LossScale, norm: Tensor) -> bool:
        decisions.append(decide(self, norm))
        return decisions[-1]

    def spoil(module: nn.Module, given: Any, result: Any) -> Any:
        if not here or now not in steps or getattr(module, "spoiled", None) != where:
            return None
        if forward:
            return result * 1e9
        if result.requires_grad:
            result.register_hook(lambda gradient: gradient * math.inf)
        return None

    build = train.launch.build_parts  # type: ignore[attr-defined]

    def marked(*args: Any) -> Any:
        sharded = build(*args)
        for part in sharded.parts:
            for name, module in part.named_modules():
                if name == where:
                    module.spoiled = where
        return sharded

    with ExitStack() as stack:
        stack.enter_context(patch("train.loop.learning_rate", learning_rate))
        stack.enter_context(patch("train.launch.build_parts", marked))
        stack.enter_context(patch.object(LossScale, "passes", passes))
        hook = register_module_forward_hook(spoil)
        stack.callback(hook.remove)
        yield decisions


def with_overflow(overrides: list[str], where: str, steps: range, on: int) -> tuple[ExitCode, list[bool]]:
    """Train with an infinite gradient in some steps on rank `on` alone."""
    with broken(where, steps, here=torch.distributed.get_rank() == on) as decisions:
        return train_toy(overrides), decisions


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (1, ""),
        (2, "parallel.zero=0"),
        (2, "parallel.zero=3"),
        pytest.param(2, "parallel.tp=2", marks=SLOW),
        (2, "parallel.pp=2"),
        pytest.param(2, "parallel.zero=2 offload.optimizer=cpu", marks=SLOW),
        pytest.param(4, "parallel.tp=2 parallel.pp=2", marks=SLOW),
    ],
    ids=lambda value: str(value).replace(" ", ","),
)
def test_all_ranks_skip_a_step_in_which_one_has_an_overflow(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path, size: int, layout: str
) -> None:
    more = [
        "loop.steps=4",
        "precision=fp16",
        "checkpoint.every_steps=1",
        "checkpoint.keep_last=0",
        *layout.split(),
    ]
    overrides = toy_overrides(toy_tokens, tmp_path, "run", *COMMON, *more)
    where = "layers.0.mlp.up_proj" if "pp" not in layout else "layers.1.mlp.up_proj"
    for code, decisions in ranks(
        size, with_overflow, overrides, where, range(2, 3), on=size - 1, timeout_s=120
    ):
        assert code == ExitCode.FINISHED and decisions == [True, True, False, True]
    folder = RunFolder(tmp_path / "run")
    lines = metrics(folder)
    assert [line["loss_scale"] for line in lines] == [65536, 65536, 32768, 32768]
    assert [line["skipped_steps"] for line in lines] == [0, 0, 1, 1]
    assert ["grad_norm" in line for line in lines] == [True, True, False, True]
    before, after, moved = (checkpoint(folder, step) for step in (2, 3, 4))
    for name, weight in before["model"].items():
        assert torch.equal(after["model"][name], weight), name
        assert not torch.equal(moved["model"][name], weight), name
    for name, moments in before["optimizer"].items():
        assert all(torch.equal(after["optimizer"][name][kind], value) for kind, value in moments.items()), (
            name
        )
        assert float(moved["optimizer"][name]["step"]) == 3, "a skipped step is none of Adam's"
    assert int(after["progress"]["samples"]) == 3 * 8, "its samples are spent"


SCALED = ["precision=fp16", "precision.loss_scale_growth_steps=3", "loop.steps=8"]


@pytest.mark.parametrize(
    ("size", "then", "layout"),
    [(2, 2, "parallel.zero=2"), (2, 1, ""), pytest.param(2, 2, "parallel.pp=2", marks=SLOW)],
)
def test_a_restart_keeps_the_loss_scale(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path, size: int, then: int, layout: str
) -> None:
    """Whatever the layout: in the same one to the bit."""

    def overrides(name: str, *more: str) -> list[str]:
        return toy_overrides(toy_tokens, tmp_path, name, *COMMON, *SCALED, *more)

    where, steps = "layers.0.mlp.up_proj", range(1, 2)
    ranks(size, with_overflow, overrides("whole", "parallel.zero=2"), where, steps, on=1, timeout_s=120)

    def stopped(settings: list[str]) -> ExitCode:
        with broken(where, steps, here=torch.distributed.get_rank() == 1):
            return train_toy(settings, stop_after=4)

    assert (
        ranks(size, stopped, overrides("again", "parallel.zero=2"), timeout_s=120)
        == [ExitCode.STOPPED] * size
    )
    ranks(then, train_toy, overrides("again", *layout.split()), timeout_s=120)
    whole, again = (metrics(RunFolder(tmp_path / name)) for name in ("whole", "again"))
    assert [line["loss_scale"] for line in whole] == [65536, 32768, 32768, 32768, 65536, 65536, 65536, 131072]
    kept = ("loss_scale", "skipped_steps")
    assert [[line[key] for key in kept] for line in again] == [[line[key] for key in kept] for line in whole]
    same = layout == "parallel.zero=2"
    for one, other in zip(again, whole, strict=True):
        assert one["loss"] == (other["loss"] if same else pytest.approx(other["loss"], rel=1e-3))


def test_a_run_goes_on_with_a_loss_scale_that_it_did_not_have(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path
) -> None:
    overrides = toy_overrides(toy_tokens, tmp_path, "run", *COMMON)
    assert ranks(1, train_toy, overrides, stop_after=3) == [ExitCode.STOPPED]
    assert "precision" not in checkpoint(RunFolder(tmp_path / "run"), 4)
    folder = run(ranks, 1, toy_tokens, tmp_path, "run", "precision=fp16")
    lines = metrics(folder)
    assert "loss_scale" not in lines[3] and lines[-1]["loss_scale"] == 65536
    assert float(checkpoint(folder, 10)["precision"]["good_steps"]) == 6


@pytest.mark.parametrize(
    ("size", "layout", "where", "forward", "said"),
    [
        (
            1,
            "precision=fp16",
            "layers.1.mlp.down_proj",
            True,
            "down_proj overflows float16, whose largest number is 65504, in the forward pass: choose",
        ),
        (
            2,
            "precision=fp16 parallel.pp=2",
            "layers.1.mlp.down_proj",
            True,
            "the result of layers.1.mlp.down_proj overflows float16",
        ),
        (
            2,
            "precision=fp16 parallel.zero=2",
            "layers.0.mlp.down_proj",
            False,
            "the gradient of layers.0.mlp.down_proj is NaN, and no other nearer to the loss",
        ),
        (
            2,
            "precision=fp16 parallel.pp=2",
            "layers.1.mlp.up_proj",
            False,
            "the gradient of layers.1.mlp.up_proj is NaN, and no other nearer to the loss",
        ),
    ],
    ids=["forward", "forward-pp", "backward", "backward-pp"],
)
def test_a_scale_at_its_lowest_ends_the_run_with_a_diagnosis(
    ranks: Ranks,
    toy_tokens: Path,
    tmp_path: Path,
    size: int,
    layout: str,
    where: str,
    forward: bool,
    said: str,
) -> None:
    more = [*layout.split(), "precision.loss_scale=4", "precision.loss_scale_patience=2"]
    overrides = toy_overrides(toy_tokens, tmp_path, "run", *COMMON, *more)

    def end() -> tuple[str, int]:
        last = torch.distributed.get_rank() == size - 1
        with broken(where, range(2, 100), here=last, forward=forward), pytest.raises(UserError) as error:
            train_toy(overrides)
        return str(error.value), error.value.exit_code

    for sentence, code in ranks(size, end, timeout_s=120):
        assert code == ExitCode.CONFIG
        # Two good steps; 4 to 2 to 1, then two at 1.
        assert sentence.startswith(
            "2 steps in a row, up to step 6, have no finite gradients even at the smallest"
        )
        assert said in sentence and sentence.endswith("choose precision=bf16, or a lower optim.lr")
    failed = [event for event in RunFolder(tmp_path / "run").read_events() if event["event"] == Event.FAILED]
    assert len(failed) == 1 and said in str(failed[0]["reason"]), "one rank tells"


@pytest.mark.req("B4")
def test_a_table_in_int8_is_restored_in_any_layout_and_by_runs_without(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path
) -> None:
    common = ["precision=four_level", "precision.optimizer_state=int8"]

    def overrides(name: str, *more: str) -> list[str]:
        return toy_overrides(toy_tokens, tmp_path, name, *COMMON, *more)

    whole = run(ranks, 2, toy_tokens, tmp_path, "whole", *common, "parallel.zero=2")
    ranks(2, train_toy, overrides("again", *common, "parallel.zero=2"), stop_after=3)
    again = run(ranks, 2, toy_tokens, tmp_path, "again", *common, "parallel.zero=2")
    assert [line["loss"] for line in metrics(again)] == [line["loss"] for line in metrics(whole)], (
        "the same bits"
    )
    ranks(2, train_toy, overrides("other", *common, "parallel.zero=2"), stop_after=3)
    table = checkpoint(RunFolder(tmp_path / "other"), 4)["model"]["embed_tokens.weight"]
    assert all(len(row.unique()) <= 255 for row in table / (table.abs().amax(1, keepdim=True) / 127))
    other = run(ranks, 1, toy_tokens, tmp_path, "other", "precision=fp32")
    for ours, theirs in zip(metrics(other), metrics(whole), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-3)


DYNAMIC = ["precision.dynamic=true", "precision.dynamic_steps=3", "loop.steps=12"]


def switches(folder: RunFolder) -> list[tuple[Any, Any]]:
    """Steps and types of the changes."""
    events = folder.read_events()
    return [(e["step"], e["accumulate"]) for e in events if e["event"] == Event.PRECISION_CHANGED]


@pytest.mark.req("A8")
@pytest.mark.parametrize(
    ("size", "layout"),
    [
        pytest.param(1, "", marks=SLOW),
        (2, "parallel.zero=2"),
        pytest.param(2, "parallel.tp=2", marks=SLOW),
    ],
)
def test_gradients_change_their_types_and_do_so_again_after_a_restart(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path, size: int, layout: str
) -> None:
    more = [*DYNAMIC, *layout.split()]

    def overrides(name: str) -> list[str]:
        # The losses of one sample each jump up and down, in any direction.
        return toy_overrides(toy_tokens, tmp_path, name, *COMMON, *more, "optim.lr=0.05")

    assert set(ranks(size, train_toy, overrides("whole"), timeout_s=120)) == {ExitCode.FINISHED}
    assert set(ranks(size, train_toy, overrides("again"), stop_after=6, timeout_s=120)) == {ExitCode.STOPPED}
    assert set(ranks(size, train_toy, overrides("again"), timeout_s=120)) == {ExitCode.FINISHED}
    whole, again = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "again")
    lines = metrics(whole)
    assert [line["accumulate_bits"] for line in lines[:3]] == [32, 32, 16]
    kept = ("accumulate_bits", "reduce_bits", "gradient_noise", "precision_switches", "loss")
    assert [[line.get(key) for key in kept] for line in metrics(again)] == [
        [line.get(key) for key in kept] for line in lines
    ]
    assert switches(again) == switches(whole)
    assert switches(whole)[0] == (3, "bfloat16")
    assert len(switches(whole)) == lines[-1]["precision_switches"]


@pytest.mark.req("A8")
def test_an_overflow_makes_gradients_wide_for_a_while_whatever_comes_between(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path
) -> None:
    def overrides(name: str) -> list[str]:
        more = ["precision=four_level", *DYNAMIC, "loop.steps=16"]
        return toy_overrides(toy_tokens, tmp_path, name, *COMMON, *more)

    def stopped(settings: list[str]) -> ExitCode:
        with broken(where, steps, here=torch.distributed.get_rank() == 1):
            return train_toy(settings, stop_after=7)

    where, steps = "layers.1.mlp.up_proj", range(4, 5)
    ranks(2, with_overflow, overrides("whole"), where, steps, on=1, timeout_s=120)
    assert ranks(2, stopped, overrides("again"), timeout_s=120) == [ExitCode.STOPPED] * 2
    ranks(2, train_toy, overrides("again"), timeout_s=120)
    for name in ("whole", "again"):
        folder = RunFolder(tmp_path / name)
        assert switches(folder) == [(3, "bfloat16"), (6, "float64"), (15, "bfloat16")]
        bits = [line["accumulate_bits"] for line in metrics(folder)]
        assert bits == [64, 64, 16, 16, 16, *[64] * 9, 16, 16]
