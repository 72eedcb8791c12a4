"""Pipelines against one process and against transformers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.composed import composed
from harness.pool import Ranks, RanksError
from harness.toy import MODEL, QUIET, toy_overrides, train_toy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from contract.exit_codes import ExitCode
from contract.run_folder import RunFolder, read_json_lines
from train.config import TrainConfig, load_config
from train.data.loader import Batch
from train.layout.check import lay_out
from train.layout.dims import ParallelDims
from train.layout.stages import SCHEDULES, stages_of
from train.mesh import Mesh
from train.model import hf
from train.model.llama import IGNORED, Llama, next_token_loss
from train.model.llama import build as build_whole
from train.optim.adamw import build_optimizer
from train.parallel.apply import build_engine, build_parts
from train.parallel.clip import clip_grad_norm
from train.parallel.engine import Engine, mean_loss
from train.parallel.fill import global_name
from train.parallel.pipeline import Pipelined
from train.parallel.tied import copied_heads

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SEED, MICRO_BATCH, STEP_BATCH, LENGTH = 3, 2, 16, 32


@dataclass
class Built:
    """What one rank has of a model."""

    chosen: TrainConfig
    """Not "config": cloudpickle would take that for torch.distributed.config, which cannot travel."""
    mesh: Mesh
    parts: nn.ModuleList
    engine: Engine


def overrides(*settings: str) -> list[str]:
    return [
        *MODEL,
        *QUIET,
        "model.vocab_size=96",
        "model.layers=8",
        f"data.sequence_length={LENGTH}",
        f"loop.global_batch_size={STEP_BATCH}",
        f"parallel.micro_batch_size={MICRO_BATCH}",
        "precision=fp32",
        *settings,
    ]


def build(*settings: str, unchecked: bool = False) -> Built:
    """Build this rank's share of a model; `unchecked` takes layouts that are refused."""
    config = composed(overrides(*settings))
    ranks = dist.get_world_size()
    dims = ParallelDims.of(config.parallel, ranks) if unchecked else lay_out(config, ranks)
    mesh = Mesh.build(dims, "cpu")
    sharded = build_parts(config, mesh, CPU, SEED)
    return Built(config, mesh, sharded.parts, build_engine(sharded, config, CPU))


def samples(dp_rank: int = 0, dp: int = 1, masked: bool = False) -> list[Batch]:
    """One step's micro-batches of a data-parallel rank; with documents where `masked`."""
    made = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 96, (STEP_BATCH, LENGTH + 1), generator=made)
    documents = torch.randint(0, 2, (STEP_BATCH, LENGTH), generator=made).cumsum(1) if masked else None
    whole = Batch(tokens[:, :-1], tokens[:, 1:], documents)
    own = slice(dp_rank, None, dp)
    return [
        Batch(*(None if x is None else x[own][i : i + MICRO_BATCH] for x in whole))  # type: ignore[arg-type]
        for i in range(0, STEP_BATCH // dp, MICRO_BATCH)
    ]


def whole_batch(masked: bool) -> Batch:
    return Batch(
        *(None if x[0] is None else torch.cat(x) for x in zip(*samples(masked=masked), strict=True))  # type: ignore[arg-type]
    )


def reference(config: TrainConfig, masked: bool = False) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process that takes the whole batch at once."""
    model = build_whole(config.model, SEED, CPU)
    batch = whole_batch(masked)
    loss = next_token_loss(model(batch.tokens, batch.documents), batch.targets)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def gradient_errors(built: Built, gradients: dict[str, Tensor]) -> list[float]:
    """Relative difference of each gradient of this rank's parts, 1 where there is none."""
    return [
        1.0 if p.grad is None else float((whole(p.grad) - gradients[known]).norm() / gradients[known].norm())
        for part in built.parts
        for name, p in part.named_parameters()
        for known in [global_name(name, built.chosen.model)]
    ]


def check(*settings: str, masked: bool = False) -> Built:
    """Loss, gradients, evaluation and then loss again are those of one process."""
    built = build(*settings)
    micro_batches = samples(built.mesh.dp.get_local_rank(), built.mesh.dims.dp, masked)
    loss, gradients = reference(built.chosen, masked)
    # Ranks of one tensor-parallel group have the same loss.
    tokens = STEP_BATCH * LENGTH * built.mesh.dims.tp
    for _ in range(2):
        nats = built.engine.evaluate(micro_batches)
        dist.all_reduce(nats)
        assert abs(float(nats) / tokens / loss - 1) < 1e-6, settings
        mine = built.engine.train(micro_batches)
        assert abs(mean_loss(mine, built.mesh) / loss - 1) < 1e-6, settings
        assert max(gradient_errors(built, gradients)) < 1e-5, settings
        built.parts.zero_grad()
    return built


@pytest.mark.req("A4")
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_every_schedule_has_the_gradients_of_one_process(ranks: Ranks, pp: int, masked: bool) -> None:
    def one_after_the_other() -> None:
        for schedule in SCHEDULES:
            # An untied and a tied model, each schedule with both over the two runs of masked.
            tied = f"model.tie_embeddings={masked}"
            check(f"parallel.pp={pp}", f"parallel.schedule={schedule}", tied, masked=masked)

    ranks(pp, one_after_the_other)


@pytest.mark.req("A4")
def test_uneven_splits_have_the_gradients_of_one_process(ranks: Ranks) -> None:
    """Also where the first or the last stage has nothing but the embedding or the head."""

    def one_after_the_other() -> None:
        for schedule, split in (
            ("1f1b", "[0,8]"),
            ("1f1b", "[8,0]"),
            ("gpipe", "[1,7]"),
            ("zbv", "[0,5,3,0]"),
        ):
            built = check("parallel.pp=2", f"parallel.schedule={schedule}", f"parallel.split={split}")
            counts = [int(count) for count in split.strip("[]").split(",")]
            own = stages_of(built.chosen.parallel, dist.get_rank())
            assert [len(part.layers) for part in built.parts] == [counts[stage] for stage in own]

    ranks(2, one_after_the_other)


@pytest.mark.req("A1", "A4")
def test_stages_are_sharded_at_every_zero_stage(ranks: Ranks) -> None:
    def one_after_the_other() -> None:
        for zero, schedule in (
            (0, "1f1b"),
            (1, "zbv"),
            (2, "interleaved_1f1b"),
            (3, "gpipe"),
            (3, "looped_bfs"),
        ):
            check("parallel.pp=2", f"parallel.zero={zero}", f"parallel.schedule={schedule}")

    ranks(4, one_after_the_other)


@pytest.mark.req("A1", "A4")
@pytest.mark.parametrize(
    "layout",
    ["tp=2 schedule=1f1b", "tp=2 schedule=zbv", "cp=2 schedule=1f1b", "recompute=selective schedule=zbv"],
)
def test_stages_are_split_by_other_axes_too(ranks: Ranks, layout: str) -> None:
    def compare() -> None:
        check("parallel.pp=2", "model.tie_embeddings=true", *(f"parallel.{one}" for one in layout.split()))

    ranks(4 if "=2" in layout else 2, compare)


@pytest.mark.req("A1", "A4")
def test_stages_are_sharded_inside_and_copied_between_groups(ranks: Ranks) -> None:
    """Each micro-batch is reduced inside a group, copies agree with the last one."""

    def one_after_the_other() -> None:
        for zero, schedule in ((2, "1f1b"), (1, "interleaved_zero_bubble")):
            layout = ("parallel.pp=2", "parallel.dp_replicate=2", f"parallel.zero={zero}")
            check(*layout, f"parallel.schedule={schedule}")

    ranks(8, one_after_the_other)


class Calls(TorchDispatchMode):
    """Context that notes the name of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_zero_2_keeps_no_whole_gradients_between_micro_batches(ranks: Ranks) -> None:
    """Where the backward is not split each micro-batch is reduced, else the step once."""

    def count(zero: int, schedule: str) -> int:
        built = build("parallel.pp=2", f"parallel.zero={zero}", f"parallel.schedule={schedule}")
        micro_batches = samples(built.mesh.dp.get_local_rank(), 2)
        with Calls() as calls:
            built.engine.train(micro_batches)
        return sum("reduce_scatter" in name for name in calls.names)

    def compare() -> None:
        once = count(1, "1f1b")
        assert once > 0
        assert count(2, "1f1b") == once * 4
        assert count(2, "zbv") == count(1, "zbv")

    ranks(4, compare)


@pytest.mark.req("A10")
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev"])
def test_a_layer_is_computed_again_once(ranks: Ranks, schedule: str) -> None:
    """In a backward of two halves torch would do so for each weight."""

    def count(recompute: str) -> int:
        built = build("parallel.pp=2", f"parallel.schedule={schedule}", f"parallel.recompute={recompute}")
        with Calls() as calls:
            built.engine.train(samples())
        return sum("attention" in name and "backward" not in name for name in calls.names)

    def compare() -> None:
        once = count("none")
        assert once > 0
        assert count("full") == 2 * once

    ranks(2, compare)


@pytest.mark.req("A4")
def test_the_trap_of_zero_3_is_refused_and_is_one(ranks: Ranks) -> None:
    """torch gets gradients wrong, without an error, where the backward is split and parameters are freed."""

    def wrong(schedule: str) -> None:
        settings = ("parallel.pp=2", "parallel.zero=3", f"parallel.schedule={schedule}")
        built = build(*settings, unchecked=True)
        _, gradients = reference(built.chosen)
        built.engine.train(samples(built.mesh.dp.get_local_rank(), 2))
        worst = torch.tensor(max(gradient_errors(built, gradients)))
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        assert worst > 0.1, f"{schedule}: right by now ({worst}), lift the refusal"

    with pytest.raises(RanksError, match=r"zero=3 gets wrong: set parallel\.zero=2"):
        ranks(4, build, "parallel.pp=2", "parallel.zero=3", "parallel.schedule=zbv")
    ranks(4, wrong, "zbv")


@pytest.mark.req("A4")
@pytest.mark.parametrize(
    ("size", "layout"), [(4, "1f1b"), (2, "zbv"), (2, "interleaved_1f1b"), (4, "1f1b zero=2 pp=2")]
)
def test_both_copies_of_a_tied_embedding_stay_equal(ranks: Ranks, size: int, layout: str) -> None:
    """Equal to the bit after some steps; the norm, which clips, is that of one process."""
    schedule, *more = layout.split()

    def train() -> Tensor:
        settings = [f"parallel.{one}" for one in (f"schedule={schedule}", f"pp={size}", *more)]
        built = build("model.tie_embeddings=true", *settings)
        _, gradients = reference(built.chosen)
        norm = torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm()
        copies = copied_heads(built.parts)
        optimizer = build_optimizer(built.parts, built.chosen, CPU)
        for step in range(3):
            built.engine.train(samples(built.mesh.dp.get_local_rank(), built.mesh.dims.dp))
            found = clip_grad_norm(optimizer, 1e-3, built.mesh, copies)
            if step == 0:
                torch.testing.assert_close(found.double(), norm, rtol=1e-6, atol=0)
            optimizer.step()
            optimizer.zero_grad()
        tied = [
            whole(p).detach()
            for part in built.parts
            for name, p in part.named_parameters()
            if name in ("embed_tokens.weight", "lm_head.weight")
        ]
        return torch.stack(tied) if tied else torch.empty(0)

    copies = [copy for of_rank in ranks(size, train) for copy in of_rank]
    assert len(copies) >= 2
    for copy in copies:
        assert torch.equal(copy, copies[0])


def test_an_error_in_a_stage_stays_what_it_is(ranks: Ranks) -> None:
    """torch wraps what a stage raises in a RuntimeError: a full device would not be told from a bug."""

    def fail() -> None:
        built = build("parallel.pp=2", "parallel.schedule=gpipe")
        built.engine.train(samples())

        def full(module: nn.Module, args: Any) -> None:
            raise torch.OutOfMemoryError("full")

        if dist.get_rank() == 0:
            built.parts[0].register_forward_pre_hook(full)
            with pytest.raises(torch.OutOfMemoryError, match="full"):
                built.engine.train(samples())

    ranks(2, fail)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_transformers(ranks: Ranks, tmp_path: Path, tied: bool) -> None:
    from transformers import LlamaForCausalLM

    settings = ["parallel.pp=2", "parallel.schedule=zbv", f"model.tie_embeddings={tied}"]
    config = load_config(overrides(*settings))
    model = build_whole(config.model, SEED, CPU)
    hf.write_hf(tmp_path / "out", config.model, model.state_dict())
    with torch.no_grad():
        theirs = LlamaForCausalLM.from_pretrained(tmp_path / "out")(whole_batch(False).tokens).logits

    def logits() -> Tensor | None:
        built = build(*settings)
        seen: list[Tensor] = []
        for part in built.parts:
            assert isinstance(part, Llama)
            if part.lm_head is not None:
                part.lm_head.register_forward_hook(lambda module, args, out: seen.append(out))
        built.engine.evaluate(samples())
        return torch.cat(seen) if seen else None

    (ours,) = [found for found in ranks(2, logits) if found is not None]
    assert (ours - theirs).abs().max() < 1e-5


def test_ignored_targets_do_not_count_in_an_evaluation(ranks: Ranks) -> None:
    def evaluate() -> float:
        built = build("parallel.pp=2")
        first, *others = samples()
        ignored = [batch._replace(targets=torch.full_like(batch.targets, IGNORED)) for batch in others]
        nats = built.engine.evaluate([first, *ignored])
        dist.all_reduce(nats)
        model = build_whole(built.chosen.model, SEED, CPU)
        with torch.no_grad():
            expected = next_token_loss(model(first.tokens), first.targets, "sum")
        assert abs(float(nats) / float(expected) - 1) < 1e-6
        return float(nats)

    ranks(2, evaluate)


@pytest.mark.parametrize(("size", "zero"), [(2, 0), (4, 2)])
def test_bf16_hands_over_bf16(ranks: Ranks, size: int, zero: int) -> None:
    """Plain parts compute under autocast, sharded ones by their own policy; both are close to fp32."""

    def train() -> None:
        built = build("parallel.pp=2", f"parallel.zero={zero}", "precision=bf16")
        loss, gradients = reference(built.chosen)
        mine = built.engine.train(samples(built.mesh.dp.get_local_rank(), built.mesh.dims.dp))
        assert isinstance(built.engine, Pipelined)
        (stage,) = built.engine._stages
        received = stage.grad_recv_info if stage.is_first else stage.args_recv_info
        assert received[0][0].buffer.dtype == torch.bfloat16
        assert abs(mean_loss(mine, built.mesh) / loss - 1) < 1e-3
        assert 1e-5 < max(gradient_errors(built, gradients)) < 0.05

    ranks(size, train)


@pytest.mark.req("C13", "A4")
def test_a_stopped_pipeline_continues_to_the_bit(ranks: Ranks, toy_tokens: Path, tmp_path: Path) -> None:
    settings = ["parallel.pp=2", "parallel.schedule=zbv", "model.layers=4", "model.tie_embeddings=true"]
    common = [*settings, "loop.steps=8", "precision=bf16", "loop.eval_batches=1"]
    undisturbed = toy_overrides(toy_tokens, tmp_path, "undisturbed", *common)
    stopped = toy_overrides(toy_tokens, tmp_path, "stopped", *common)
    assert ranks(2, train_toy, undisturbed) == [ExitCode.FINISHED] * 2
    assert ranks(2, train_toy, stopped, stop_after=3) == [ExitCode.STOPPED] * 2
    assert ranks(2, train_toy, stopped) == [ExitCode.FINISHED] * 2
    runs = [RunFolder(tmp_path / name) for name in ("undisturbed", "stopped")]
    lines = [{line["step"]: line for line in read_json_lines(run.metrics) if "loss" in line} for run in runs]
    assert list(lines[0]) == list(range(1, 9))
    for name in ("loss", "grad_norm"):
        one, other = ({step: line[name] for step, line in of_run.items()} for of_run in lines)
        assert one == other
    assert all(0 <= line["pipeline_bubble"] < 1 for line in lines[0].values())
    assert lines[0][1]["pipeline_bubble_theory"] == pytest.approx(1 / (1 + 3 * 2 * 4))
    evaluations = [
        [line["eval_loss"] for line in read_json_lines(run.metrics) if "eval_loss" in line] for run in runs
    ]
    assert evaluations[0] == evaluations[1]
