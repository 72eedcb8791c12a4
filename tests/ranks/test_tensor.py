"""Tensor parallelism against the same model in one piece: losses, gradients, logits."""

import logging
import random
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.pool import Ranks
from torch import nn
from torch.distributed.tensor import DTensor

from contract.errors import ConfigError
from train.config import TrainConfig
from train.data.loader import Batch
from train.layout.check import lay_out
from train.layout.config import ParallelConfig
from train.layout.dims import ParallelDims
from train.mesh import Mesh
from train.model.config import ModelConfig
from train.model.hf import write_hf
from train.model.llama import IGNORED, Llama, build, next_token_loss
from train.optim.adamw import build_optimizer, gradients_of
from train.parallel.apply import Sharded, build_engine, build_parts
from train.parallel.clip import clip_grad_norm, gradient_norm
from train.parallel.fill import fill
from train.parallel.tensor import loss_context, shard, vocabulary_loss
from train.precision.config import Compute, PrecisionConfig

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "dim": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 4,
    "ffn_dim": 48,
    "max_sequence_length": 64,
    "init_std": 0.2,
}


@dataclass(frozen=True)
class Case:
    """A model under a layout, and the batch that it sees."""

    model: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)
    sequence: int = 16
    masked: bool = False
    """Whether documents are masked and some targets do not count."""

    @property
    def settings(self) -> TrainConfig:
        """Of a run with these sizes."""
        config = TrainConfig(
            model=ModelConfig(**{**SIZES, **self.model}),
            parallel=ParallelConfig(**{"micro_batch_size": 2, **self.parallel}),
            precision=PrecisionConfig(compute=Compute.float32),
        )
        config.data.sequence_length = self.sequence
        return config

    def batch(self, samples: int) -> Batch:
        """Random tokens, the same on every rank."""
        generator = torch.Generator().manual_seed(1)
        vocabulary = self.settings.model.vocabulary
        text = torch.randint(0, vocabulary, (samples, self.sequence + 1), generator=generator)
        # The last row of the vocabulary belongs to the rank that may have fewer.
        text[:, 3] = vocabulary - 1
        tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        if not self.masked:
            return Batch(tokens, targets)
        targets[:, ::5] = IGNORED
        documents = torch.randint(0, 2, tokens.shape, generator=generator).cumsum(1)
        return Batch(tokens, targets, documents)


def whole(config: TrainConfig) -> Llama:
    """The model in one piece, every parameter random."""
    model = build(config.model, 5, CPU)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def split(config: TrainConfig, model: Llama) -> Sharded:
    """The same model over the ranks of the test."""
    mesh = Mesh.build(ParallelDims.of(config.parallel, dist.get_world_size()), "cpu")
    sharded = build_parts(config, mesh, CPU, seed=None)
    weights = dict(model.named_parameters())
    for part in sharded.parts:
        fill(part, config.model, lambda name, _, where: weights[name].detach()[where])
    return sharded


def gradients(part: nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients, by name; each must lie as its parameter does."""
    found = {}
    for name, parameter in part.named_parameters():
        assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor), name
        assert parameter.grad.placements == parameter.placements, name
        found[name] = parameter.grad.full_tensor()
    return found


def check(case: Case, tolerance: float = 3e-5) -> None:
    """Run on each rank: one step of two micro-batches, an evaluation and the norm, against the model in one piece."""
    config = case.settings
    model = whole(config)
    sharded = split(config, model)
    engine = build_engine(sharded, config, CPU)
    mesh = sharded.mesh
    own, rank = 4, mesh.dp.get_local_rank()
    batch = case.batch(own * mesh.dp.size())
    halves = [slice(rank * own + start, rank * own + start + 2) for start in (0, 2)]
    micro_batches = [Batch(*(None if t is None else t[half] for t in batch)) for half in halves]

    loss = next_token_loss(model(batch.tokens, batch.documents), batch.targets)
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}

    trained = engine.train(micro_batches)
    assert type(trained) is torch.Tensor
    dist.all_reduce(trained)
    torch.testing.assert_close(trained / mesh.dims.ranks, loss.detach(), rtol=tolerance, atol=0)
    for name, gradient in gradients(sharded.parts[0]).items():
        reference = expected[name]
        assert reference is not None and gradient.shape == reference.shape
        error = (gradient - reference).norm() / reference.norm()
        assert error < tolerance, f"{case}: {name} {error:.1e}"
    norm = gradient_norm(gradients_of(sharded.parts.parameters()), mesh)
    reference_norm = torch.nn.utils.get_total_norm([g for g in expected.values() if g is not None])
    torch.testing.assert_close(norm, reference_norm, rtol=tolerance, atol=0)

    nats = engine.evaluate(micro_batches)
    assert type(nats) is torch.Tensor
    dist.all_reduce(nats)
    with torch.no_grad():
        summed = next_token_loss(model(batch.tokens, batch.documents), batch.targets, "sum").double()
    torch.testing.assert_close(nats / mesh.dims.tp, summed, rtol=tolerance, atol=0)


def check_all(cases: list[Case]) -> None:
    """`check` each of them."""
    for case in cases:
        check(case)


SWITCHES = [
    {"sequence_parallel": sequence, "loss_parallel": loss}
    for sequence in (True, False)
    for loss in (True, False)
]


@pytest.mark.req("A1")
@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_every_switch_gives_the_gradients_of_one_process(ranks: Ranks, tie: bool) -> None:
    model = {"tie_embeddings": tie, "kv_heads": 2}
    cases = [
        Case(model, {"tp": 2, **switches}, masked=masked) for switches in SWITCHES for masked in (False, True)
    ]
    ranks(2, check_all, cases)


@pytest.mark.req("A1")
@pytest.mark.parametrize(("tp", "heads"), [(2, 4), (4, 4), (4, 8), (8, 8)])
def test_heads_of_keys_are_dealt_out_or_shared(ranks: Ranks, tp: int, heads: int) -> None:
    cases = [
        Case({"heads": heads, "kv_heads": kv_heads}, {"tp": tp, "sequence_parallel": sequence})
        for kv_heads in (1, 2, 4, 8)
        for sequence in (True, False)
        if heads % kv_heads == 0 and (tp < 8 or kv_heads == 2)
    ]
    ranks(tp, check_all, cases)


@pytest.mark.req("A1")
@pytest.mark.parametrize("tp", [2, 4])
def test_sizes_that_do_not_divide_leave_the_last_rank_with_less(ranks: Ranks, tp: int) -> None:
    model = {"vocab_size": 61, "ffn_dim": 45}
    cases = [
        Case({**model, "tie_embeddings": tie}, {"tp": tp, **switches}, masked=True)
        for tie in (False, True)
        for switches in SWITCHES
    ]
    ranks(tp, check_all, cases)


@pytest.mark.req("A1", "C5")
@pytest.mark.parametrize(
    "model", [{}, {"vocab_size": 61, "ffn_dim": 45, "kv_heads": 1}], ids=["even", "uneven"]
)
def test_data_parallel_ranks_share_what_tensor_parallel_ones_hold(
    ranks: Ranks, model: dict[str, Any]
) -> None:
    layouts = [
        {"zero": 0},
        {"zero": 1},
        {"zero": 3},
        {"zero": 3, "sequence_parallel": False, "loss_parallel": False},
    ]
    ranks(4, check_all, [Case(model, {"tp": 2, **layout}) for layout in layouts])


@pytest.mark.req("A1")
def test_rows_of_an_uneven_vocabulary_lie_where_checkpoints_look_for_them(ranks: Ranks) -> None:
    def read_back(size: int) -> None:
        case = Case({"vocab_size": size, "ffn_dim": size, "dim": 24}, {"tp": 2, "zero": 3})
        model = whole(case.settings)
        for name, parameter in split(case.settings, model).parts[0].named_parameters():
            expected = model.get_parameter(name)
            torch.testing.assert_close(parameter.full_tensor(), expected, rtol=0, atol=0, msg=name)

    # Three ranks would get 2, 2 and 0 of the larger half's 4 rows, but one each of the smaller's 3.
    for size in (7, 8):
        ranks(6, read_back, size)


@pytest.mark.req("D2")
def test_lower_precision_stays_near_that_of_one_process(ranks: Ranks) -> None:
    def compare(parallel: dict[str, Any]) -> None:
        config = Case({"kv_heads": 1}, {"tp": 2, **parallel}).settings
        config.precision.compute = Compute.bfloat16
        model = whole(config)
        batch = Case().batch(2)
        next_token_loss(model(batch.tokens), batch.targets).backward()
        sharded = split(config, model)
        build_engine(sharded, config, CPU).train([batch])
        for name, gradient in gradients(sharded.parts[0]).items():
            reference = model.get_parameter(name).grad
            assert reference is not None and gradient.dtype == torch.float32
            assert 1e-5 < (gradient - reference).norm() / reference.norm() < 0.1, name

    for size, parallel in ((2, {}), (2, {"sequence_parallel": False}), (4, {"zero": 2})):
        ranks(size, compare, parallel)


@pytest.mark.req("A1")
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_stage_takes_and_gives_its_share_of_the_sequence(ranks: Ranks, sequence_parallel: bool) -> None:
    case = Case({"kv_heads": 1}, {"tp": 2, "sequence_parallel": sequence_parallel})

    def chain() -> None:
        config, batch = case.settings, case.batch(2)
        model = whole(config)
        next_token_loss(model(batch.tokens), batch.targets).backward()
        mesh = Mesh.build(ParallelDims(tp=2), "cpu")
        with torch.device("meta"):
            first, last = Llama(config.model), Llama(config.model)
        first.norm = first.lm_head = last.embed_tokens = None
        del first.layers["1"], last.layers["0"]
        for part in (first, last):
            shard(part, config, mesh)
            part.to_empty(device=CPU)
            fill(part, config.model, lambda name, _, where: model.get_parameter(name).detach()[where])
        positions = torch.arange(case.sequence)
        hidden = first(batch.tokens)
        assert type(hidden) is torch.Tensor
        assert hidden.shape == (2, case.sequence // (2 if sequence_parallel else 1), config.model.dim)
        received = hidden.detach().requires_grad_()
        with loss_context(config, mesh):
            vocabulary_loss(last(received, positions=positions), batch.targets, "mean").backward()
        hidden.backward(received.grad)
        for part in (first, last):
            for name, gradient in gradients(part).items():
                torch.testing.assert_close(
                    gradient, model.get_parameter(name).grad, rtol=1e-4, atol=1e-6, msg=name
                )

    ranks(2, chain)


@pytest.mark.req("A1")
def test_logits_are_those_of_hugging_face(ranks: Ranks, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    case = Case({"kv_heads": 2}, {"tp": 4, "loss_parallel": False})
    config = case.settings
    write_hf(tmp_path / "hf", config.model, whole(config).state_dict())
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        expected = theirs(case.batch(2).tokens).logits

    def logits() -> torch.Tensor:
        sharded = split(config, whole(config))
        with torch.no_grad():
            return sharded.parts[0](case.batch(2).tokens).to_local()

    for found in ranks(4, logits):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.req("A1", "D8")
@pytest.mark.parametrize("tp", [2, 4])
def test_any_sizes_are_right_or_refused(ranks: Ranks, session_seed: int, tp: int) -> None:
    draw = random.Random(session_seed)
    cases: list[Case] = []
    while len(cases) < 6:
        heads = draw.choice([1, 2, 3, 4, 6, 8, 12])
        model = {
            "heads": heads,
            "kv_heads": draw.choice([n for n in range(1, heads + 1) if heads % n == 0]),
            "dim": heads * draw.choice([2, 4, 6]),
            "ffn_dim": draw.randint(1, 40),
            "vocab_size": draw.randint(2, 70),
            "tie_embeddings": draw.random() < 0.5,
        }
        dp = draw.choice([1, 2]) if tp == 2 else 1
        parallel = {"tp": tp, "dp": dp, "zero": draw.randint(0, 3), **draw.choice(SWITCHES)}
        case = Case(model, parallel, sequence=draw.randint(5, 20), masked=draw.random() < 0.5)
        config = case.settings
        config.loop.global_batch_size = 4 * dp
        try:
            lay_out(config, tp * dp)
        except ConfigError:
            continue
        cases.append(case)
    for size in (tp, 2 * tp):
        ranks(size, check_all, [case for case in cases if case.parallel["dp"] * tp == size])


@pytest.mark.req("D8")
@pytest.mark.parametrize(
    ("model", "parallel", "reason"),
    [
        (
            {"vocab_size": 9},
            {"tp": 4},
            "model.vocab_size=9 leaves nothing for the last of parallel.tp=4 ranks",
        ),
        ({"ffn_dim": 1}, {"tp": 2}, "model.ffn_dim=1 leaves nothing for the last of parallel.tp=2 ranks"),
        ({"ffn_dim": 45}, {"tp": 2, "dp": 3, "zero": 1}, "model.dim=32, which 3 ranks .* do not divide"),
    ],
)
def test_sizes_that_cannot_be_cut_are_refused(
    model: dict[str, Any], parallel: dict[str, Any], reason: str
) -> None:
    config = Case(model, parallel).settings
    config.loop.global_batch_size = 12
    with pytest.raises(ConfigError, match=reason):
        lay_out(config, parallel["tp"] * parallel.get("dp", 1))


@pytest.mark.req("A1")
@pytest.mark.parametrize("loss_parallel", [True, False])
def test_a_step_says_nothing(ranks: Ranks, loss_parallel: bool) -> None:
    def run() -> list[str]:
        said: list[str] = []
        listener = logging.Handler(logging.WARNING)
        listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("torch").addHandler(listener)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            check_step()
        logging.getLogger("torch").removeHandler(listener)
        return said + [str(warning.message) for warning in warned]

    def check_step() -> None:
        case = Case({"vocab_size": 61}, {"tp": 2, "zero": 3, "loss_parallel": loss_parallel})
        sharded = split(case.settings, whole(case.settings))
        engine = build_engine(sharded, case.settings, CPU)
        engine.train([case.batch(2)])
        clip_grad_norm(build_optimizer(sharded.parts, case.settings, CPU), 1.0, sharded.mesh)
        engine.evaluate([case.batch(2)])

    assert ranks(4, run) == [[]] * 4
